"""A loop of your own under Ray Train: a function that Ray calls on each of its workers.

    python examples/engines/ray_train.py
    python examples/engines/ray_train.py --workers 3 --strategy ParameterServer

Each epoch is reported to Ray with a checkpoint. After a loss Ray starts all workers again, which go
on from the newest one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import orchestra


def train(settings: dict[str, Any]) -> None:
    """Train on this worker; Ray has set the variables by which Orchestra finds the others."""
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.9)
    batches = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, batches = orchestra.distribute(
        model, optimizer, batches, settings["strategy"]
    )
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            batches.load_state_dict(torch.load(Path(folder, "state.pt"), weights_only=True))
    while batches.epoch < settings["epochs"]:
        losses = []
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        # Ray waits for a report of every worker; a dedicated server has no loss, and no state.
        report = {"epoch": batches.epoch, "loss": sum(losses) / max(len(losses), 1)}
        state = batches.state_dict()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder, "state.pt"))
            first = Checkpoint.from_directory(folder) if orchestra.is_first() else None
            ray.train.report(report, checkpoint=first)


def main() -> None:
    """Start the workers, and print what the first one has reported last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1.0, help="of each worker")
    parser.add_argument("--strategy", default="AllReduce('ring')")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--storage", default=None, help="a folder that all nodes share")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"strategy": options.strategy, "epochs": options.epochs, "lr": 0.02},
        scaling_config=ScalingConfig(
            num_workers=options.workers, resources_per_worker={"CPU": options.cpus}
        ),
        run_config=RunConfig(
            name="digits",
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=options.restarts),
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
