"""The search of a plan: the race, carried out by simulations on the processes of this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import rmtree

from orchestra.engines.processes.system import now
from orchestra.engines.simulation.training import assigned
from orchestra.engines.simulation.trials import Trial, Tried, hand_out
from orchestra.errors import InputError
from orchestra.planning.candidates import Candidate
from orchestra.planning.race import Race, SearchBudget, TrialRequest
from orchestra.planning.standing import NO_TIME, Contender, Length
from orchestra.report.numbers import count
from orchestra.trainer.settings import Target
from orchestra.worker.runtime import usable_cores

MOST_PROCESSES = 8
CHECKPOINTS, MODEL = "checkpoints", "parameters.safetensors"  # in the folder of a run

Tell = Callable[[str, float], None]
"""Tells what is under way, and the part of the budget that is used up."""
Ask = Callable[[], TrialRequest | None]
"""Returns the next simulation, or None while no simulation can begin."""


class Search(Race):
    """Finds out which of `candidates` reaches the target first.

    Args:
        target: what is to be reached; None: what one process reaches in 3/4 of the samples.
        folder: of the runs.
        tell: what is under way, and the part of the budget that is used up.

    Attributes:
        stopped: the user ended it.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        target: Target | None,
        length: Length,
        folder: Path,
        budget: SearchBudget,
        tell: Tell,
        *,
        seeds: Sequence[int] = (0, 1, 2),
    ) -> None:
        super().__init__(candidates, target, length, budget, seeds)
        self.stopped = False
        self._folder, self._tell = folder, tell

    def run(self) -> None:
        """Carry out the race until one candidate has won, the budget is used up, or Ctrl-C."""
        self.carry_out(lambda: self.ask(now()), self.told, self._budget.until)
        self.over()
        if self.stopped:
            self.notes.append("the search was stopped before its end")

    def tidy(self) -> None:
        """Remove the checkpoints and models of all runs: nothing goes on from them, and a model
        with its optimizer's state and all snapshots is many times as large as what is read."""
        for run in self._folder.glob("*/seed-*"):
            rmtree(run / CHECKPOINTS, ignore_errors=True)
            (run / MODEL).unlink(missing_ok=True)

    def add_speeds(self, candidates: Sequence[Candidate], until: float) -> None:
        """Find the speeds of further candidates, which are not raced, until a moment."""
        fresh = [Contender(each) for each in candidates if each.name not in self.entries]
        if fresh and not self.stopped:
            self.entries |= {entry.name: entry for entry in fresh}
            self.find_speeds(fresh, until)
            for entry in fresh:
                entry.dropped = entry.dropped or "for the scaling curve alone"

    def find_speeds(self, entries: Sequence[Contender], until: float, steps: int = 0) -> None:
        """Find the speeds of `entries`, whether they are raced or not, until a moment: from a few
        steps, or from `steps`."""
        waiting = list(reversed(entries))

        def ask() -> TrialRequest | None:
            if not waiting or now() > until:
                return None
            return self.request_speed(waiting.pop(), steps)

        def told(request: TrialRequest, tried: Tried) -> None:
            self.under_way.remove(request)
            self.take_speed(request, tried)
            if request.entry.speed is None and request.entry.dropped is None:
                waiting.append(request.entry)  # with values

        self.carry_out(ask, told, until, len(entries))
        for entry in entries:
            if entry.speed is None and entry.dropped is None:
                entry.dropped = NO_TIME

    def carry_out(
        self,
        ask: Ask,
        told: Callable[[TrialRequest, Tried], None],
        until: float,
        most: int = MOST_PROCESSES,
    ) -> None:
        """Simulate what is asked for, on at most so many processes, until a moment or Ctrl-C."""
        with tempfile.TemporaryDirectory(prefix="orchestra-plan-") as place:
            folders = (Path(place) / str(number) for number in range(1_000_000_000))

            def trial() -> tuple[TrialRequest, Trial] | None:
                while (request := ask()) is not None:
                    self._tell_part()
                    folder = self._folder_of(request, folders)
                    try:
                        return request, Trial(assigned(request.run, folder), request.part)
                    except InputError as error:
                        told(request, Tried(failure=str(error)))
                return None

            try:
                many = max(1, min(processes(), most))
                self.stopped |= self.hand_out(trial, told, until, many)
            except KeyboardInterrupt:
                self.stopped = True

    def hand_out(
        self,
        trial: Callable[[], tuple[TrialRequest, Trial] | None],
        told: Callable[[TrialRequest, Tried], None],
        until: float,
        many: int,
    ) -> bool:
        """Carry out trials on `many` processes; return whether the user ended it."""
        return hand_out(trial, told, until, many, self._tell_part)

    def _folder_of(self, request: TrialRequest, temporary: Iterator[Path]) -> Path:
        """Return the folder of a run: one that learns may go on later, from its checkpoint."""
        if not request.learns:
            return next(temporary)
        name = request.entry.name.replace(os.sep, "-").replace("%", "percent")
        return self._folder / name / f"seed-{request.run.seed}"

    def _tell_part(self) -> None:
        used = (now() - self._budget.began) / (self._budget.until - self._budget.began)
        learning = [each for each in self.under_way if each.learns]
        speeds = len(self.under_way) - len(learning)
        parts = [f"{each.entry.name} with seed {each.run.seed}" for each in learning]
        parts += [f"{count('speed', speeds)} from shapes"] * (speeds > 0)
        # Processes start before the first simulation, and end after the last one
        self._tell("; ".join(parts) or "simulating", min(used, 1.0))


def processes() -> int:
    """Return how many simulations may go on at the same time."""
    return max(1, min(len(usable_cores()), MOST_PROCESSES))
