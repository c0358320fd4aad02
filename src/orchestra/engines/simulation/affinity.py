"""Threads of which one runs at a time, on one core after the other of a machine.

The one that wakes another still runs, so that the system puts that one on an idle core, whose
caches hold nothing of what it needs. So it is told to wake where the first one runs; from then on
the system may move it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable


def _reader() -> Callable[[], int] | None:
    """What tells which core runs it; None where there is no such thing."""
    if sys.platform != "linux":
        return None
    read: Callable[[], int] | None = getattr(ctypes.CDLL(None), "sched_getcpu", None)
    return read if read is not None and read() >= 0 else None


class Affinity:
    """To the cores that the present thread may use."""

    def __init__(self) -> None:
        self._read = _reader()
        self._cores = set() if self._read is None else os.sched_getaffinity(0)

    def bring_here(self, thread: int) -> None:
        """Let `thread` (its native id), which waits, wake on the core of the present one."""
        if self._read is not None:
            self._restrict(thread, {self._read()})

    def release(self) -> None:
        """Let the present thread run on any of them again."""
        self._restrict(0, self._cores)

    def _restrict(self, thread: int, cores: set[int]) -> None:
        if len(self._cores) > 1:
            try:
                os.sched_setaffinity(thread, cores)
            except OSError:
                return  # a sandbox may forbid it, and all goes on, only slower
