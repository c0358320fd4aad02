"""Faults that a real rank injects into itself: signals, connections that end, files that break."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from orchestra.engines.injection import Inject, Injector
from orchestra.transports.sockets import SocketTransport

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


class ProcessInjector(Injector):
    """Injects faults into the process of a rank.

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
        super().__init__(faults, log)
        self.transport, self._watcher, self._address = transport, watcher, address
        self._local = local
        self._strangers: list[socket.socket] = []
        if "write" in self._kinds:
            self._look_at_writes()
        self.reach("start")

    def inject(self, fault: Inject, peer: int | None) -> None:
        if fault.action in SIGNALS:
            self._signal(fault, SIGNALS[fault.action])
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
        fault = self.reach("write")
        if fault is None:
            return
        if fault.action == "full_disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if fault.action == "truncate":
            written = [file for file in Path(path).parent.rglob("*") if file.is_file()]
            for file in written[-1:]:
                os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)


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
