"""How a connection begins: with a hello from each end. Imports without torch: launchers use it.

Magic and version, the sender's rank, and a keyed digest of the run's token, which proves membership
and does not give the token away. The size is fixed: what has not been compared yet is never parsed.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import time

from orchestra.transports.tls import TLS, in_words

MAGIC = b"orchestra"
VERSION = 1
WATCHER = -1
"""The watcher's number, where ranks have theirs."""

_HELLO = struct.Struct(f"<{len(MAGIC)}sBi")
HELLO_BYTES = _HELLO.size + 32


def hello(sender: int, receiver: int, token: bytes) -> bytes:
    """What `sender` says first, [HELLO_BYTES]: to `receiver` alone it proves that it belongs."""
    proof = hmac.digest(token, b"%d to %d" % (sender, receiver), "sha256")
    return _HELLO.pack(MAGIC, VERSION, sender) + proof


def sender_of(said: bytes) -> int:
    """The rank that a hello claims to be from."""
    _, _, sender = _HELLO.unpack_from(said)
    return int(sender)


def proves(said: bytes, sender: int, receiver: int, token: bytes) -> bool:
    """Whether `said` is the hello of `sender` to `receiver`."""
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
