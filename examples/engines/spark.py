"""A loop of your own under Spark: Spark prepares a DataFrame, and TorchDistributor trains on it.

    python examples/engines/spark.py
    python examples/engines/spark.py --workers 3 --strategy ParameterServer

Without --master it runs in this machine. Spark writes the DataFrame to a folder that all nodes
share, a file for each partition. Each worker opens all files, and Orchestra deals the samples out.
When a worker is lost the job fails; the same command with the same --folder goes on.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import orchestra


def train(folder: str, strategy: str, epochs: int) -> dict[str, Any]:
    """Train on this worker; torchrun, which Spark starts, tells Orchestra where the others are."""
    table = parquet.read_table(Path(folder, "digits"))
    pixels = torch.from_numpy(np.stack(table["pixels"].to_numpy())).float()
    data = TensorDataset(pixels / 16, torch.from_numpy(table["label"].to_numpy().copy()))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    batches = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, batches = orchestra.distribute(model, optimizer, batches, strategy)

    saved, losses = Path(folder, "state.pt"), []
    if saved.exists():
        batches.load_state_dict(torch.load(saved, weights_only=True))
        print("going on after epoch", batches.epoch)
    while batches.epoch < epochs:
        losses = []
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        state = batches.state_dict()
        if orchestra.is_first():  # a dedicated server has no losses, and returns like the others
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
    return {
        "epoch": batches.epoch,
        "loss": sum(losses) / max(len(losses), 1),
        "model": model.state_dict(),
    }


def main() -> None:
    """Prepare the data in Spark, train, and use what the first worker returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strategy", default="AllReduce('ring')")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--master", help="such as spark://HOST:7077")
    parser.add_argument("--folder", help="that all nodes share; a training in it goes on")
    options = parser.parse_args()
    master = options.master or f"local[{options.workers}]"
    spark = SparkSession.builder.master(master).appName("digits").getOrCreate()
    folder = options.folder or tempfile.mkdtemp()

    pixels, labels = load_digits(return_X_y=True)
    rows = [(row.tolist(), int(label)) for row, label in zip(pixels, labels, strict=True)]
    frame = spark.createDataFrame(rows, "pixels array<double>, label bigint")
    frame.repartition(options.workers).write.mode("ignore").parquet(f"{folder}/digits")

    distributor = TorchDistributor(options.workers, local_mode=False, use_gpu=False)
    result = distributor.run(train, folder, options.strategy, options.epochs)
    spark.stop()
    print(f"epoch {result['epoch']}: loss {result['loss']:.4f}")


if __name__ == "__main__":
    main()
