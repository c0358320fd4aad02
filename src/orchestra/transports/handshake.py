"""How a connection begins: mutual TLS where it is set up, then a challenge and a hello per end.

Both ends send their challenge at once: magic, version and a nonce. A hello holds the sender's rank
and a digest of both challenges, keyed with the run's token. It proves membership on this connection
alone, and does not give the token away. The end that connects sends its hello first. Sizes are
fixed, so nothing is parsed before the hello has been compared. Imports without torch.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from orchestra.errors import InputError

MAGIC = b"orchestra\2"
"""The name of this protocol and its version."""
WATCHER = -1
"""The watcher's number, where ranks have theirs."""
NEWCOMER = -2
"""The number of a process that asks the watcher to become a rank."""

LOOK_SECONDS = 5.0  # without an answer, after which one looks whether it is still wanted

NONCE_BYTES = 32
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
_RANK = struct.Struct("<i")
HELLO_BYTES = _RANK.size + 32


@dataclass(frozen=True)
class TLS:
    """PEM files of one rank, or of all: its certificate, its private key, and the authority.

    A process with a certificate of `authority` belongs to the run; host names are not compared.
    A certificate has to allow both client and server use (or not say).
    """

    certificate: Path
    key: Path
    authority: Path

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        """Make an SSL context from the files. Raises `InputError` for one that cannot be used."""
        protocol = ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except OSError as error:
            raise InputError(
                f"TLS cannot use certificate {self.certificate}, key {self.key} and authority "
                f"{self.authority}: {error}; give three PEM files that belong together"
            ) from error
        return context


def in_words(error: OSError) -> str:
    """Say why a connection failed; where certificates are concerned, which end refused which."""
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused here: {error.verify_message}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it shows no certificate"
    if "_ALERT_" in reason and ("CERTIFICATE" in reason or reason.endswith("UNKNOWN_CA")):
        words = reason.partition("_ALERT_")[2].replace("_", " ").lower()
        return f"it refuses the certificate of this end: {words}"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "it does not speak TLS"
    return str(error)


def from_environment(environ: Mapping[str, str]) -> TLS | None:
    """The files that `ORCHESTRA_TLS_CERTIFICATE`, `_KEY` and `_AUTHORITY` name; None if unset.

    Raises:
        InputError: some of them are set, and some are not.
    """
    names = [f"ORCHESTRA_TLS_{field.name.upper()}" for field in fields(TLS)]
    missing = [name for name in names if not environ.get(name)]
    if len(missing) == len(names):
        return None
    if missing:
        raise InputError(f"TLS needs {', '.join(names)}: {', '.join(missing)} is not set")
    return TLS(*(Path(environ[name]) for name in names))


def listen(host: str = "127.0.0.1") -> socket.socket:
    """Listen on a free port of `host`; raises `InputError` where that is no address of this one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=128)
    except OSError as error:
        raise InputError(
            f"cannot listen on {host!r}: {error}; name an address of this machine"
        ) from error


def address_of(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


def challenge() -> bytes:
    """Return the first bytes that an end sends: the hello of the other end has to cover them."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


def hello(sender: int, receiver: int, token: bytes, own: bytes, other: bytes) -> bytes:
    """Return the bytes that prove to `receiver` that `sender` belongs to the run.

    Args:
        own: the challenge that `sender` has sent.
        other: the challenge that `receiver` has sent.
    """
    # The digest covers both ranks, so that a hello cannot be sent back to its sender, or on to
    # another rank. The receiver's challenge is new, so that a recorded hello cannot be replayed.
    purpose = b"%s%d to %d" % (MAGIC, sender, receiver)
    return _RANK.pack(sender) + hmac.digest(token, purpose + own + other, "sha256")


def connect(
    address: tuple[str, int],
    sender: int,
    receiver: int,
    token: bytes,
    *,
    tls: TLS | None,
    deadline: float,
    look: Callable[[], None] = lambda: None,
) -> socket.socket:
    """Connect `sender` to `receiver` at `address`; blocking, after both hellos.

    Raises ConnectionError, with the reason, if there is no connection by `deadline`, in seconds of
    perf_counter. `look` is called now and then while there is no answer at all; its errors pass
    through.
    """
    connection = None
    try:
        connection = _reach(address, deadline, look)
        # Small messages leave at once; Nagle's algorithm would hold them for an acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            connection = tls.context(server_side=False).wrap_socket(connection)
        own = challenge()
        # Before anything is read, so that a listener that expects TLS can refuse plain bytes.
        # Where our certificate was refused, the other end has closed, and its reason is to be read.
        with contextlib.suppress(OSError):
            connection.sendall(own)
        other = _read(connection, CHALLENGE_BYTES, deadline)
        connection.sendall(hello(sender, receiver, token, own, other))
        answer = _read(connection, HELLO_BYTES, deadline)
        # In constant time, as the comparison must not tell how many bytes were right.
        if not hmac.compare_digest(answer, hello(receiver, sender, token, other, own)):
            raise ConnectionError("what listens there is not of this run")
    except OSError as error:
        if connection is not None:
            connection.close()
        raise ConnectionError(in_words(error)) from error
    return connection


def _reach(address: tuple[str, int], deadline: float, look: Callable[[], None]) -> socket.socket:
    """Return a connection with `address`; a firewall may drop what asks for one."""
    while True:
        seconds = remaining(deadline)
        try:
            return socket.create_connection(address, timeout=min(seconds, LOOK_SECONDS))
        except TimeoutError:
            if seconds <= LOOK_SECONDS:
                raise
            look()


def _read(connection: socket.socket, length: int, deadline: float) -> bytes:
    """Block until `length` bytes have arrived. Raises OSError if they do not come in time."""
    data = b""
    while len(data) < length:
        # For each piece: a listener that sends byte by byte must not put off the deadline.
        connection.settimeout(remaining(deadline))
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionError("it closed the connection in the hello")
        data += piece
    return data


def remaining(deadline: float) -> float:
    """Return the seconds until `deadline`. Raises TimeoutError if it has passed."""
    seconds = deadline - time.perf_counter()
    if seconds <= 0:
        raise TimeoutError("no answer in time")
    return seconds


@dataclass(eq=False)
class _Arrival:
    """An accepted connection that has yet to prove that it comes from a rank of the run."""

    connection: socket.socket
    host: str
    since: float
    own: bytes = field(default_factory=challenge)
    challenged: bool = False
    received: bytes = b""

    def advance(self) -> None:
        """Send the challenge, and read what is there; return once the hello is complete.

        Raises OSError where more has to come, the other end went, or it does not speak TLS as it
        should.
        """
        if not self.challenged:
            if isinstance(self.connection, ssl.SSLSocket):
                self.connection.do_handshake()
            # It never blocks, nor does the answer: they fit into the buffer of a new connection.
            self.connection.send(self.own)
            self.challenged = True
        while missing := CHALLENGE_BYTES + HELLO_BYTES - len(self.received):
            piece = self.connection.recv(missing)
            if not piece:
                raise ConnectionError("closed in the hello")
            self.received += piece


@dataclass(eq=False)
class Reception:
    """Accepts connections, and hands over those that prove that they come from a rank of the run.

    The data of its sockets in `selector` are functions: call them when their socket is ready.

    Attributes:
        receiver: the rank of this end, or `WATCHER`.
        tls: of this end, where given.
        missing: the ranks whose connections are taken; one that is handed over is removed.
        spare: connections that may be without proof beside those of the missing ranks; one more
            pushes out the oldest.
        welcome: called with a rank and its non-blocking connection, after both hellos.
        refused: called with the host, and with why a connection failed in TLS.
    """

    selector: selectors.BaseSelector
    listener: socket.socket
    receiver: int
    token: bytes
    tls: TLS | None
    missing: set[int]
    spare: int
    welcome: Callable[[int, socket.socket], None]
    refused: Callable[[str, str], None]

    def __post_init__(self) -> None:
        self._context = None if self.tls is None else self.tls.context(server_side=True)
        self._arrivals: dict[_Arrival, None] = {}  # the oldest first
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def advance_all(self) -> None:
        """Read what has arrived on all connections that are without proof."""
        for arrival in list(self._arrivals):
            self._advance(arrival)

    def drop(self, before: float = math.inf) -> None:
        """Close those without proof that came `before`, in seconds of `time.monotonic`."""
        for arrival in [arrival for arrival in self._arrivals if arrival.since < before]:
            self._drop(arrival)

    def _accept(self) -> None:
        # Strangers who connect and say nothing must not keep the ranks out.
        if len(self._arrivals) >= self.spare + len(self.missing):
            self._drop(next(iter(self._arrivals)))
        try:
            connection, (host, *_) = self.listener.accept()
        except OSError:
            return  # it went again
        try:
            connection.setblocking(False)  # it may be slow
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.getpeername()  # where this fails, wrap_socket would leave its socket open
            if self._context is not None:
                connection = self._context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
        except OSError:
            connection.close()
            return
        arrival = _Arrival(connection, host, time.monotonic())
        self._arrivals[arrival] = None
        self.selector.register(connection, selectors.EVENT_READ)
        self._advance(arrival)

    def _advance(self, arrival: _Arrival) -> None:
        connection = arrival.connection
        if arrival not in self._arrivals:
            return  # pushed out just now
        try:
            arrival.advance()
            other, claim = arrival.received[:CHALLENGE_BYTES], arrival.received[CHALLENGE_BYTES:]
            (peer,) = _RANK.unpack_from(claim)
            proof = hello(peer, self.receiver, self.token, other, arrival.own)
            if not hmac.compare_digest(claim, proof) or peer not in self.missing:
                raise ConnectionError("not of this run, or not expected")
            connection.send(hello(self.receiver, peer, self.token, arrival.own, other))
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as more:
            writes = isinstance(more, ssl.SSLWantWriteError)
            events = selectors.EVENT_WRITE if writes else selectors.EVENT_READ
            self.selector.modify(connection, events, lambda: self._advance(arrival))
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                self.refused(arrival.host, in_words(error))
            self._drop(arrival)
        else:
            self._forget(arrival)
            self.missing.remove(peer)
            self.welcome(peer, connection)

    def _drop(self, arrival: _Arrival) -> None:
        self._forget(arrival)
        arrival.connection.close()

    def _forget(self, arrival: _Arrival) -> None:
        del self._arrivals[arrival]
        self.selector.unregister(arrival.connection)
