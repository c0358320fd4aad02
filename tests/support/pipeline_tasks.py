"""Models that are awkward to cut, and losses that a pipeline cannot follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tests.support.tasks_for_tests import CLASSES, cross_entropy, data, initialised
from torch import Tensor, nn
from torch.nn import functional

from orchestra.tasks import Task, TensorData


class Awkward(nn.Module):
    """Cuts that must not be: before a change in place, where a number is passed on.

    And what is easily forgotten: a parameter that is frozen, one that is never used, a constant
    read far from where it was made, a tensor of two stages before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(64, 32)
        self.middle = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(32, 32), nn.BatchNorm1d(32))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.out = nn.Linear(32, CLASSES)
        self.never = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(32, dtype=torch.float64), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        early = self.inward(images.flatten(1))
        count = early.shape[0]
        hidden = self.middle(early * self.scale) + self.shift
        places = torch.arange(count, dtype=torch.float64)[:, None] * 0.01
        late = functional.relu_(self.frozen(hidden) + places)
        result: Tensor = self.out(late.view(count, 32) + early)
        return result


def awkward(samples: int = 96) -> Task:
    """In float64, with BatchNorm, a curve, and a test."""
    kind = torch.float64
    return Task(
        model=lambda: initialised(Awkward(), kind),
        train=TensorData(*data(samples, kind)),
        test=TensorData(*data(16, kind)),
        loss=cross_entropy,
        collate=TensorData.collate,
    )


def layered() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def twice(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images) + model(-images), labels)


def penalised(model: nn.Module, batch: Any) -> Tensor:
    decay: Tensor = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
    return cross_entropy(model, batch) + 0.1 * decay


def never(model: nn.Module, batch: Any) -> Tensor:
    return torch.zeros(())


MADE: list[nn.Module] = []
"""The models that `remembered` made, in this process."""


def remembered() -> Task:
    """A task of `layered` models that can be looked at later."""

    def make() -> nn.Module:
        MADE.append(layered())
        return MADE[-1]

    return replace(lossy("twice"), model=make, loss=cross_entropy)


LOSSES = {"twice": twice, "penalised": penalised, "never": never}


def lossy(loss: str) -> Task:
    """A task with one of `LOSSES`."""
    return Task(
        model=layered,
        train=TensorData(*data(32, torch.float32)),
        loss=LOSSES[loss],
        collate=TensorData.collate,
    )
