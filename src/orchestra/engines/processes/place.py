"""The node that a rank's process moves to before it listens for the others. Imports without torch.

A socket stays in the network namespace in which it was made. So the connection to the watcher,
which is made first, is out of band: neither shaped nor cut with the node's link.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Delay:
    """Messages to `target` leave `seconds` later, between two times on the stopwatch."""

    target: int
    seconds: float
    begin: float
    end: float


@dataclass(frozen=True)
class Place:
    """The emulated node of one rank, and its place on it.

    Attributes:
        node: its name.
        address: of the node; ranks listen there.
        interface: which has it.
        namespace: a path to its network namespace.
        members: the file of a control group, which takes process ids.
        threads: its share of the node's cores.
        local_rank: its index among the ranks of the node.
        latencies: seconds that a message to each rank waits before it leaves.
        delays: what is added to them for a while.
        shared_memory: whether ranks of the node may share memory.
    """

    node: str
    address: str
    interface: str
    namespace: str
    members: str
    threads: int
    local_rank: int
    latencies: tuple[float, ...]
    delays: tuple[Delay, ...] = ()
    shared_memory: bool = True

    def enter(self) -> None:
        """Move this thread, and all processes and threads that it will start, to the node.

        The control group takes all threads of the process, the namespace only this one.
        """
        Path(self.members).write_text(str(os.getpid()))
        descriptor = os.open(self.namespace, os.O_RDONLY)
        try:
            set_namespace(descriptor)
        finally:
            os.close(descriptor)

    def held(self) -> Latencies | None:
        """Return how long messages wait; None if none does."""
        held = any(self.latencies) or self.delays
        return Latencies(self.latencies, self.delays) if held else None


class Latencies:
    """How long a message waits before it leaves, by the rank that it is for."""

    def __init__(self, usual: Sequence[float], delays: Sequence[Delay] = ()) -> None:
        self._usual, self._delays = usual, delays
        self._began: float | None = None

    def begin(self, now: float) -> None:
        """Note when the stopwatch starts for the first time: `delays` count from there."""
        if self._began is None:
            self._began = now

    def seconds(self, target: int, now: float) -> float:
        """Return the latency in seconds of a message to `target` that is sent `now`."""
        usual = self._usual[target]
        if self._began is None or not self._delays:
            return usual
        time = now - self._began
        more = (d.seconds for d in self._delays if d.target == target and d.begin <= time < d.end)
        return usual + sum(more)


def set_namespace(descriptor: int) -> None:
    """Move this thread into the network namespace that `descriptor` is open on.

    `os.setns` is there from Python 3.12 on.
    """
    _call("setns", descriptor, CLONE_NEWNET)


def leave_namespace() -> None:
    """Move this thread into a new network namespace, in which there is a loopback that is down."""
    _call("unshare", CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
