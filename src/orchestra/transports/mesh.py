"""Set-up of the socket transport: every rank connects to those below it and accepts the others.

A connection begins with a hello in each direction, as `orchestra.transports.handshake` has it.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Callable, Sequence

from orchestra.errors import InputError, PeerLost
from orchestra.transports.handshake import TLS, Reception, connect, in_words, remaining
from orchestra.transports.progress import ProgressEngine
from orchestra.transports.sockets import SocketTransport

STRANGERS = 64
"""Connections that have not said hello, beside those of the ranks; more push out the oldest."""


class Listener:
    """A port of this rank, on the interface `host`, where the ranks above it connect."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.socket = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise InputError(
                f"cannot listen on {host!r}: {error}; name an address of this machine"
            ) from error
        self.socket.setblocking(False)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self.socket.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect_mesh(
    rank: int,
    addresses: Sequence[tuple[str, int]],
    listener: Listener,
    token: bytes,
    *,
    tls: TLS | None = None,
    timeout: float,
    on_flow_start: Callable[[], None] | None = None,
    on_wait: Callable[[tuple[int, ...]], None] = lambda ranks: None,
) -> SocketTransport:
    """Connect `rank` with every other one; `addresses[r]` is where rank r listens.

    `listener` is closed when this returns or raises. Connections that do not prove that they
    belong to the run within `timeout` seconds, or claim a rank that is there already, are dropped.
    `on_wait` is called with the ranks that this one waits for, whenever they change.
    Raises `PeerLost` that names the first rank that could not be reached, or did not come.
    """
    deadline = time.perf_counter() + timeout
    connections: dict[int, socket.socket] = {}
    try:
        with listener:
            for peer in range(rank):
                on_wait((peer,))
                connections[peer] = _connect(rank, peer, token, addresses[peer], tls, deadline)
            missing = set(range(rank + 1, len(addresses)))
            _receive(rank, listener, token, tls, missing, connections, on_wait, deadline)
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    for connection in connections.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return SocketTransport(ProgressEngine(rank, connections), on_flow_start)


def _connect(
    rank: int, peer: int, token: bytes, address: tuple[str, int], tls: TLS | None, deadline: float
) -> socket.socket:
    """A connection from `rank`, which is here, to `peer` after both hellos."""
    try:
        return connect(address, rank, peer, token, tls=tls, deadline=deadline)
    except ConnectionError as error:
        where = f"{address[0]}:{address[1]}"
        raise PeerLost(peer, f"it could not be reached at {where}: {error}") from error


def _receive(
    rank: int,
    listener: Listener,
    token: bytes,
    tls: TLS | None,
    missing: set[int],
    connections: dict[int, socket.socket],
    on_wait: Callable[[tuple[int, ...]], None],
    deadline: float,
) -> None:
    """Accept connections until all of `missing` are among `connections`.

    Raises `PeerLost` with the lowest missing rank when the time is up.
    """
    refused = ""

    def refuse(_: str, error: ssl.SSLError) -> None:
        nonlocal refused
        refused = f"; a connection was refused: {in_words(error)}"

    def welcome(peer: int, connection: socket.socket) -> None:
        missing.remove(peer)
        connections[peer] = connection
        on_wait(tuple(sorted(missing)))

    context = None if tls is None else tls.context(server_side=True)
    with selectors.DefaultSelector() as selector:
        reception = Reception(
            selector, listener.socket, rank, token, context,
            wanted=missing.__contains__, most=lambda: STRANGERS + len(missing),
            welcome=welcome, refused=refuse,
        )  # fmt: skip
        try:
            on_wait(tuple(sorted(missing)))
            while missing:
                for key, _ in selector.select(remaining(deadline)):
                    key.data()
        except TimeoutError:
            first, *rest = sorted(missing)
            others = f" (nor did {', '.join(map(str, rest))})" if rest else ""
            raise PeerLost(first, f"it did not connect in time{others}{refused}") from None
        finally:
            reception.close()
