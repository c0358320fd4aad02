"""A task whose test split tells who reads it, and strategies that fail, for comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.support.tasks_for_tests import cross_entropy, data, initialised, mlp
from torch import Tensor
from torch.utils.data import Dataset

from orchestra.errors import InputError
from orchestra.settings import setting
from orchestra.strategies.all_reduce import AllReduce, AllReduceMember
from orchestra.tasks import Task, TensorData
from orchestra.tasks.classification import accuracy
from orchestra.worker.worker import Worker

TRIALS_FROM = 1000
"""The seeds from here on are those of trials."""


class Guarded(Dataset[tuple[Tensor, Tensor]]):
    """Test data that a trial must not read."""

    def __init__(self, samples: int) -> None:
        self._images, self._labels = data(samples, torch.float32)
        self._seed = torch.initial_seed()  # the run's, which is set before the task is made

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._seed >= TRIALS_FROM:
            raise AssertionError("a trial reads the test data")
        return self._images[index], self._labels[index]


def guarded(samples: int = 96, validation: bool = True) -> Task:
    """A small classification, in one thread on any number of ranks."""
    torch.set_num_threads(1)
    return Task(
        model=lambda: initialised(mlp(), torch.float32),
        train=TensorData(*data(samples, torch.float32)),
        validation=TensorData(*data(40, torch.float32)) if validation else None,
        test=Guarded(24),
        loss=cross_entropy,
        metrics=accuracy,
        collate=TensorData.collate,
    )


@dataclass(frozen=True, repr=False)
class Failing(AllReduce):
    """All-reduce whose first update fails, until the file `mended` is there."""

    mended: str = setting("/nowhere", "a path")

    def member(self, worker: Worker) -> Any:
        return FailingMember(**vars(super().member(worker)))


class FailingMember(AllReduceMember):
    def update(self) -> None:
        strategy = self.strategy
        assert isinstance(strategy, Failing)
        if not Path(strategy.mended).exists():
            raise ValueError("broken on purpose")
        super().update()


@dataclass(frozen=True, repr=False)
class Refusing(AllReduce):
    """All-reduce that takes no task."""

    def member(self, worker: Worker) -> Any:
        raise InputError("Refusing: refuses everything; choose another strategy")
