"""Network namespaces without names: each is there as long as somebody holds it.

A namespace that `ip netns add` makes has a name in the file system and stays after a crash. These
are held by open descriptors of the launcher, and by the processes inside. When both are gone the
kernel removes them, and with them every interface, bridge and queueing discipline, whatever it was
that ended the processes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from orchestra.engines.processes.place import leave_namespace, set_namespace
from orchestra.errors import RunFailed

_OWN = "/proc/thread-self/ns/net"


class Namespace:
    """A network namespace, until `close`."""

    def __init__(self) -> None:
        before = os.open(_OWN, os.O_RDONLY)
        try:
            leave_namespace()
            try:
                self.descriptor = os.open(_OWN, os.O_RDONLY)
            finally:
                set_namespace(before)
        finally:
            os.close(before)

    @property
    def path(self) -> str:
        """By which other processes of this machine open it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets and processes that this thread makes inside belong to the namespace."""
        before = os.open(_OWN, os.O_RDONLY)
        try:
            set_namespace(self.descriptor)
            try:
                yield
            finally:
                set_namespace(before)
        finally:
            os.close(before)

    def ip(self, lines: Sequence[str]) -> None:
        """Carry out commands of ip(8), such as "link set lo up". Raises `RunFailed`."""
        self._batch("ip", lines)

    def tc(self, lines: Sequence[str]) -> None:
        """Carry out commands of tc(8). Raises `RunFailed`."""
        self._batch("tc", lines)

    def output(self, *command: str) -> str:
        """What a command prints inside."""
        with self.inside():
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def _batch(self, program: str, lines: Sequence[str]) -> None:
        with self.inside():
            done = subprocess.run(
                [program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True,
                text=True, check=False,
            )  # fmt: skip
        if done.returncode != 0:
            reason = "; ".join(done.stderr.strip().splitlines())
            raise RunFailed(f"the emulated network: {program}: {reason}")

    def close(self) -> None:
        """Let go of it."""
        os.close(self.descriptor)
