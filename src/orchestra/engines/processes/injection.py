"""Faults that a rank injects into itself at an operation that it counts, for tests and campaigns.

The variable `ORCHESTRA_INJECT` has them, separated by semicolons, for all ranks:

    Inject("kill", rank=1, at="send", number=30); Inject("delay", rank=0, at="gradient")

A fault is addressed by its rank and the number of an operation, and never by seconds, so that a run
can be disturbed again at the same place. A rank without faults has no interceptor for them. Before
it injects one, the rank adds a line to the file that `ORCHESTRA_INJECT_LOG` names, if it is set. A
fault that the file has is not injected again, in a run that is restarted or resumed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from orchestra.settings import MAX_RANKS, REQUIRED, Registry, Settings, parse, setting
from orchestra.transports.sockets import SocketTransport
from orchestra.worker.interception import HookedCall, HookedFlow, Interceptor
from orchestra.worker.runtime import Work

T = TypeVar("T")

VARIABLE, LOG = "ORCHESTRA_INJECT", "ORCHESTRA_INJECT_LOG"

SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}
STRANGE = (b"GET / HTTP/1.1\r\nHost: orchestra\r\n\r\n", bytes(range(256)) * 16, b"")
"""What strangers say on a port on which a run listens; the last one says nothing."""

WRITES = ("open", "os.rename")
"""Python's audit events that are points of a checkpoint's write. Not os.mkdir: ranks make the same
folder, and ignore an error where another one has made it meanwhile."""


class Injected(ArithmeticError):
    """The exception of the program that the fault "raise" raises."""


@dataclass(frozen=True, repr=False)
class Inject(Settings):
    """A fault of one rank, at the operation of that kind with that number."""

    action: Literal[
        "kill", "stop", "terminate", "interrupt", "raise", "delay", "nan", "cut", "reset",
        "strangers", "full_disk", "truncate",
    ] = setting(
        REQUIRED,
        "kill, stop, terminate, interrupt: SIGKILL, SIGSTOP, SIGTERM, SIGINT to the target; "
        "raise: an exception in the program; delay: the operation begins later; nan: a gradient "
        "(at=gradient) becomes NaN; cut, reset: the connection to the operation's peer, or to the "
        "target, ends; strangers: three connections to the watcher say nothing or nonsense, and "
        "stay open; full_disk: no space is left (at=write); truncate: half of the file under way "
        "is lost, and the rank is killed (at=write)",
    )  # fmt: skip
    _: KW_ONLY
    rank: int = setting(REQUIRED, "the rank that injects it", low=0, high=MAX_RANKS)
    at: Literal["start", "send", "receive", "collective", "wait", "gradient", "step", "write"] = (
        setting("start", "kind of operation; write: a point of the write of a checkpoint")
    )
    number: int = setting(1, "of the operation among this rank's of its kind", low=1, high=10**9)
    target: Literal["rank", "group", "launcher", "fork server", "watcher"] = setting(
        "rank", "the process that gets a signal, or watcher: the connection that ends"
    )
    seconds: float = setting(1.0, "of a delay, or until a stopped rank continues", low=0, high=3600)


INJECTIONS = Registry("fault", {"Inject": f"{__name__}:Inject"})


def injections(environ: Mapping[str, str], rank: int) -> list[Inject]:
    """Return the faults that the environment still has for `rank`. Raises `InputError`."""
    texts = [text for text in environ.get(VARIABLE, "").split(";") if text.strip()]
    found = [parse(text, INJECTIONS, where=VARIABLE) for text in texts]
    done = {line["fault"] for line in injected(Path(environ[LOG]))} if LOG in environ else ()
    return [fault for fault in found if fault.rank == rank and repr(fault) not in done]


def injected(log: Path) -> list[dict[str, Any]]:
    """Return what ranks have injected: `fault` and the `monotonic` time of each."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class Injector(Interceptor):
    """Counts the operations of a rank, and injects `faults`.

    Args:
        transport: of the rank's main flow in the group that it is in.
        watcher: the connection to the watcher.
        address: where the watcher listens.
        local: whether this process was forked for a launcher of ours.
        log: the file that gets a line for each fault.
    """

    def __init__(
        self,
        faults: list[Inject],
        transport: SocketTransport,
        watcher: socket.socket,
        address: tuple[str, int],
        *,
        local: bool,
        log: str | None,
    ) -> None:
        self._faults: dict[tuple[str, int], Inject] = {(f.at, f.number): f for f in faults}
        kinds = {fault.at for fault in faults}
        self.heeds_messages = bool(kinds & {"send", "receive", "wait"})
        self._counts: dict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self.transport, self._watcher, self._address = transport, watcher, address
        self._local, self._log = local, log
        self._strangers: list[socket.socket] = []
        if "write" in kinds:
            self._look_at_writes()
        self._reach("start")

    def begin(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        kind = "collective" if operation.kind == "native" else operation.kind
        self._reach(kind, operation.peer)
        return proceed()

    def wait(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        self._reach("wait", operation.peer)
        return proceed()

    def compute(self, flow: HookedFlow, work: Work, proceed: Callable[[], T]) -> T:
        # A loop of the user's own tells of each forward pass, without samples.
        if work.kind not in ("gradient", "backward") and work != ("forward", 0, ()):
            return proceed()
        fault = self._reach("gradient")
        with not_a_number() if fault and fault.action == "nan" else contextlib.nullcontext():
            return proceed()

    def progress(self, step: int) -> None:
        self._reach("step")

    def _reach(self, at: str, peer: int | None = None) -> Inject | None:
        """Count an operation of kind `at`; inject the fault at it, if any, and return that."""
        fault = self._faults.get((at, next(self._counts[at])))
        if fault is not None:
            self._note(fault)
            self._inject(fault, peer)
        return fault

    def _note(self, fault: Inject) -> None:
        if self._log is not None:
            line = json.dumps({"fault": repr(fault), "monotonic": time.monotonic()})
            with Path(self._log).open("a") as file:
                file.write(line + "\n")

    def _inject(self, fault: Inject, peer: int | None) -> None:
        if fault.action in SIGNALS:
            self._signal(fault, SIGNALS[fault.action])
        elif fault.action == "raise":
            raise Injected(f"injected at {fault.at} {fault.number}")
        elif fault.action == "delay":
            threading.Event().wait(fault.seconds)
        elif fault.action in ("cut", "reset"):
            self._cut(fault, peer)
        elif fault.action == "strangers":
            for words in STRANGE:
                self._strangers.append(socket.create_connection(self._address))
                self._strangers[-1].sendall(words)

    def _signal(self, fault: Inject, number: signal.Signals) -> None:
        if fault.target == "group":
            os.killpg(0, number)
            return
        pid = os.getpid()
        if fault.target == "fork server" or (fault.target == "launcher" and not self._local):
            pid = os.getppid()
        elif fault.target == "launcher":
            # The fork server is between the two.
            fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
            pid = int(fields[1])
        if fault.action == "stop" and pid == os.getpid():
            continue_after(fault.seconds)
        os.kill(pid, number)

    def _cut(self, fault: Inject, peer: int | None) -> None:
        connection: socket.socket | None = self._watcher
        if fault.target != "watcher":
            own, size = self.transport.rank, self.transport.size
            to = (own + 1) % size if peer is None or peer == own else peer
            connection = self.transport.connection(to)
        if connection is None:
            return
        with contextlib.suppress(OSError):
            if fault.action == "cut":
                # Past TLS, which would say farewell.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
            else:
                reset(connection)

    # Files

    def _look_at_writes(self) -> None:
        """Count the points of the writes of checkpoints, by Python's audit events."""
        looking = threading.local()

        def look(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in WRITES or getattr(looking, "at", False):
                return
            path = arguments[0]
            if not isinstance(path, str | os.PathLike) or "/checkpoints/." not in os.fspath(path):
                return
            looking.at = True  # a line of the log is written to a file, too
            try:
                self._reach_write(str(path))
            finally:
                looking.at = False

        sys.addaudithook(look)

    def _reach_write(self, path: str) -> None:
        fault = self._reach("write")
        if fault is None:
            return
        if fault.action == "full_disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if fault.action == "truncate":
            written = [file for file in Path(path).parent.rglob("*") if file.is_file()]
            for file in written[-1:]:
                os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def not_a_number() -> Iterator[None]:
    """Let the gradient of every output that a module computes inside be NaN."""

    def spoil(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.nan)

    handle = register_module_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def continue_after(seconds: float) -> None:
    """Have the kernel send SIGCONT to this process after `seconds`, though it is stopped (Linux).

    No process is started for it, which might be left.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    timer = ctypes.c_void_p()
    # struct sigevent: sigev_value, sigev_signo, sigev_notify (SIGEV_SIGNAL), in 64 bytes
    event = struct.pack("<qii48x", 0, signal.SIGCONT, 0)
    # struct itimerspec: the interval, and the first time
    when = struct.pack("<qqqq", 0, 0, int(seconds), int(seconds % 1 * 1e9) + 1)
    if libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) or libc.timer_settime(
        timer, 0, when, None
    ):
        raise OSError(ctypes.get_errno(), "no timer")


def reset(connection: socket.socket) -> None:
    """End `connection` with a reset, and leave its descriptor as it is (Linux)."""
    # connect(2): an address of family AF_UNSPEC dissolves the association, by RST.
    ctypes.CDLL(None).connect(connection.fileno(), struct.pack("<H14x", socket.AF_UNSPEC), 16)
