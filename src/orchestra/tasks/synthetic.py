"""A model of which only the size is told: to ask how long a training takes, without data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestra.tasks import settings
from orchestra.tasks.task import Task

FLOPS_PER_PARAMETER = 6.0
"""Of a sample's gradient where each parameter is multiplied once: 2 forward, 4 backward."""


def synthetic(chosen: settings.Synthetic) -> Task:
    """The task; it holds no data."""
    flops = chosen.sample_flops or FLOPS_PER_PARAMETER * chosen.parameters
    edges = [chosen.parameters * k // chosen.tensors for k in range(chosen.tensors + 1)]
    sizes = [end - first for first, end in itertools.pairwise(edges)]
    train = Numbers(chosen.samples)
    return Task(model=lambda: Sized(sizes), train=train, loss=pull, sample_flops=flops)


class Numbers(Dataset[Tensor]):
    """Sample i is the number i / samples."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index / self._samples)


class Sized(nn.Module):
    """Vectors of the given sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, numbers: Tensor) -> Tensor:
        """The numbers, each times the mean of the means of the vectors."""
        means = torch.stack([vector.mean() for vector in self.vectors])
        return numbers * means.mean()


def pull(model: nn.Module, batch: Any) -> Tensor:
    """The mean of the model's answers: its gradient is the same everywhere."""
    answers: Tensor = model(batch)
    return answers.mean()
