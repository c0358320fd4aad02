"""What the operating system knows of processes, hosts and addresses."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from orchestra.errors import InputError

_PR_SET_PDEATHSIG = 1


def is_stopped(pid: int) -> bool:
    """Whether the kernel holds process `pid` stopped (state T); False where it cannot be asked."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name of the program, in brackets before the state, may hold spaces and brackets.
    return text.rpartition(")")[2].split()[0] == "T"


def exit_status(pid: int, *, within: float = 0.0) -> int | None:
    """How child process `pid` ended, within so many seconds, negative for a signal; it remains to
    be waited for. None while it runs, or where it is no child of this process."""
    deadline = time.monotonic() + within
    while True:
        try:
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
    """While inside, each signal calls its handler; only a main thread can arrange that."""
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


def kernel() -> str:
    """Equal for two processes whose numbers of cores mean the same cores; empty if not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def machine() -> str:
    """Equal for two processes that see each other's process ids; empty where that is not known."""
    boot = kernel()
    try:
        return f"{boot}:{Path('/proc/self/ns/pid').readlink()}" if boot else ""
    except OSError:
        return ""


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even while it is stopped (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def numeric(host: str) -> str:
    """The numeric form of `host`, an address or a name of this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            f"host {host!r} is unknown: {error}; name an address of this machine"
        ) from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address).is_unspecified:
        raise InputError(f"host {host!r} is every address: name the one that others are to use")
    return address


def towards(host: str, port: int) -> str:
    """The local address of the interface that reaches `host`; loopback for loopback."""
    address = numeric(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # sends nothing
        except OSError as error:
            raise InputError(
                f"no interface of this machine reaches {host}: {error}; name one of its addresses"
            ) from error
        return str(probe.getsockname()[0])
