"""How a connection begins: mutual TLS where it is set up, then a hello from each end.

A hello holds magic and version, the sender's rank, and a keyed digest of the run's token, which
proves membership and does not give the token away. Its size is fixed, so nothing is parsed before
it has been compared. Imports without torch: launchers use it.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import ssl
import struct
import time
from collections.abc import Mapping
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
