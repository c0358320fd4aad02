"""Restarts of a run that has lost a rank: whether, from where, and after which pause."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from orchestra.errors import InputError, RankLost, RunFailed
from orchestra.records.files import steps_files
from orchestra.records.following import Tail
from orchestra.records.live import add_notice
from orchestra.records.record import Restart, RunRecord
from orchestra.records.store import RunFolder
from orchestra.trainer.checkpoint_files import newest_whole, steps_of
from orchestra.trainer.settings import Run

PAUSE_SECONDS = 1.0  # before the first restart; before each further one twice as long
MOST_PAUSE_SECONDS = 30.0
FROM_BEGINNING = (
    "each restart is from the beginning, as there are no checkpoints: set checkpoint_every to lose "
    "less"
)


def require_possible(run: Run, most: int) -> None:
    """Raise `InputError` if `run` cannot be restarted, or not `most` times."""
    if most < 0:
        raise InputError(f"max_restarts: {most} is below 0")
    if most and run.training.engine == "simulation":
        raise InputError(
            "max_restarts: a simulation repeats its faults exactly, so a restart would end as "
            "the run before it: leave it out"
        )


def pause_before(number: int) -> float:
    """Return the seconds of the pause before restart `number`, from 1."""
    return min(PAUSE_SECONDS * 2.0 ** (number - 1), MOST_PAUSE_SECONDS)


@dataclass(frozen=True)
class Remains:
    """What the folder of a run holds after its end: where it would go on, and how far it was."""

    failure: str | None  # why the run ended, in one line; None if the record does not tell
    checkpoint: int | None  # the number of the newest whole one
    step: int  # of its first worker; 0 without a checkpoint
    saved: tuple[tuple[int, int], ...]  # each rank in the checkpoint, and its steps there
    recorded: tuple[tuple[int, int, int, int], ...]
    """Each rank with a file of steps, the time and size of that file, and the last step in it."""


def remains_in(folder: Path) -> Remains:
    """Return what a run has left in `folder`."""
    checkpoint, step, saved = None, 0, {}
    if (found := newest_whole(folder / "checkpoints")) is not None:
        checkpoint, manifest = found
        step = steps_of(folder / "checkpoints", checkpoint, manifest.first_worker)
        saved = manifest.steps_by_slot(folder / "checkpoints", checkpoint)
    failure = None
    with suppress(InputError):  # a damaged summary
        ended = RunFolder(folder).ended()
        failure = None if ended is None else ended.ending.failure
    recorded = []
    for rank, path in steps_files(folder).items():
        status, last = path.stat(), 0
        with suppress(LookupError, ValueError):
            last = int(Tail(path).read()[-1]["step"])
        recorded.append((rank, status.st_mtime_ns, status.st_size, last))
    first = None if failure is None else failure.split("\n", 1)[0]
    return Remains(first, checkpoint, step, tuple(saved.items()), tuple(recorded))


class StepCount:
    """Counts the steps that restarts repeat, each recorded step once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}  # time and size of files of steps

    def restart(self, cause: str, at: float, remains: Remains) -> Restart:
        """Return the entry of a restart; `remains` are those of the run that ended by `cause`."""
        again, saved = 0, dict(remains.saved)
        for rank, *state, last in remains.recorded:
            # A rank that was lost in its set-up has not yet cut its file off at the checkpoint:
            # the steps in it were counted before.
            if self._seen.get(rank) != tuple(state):
                again = max(again, last - saved.get(rank, remains.step))
        self.skip(remains)
        return Restart(cause, at, remains.checkpoint, remains.step, again)

    def skip(self, remains: Remains) -> None:
        """Leave out the steps that are recorded so far."""
        self._seen = {rank: (time, size) for rank, time, size, _ in remains.recorded}


class Restarts:
    """The restarts of `run` in its `folder`, `most` of them at most, after those `made` before.

    `tell` is called with each line for the user.

    Raises:
        InputError: see `require_possible`.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        most: int,
        tell: Callable[[str], None],
        made: Sequence[Restart] = (),
    ) -> None:
        require_possible(run, most)
        self.made = [*made]
        self._run, self._folder, self._most, self._tell = run, folder, most, tell
        self._notices: list[str] = []
        self._count = StepCount()

    def begin(self) -> None:
        """Note the state of the folder before the run begins or resumes."""
        if self._most and not self._run.training.checkpoint_every:
            self._say(FROM_BEGINNING)
        self._count.skip(remains_in(self._folder))

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
        cause = str(loss).split("\n", 1)[0]
        restart = self._count.restart(cause, time.time(), remains_in(self._folder))
        start = "the beginning"
        if restart.checkpoint is not None:
            start = f"checkpoint {restart.checkpoint}, step {restart.step}"
        elif self._run.training.checkpoint_every:
            start += ": no checkpoint yet"
        number = len(self.made) + 1
        pause = pause_before(number)
        self._say(f"{cause}; restart {number} of {self._most} in {pause:g} s, from {start}")
        time.sleep(pause)
        self.made.append(restart)

    def added_to(self, record: RunRecord) -> RunRecord:
        """Return `record`, of the last attempt, with the restarts before it."""
        notices = (*self._notices, *record.ending.notices)
        return replace(record, ending=replace(record.ending, restarts=self.made, notices=notices))

    def _say(self, text: str) -> None:
        self._notices.append(text)
        self._tell(text)
        add_notice(self._folder, text)
