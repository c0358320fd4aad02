"""The operating system: processes and hosts, signals, time and processor use, memory, and the
emulated node that a rank's process moves to. Imports without torch.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from orchestra.records.report import Usage
from orchestra.worker.runtime import Work, allowed_cores

T = TypeVar("T")

TWICE_SECONDS = 0.5  # one signal may arrive twice within

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_LARGEST_THRESHOLD = 32 << 20  # that glibc takes
_KEPT_BYTES = 256 << 20

_STAT = Path("/proc/stat")
_STOLEN = (7,)
_WORKING = (0, 1, 2, 5, 6, *_STOLEN)
"""Fields of a line of /proc/stat: user, nice, system, irq, softirq, steal (proc(5))."""


def is_stopped(pid: int) -> bool:
    """True if the kernel holds process `pid` stopped (state T); False where it cannot be asked."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name of the program, in brackets before the state, may hold spaces and brackets.
    return text.rpartition(")")[2].split()[0] == "T"


def exit_status(pid: int, *, within: float = 0.0) -> int | None:
    """Return the exit status of child `pid`, negative for a signal, without reaping it.

    Waits up to `within` seconds. None while it runs, or where it is no child of this process.
    """
    deadline = time.monotonic() + within
    while True:
        try:
            # WNOWAIT leaves the child to `multiprocessing`, which started it and reaps it.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if ended is not None:
            exited = ended.si_code == os.CLD_EXITED
            return ended.si_status if exited else -ended.si_status
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)


@contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Let each signal call its handler inside the block; without effect outside a main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda *_, handler=handler: handler())
        for number, handler in handlers.items()
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopWish:
    """Remembers that SIGTERM asked this process to stop; a handler of the signal, which may come at
    any moment, calls it. Nothing is sent from there: the program may be in the midst of sending."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, *_: object) -> None:
        self.asked = True


def spaced(handler: Callable[[], None]) -> Callable[[], None]:
    """Return `handler` without effect within half a second of its last call: who sends a signal to
    a process group may send it to a member again, or have it passed on."""
    called_at = -math.inf

    def spaced_handler() -> None:
        nonlocal called_at
        passed, called_at = time.monotonic() - called_at, time.monotonic()
        if passed > TWICE_SECONDS:
            handler()

    return spaced_handler


def kernel() -> str:
    """Return a text equal for processes that number the same cores alike; empty if not known."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def machine() -> str:
    """Return a text equal for processes that see each other's ids; empty if not known."""
    with suppress(OSError):
        return f"{boot}:{Path('/proc/self/ns/pid').readlink()}" if (boot := kernel()) else ""
    return ""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process when its parent ends, even while it is stopped (Linux).
    Another `number` is that of the signal that the kernel sends in place of SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def now() -> float:
    """Return seconds on the clock that all processes of this machine share."""
    return time.monotonic()


def busy_seconds(
    text: str, cores: tuple[int, ...], ticks: int, places: tuple[int, ...] = _WORKING
) -> float:
    """Return processor seconds of all programs on `cores` since the start of the system.

    They are read from the `text` of /proc/stat, with `ticks` a second; the fields `places` count.
    """
    wanted = {f"cpu{core}" for core in cores}
    lines = (line.split() for line in text.splitlines())
    fields = (line[1:] for line in lines if line and line[0] in wanted)
    return sum(int(line[place]) for line in fields for place in places) / ticks


@dataclass
class UsageMeter:
    """Adds up what this process and its machine use between `start` and `stop`."""

    passed: float = 0.0
    own: float = 0.0
    busy: float | None = 0.0
    stolen: float | None = 0.0
    switches: int = 0

    def running(self, running: bool) -> None:
        """Start or stop the meter, as a `Runtime` does with its stopwatch."""
        sign = -1 if running else 1
        self.passed += sign * time.monotonic()
        self.own += sign * time.process_time()
        self.switches += sign * resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        try:
            now = _STAT.read_text(), allowed_cores(), os.sysconf("SC_CLK_TCK")
            busy, stolen = busy_seconds(*now), busy_seconds(*now, _STOLEN)
        except (OSError, ValueError, IndexError):
            self.busy = self.stolen = None
        if self.busy is not None and self.stolen is not None:
            self.busy += sign * busy
            self.stolen += sign * stolen

    def usage(self) -> Usage:
        """Return all use so far; not while it runs."""
        cores = len(allowed_cores())
        return Usage(machine(), cores, self.passed, self.own, self.busy, self.stolen, self.switches)


@dataclass
class TimedCompute:
    """Measures the computation of a rank by the clock."""

    seconds: float = 0.0
    main_seconds: float = 0.0
    calls: int = 0
    _main: int = field(default_factory=threading.get_ident)
    _in_gradient: int | None = None  # the thread that computes one
    _waited: float = 0.0  # inside computations that have not ended

    def run(self, work: Work, function: Callable[[], T]) -> T:
        # The time of a bucket that is encoded during a gradient counts there. Only a simulation
        # charges a "step", which stands for what surrounds a gradient.
        if self._in_gradient == threading.get_ident() or work.kind == "step":
            return function()
        if work.kind == "gradient":
            self._in_gradient = threading.get_ident()
        started = time.perf_counter()
        try:
            return function()
        finally:
            passed = time.perf_counter() - started - self._waited
            self.seconds += passed
            if threading.get_ident() == self._main:
                self.main_seconds += passed
            self._waited = 0.0
            self.calls += 1
            if work.kind == "gradient":
                self._in_gradient = None

    def advance_to(self, slot: int) -> None:
        """Do nothing: only a simulation charges a part of a backward pass."""

    def wait_before_using(self, slot: int, wait: Callable[[], object]) -> None:
        started = time.perf_counter()
        wait()
        self._waited += time.perf_counter() - started


def peak_memory() -> int:
    """Return the peak memory of this process in bytes, Python and torch included."""
    # In bytes on macOS, in KiB on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def keep_freed_memory() -> None:
    """Let this process keep what it frees, up to 256 MiB, for what it needs next.

    Else the activations of a step may be given back to the system after it, and every page of them
    be taken from there anew, and filled with zeros, in the next.
    """
    # Blocks up to this size come from the heap. This also ends glibc's dynamic adjustment.
    _mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    _mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def keep_one_arena() -> None:
    """Let all threads take their memory from one place, which the caches then hold.

    Where one thread runs at a time, as in a simulation, none waits for another there. Has to be
    called before the process has a second thread: the arena of that one would be used, too.
    """
    _mallopt(_M_ARENA_MAX, 1)


def _mallopt(parameter: int, value: int) -> None:
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(parameter, value)


# Emulated nodes


@dataclass(frozen=True)
class Delay:
    """Messages to `target` leave `seconds` later, between two times on the stopwatch."""

    target: int
    seconds: float
    begin: float
    end: float


@dataclass(frozen=True)
class RankPlace:
    """The emulated node of one rank, and its place on it.

    The rank's process moves there before it listens for the others. A socket stays in the network
    namespace in which it was made, so the connection to the watcher, which is made first, is out of
    band: neither shaped nor cut with the node's link.
    """

    node: str  # its name
    address: str  # of the node; ranks listen there
    interface: str  # which has it
    namespace: str  # a path to its network namespace
    members: str  # the file of a control group, which takes process ids
    threads: int  # its share of the node's cores
    local_rank: int  # its index among the ranks of the node
    latencies: tuple[float, ...]  # seconds that a message to each rank waits before it leaves
    delays: tuple[Delay, ...] = ()  # what is added to them for a while
    shared_memory: bool = True  # whether ranks of the node may share it

    def enter(self) -> None:
        """Move this thread, and all processes and threads that it will start, to the node.

        The control group takes all threads of the process, the namespace only this one.
        """
        Path(self.members).write_text(str(os.getpid()))
        enter_namespace(self.namespace)

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


def enter_namespace(path: str) -> None:
    """Move this thread into the network namespace at `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        set_namespace(descriptor)
    finally:
        os.close(descriptor)


def set_namespace(descriptor: int) -> None:
    """Move this thread into the network namespace that `descriptor` is open on.

    `os.setns` is there from Python 3.12 on.
    """
    _call("setns", descriptor, _CLONE_NEWNET)


def leave_namespace() -> None:
    """Move this thread into a new network namespace, in which there is a loopback that is down."""
    _call("unshare", _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
