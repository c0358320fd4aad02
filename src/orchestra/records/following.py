"""A run that is still under way: the lines that are added to its files, and what they say."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from orchestra.errors import InputError
from orchestra.records.files import steps_files
from orchestra.records.live import Live, read_live, under_way
from orchestra.records.record import RunRecord
from orchestra.records.trace import longest_waits, read_trace
from orchestra.settings.reading import open_file

if TYPE_CHECKING:
    from orchestra.records.store import RunFolder

MOST_BYTES = 1 << 20
"""The most bytes read at a time. Where more were added, lines at even distances stand for them."""
SAMPLES = 64
MOST = 1e18  # no figure of a step comes near
MOST_LOGGED = 1e300  # of a number that a strategy logs: means over many are finite, too
PARTS = ("compute", "communicate", "wait", "input")
"""The parts of a step's seconds, as its line names them."""
Line = dict[str, Any]
WINDOW_SECONDS, WINDOW_STEPS = 10.0, 10
"""Figures are means over at least this many seconds of the stopwatch and this many steps."""
MAX_WINDOW = 5000
HISTORY = 512
SILENT_SECONDS = 5.0
"""How much older than another worker's a worker's last step is for it to count as silent."""
MAX_TIMELINE = 1 << 23  # bytes of the packed file: a larger one takes too long to read


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
            # Parsing 100 MB of steps takes 9 s; the end of the file and sampled lines take 0.03 s.
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


@dataclass(frozen=True)
class RankView:
    """One rank of a run: its last steps, or, once the run is completed, all of them.

    What is not known is None; `parts` are those of its time.
    """

    rank: int
    role: str
    step: int
    samples_per_second: float | None = None
    loss: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    staleness: tuple[float, int] | None = None
    batch: int | None = None
    bytes_per_second: float | None = None
    waits_for: str = ""
    phase: str = ""
    silent_seconds: float = 0.0


class RankTrack:
    """The steps of one rank, as its file grows."""

    def __init__(self, path: Path) -> None:
        # Bounded for steps of less than 2 ms, of which ten seconds have more than this
        self.window: deque[Line] = deque(maxlen=MAX_WINDOW)
        self.history: list[tuple[float, float]] = []
        self.switched: list[int] = []
        self.decisions: list[Mapping[str, Any]] = []
        self._tail = Tail(path)
        self._every, self._count = 1, 0

    def poll(self) -> list[Line]:
        """Read the lines that were added, and return them."""
        # A file of another version, or a damaged line, must not end whoever watches
        lines = [line for line in self._tail.read() if is_step(line)]
        # A resumed run rewrites its file: steps after the checkpoint are dropped and done again
        if self._tail.began_anew:
            for kept in (self.window, self.history, self.switched, self.decisions):
                kept.clear()
        for line in lines:
            self.window.append(line)
            if line.get("switched_at_step") not in (None, *self.switched):
                self.switched.append(line["switched_at_step"])
            if "decision" in line:
                self.decisions.append(line["decision"])
            self._remember(line)
        # One line more than the window: a rate needs the moment at which the first step began
        since = self.window[-1]["seconds"] - WINDOW_SECONDS if self.window else 0.0
        while len(self.window) > WINDOW_STEPS + 1 and self.window[1]["seconds"] < since:
            self.window.popleft()
        return lines

    def _remember(self, line: Line) -> None:
        """Keep at most `HISTORY` losses, evenly spaced over the steps."""
        self._count += 1
        loss = line["loss"]
        if self._count % self._every or loss is None or not math.isfinite(loss):
            return
        self.history.append((float(line["consumed"]), float(loss)))
        if len(self.history) > HISTORY:
            # Every second one from now on, too: evenly spaced, however long the run
            del self.history[::2]
            self._every *= 2

    def view(self, rank: int, newest: float) -> RankView:
        """Return the last steps of `rank`; `newest` is the latest moment that any rank reported."""
        first, *lines = self.window
        # The first line only tells when the next step began
        began = first["seconds"] if lines else 0.0
        lines = lines or [first]
        last = lines[-1]
        seconds = last["seconds"] - began

        def rate(name: str) -> float | None:
            return sum(line.get(name) or 0 for line in lines) / seconds if seconds > 0 else None

        parts = {name: rate(name) or 0.0 for name in PARTS if name in last}
        stale = [value for line in lines for value in line.get("staleness") or ()]
        staleness = (sum(stale) / len(stale), max(stale)) if stale else None
        silent = newest - last["seconds"]
        return RankView(
            rank, "worker", last["step"], rate("samples"), last["loss"], parts, staleness,
            last["samples"], rate("bytes_sent"),
            silent_seconds=silent if silent > SILENT_SECONDS else 0.0,
        )  # fmt: skip


class LiveRun:
    """A run that may still be under way, read again and again, and tolerantly.

    Lines that are no steps are skipped. Of a large addition only lines at even distances are read.
    A file that was written anew, as by a resumed run, is read from its start.

    Attributes:
        tracks: of each rank, the steps that were read so far.
        live: the last `live.json`, which `poll` reads; None if the run has no such file.
        record: the record, which `poll` reads once the run has ended.
        under_way: whether a process was at work in the folder at the last `poll`.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.tracks: dict[int, RankTrack] = {}
        self.live: Live | None = None
        self.record: RunRecord | None = None
        self.under_way = False

    def poll(self, now: float) -> None:
        """Read what is known at the time `now`, in seconds since 1970."""
        self.record = self.run.ended()
        self.live = read_live(self.run.path)
        self.under_way = self.record is None and under_way(self.run.path, self.live, now)
        if self.record is None and not self.under_way:
            self.record = self.run.ended()  # it may have ended just now
        self.poll_steps()

    def poll_steps(self) -> dict[int, list[Line]]:
        """Read the steps that were added, and return them by rank."""
        news = {}
        for rank, path in steps_files(self.run.path).items():
            track = self.tracks.setdefault(rank, RankTrack(path))
            with suppress(OSError):
                news[rank] = track.poll()
        return news

    @cached_property
    def waits(self) -> Mapping[int, str]:
        """The name of the rank that each rank waited for longest, by the timeline of a run that has
        ended. Empty without a timeline, or if reading it would take long."""
        path = self.run.trace
        with suppress(OSError, InputError):
            if path is not None and path.stat().st_size <= MAX_TIMELINE:
                return longest_waits(read_trace(path))
        return {}


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
