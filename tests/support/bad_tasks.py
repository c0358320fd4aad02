"""Tasks of a user's own that cannot be trained, each for one reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tests.support.tasks_for_tests import cross_entropy, data, mlp
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestra.tasks import Task, TensorData

TRAIN = TensorData(*data(32, torch.float32))


def fine() -> Task:
    return Task(
        model=mlp,
        train=TRAIN,
        test=TRAIN,
        loss=cross_entropy,
        metrics=lambda *_: {"accuracy": 0.5},
        collate=TensorData.collate,
    )


def untested() -> Task:
    return replace(fine(), test=None)


def nothing_to_train() -> Task:
    def model() -> nn.Module:
        return mlp().requires_grad_(False)

    return replace(fine(), model=model)


def no_parameters() -> Task:
    return replace(fine(), model=nn.Flatten)


def two_dtypes() -> Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())

    return replace(fine(), model=model)


class Odd(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(8)


def unsplittable() -> Task:
    """The second tensor of a batch belongs to no sample."""

    def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.stack(samples), torch.ones(3)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = model(batch[0]).square().mean()
        return result

    return Task(model=lambda: nn.Linear(8, 1), train=Odd(), loss=loss, collate=collate)


def not_a_task() -> int:
    return 5


def returns_a_model() -> Task:
    return mlp()  # type: ignore[return-value]


def returns_nothing() -> Task:
    return None  # type: ignore[return-value]


def a_model() -> Task:
    return replace(fine(), model=mlp())
