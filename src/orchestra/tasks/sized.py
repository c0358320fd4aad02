"""What the task `synthetic` is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


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
