"""What `executor.c` does, where it has been compiled: a rank's rows of a schedule, in one call.

The call holds no lock of the interpreter. It moves whatever can move over all connections, and adds
in the order of the schedule, with the bits of torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestra.errors import InputError
from orchestra.schedules import Schedule
from orchestra.schedules.rows import ROW, Rows, rows_of
from orchestra.schedules.table import table_of
from orchestra.transports.compiled import library, loaded
from orchestra.transports.framing import DTYPES

NAME = "orchestra.transports._executor"

DONE, LOOK, ENDED, MISMATCH = range(4)
"""What a call returns. LOOK: call it again, after a look at what the caller waits for besides."""

MAGIC = 0x656E616C
_SCRATCH_BYTES = 1 << 15
_WIDEST = 16  # bytes of an element
_PLACE_BYTES = 16
_POLL_BYTES = 8
_MARKS = 256  # as in executor.c
_DELAY_BYTES = 1 << 23  # on their way at once, over a connection with a latency

# Those that torch adds, too.
_SUMMED = "float32 float64 float16 bfloat16 bool uint8 int8 int16 int32 int64 complex64 complex128"
SUMMED = frozenset(getattr(torch, name) for name in _SUMMED.split())


class Frame(ctypes.Structure):
    """What both ends of a connection have to agree on when a job begins to cross it."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("magic", "dtype", "lane", "job")),
        *((name, ctypes.c_uint64) for name in ("bytes", "table")),
    ]

    def __str__(self) -> str:
        dtype = DTYPES[self.dtype] if self.dtype < len(DTYPES) else f"dtype {self.dtype}"
        return (
            f"{self.bytes} bytes of {dtype}, tag {self.lane}, number {self.job}, "
            f"schedule {self.table:016x}"
        )


class _Side(ctypes.Structure):
    _fields_ = [
        ("jobs", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("row", "framed", "waits")),
    ]


class _Mark(ctypes.Structure):
    _fields_ = [("end", ctypes.c_int64), ("due", ctypes.c_double)]


class _DelayLine(ctypes.Structure):
    _fields_ = [
        ("room", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("size", "entered", "left")),
        ("latency", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("first", "marked")),
        ("marks", _Mark * _MARKS),
    ]


class _Conn(ctypes.Structure):
    _fields_ = [
        ("delay", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("fd", "carried")),
        ("out", _Side),
        ("into", _Side),
        ("frame", Frame),
        ("arrived", ctypes.c_int64),
        ("arriving", ctypes.c_double),
        ("carry", ctypes.c_char * _WIDEST),
    ]


class _Job(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "places", "conns", "polls", "vector")),
        *((name, ctypes.c_int64) for name in ("count", "crossing")),
        *((name, ctypes.c_uint64) for name in ("bytes", "table")),
        *((name, ctypes.c_uint32) for name in ("dtype", "lane")),
        *(
            (name, ctypes.c_int32)
            for name in ("news", "patience", "begun", "where", "error", "unused")
        ),
        ("low", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("waited", "moving")),
    ]


@functools.cache
def _run() -> Callable[[int], int]:
    compiled = loaded(NAME)
    assert compiled is not None
    run = compiled.executor_run
    run.argtypes = [ctypes.c_void_p]
    return run


def is_there() -> bool:
    """Return whether it has been compiled, and ORCHESTRA_COMPILED is not 0.

    Raises `InputError` if it was compiled from another version than this one.
    """
    compiled = library(NAME)
    return compiled is not None and _is_current(compiled)


@functools.cache
def _is_current(compiled: ctypes.CDLL) -> bool:
    sizes = [ROW.itemsize, _PLACE_BYTES, *map(ctypes.sizeof, (_DelayLine, _Conn, _Job))]
    try:
        found = list((ctypes.c_int32 * len(sizes)).in_dll(compiled, "executor_layout"))
    except ValueError:  # of a version that does not tell
        found = []
    if found != sizes:
        raise InputError(
            "the compiled part of Orchestra is of another version: install Orchestra again, or set "
            "ORCHESTRA_COMPILED=0"
        )
    return True


class Wire:
    """A connection that carries one job after the other, and nothing else.

    Attributes:
        connection: a stream socket.
        state: what compiled code knows of it.
        address: of the state.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.state = _Conn(fd=connection.fileno())
        self.address = ctypes.addressof(self.state)
        self._delay: tuple[_DelayLine, NDArray[np.uint8]] | None = None

    def hold(self, latency: float) -> None:
        """Let what jobs send from now on leave `latency` seconds later."""
        if self._delay is None:
            room = np.empty(_DELAY_BYTES, np.uint8)
            delay = _DelayLine(room=_address(room), size=len(room))
            self._delay = delay, room  # alive, as C has their addresses
            self.state.delay = ctypes.addressof(delay)
        self._delay[0].latency = latency

    def close(self) -> None:
        """Close the connection; no job may be in `run`. One that begins later finds its end."""
        self.state.fd = -1
        self.connection.close()

    @property
    def arrived(self) -> tuple[int, float]:
        """The bytes that have arrived, and the seconds blocked in the middle of a transfer."""
        return int(self.state.arrived), float(self.state.arriving)


def _address(array: NDArray[Any]) -> int:
    """Return where `array` lies; its attribute `ctypes` takes longer."""
    address: int = array.__array_interface__["data"][0]
    return address


@dataclass(frozen=True, eq=False)
class Plan:
    """A rank's part in some rounds of a schedule, for vectors of one size.

    Attributes:
        bytes: of a vector.
        rows: in bytes; the peer of each is a place in `peers`.
        address: of the rows.
        peers: the places in the group that this rank exchanges anything with.
        table: a hash of the schedule and the edges, the same on all ranks.
        scratch: bytes of memory that a job uses in addition to the vector, where it adds.
    """

    bytes: int
    rows: Rows
    address: int
    peers: tuple[int, ...]
    table: int
    scratch: int

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether vectors of `dtype` can be added where the plan adds."""
        return not self.scratch or dtype in SUMMED


@functools.lru_cache(maxsize=256)
def plan_of(
    schedule: Schedule,
    index: int,
    edges: tuple[int, ...],
    element_bytes: int,
    first: int = 0,
    end: int | None = None,
) -> Plan:
    """Return the part of the rank at `index`, in the rounds from `first` to before `end`."""
    table = table_of(schedule)
    cuts = np.array(edges) * element_bytes
    # Of the whole collective up to there, as only its first rows open their connections.
    before = len(rows_of(table.parts(index, 0, first), cuts)) if first else 0
    rows = rows_of(table.parts(index, 0, end), cuts)[before:]
    peers = np.unique(rows["peer"])
    rows["peer"] = np.searchsorted(peers, rows["peer"])
    hashed = hashlib.blake2b(repr(edges).encode(), digest_size=8)
    for column in (table.begin, table.source, table.target, table.first, table.end, table.reduces):
        hashed.update(column.tobytes())
    number = int.from_bytes(hashed.digest(), "little")
    added = (rows["end"] - rows["first"])[rows["adds"] == 1].max(initial=0)
    size, scratch = edges[-1] * element_bytes, min(int(added), _SCRATCH_BYTES)
    return Plan(size, rows, _address(rows), tuple(peers.tolist()), number, scratch)


class Job:
    """A plan carried out on one vector after the other, over a wire to each of its peers.

    Args:
        dtype: of the vectors.
        wires: in the order of the plan's peers.
        lane: a number that both ends of a wire have to agree on.
        news: a descriptor; `run` returns `LOOK` when it can be read.
        patience: milliseconds without progress, after which `run` returns `LOOK`; -1: no limit.
    """

    def __init__(
        self,
        plan: Plan,
        dtype: torch.dtype,
        wires: Sequence[Wire],
        lane: int,
        news: int = -1,
        patience: int = -1,
    ) -> None:
        assert len(wires) == len(plan.peers)
        assert plan.fits(dtype)
        count, crossing = len(plan.rows), len(wires)
        self._run = _run()
        self._wires = wires
        places = np.empty(count * _PLACE_BYTES, np.uint8)
        polls = np.empty((crossing + 1) * _POLL_BYTES, np.uint8)
        # An array of ctypes would be a new type each time, which takes longer than all else here.
        conns = np.array([wire.address for wire in wires], np.uintp)
        self._vector: Tensor | None = None
        self._kept = plan, places, polls, conns  # alive, as C has their addresses
        self._state = _Job(
            plan.address, _address(places), _address(conns), _address(polls),
            None, count, crossing, plan.bytes, plan.table,
            DTYPES.index(dtype), lane, news, patience,
        )  # fmt: skip
        self._address = ctypes.addressof(self._state)

    def begin(self, vector: Tensor) -> None:
        """Let `run` carry out the plan on `vector`, which is flat and contiguous, on the CPU."""
        state = self._state
        assert vector.nbytes == state.bytes
        self._vector = vector
        state.vector = vector.data_ptr()
        state.begun = state.low = 0
        state.waited = state.moving = 0.0

    def run(self) -> int:
        """Move rows until all are done, there is news, or patience is at an end.

        Handlers of signals run between two calls. After `ENDED` and `MISMATCH` no wire of the job
        is of further use.
        """
        return self._run(self._address)

    @property
    def seconds(self) -> tuple[float, float]:
        """The seconds blocked with nothing to move, and in the middle of transfers."""
        return float(self._state.waited), float(self._state.moving)

    @property
    def awaited(self) -> int | None:
        """The place of a peer that has still to send something, or to take something."""
        for way in ("into", "out"):
            for place, wire in enumerate(self._wires):
                if getattr(wire.state, way).row >= 0:
                    return place
        return None

    @property
    def where(self) -> int:
        """The place in the plan's peers of the wire that ended, or has another frame."""
        return int(self._state.where)

    @property
    def error(self) -> int:
        """The errno of the wire that ended; 0 where the other end has closed it."""
        return int(self._state.error)

    def mismatch(self) -> str:
        """Say what the other end of a wire begins in place of this job."""
        state, wire = self._state, self._wires[self.where].state
        other = wire.frame
        if other.magic != MAGIC:
            return "it sends what is no collective"
        own = Frame(MAGIC, state.dtype, state.lane, wire.into.jobs, state.bytes, state.table)
        return f"it begins a collective on {other}, this rank one on {own}"
