"""A run under way: what `live.json` has, whether the run goes on, and lines added to files."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from socket import gethostname
from typing import Any, BinaryIO, cast

from orchestra.errors import InputError
from orchestra.records.record import partial_of
from orchestra.records.report import StragglerFinding
from orchestra.settings.base import to_plain
from orchestra.settings.reading import open_file, read_json

LIVE = "live.json"
"""A file in the folder of a run, written about once a second and removed at a normal end."""
FRESH_SECONDS = 10.0  # an older file belongs to a run that has ended, unless a lock says otherwise
MOST_BYTES = 1 << 20
"""The most bytes read at a time. Where more were added, lines at even distances stand for them."""
MAX_NOTICES = 5  # the newest ones, in `live.json`
SAMPLES = 64
MOST = 1e18  # no figure of a step comes near
MOST_LOGGED = 1e300  # of a number that a strategy logs: means over many are finite, too
PARTS = ("compute", "communicate", "wait", "input")
"""The parts of a step's seconds, as its line names them."""
Line = dict[str, Any]


@dataclass(frozen=True)
class Waiting:
    """Ranks any of which may release the waiting one, and the part of its last beats at which it
    waited for them."""

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
    """Return the last `live.json` of a run; None if there is none, or one of another version."""
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
    # An inode alone may be that of a file in another file system, and the device that the kernel
    # shows with a lock is not the one of `stat` on btrfs.
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


class Tail:
    """Reads the lines that are added to the file `path`, which need not be there yet.

    A last line without its end is kept until the rest is there. What is no JSON object is left out.
    `began_anew` says that the last `read` found a file that was written anew, and read it from its
    start.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self.began_anew = False
        self._path = path
        self._most_bytes = most_bytes
        self._file: tuple[int, int] | None = None  # device and inode
        self._position = 0  # of what was read
        self._rest = b""

    def read(self) -> list[Line]:
        """Return the lines that have been completed since the last call, in their order; raise
        `OSError` if the file is there, but cannot be read. What is no file has no lines."""
        self.began_anew = False
        try:
            file = open_file(self._path)
        except (FileNotFoundError, InputError):
            return []
        with file:
            status = os.fstat(file.fileno())
            # A file that was replaced, or has become shorter, is another run's.
            same, size = (status.st_dev, status.st_ino), status.st_size
            self.began_anew = self._file not in (None, same) or size < self._position
            if self.began_anew:
                self._position, self._rest = 0, b""
            self._file = same
            lines = []
            # 100 MB of steps take 9 s to parse, its end and lines in between 0.03 s (decision 100).
            if size - self._position > self._most_bytes:
                start = size - self._most_bytes // 2
                lines = self._sampled(file, self._position, start)
                file.seek(start)
                file.readline(self._most_bytes)  # the rest of a line that began before
                self._rest = b""
            else:
                file.seek(self._position)
            text = self._rest + file.read()
            self._position = file.tell()
        whole, end, self._rest = text.rpartition(b"\n")
        return lines + _parsed((whole + end).splitlines())

    @staticmethod
    def _sampled(file: BinaryIO, begin: int, end: int) -> list[Line]:
        """Return lines at even distances between two places of `file`."""
        found = []
        for k in range(SAMPLES):
            file.seek(begin + (end - begin) * k // SAMPLES)
            if k or begin:
                file.readline(MOST_BYTES)
            if file.tell() < end:
                found.append(file.readline(MOST_BYTES))
        return _parsed(found)


def is_step(line: Line) -> bool:
    """Return whether `line` has the figures of a step; its loss may be NaN, or None."""
    needed = [line.get(name) for name in ("step", "seconds", "consumed", "samples")]
    others = [line.get(name, 0) for name in (*PARTS, "bytes_sent")]
    lists = [line.get(name, []) for name in ("staleness", "rates")]
    if type(line.get("loss", "")) not in (float, type(None)) or not all(
        isinstance(each, list) for each in lists
    ):
        return False
    # To Python `True` is an int; NaN compares as false.
    return is_logged(line.get("logged", {})) and all(
        type(value) in (int, float) and abs(value) < MOST
        for value in itertools.chain(needed, others, *lists)
    )


def is_logged(logged: object) -> bool:
    """Return whether `logged` has finite numbers by plain names, which can name a file."""
    return isinstance(logged, dict) and all(
        name.isidentifier() and len(name) <= 100
        and isinstance(value, Real) and abs(cast(float, value)) < MOST_LOGGED
        for name, value in logged.items()
    )  # fmt: skip


def _parsed(lines: list[bytes]) -> list[Line]:
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
