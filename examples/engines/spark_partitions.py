"""A loop of your own under Spark, in which each worker trains on its own partitions of a DataFrame.

    python examples/engines/spark_partitions.py
    python examples/engines/spark_partitions.py --partitions 3 --strategy 'LocalSGD(every=8)'

Spark writes a file for each partition. Worker w of N holds the rows of the partitions w, w + N,
w + 2N ... in memory, and trains on each of them once in an epoch. So no worker needs room for all
rows, and an order of the DataFrame decides which worker sees what: sort it, say, by customer.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import torch
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Sampler

import orchestra

Place = tuple[int, int]
"""A row of the DataFrame: the partition, and the row in it."""


class Partitions(Dataset[tuple[Tensor, Tensor]]):
    """The rows of a DataFrame by `Place`; those of the partitions in `own` lie in memory.

    Rows of others are read one by one. Orchestra reads two rows of worker 0 on all workers before
    each epoch, to see that they have the same data.
    """

    def __init__(self, files: Sequence[Path], own: Sequence[int]) -> None:
        self._files = files
        self._tables = {number: parquet.read_table(files[number]) for number in own}
        self.read_from_others = 0

    def __getitem__(self, place: Place) -> tuple[Tensor, Tensor]:
        partition, row = place
        table = self._tables.get(partition)
        if table is None:
            self.read_from_others += 1
            table = parquet.read_table(self._files[partition])
        pixels, label = table["pixels"][row].as_py(), table["label"][row].as_py()
        return torch.tensor(pixels) / 16, torch.tensor(label)


class PartitionBatches(Sampler[list[Place]]):
    """Batches for each worker in turn, as Orchestra deals them out: of its own partitions.

    All workers make equally many. Those of a worker with fewer rows are smaller, and weigh less. It
    draws from torch's generator, from which Orchestra lets all workers draw the same.
    """

    def __init__(self, rows: Sequence[int], workers: int, batch_size: int) -> None:
        """`rows`: of each partition."""
        self._places = [
            [(p, row) for p in range(worker, len(rows), workers) for row in range(rows[p])]
            for worker in range(workers)
        ]
        counts = [len(places) for places in self._places]
        self._steps = -(-max(counts) // batch_size)
        if min(counts) < self._steps:
            raise ValueError(
                f"a worker has {min(counts)} rows for {self._steps} batches, since another one has "
                f"{max(counts)}: repartition the DataFrame"
            )

    def __len__(self) -> int:
        return self._steps * len(self._places)

    def __iter__(self) -> Iterator[list[Place]]:
        orders = [torch.randperm(len(places)).tolist() for places in self._places]
        for step in range(self._steps):
            for places, order in zip(self._places, orders, strict=True):
                start, stop = (len(order) * each // self._steps for each in (step, step + 1))
                yield [places[number] for number in order[start:stop]]


def train(folder: str, strategy: str, epochs: int) -> dict[str, Any]:
    """Train on this worker; torchrun, which Spark starts, tells Orchestra where the others are."""
    rank, workers = orchestra.rank(), orchestra.world_size()
    files = sorted(Path(folder, "digits").glob("part-*.parquet"))
    rows = [parquet.read_metadata(file).num_rows for file in files]
    own = range(rank, len(files), workers)
    data = Partitions(files, own)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    batches = DataLoader(data, batch_sampler=PartitionBatches(rows, workers, 16))
    model, optimizer, batches = orchestra.distribute(model, optimizer, batches, strategy)
    if len(batches.workers) < workers:
        raise ValueError(f"{strategy}: a server has no partitions; let each rank train")
    trained = 0
    for _ in batches.epochs(epochs):
        losses = []
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            trained += len(targets)
    print(
        f"worker {rank}: {trained} rows of the partitions {[*own]}, and {data.read_from_others} "
        "of others to compare"
    )
    loss = orchestra.mean(sum(losses) / len(losses), len(losses))
    return {"loss": loss, "model": model.state_dict()}


def main() -> None:
    """Prepare the data in Spark, train, and use what the first worker returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--partitions", type=int, default=4, help="at least one for each worker")
    parser.add_argument("--strategy", default="AllReduce('ring')")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--master", help="such as spark://HOST:7077")
    parser.add_argument("--folder", help="a new one that all nodes share")
    options = parser.parse_args()
    master = options.master or f"local[{options.workers}]"
    spark = SparkSession.builder.master(master).appName("digits").getOrCreate()
    folder = options.folder or tempfile.mkdtemp()

    pixels, labels = load_digits(return_X_y=True)
    rows = [(row.tolist(), int(label)) for row, label in zip(pixels, labels, strict=True)]
    frame = spark.createDataFrame(rows, "pixels array<float>, label bigint")
    frame.repartition(options.partitions).write.parquet(f"{folder}/digits")

    distributor = TorchDistributor(options.workers, local_mode=False, use_gpu=False)
    result = distributor.run(train, folder, options.strategy, options.epochs)
    spark.stop()
    print(f"loss {result['loss']:.4f}")


if __name__ == "__main__":
    main()
