"""Simulations of a plan's candidates, shared out among processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from orchestra.engines.events import Event, Notice
from orchestra.engines.processes.launch import launch
from orchestra.engines.processes.system import now
from orchestra.engines.simulation.training import assigned
from orchestra.engines.simulation.trials import Trial, Trials, Tried, try_all
from orchestra.errors import InputError, RunFailed
from orchestra.planning.standing import Entry
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.trainer.settings import Run
from orchestra.worker.threads import usable_cores

SPEED_STEPS, RANK_STEPS, FEWEST_STEPS = 20, 4000, 8
"""Of a simulation without values: steps, those of all ranks together, and the fewest."""
PATIENCE = 3600.0
MOST_PROCESSES = 8

Job = tuple[Entry, Run, Path, float]
"""A run of a candidate, its folder, and the part of its samples after which it is stopped."""


class Simulator:
    """Carries out jobs; `tell` is called meanwhile, `stopped` says that the user wants an end."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.stopped = False
        self._tell = tell

    def carry_out(self, jobs: Sequence[Job], deadline: float) -> list[tuple[Entry, Tried]]:
        """What became of each job; those for which there was no time have no record."""
        found: dict[int, Tried] = {}
        trials: dict[int, Trial] = {}
        for place, (_, run, folder, part) in enumerate(jobs):
            try:
                trials[place] = Trial(assigned(run, folder), part)
            except InputError as error:
                found[place] = Tried(failure=str(error))
        places = list(trials)
        if places and now() < deadline and not self.stopped:
            for number, tried in self._launched([trials[place] for place in places], deadline):
                found[places[number]] = tried
        return [(entry, found.get(place, Tried())) for place, (entry, *_) in enumerate(jobs)]

    def _launched(self, trials: Sequence[Trial], deadline: float) -> list[tuple[int, Tried]]:
        """Carry out the trials, shared out among processes; alone, if one took all with it."""
        ranks = min(processes(), len(trials))
        threads = max(1, len(usable_cores()) // (2 * ranks))  # others are at work, too
        work = Trials(trials, deadline, threads)
        try:
            launched = launch(try_all, work, ranks, patience=PATIENCE, on_event=self._on_event)
        except RunFailed as failure:
            if len(trials) == 1:
                return [(0, Tried(failure=str(failure).splitlines()[0]))]
            return [
                (place, tried)
                for place, trial in enumerate(trials)
                for _, tried in self._launched([trial], deadline)
            ]
        self.stopped = self.stopped or launched.stopped
        lists = cast("tuple[list[tuple[int, Tried]] | None, ...]", launched.results)
        return [each for own in lists if own is not None for each in own]

    def _on_event(self, event: Event | Notice) -> None:
        self._tell()


def processes() -> int:
    """How many simulations go on at the same time, at most."""
    return max(1, min(len(usable_cores()), MOST_PROCESSES))


def short(run: Run, steps: int = 0) -> Run:
    """A few steps of `run`, without values, or so many."""
    training = run.training
    steps = steps or max(FEWEST_STEPS, min(SPEED_STEPS, RANK_STEPS // training.ranks))
    if isinstance(run.strategy, LocalSGD) and run.strategy.every is not None:
        steps = 2 * run.strategy.every
    training = replace(
        training, epochs=None, steps=steps, tensors="shapes", clip_norm=None, target=None,
        snapshots=0,
    )  # fmt: skip
    return replace(run, training=training)
