"""Ports for processes that have to know one before any of them listens."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator


def ports() -> Iterator[int]:
    """Ports below those that the system gives to connections, other ones in each worker."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return itertools.cycle(range(20_000 + 500 * worker, 20_500 + 500 * worker))


PORTS = ports()


def free_port() -> int:
    """A port on which nobody listens."""
    for port in PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError
