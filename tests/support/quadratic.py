"""A quadratic that NumPy can follow: the loss of x at a sample a is 1/2 |x - a|^2."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from orchestra.data import DataPlan
from orchestra.data.feed import Feed, open_samples
from orchestra.tasks import Task, TensorData

Vector = NDArray[np.float64]

SIZE = 5


class Point(nn.Module):
    """Two parameters, so that there is something to cut between; they begin at 1, 2, ... ."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(1.0, 4.0, dtype=torch.float64))
        self.second = nn.Parameter(torch.arange(4.0, 6.0, dtype=torch.float64))

    def forward(self, samples: Tensor) -> Tensor:
        return torch.cat([self.first, self.second]) - samples


def half_square(model: nn.Module, batch: Any) -> Tensor:
    (samples,) = batch
    loss: Tensor = 0.5 * model(samples).square().sum(1).mean()
    return loss


def quadratic(samples: int = 60) -> Task:
    """Samples drawn by a seed, in float64."""
    generator = torch.Generator().manual_seed(3)
    points = torch.randn(samples, SIZE, dtype=torch.float64, generator=generator)
    data = TensorData(points)
    return Task(model=Point, train=data, test=data, loss=half_square, collate=TensorData.collate)


def start() -> Vector:
    """x before the first step."""
    return np.arange(1.0, SIZE + 1.0)


def mean_samples(
    ranks: int, batch_size: int, samples: int = 60, shares: tuple[float, ...] | None = None
) -> list[list[tuple[Vector, int]]]:
    """For each step of an epoch and each rank the mean of its samples, and how many they are.

    The gradient of x there is x minus that mean.
    """
    task = quadratic(samples)
    plan = DataPlan(0, samples, ranks * batch_size, shares or (1.0,) * ranks)
    feeds = [Feed(open_samples(task.train, 0, task.collate), plan, rank) for rank in range(ranks)]
    steps = []
    for step in range(plan.steps):
        parts = [feed.next(step) for feed in feeds]
        steps.append([(batch[0].numpy().mean(0) if n else start() * 0, n) for batch, n in parts])
    return steps


def final(state: dict[str, Tensor]) -> Vector:
    """x of a trained state."""
    return np.concatenate([state["first"].numpy(), state["second"].numpy()])
