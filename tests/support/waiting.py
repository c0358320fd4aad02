"""Waiting for a condition that other processes bring about."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.02
DEADLINE_SECONDS = 120.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return once `condition` holds; fail after a deadline that only a broken run reaches."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_SECONDS / POLL_SECONDS)):
        if condition():
            return
        pause.wait(POLL_SECONDS)
    raise AssertionError(f"waited {DEADLINE_SECONDS:g} s in vain: {what}")


def kill(pid: int) -> None:
    """End process `pid`, which may have ended since it was looked for."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether process `pid` exists and is more than a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether the kernel holds process `pid`."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def descendants(pid: int | None = None) -> set[int]:
    """The processes that process `pid` (this one) started, and those that they started."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: set[int] = set()
    pending = [pid or os.getpid()]
    while pending:
        for child in children.get(pending.pop(), []):
            found.add(child)
            pending.append(child)
    return found


def listening_ports(pid: int) -> set[str]:
    """The local addresses on which process `pid` listens (IPv4, as the kernel writes them)."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(entry.readlink()))
        except FileNotFoundError:
            continue
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {f[1] for f in lines if f[3] == "0A" and f"socket:[{f[9]}]" in inodes}
