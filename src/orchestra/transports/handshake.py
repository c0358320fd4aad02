"""How a connection begins: mutual TLS where it is set up, then a hello from each end.

A hello holds magic and version, the sender's rank, and a keyed digest of the run's token, which
proves membership and does not give the token away. Its size is fixed, so nothing is parsed before
it has been compared. Imports without torch: launchers use it.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from orchestra.errors import InputError

MAGIC = b"orchestra"
VERSION = 1
WATCHER = -1
"""The watcher's number, where ranks have theirs."""

_HELLO = struct.Struct(f"<{len(MAGIC)}sBi")
HELLO_BYTES = _HELLO.size + 32


@dataclass(frozen=True)
class TLS:
    """PEM files of one rank, or of all: its certificate, its private key, and the authority.

    Whoever holds a certificate of `authority` belongs to the run; host names are not compared.
    A certificate has to allow both client and server use (or not say).
    """

    certificate: Path
    key: Path
    authority: Path

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        """Raises `InputError` for a file that cannot be used."""
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

    def wrap(self, connection: socket.socket, *, server_side: bool) -> ssl.SSLSocket:
        """Shake hands on a connected blocking socket, within the socket's own time-out.

        Raises `ssl.SSLError` where the other end is not of the run.
        """
        return self.context(server_side=server_side).wrap_socket(
            connection, server_side=server_side
        )


def wrap_accepted(connection: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """The server's side of TLS on an accepted socket that does not block; no hands are shaken yet.

    Raises OSError, with the socket closed, where the other end has gone again.
    """
    try:
        connection.getpeername()  # where this fails, wrap_socket would leave its socket open
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    except OSError:
        connection.close()
        raise


def in_words(error: OSError) -> str:
    """Why a connection failed, in words; of certificates, which end refused which."""
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


def hello(sender: int, receiver: int, token: bytes) -> bytes:
    """The first bytes of `sender`, [HELLO_BYTES]; they prove to `receiver` that it belongs."""
    proof = hmac.digest(token, b"%d to %d" % (sender, receiver), "sha256")
    return _HELLO.pack(MAGIC, VERSION, sender) + proof


def sender_of(said: bytes) -> int:
    """The rank that a hello claims to be from."""
    _, _, sender = _HELLO.unpack_from(said)
    return int(sender)


def proves(said: bytes, sender: int, receiver: int, token: bytes) -> bool:
    """True if `said` is the hello of `sender` to `receiver`."""
    return hmac.compare_digest(said, hello(sender, receiver, token))


def connect(
    address: tuple[str, int],
    sender: int,
    receiver: int,
    token: bytes,
    *,
    tls: TLS | None,
    deadline: float,
) -> socket.socket:
    """A blocking connection of `sender` to `receiver`, at `address`, after both hellos.

    Raises ConnectionError that says why there is none by `deadline`, in seconds of perf_counter.
    """
    connection = None
    try:
        connection = socket.create_connection(address, timeout=remaining(deadline))
        if tls is not None:
            connection = tls.wrap(connection, server_side=False)
        # Where our certificate was refused, the other end has closed, and its reason is to be read.
        with contextlib.suppress(OSError):
            connection.sendall(hello(sender, receiver, token))
        if not proves(_read_hello(connection, deadline), receiver, sender, token):
            raise ConnectionError("what listens there is not of this run")
    except OSError as error:
        if connection is not None:
            connection.close()
        raise ConnectionError(in_words(error)) from error
    return connection


def _read_hello(connection: socket.socket, deadline: float) -> bytes:
    answer = b""
    while len(answer) < HELLO_BYTES:
        connection.settimeout(remaining(deadline))
        piece = connection.recv(HELLO_BYTES - len(answer))
        if not piece:
            raise ConnectionError("it closed the connection in the hello")
        answer += piece
    return answer


def remaining(deadline: float) -> float:
    """Seconds until `deadline`; raises TimeoutError where none are left."""
    seconds = deadline - time.perf_counter()
    if seconds <= 0:
        raise TimeoutError("no answer in time")
    return seconds


class _Arrival:
    """An accepted connection that has yet to prove that it comes from a rank of the run."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.connection = connection
        self.host = host
        self.since = time.monotonic()
        self.hello = b""
        self._shaken = False

    def advance(self) -> int:
        """Read what is there; the selector's event to wait for, or 0 once the hello is complete.

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


class Reception:
    """Accepts connections, and hands over those that prove that they come from a rank of the run.

    The data of its sockets in `selector` are functions: call them when their socket is ready.

    Args:
        receiver: the rank of this end, or `WATCHER`.
        context: TLS of this end; None where there is none.
        wanted: says of a rank whether its connection is taken.
        most: the number of connections that may be without proof; one more pushes out the oldest.
        welcome: called with a rank and its non-blocking connection, after both hellos.
        refused: called with the host and the error of a connection that failed in TLS.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        receiver: int,
        token: bytes,
        context: ssl.SSLContext | None,
        *,
        wanted: Callable[[int], bool],
        most: Callable[[], int],
        welcome: Callable[[int, socket.socket], None],
        refused: Callable[[str, ssl.SSLError], None],
    ) -> None:
        self._selector = selector
        self._listener = listener
        self._receiver = receiver
        self._token = token
        self._context = context
        self._wanted, self._most = wanted, most
        self._welcome, self._refused = welcome, refused
        self._arrivals: dict[_Arrival, None] = {}  # the oldest first
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def advance_all(self) -> None:
        """Read what has arrived on all connections that are without proof."""
        for arrival in list(self._arrivals):
            self._advance(arrival)

    def drop_since(self, limit: float) -> None:
        """Close those without proof that came before `limit`, in seconds of `time.monotonic`."""
        for arrival in [arrival for arrival in self._arrivals if arrival.since < limit]:
            self._drop(arrival)

    def close(self) -> None:
        """Close all connections that are without proof."""
        for arrival in list(self._arrivals):
            self._drop(arrival)

    def _accept(self) -> None:
        if len(self._arrivals) >= self._most():
            self._drop(next(iter(self._arrivals)))
        try:
            connection, (host, *_) = self._listener.accept()
            connection.setblocking(False)  # it may be slow
            if self._context is not None:
                connection = wrap_accepted(connection, self._context)
        except OSError:
            return  # it went again
        arrival = _Arrival(connection, host)
        self._arrivals[arrival] = None
        self._watch(arrival, selectors.EVENT_READ)

    def _watch(self, arrival: _Arrival, events: int) -> None:
        self._selector.register(arrival.connection, events, lambda: self._advance(arrival))

    def _advance(self, arrival: _Arrival) -> None:
        if arrival not in self._arrivals:
            return  # pushed out just now
        try:
            events = arrival.advance()
            if not events:
                peer = sender_of(arrival.hello)
                if not proves(arrival.hello, peer, self._receiver, self._token):
                    raise ConnectionError("not of this run")
                if not self._wanted(peer):
                    raise ConnectionError("not expected")
                # It fits into the empty buffer of a new connection.
                arrival.connection.send(hello(self._receiver, peer, self._token))
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                self._refused(arrival.host, error)
            self._drop(arrival)
            return
        self._selector.unregister(arrival.connection)
        if events:
            self._watch(arrival, events)
        else:
            del self._arrivals[arrival]
            self._welcome(peer, arrival.connection)

    def _drop(self, arrival: _Arrival) -> None:
        del self._arrivals[arrival]
        self._selector.unregister(arrival.connection)
        arrival.connection.close()
