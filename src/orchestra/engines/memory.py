"""How the C library's allocator treats memory that is freed and taken again in every step.

Elsewhere than in glibc there is nothing to be told (docs/decisions/0037-memory.md).
"""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_LARGEST_THRESHOLD = 32 << 20  # that glibc takes
_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Let this process keep what it frees, up to 256 MiB, for what it needs next.

    Else the activations of a step may be given back to the system after it, and every page of them
    be taken from there anew, and filled with zeros, in the next.
    """
    _tell(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    _tell(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def keep_one_arena() -> None:
    """Let all threads take their memory from one place, which the caches then hold.

    Where one thread runs at a time, as in a simulation, none waits for another there. It has to be
    told before the process has a second thread: the place that this one got would be used, too.
    """
    _tell(_M_ARENA_MAX, 1)


def _tell(parameter: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(parameter, value)
