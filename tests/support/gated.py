"""A training whose steps wait for the test's leave."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from tests.support.rank_programs import arrive
from tests.support.waiting import wait_until
from torch import Tensor, nn

from orchestra.records.report import RankReport
from orchestra.tasks import Task, TensorData
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run
from orchestra.worker.runtime import Runtime

PARAMETERS = 1_000_000  # 4 MB: more than the buffers of a connection take at once
LIMIT = "limit"


class Counted(nn.Module):
    """One long vector, and the number of losses computed with it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PARAMETERS))
        self.calls = 0


def gated(folder: str, samples: int) -> Task:
    """A worker computes the gradient of its step k once the folder's limit is at least k."""
    place = Path(folder)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(model, Counted)
        model.calls += 1
        wait_until(lambda: _limit(place) >= model.calls, f"leave for step {model.calls}")
        return (model.weight - batch[1].mean()).square().mean()

    numbers = torch.linspace(-1.0, 1.0, samples)
    data = TensorData(numbers, numbers)
    return Task(model=Counted, train=data, loss=loss, collate=TensorData.collate)


def let_run(folder: Path, steps: int, pid: int | None = None) -> None:
    """Every worker may complete `steps` steps in all; or the one that is process `pid`."""
    draft = folder / "limit.draft"
    draft.write_text(str(steps))
    draft.rename(folder / (LIMIT if pid is None else f"{LIMIT}-{pid}"))


def _limit(folder: Path) -> int:
    everyone = (folder / LIMIT).read_text()  # first: a limit of one's own is written before it
    own = folder / f"{LIMIT}-{os.getpid()}"
    return int(own.read_text() if own.exists() else everyone)


def train_noted(runtime: Runtime, assignment: tuple[Run, Path]) -> RankReport:
    """Train, with each rank's process id in the folder."""
    arrive(runtime, assignment[1])
    return train(runtime, assignment)
