"""The fork server of a launcher."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.support.waiting import descendants


def parent_of(pid: int) -> int:
    """Return the process that has started process `pid`, such as the fork server of a rank."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def fork_server(launcher: int) -> int | None:
    """The fork server of a launcher, once it runs."""
    for pid in descendants(launcher):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # Ranks have the same command line: they are forked from it.
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if parent_of(pid) == launcher and b"forkserver" in command:
                return pid
    return None
