"""Set-up of the socket transport: every rank connects to those below it and accepts the others.

A connection begins with a hello in each direction, as `orchestra.transports.handshake` has it.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from orchestra.errors import InputError, PeerLost
from orchestra.transports.handshake import (
    HELLO_BYTES,
    TLS,
    connect,
    hello,
    in_words,
    proves,
    remaining,
    sender_of,
    wrap_accepted,
)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
            _Reception(rank, listener, token, tls, missing, connections, on_wait).run(deadline)
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


class _Arrival:
    """An accepted connection that has yet to prove that it comes from a rank of the run."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext | None) -> None:
        connection.setblocking(False)
        if context is not None:
            connection = wrap_accepted(connection, context)
        self.connection = connection
        self.hello = b""
        self._shaken = False

    def advance(self) -> int:
        """Take in what is there; what to wait for next, or 0 once the hello is complete.

        Raises OSError where the other end went or does not speak TLS as it should.
        """
        try:
            if isinstance(self.connection, ssl.SSLSocket) and not self._shaken:
                self.connection.do_handshake()
                self._shaken = True
            while len(self.hello) < HELLO_BYTES:
                piece = self.connection.recv(HELLO_BYTES - len(self.hello))
                if not piece:
                    raise ConnectionError("closed in the hello")
                self.hello += piece
        except (BlockingIOError, ssl.SSLWantReadError):
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        return 0


class _Reception:
    """Accepts connections until all of `missing` are among `connections`."""

    def __init__(
        self,
        rank: int,
        listener: Listener,
        token: bytes,
        tls: TLS | None,
        missing: set[int],
        connections: dict[int, socket.socket],
        on_wait: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._rank = rank
        self._listener = listener.socket
        self._token = token
        self._context = None if tls is None else tls.context(server_side=True)
        self._missing = missing
        self._connections = connections
        self._on_wait = on_wait
        self._refused = ""

    def run(self, deadline: float) -> None:
        """Raises `PeerLost` with the lowest missing rank when the time is up."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                self._on_wait(tuple(sorted(self._missing)))
                while self._missing:
                    self._turn(selector, deadline)
            finally:
                for key in list(selector.get_map().values()):
                    if key.data is not None:
                        key.data.connection.close()

    def _turn(self, selector: selectors.BaseSelector, deadline: float) -> None:
        try:
            ready = selector.select(remaining(deadline))
        except TimeoutError:
            first, *rest = sorted(self._missing)
            others = f" (nor did {', '.join(map(str, rest))})" if rest else ""
            reason = f"it did not connect in time{others}{self._refused}"
            raise PeerLost(first, reason) from None
        for key, _ in ready:
            if key.data is None:
                self._accept(selector)
            else:
                self._advance(selector, key.data)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it went again
        arrivals = [key.data for key in selector.get_map().values() if key.data is not None]
        if len(arrivals) >= STRANGERS + len(self._missing):
            self._drop(selector, arrivals[0])
        try:
            arrival = _Arrival(connection, self._context)
        except OSError:
            return  # it went again
        selector.register(arrival.connection, selectors.EVENT_READ, arrival)

    def _advance(self, selector: selectors.BaseSelector, arrival: _Arrival) -> None:
        try:
            events = arrival.advance()
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                self._refused = f"; a connection was refused: {in_words(error)}"
            self._drop(selector, arrival)
            return
        if events:
            selector.modify(arrival.connection, events, arrival)
        elif not self._admit(selector, arrival):
            self._drop(selector, arrival)

    def _admit(self, selector: selectors.BaseSelector, arrival: _Arrival) -> bool:
        """Give the connection its rank's place and answer it, if it proves who it is."""
        peer = sender_of(arrival.hello)
        known = proves(arrival.hello, peer, self._rank, self._token)
        if not known or peer not in self._missing:
            return False
        try:
            # It fits into the empty buffer of a new connection.
            arrival.connection.send(hello(self._rank, peer, self._token))
        except OSError:
            return False
        selector.unregister(arrival.connection)
        self._missing.remove(peer)
        self._connections[peer] = arrival.connection
        self._on_wait(tuple(sorted(self._missing)))
        return True

    @staticmethod
    def _drop(selector: selectors.BaseSelector, arrival: _Arrival) -> None:
        selector.unregister(arrival.connection)
        arrival.connection.close()
