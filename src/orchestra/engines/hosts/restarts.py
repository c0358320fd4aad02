"""Restarts of a run on hosts by ssh, by the command that has started its ranks.

The ranks are all new in each attempt. So this command holds the restarts, and each attempt's rank 0
gets them for the record.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from orchestra.engines.hosts.agent import LEAVING_SECONDS
from orchestra.engines.hosts.connection import Hosts
from orchestra.engines.processes.environment import RESTARTS_VARIABLE
from orchestra.engines.restarts import (
    FROM_BEGINNING,
    Remains,
    StepCount,
    pause_before,
    require_possible,
)
from orchestra.errors import InputError, tell
from orchestra.records.record import Restart
from orchestra.settings.base import from_plain, to_plain
from orchestra.trainer.settings import Run

_UNTOLD = "a rank was lost"


class HostRestarts:
    """The restarts of `run`, `most` of them at most.

    Raises:
        InputError: see `require_possible`.
    """

    def __init__(self, run: Run, most: int) -> None:
        require_possible(run, most)
        if most and not run.training.checkpoint_every:
            tell(FROM_BEGINNING)
        self._most = most
        self.checkpoint: int | None = None  # from which the same command goes on, if it is known
        self._made: list[Restart] = []
        self._losses: list[tuple[str | None, float]] = []  # causes and times since the last attempt
        self._count = StepCount()

    @property
    def number(self) -> int:
        """The restarts so far."""
        return len(self._made) + len(self._losses)

    def note_checkpoint(self, hosts: Hosts, first: str, out: Path) -> None:
        """Ask the host `first` where a run that has ended would go on, for `prepare`."""
        with suppress(InputError):  # the host is lost, too
            order = {"folder": str(out), "seconds": 0.0}
            answer = hosts.ask("remains", {first: order})[first]
            self.checkpoint = from_plain(Remains, answer["remains"]).checkpoint

    def prepare(self, cause: str | None, out: Path) -> bool:
        """Tell the user, and pause; return False at once if no restart is left.

        `cause` is that of the run's end, None where rank 0 has told it.
        """
        number = self.number + 1
        if number > self._most:
            what = f"no restart is left of {self._most}" if self._most else self._remedy(out)
        else:
            what = f"restart {number} of {self._most} in {pause_before(number):g} s"
        if words := "; ".join(filter(None, (cause, what))):
            tell(words)
        if number > self._most:
            return False
        self._losses.append((cause, time.time()))
        time.sleep(pause_before(number))
        return True

    def _remedy(self, out: Path) -> str | None:
        if self.checkpoint is None:
            return None
        return (
            f"the same command with --out {out} goes on from checkpoint {self.checkpoint}; "
            "--max-restarts N does so by itself"
        )

    def begin(self, hosts: Hosts, first: str, out: Path) -> dict[str, str]:
        """Note what the run has left on the host `first`; return a variable for rank 0.

        Raises:
            InputError: the host is lost, or the run before has not ended there.
        """
        if not self._most:
            return {}
        order = {"folder": str(out), "seconds": LEAVING_SECONDS if self._losses else 0.0}
        answer = hosts.ask("remains", {first: order})[first]
        if self._losses and answer["held"]:
            raise InputError(f"{first}: {out}: the run before has not ended there")
        remains = from_plain(Remains, answer["remains"])
        for cause, at in self._losses:
            told = cause or remains.failure or _UNTOLD
            self._made.append(self._count.restart(told, at, remains))
        self._losses.clear()
        self._count.skip(remains)
        return {RESTARTS_VARIABLE: json.dumps(to_plain(self._made))}
