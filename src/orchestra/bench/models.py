"""What the benchmarks train: models of a few sizes, with batches of random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestra.errors import InputError, nearest

ALL = "all"


@dataclass(frozen=True)
class Subject:
    """A model with a batch to measure it by.

    `batch_size` is that of one worker; `steps` are timed together, as one block, so that a block
    is long beside the clock and short beside the drift of the machine.
    """

    name: str
    build: Callable[[], nn.Module]
    batch_size: int
    classes: int
    input_shape: tuple[int, ...]
    steps: int

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Random inputs, [samples, *input_shape], and labels."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(samples, *self.input_shape, generator=generator)
        return inputs, torch.randint(self.classes, (samples,), generator=generator)

    @staticmethod
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross entropy."""
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)


def lenet() -> nn.Module:
    """LeNet-5 on 28 x 28 images: 61,706 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    """A perceptron of 25.1 million parameters."""
    width = 1_960
    return nn.Sequential(
        nn.Linear(1024, width), nn.ReLU(),
        *(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())),
        nn.Linear(width, 10),
    )  # fmt: skip


SUBJECTS = (
    Subject("lenet", lenet, 64, 10, (1, 28, 28), steps=25),
    Subject("mlp25m", mlp, 32, 10, (1024,), steps=3),
)


def subjects_named(name: str) -> tuple[Subject, ...]:
    """The subject of that name, or all of them for "all"."""
    if name == ALL:
        return SUBJECTS
    by_name = {subject.name: subject for subject in SUBJECTS}
    if name not in by_name:
        raise InputError(f"--model: unknown model {name!r}; {nearest(name, [*by_name, ALL])}")
    return (by_name[name],)
