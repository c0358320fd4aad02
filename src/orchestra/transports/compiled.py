"""What `compiled.c` does for shared memory, where it has been compiled: barriers, and sums.

Without it the same is done by sockets and torch alone, with the same bits. A C compiler makes it
when Orchestra is installed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec

from torch import Tensor

NAME = "orchestra.transports._compiled"
AWAKE_SECONDS = 200e-6
"""For which a rank looks for the others before it sleeps: if it is late after waking, the others
sleep in the next barrier, and so on."""
ALONE_SECONDS = 20e-6
"""Of these, in which it keeps its core to itself, unless there are more ranks than cores."""
FLAG_BYTES = 64
"""Of each rank, in the shared memory."""
ROOM = 1 << 18
"""Elements of a chunk: with those of other ranks, few enough for the caches."""
SO_FAR, NOTHING = -1, -2

_INTERRUPTED, TIMED_OUT, LOST = 1, 2, 3


class _End(ctypes.Structure):
    _fields_ = [
        ("flags", ctypes.c_void_p),
        ("doors", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("awake", "alone", "waited")),
        ("arrived", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("rank", "size", "patience", "awaited", "lost")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("first", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("other", ctypes.c_int32),
    ]


class _Sum(ctypes.Structure):
    _fields_ = [
        ("vector", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("length", "count", "stride", "room", "at", "before")),
        ("turn", ctypes.c_int32),
        ("shown", ctypes.c_int32),
    ]


@functools.cache
def loaded(name: str) -> ctypes.CDLL | None:
    """Return the extension module `name`, read by its symbols; None if it has not been compiled."""
    found = find_spec(name)
    if found is None or found.origin is None or sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(found.origin)
    except OSError:  # of another kind of machine
        return None


def library(name: str) -> ctypes.CDLL | None:
    """Return what `loaded` does; None also if ORCHESTRA_COMPILED is 0."""
    return None if os.environ.get("ORCHESTRA_COMPILED") == "0" else loaded(name)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = loaded(NAME)
    if library is None:
        return None
    library.arrive.argtypes = library.await_all.argtypes = [ctypes.c_void_p]
    library.arrive.restype = None
    library.add_up.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


def is_there() -> bool:
    """Return whether it has been compiled, and ORCHESTRA_COMPILED is not 0."""
    return os.environ.get("ORCHESTRA_COMPILED") != "0" and _library() is not None


class Steps:
    """How the elements of a vector are summed, in the order in which they are added.

    Args:
        steps: first and last element (not included), a rank, and what its elements are added to:
            those of another rank, the sum `SO_FAR`, or `NOTHING`.
    """

    def __init__(self, steps: Iterable[tuple[int, int, int, int]]) -> None:
        made = [_Step(*step) for step in steps]
        self.array = (_Step * len(made))(*made)


class CompiledEnd:
    """One rank's end: what `SharedMemory` is without it.

    Args:
        rank: this rank.
        doors: the file descriptor of the socket to each other rank.
        flags: `FLAG_BYTES` for each rank, in the shared memory.
        timeout: seconds for another rank to come; None: no limit.
    """

    def __init__(
        self, rank: int, doors: Mapping[int, int], flags: Tensor, timeout: float | None
    ) -> None:
        library = _library()
        assert library is not None
        self._library, self._flags = library, flags
        size = len(doors) + 1
        self._doors = (ctypes.c_int32 * size)(*(doors.get(peer, -1) for peer in range(size)))
        # With more ranks than cores a rank that spins takes the core of one that is waited for.
        alone = 0.0 if size > len(os.sched_getaffinity(0)) else ALONE_SECONDS
        patience = -1 if timeout is None else min(int(1e3 * timeout), 2**31 - 1)
        self._own = _End(
            flags.data_ptr(), ctypes.addressof(self._doors), AWAKE_SECONDS, alone, 0.0,
            0, rank, size, patience, -1, -1,
        )  # fmt: skip
        # C keeps its state in `_own` between calls; `_flags` and `_doors` are kept alive for it.
        self._address = ctypes.addressof(self._own)

    @property
    def awaited(self) -> int | None:
        """The rank for which this one sleeps."""
        return None if self._own.awaited < 0 else int(self._own.awaited)

    @property
    def seconds_waiting(self) -> float:
        return float(self._own.waited)

    @property
    def lost(self) -> int:
        """The rank that has gone, or not come in time."""
        return int(self._own.lost)

    def barrier(self) -> int:
        """Wait until all ranks are here: 0, `TIMED_OUT` or `LOST`."""
        self._library.arrive(self._address)
        return self._patiently(self._library.await_all, self._address)

    def add_up(self, vector: Tensor, steps: Steps, places: Tensor, turn: int) -> tuple[int, int]:
        """Replace each rank's vector by the sums. Returns as `barrier`, and the last place used.

        Args:
            vector: float32, contiguous.
            places: shape [2, ranks + 1, elements], float32.
            turn: the place to begin with.
        """
        stride = places.shape[2]
        wanted = _Sum(
            vector.data_ptr(), ctypes.addressof(steps.array), places.data_ptr(),
            vector.numel(), len(steps.array), stride, min(ROOM, stride), 0, 0, turn, 0,
        )  # fmt: skip
        address = ctypes.addressof(wanted)
        found = self._patiently(self._library.add_up, self._address, address)
        return found, 1 - int(wanted.turn)

    @staticmethod
    def _patiently(function: Callable[..., int], *arguments: int) -> int:
        """Call `function` again whenever a signal has interrupted it."""
        while True:
            # Python runs the handlers of signals between two calls.
            found = function(*arguments)
            if found != _INTERRUPTED:
                return found
