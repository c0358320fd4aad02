"""What the operating system knows of processes and hosts."""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def is_stopped(pid: int) -> bool:
    """Whether the kernel holds process `pid` stopped (state T); False where it cannot be asked."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name of the program, in brackets before the state, may hold spaces and brackets.
    return text.rpartition(")")[2].split()[0] == "T"


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
