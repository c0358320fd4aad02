"""Restarts of a run that has lost a rank: whether, from where, and after which pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from orchestra.errors import InputError, RankLost, RunFailed
from orchestra.records.live import Tail, add_notice
from orchestra.records.record import Restart, RunRecord
from orchestra.settings.base import to_plain
from orchestra.trainer.checkpoint_files import newest_whole, steps_of
from orchestra.trainer.settings import Run

PAUSE_SECONDS = 1.0  # before the first restart; before each further one twice as long
MOST_PAUSE_SECONDS = 30.0


class Restarts:
    """The restarts of `run` in its `folder`, `most` of them at most.

    `tell` is called with each line for the user.

    Raises:
        InputError: there cannot be as many, or none on this engine.
    """

    def __init__(self, run: Run, folder: Path, most: int, tell: Callable[[str], None]) -> None:
        if most < 0:
            raise InputError(f"max_restarts: {most} is below 0")
        if most and run.training.engine == "simulation":
            raise InputError(
                "max_restarts: a simulation repeats its faults exactly, so a restart would end as "
                "the run before it: leave it out"
            )
        self.made: list[Restart] = []
        self._run, self._folder, self._most, self._tell = run, folder, most, tell
        self._notices: list[str] = []
        self._seen: dict[Path, tuple[int, int]] = {}  # time and size of files of steps

    def begin(self) -> None:
        """Note the state of the folder before the run begins or resumes."""
        if self._most and not self._run.training.checkpoint_every:
            self._say(
                "each restart is from the beginning, as there are no checkpoints: set "
                "checkpoint_every to lose less"
            )
        self._recorded()

    def follow(self, failure: RunFailed) -> bool:
        """Return whether a restart follows a run that ended by `failure`."""
        return isinstance(failure, RankLost) and len(self.made) < self._most

    def concluded(self, failure: RunFailed) -> RunFailed:
        """Return the `failure` of a run that is not restarted, in the words for its user."""
        if not self._most or not self.made or not isinstance(failure, RankLost):
            return failure
        first, *others = str(failure).splitlines()
        return RankLost("\n".join([f"{first}; no restart is left of {self._most}", *others]))

    def prepare(self, loss: RankLost) -> None:
        """Note where the run will go on, tell the user, and pause. No rank may be left."""
        recorded = self._recorded()
        checkpoint, step, saved = self._newest()
        again = max((last - saved.get(rank, step) for rank, last in recorded.items()), default=0)
        cause = str(loss).split("\n", 1)[0]
        restart = Restart(cause, time.time(), checkpoint, step, max(0, again))
        start = "the beginning"
        if checkpoint is not None:
            start = f"checkpoint {checkpoint}, step {step}"
        elif self._run.training.checkpoint_every:
            start += ": no checkpoint yet"
        pause = min(PAUSE_SECONDS * 2 ** len(self.made), MOST_PAUSE_SECONDS)
        number = len(self.made) + 1
        self._say(f"{cause}; restart {number} of {self._most} in {pause:g} s, from {start}")
        time.sleep(pause)
        self.made.append(restart)

    def added_to(self, record: RunRecord) -> RunRecord:
        """Return `record`, of the last attempt, with the restarts before it."""
        return replace(
            record,
            restarts=[to_plain(restart) for restart in self.made],
            notices=(*self._notices, *record.notices),
        )

    def _newest(self) -> tuple[int | None, int, dict[int, int]]:
        """Return the number of the newest whole checkpoint, the steps of its first worker, and
        those of each of its ranks; None and 0 where there is none."""
        folder = self._folder / "checkpoints"
        found = newest_whole(folder)
        if found is None:
            return None, 0, {}
        index, manifest = found
        first = steps_of(folder, index, manifest.first_worker)
        return index, first, manifest.steps_by_slot(folder, index)

    def _say(self, text: str) -> None:
        self._notices.append(text)
        self._tell(text)
        add_notice(self._folder, text)

    def _recorded(self) -> dict[int, int]:
        """Return the last step of each rank whose file of steps has changed since the last call."""
        last = {}
        for path in self._folder.glob("steps-rank-*.jsonl"):
            status = path.stat()
            state = status.st_mtime_ns, status.st_size
            # A rank that was lost in its set-up has not yet cut its file off at the checkpoint:
            # the steps in it were counted before.
            if self._seen.get(path) == state:
                continue
            self._seen[path] = state
            with suppress(LookupError, ValueError):
                last[int(path.stem.rpartition("-")[2])] = int(Tail(path).read()[-1]["step"])
        return last
