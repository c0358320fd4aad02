"""A task whose parameters count updates: every gradient is 1, in every element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.support.failing_tasks import Disturbed
from tests.support.waiting import wait_until
from torch import Tensor, nn

from orchestra.tasks import Task

RATE = 2.0**-10  # so that every sum of rates is exact


class Counter(nn.Module):
    """Begins at 0, and is at -RATE times the number of updates."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


def counted(folder: str, size: int = 1000, after: int = 40) -> Task:
    """After `after` reads a rank leaves a file in `folder`, and waits for `go` there."""
    place = Path(folder)

    def disturb(_: int, reads: int) -> None:
        if reads == after:
            (place / f"at-{torch.initial_seed()}").touch()
            wait_until((place / "go").exists, "the test lets the ranks go")

    def loss(model: nn.Module, _: Any) -> Tensor:
        total: Tensor = model.weight.sum()  # type: ignore[operator]
        return total

    return Task(
        model=lambda: Counter(size),
        train=Disturbed(disturb),
        test=Disturbed(lambda *_: None),
        loss=loss,
    )


def updates_of(parameters: Tensor) -> set[float]:
    """How many updates the elements of `parameters` have seen."""
    return {float(count) for count in (parameters / -RATE).unique()}
