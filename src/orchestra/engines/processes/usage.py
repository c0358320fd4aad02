"""Reads what a process takes of its machine's processors."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from orchestra.engines.processes.system import machine
from orchestra.records.report import Usage
from orchestra.worker.threads import usable_cores

_STAT = Path("/proc/stat")
_WORKING = (0, 1, 2, 5, 6, 7)
"""Fields of a line of /proc/stat: user, nice, system, irq, softirq, steal (proc(5))."""


def now() -> float:
    """Seconds on the clock that all processes of this machine share."""
    return time.monotonic()


def busy_seconds(text: str, cores: tuple[int, ...], ticks: int) -> float:
    """Processor seconds of all programs on `cores` since the start, from the `text` of /proc/stat,
    which counts `ticks` a second."""
    wanted = {f"cpu{core}" for core in cores}
    lines = (line.split() for line in text.splitlines())
    fields = (line[1:] for line in lines if line and line[0] in wanted)
    return sum(int(line[place]) for line in fields for place in _WORKING) / ticks


@dataclass
class UsageMeter:
    """Adds up what this process and its machine use between `start` and `stop`."""

    passed: float = 0.0
    own: float = 0.0
    busy: float | None = 0.0

    def running(self, running: bool) -> None:
        """Starts it, or stops it: what a `Runtime` calls its stopwatch."""
        sign = -1 if running else 1
        self.passed += sign * time.monotonic()
        self.own += sign * time.process_time()
        now = _busy_now()
        self.busy = None if now is None or self.busy is None else self.busy + sign * now

    def usage(self) -> Usage:
        """All so far; not while it runs."""
        return Usage(machine(), len(usable_cores()), self.passed, self.own, self.busy)


def _busy_now() -> float | None:
    try:
        return busy_seconds(_STAT.read_text(), usable_cores(), os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None
