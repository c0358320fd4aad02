"""A run under way: what `live.json` has, and whether a process is at work in a folder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname

from orchestra.errors import InputError
from orchestra.records.files import LIVE, partial_of
from orchestra.records.report import StragglerFinding
from orchestra.settings.base import to_plain
from orchestra.settings.reading import read_json

FRESH_SECONDS = 10.0  # an older file belongs to a run that has ended, unless a lock says otherwise
MAX_NOTICES = 5  # the newest ones, in `live.json`


@dataclass(frozen=True)
class Waiting:
    """Ranks that a rank waits for (one of them can release it), and the part of its last beats at
    which it waited for them."""

    ranks: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class RankNow:
    """The last report of a rank.

    `seconds` is the time on its stopwatch up to which `arrived` counts: for each rank that sent
    large messages the bytes, and the seconds for which one was arriving.
    """

    rank: int
    phase: str
    step: int = 0
    samples: int = 0
    waits_for: tuple[Waiting, ...] = ()
    seconds: float = 0.0
    arrived: tuple[tuple[int, float, float], ...] = ()


@dataclass(frozen=True)
class Live:
    """A run at the moment `written`, by its `process` on the machine `host`; times are that
    machine's, in seconds since 1970."""

    written: float
    host: str
    process: int
    ranks: tuple[RankNow, ...] = ()
    training_since: float | None = None  # when the first step began
    fraction: float | None = None  # of the budget, used up; None as long as it is not known
    fraction_then: float = 0.0  # at the first step
    stragglers: tuple[StragglerFinding, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the budget is used up, at the pace so far, by the clock on the wall."""
        if self.training_since is None or self.fraction is None:
            return None
        done = self.fraction - self.fraction_then
        passed = self.written - self.training_since
        return passed * (1 - self.fraction) / done if done > 0 and passed > 0 else None


def write_live(folder: Path, live: Live) -> None:
    """Replace `live.json` as a whole. What cannot be written is left out: nobody depends on it."""
    path = folder / LIVE
    with contextlib.suppress(OSError):
        # Without fsync: it is written about once a second, and worth nothing after a crash.
        partial_of(path).write_text(json.dumps(to_plain(live, finite=True)))
        partial_of(path).replace(path)


def read_live(folder: Path) -> Live | None:
    """Return the last `live.json` of a run; None if it is missing or of another version."""
    try:
        live: Live = read_json(folder / LIVE, Live)
    except (FileNotFoundError, InputError):
        return None
    return live


def add_notice(folder: Path, text: str) -> None:
    """Add a notice to `live.json`, where the last attempt of a run has left one."""
    live = read_live(folder)
    if live is not None:
        write_live(folder, replace(live, notices=(*live.notices, text)[-MAX_NOTICES:]))


def remove_live(folder: Path) -> None:
    """Remove the file of a run that has ended well: its record says more."""
    with contextlib.suppress(OSError):
        (folder / LIVE).unlink(missing_ok=True)


def under_way(folder: Path, live: Live | None, now: float) -> bool:
    """Return whether a process is at work in `folder` at the time `now`, in seconds since 1970.

    A lock on the folder is certain. Some file systems have none, and other machines do not show
    theirs: then the run has to have written its file a moment ago.
    """
    if holder(folder) is not None:
        return True
    if live is None or now - live.written >= FRESH_SECONDS:
        return False
    return live.host != gethostname() or Path(f"/proc/{live.process}").exists()


def holder(folder: Path) -> str | None:
    """Return the process that has locked `folder`, as far as the kernel shows it."""
    with contextlib.suppress(OSError):
        there = folder.stat()
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            # A process id of 0 is of another namespace, as a container's; "->" is one that waits.
            if words[1] == "FLOCK" and words[5].endswith(f":{there.st_ino}"):
                process = int(words[4])
                if process > 0 and _has_open(process, there):
                    return f"process {process}"
    return None


def _has_open(process: int, file: os.stat_result) -> bool:
    """Return whether `process` has `file` open; True for one of another user, who hides it.

    An inode alone may be that of a file in another file system, and the device that the kernel
    shows with a lock is not the one of `stat` on btrfs.
    """
    try:
        for each in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(each.stat(), file):
                    return True
    except PermissionError:
        return True
    return False


def mean_rates(before: Sequence[RankNow], after: Sequence[RankNow]) -> dict[tuple[int, int], float]:
    """Return the bytes/s of each pair (source, target) between two moments of the stopwatch."""
    earlier = {each.rank: each for each in before}
    rates = {}
    for now in after:
        then = earlier.get(now.rank, RankNow(now.rank, ""))
        had = {source: size for source, size, _ in then.arrived}
        seconds = now.seconds - then.seconds
        for source, size, _ in now.arrived:
            more = size - had.get(source, 0.0)
            if seconds > 0 and more > 0:
                rates[source, now.rank] = more / seconds
    return rates
