"""Tasks that go wrong, or wait for a test."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from tests.support.tasks_for_tests import MODELS, cross_entropy, data, initialised
from tests.support.waiting import wait_until
from torch import Tensor
from torch.utils.data import Dataset

from orchestra.tasks import Task

SAMPLES = 96


class Disturbed(Dataset[tuple[Tensor, Tensor]]):
    """Ordinary samples; `disturb` is called with the index and the number of each read."""

    def __init__(self, disturb: Callable[[int, int], None]) -> None:
        self._images, self._labels = data(SAMPLES, torch.float32)
        self._disturb = disturb
        self._reads = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._reads += 1
        self._disturb(index, self._reads)
        return self._images[index], self._labels[index]


def task(disturb: Callable[[int, int], None], model: str = "mlp") -> Task:
    return Task(
        model=lambda: initialised(MODELS[model](), torch.float32),
        train=Disturbed(disturb),
        loss=cross_entropy,
    )


def gated(folder: str, after: int = 40, model: str = "mlp") -> Task:
    """After `after` reads a rank leaves its process id in `folder`, and waits for `go` there."""

    def disturb(_: int, reads: int) -> None:
        if "ORCHESTRA_TEST_FAILS" in os.environ:
            raise ValueError("no such data here")
        if reads == after:
            (Path(folder) / f"at-{os.getpid()}").touch()
            wait_until((Path(folder) / "go").exists, "the test lets the ranks go")

    return task(disturb, model)


def broken(sample: int = 70) -> Task:
    """One sample cannot be read; no warm-up reads it."""

    def disturb(index: int, reads: int) -> None:
        if index == sample and reads > 16:
            raise ValueError(f"sample {index} cannot be decoded")

    return task(disturb)


def hanging(sample: int = 70) -> Task:
    """One sample never comes."""

    def disturb(index: int, reads: int) -> None:
        if index == sample and reads > 16:
            threading.Event().wait()

    return task(disturb)


def slow(seconds: float, sample: int = 70) -> Task:
    """One sample takes `seconds` in native code that holds the interpreter: no sign of life."""

    def disturb(index: int, reads: int) -> None:
        if index == sample and reads > 8:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    return task(disturb)


def dying(folder: str, deaths: str) -> Task:
    """Rank r is killed in its n-th step of the first launch, for "r@n", and so on by commas.

    A file in `folder` for each death tells the launches apart.
    """
    planned = [tuple(map(int, death.split("@"))) for death in deaths.split(",") if death]
    launch = len(list(Path(folder).glob("death-*")))
    rank, step = planned[launch] if launch < len(planned) else (-1, 0)
    own = os.environ.get("RANK") or multiprocessing.current_process().name.removeprefix("rank ")
    calls = itertools.count()  # the first one is the warm-up

    def loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if next(calls) == step and own == str(rank):
            (Path(folder) / f"death-{launch}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return cross_entropy(model, batch)

    plain = task(lambda *_: None)
    return dataclasses.replace(plain, loss=loss)


def lost(deaths: str, model: str = "mlp") -> Task:
    """Rank r is killed in the n-th gradient that it computes, for "r@n", and so on by commas."""
    pairs = [death.split("@") for death in deaths.split(",") if death]
    planned = {int(rank): int(number) for rank, number in pairs}
    own = os.environ.get("RANK") or multiprocessing.current_process().name.removeprefix("rank ")
    calls = itertools.count()  # the first one is the warm-up

    def loss(module: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if next(calls) == planned.get(int(own) if own.isdecimal() else -1):
            os.kill(os.getpid(), signal.SIGKILL)
        return cross_entropy(module, batch)

    return dataclasses.replace(task(lambda *_: None, model), loss=loss)


def fatal() -> Task:
    """Whatever process computes a gradient is killed."""

    def loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return cross_entropy(model, batch)

    return dataclasses.replace(task(lambda *_: None), loss=loss)


def diverging() -> Task:
    """The loss becomes infinite, then not a number."""

    def loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = (model(batch[0]) ** 2).sum() * 1e6
        return result

    return Task(model=MODELS["mlp"], train=Disturbed(lambda *_: None), loss=loss)


def missing_file(path: str) -> Task:
    """The data file is read when the task is made."""
    return Task(
        model=MODELS["mlp"],
        train=torch.utils.data.TensorDataset(torch.load(path)),
        loss=cross_entropy,
    )
