"""A training inside a measurement, whose pieces of work are timed one by one."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from orchestra.trainer.program import train
from orchestra.trainer.settings import Run
from orchestra.worker.runtime import PassingReporter, Runtime, Work

T = TypeVar("T")
FIRST_STEPS = 3
"""The first steps of a run, which do not count."""


@dataclass
class Profile:
    """Takes the place of a rank's compute, and records when each piece of work began and ended.

    `exchange` is called after each update, as part of the next step.
    """

    clock: Callable[[], float]
    exchange: Callable[[], object] = lambda: None
    seconds: float = 0.0
    main_seconds: float = 0.0
    notes: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def run(self, work: Work, function: Callable[[], T]) -> T:
        began = self.clock()
        result = function()
        ended = self.clock()
        self.seconds += ended - began
        self.main_seconds = self.seconds
        self.notes[work.kind].append((began, ended))
        # After the update, so that the next step finds the caches as an exchange leaves them
        if work.kind == "update":
            self.exchange()
        return result

    def needs(self, slot: int, wait: Callable[[], object]) -> None:
        wait()

    def reached(self, slot: int) -> None:
        """The clock knows."""

    def steps(self) -> dict[str, list[float]]:
        """Return, for each step but the first ones, the seconds of the gradient, the update, the
        rest, and all three together.
        """
        times: dict[str, list[float]] = defaultdict(list)
        ends = [ended for _, ended in self.notes["update"]]
        # In the first ones memory is taken and kernels are chosen
        for step in range(FIRST_STEPS, len(ends)):
            whole = rest = ends[step] - ends[step - 1]
            for kind in ("gradient", "update"):
                began, ended = self.notes[kind][step]
                times[kind].append(ended - began)
                rest -= ended - began
            times["step"].append(rest)
            times["whole"].append(whole)
        return times


@dataclass
class _Inner(PassingReporter):
    """Reports of a training inside a measurement only that it is alive, with `done` figures."""

    done: int

    def progress(self, *, samples: int, **_: Any) -> None:
        self.inner.progress(step=self.done, samples=samples)


def train_profiled(
    runtime: Runtime, run: Run, profile: Profile, done: int, folder: str | None
) -> None:
    """Train `run` with `profile` in place of the rank's compute; `done` figures are known so far.

    Its files lie in `folder`, the launcher's, since ranks may be killed.
    """
    reporter = _Inner(runtime.reporter, done)
    runtime = replace(runtime, ranks=run.training.ranks, compute=profile, reporter=reporter)
    with tempfile.TemporaryDirectory(prefix="training-", dir=folder) as own:
        train(runtime, (run, Path(own)))
