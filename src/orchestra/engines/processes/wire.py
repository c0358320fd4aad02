"""Frames of the control connection: a JSON object, and raw bytes beside it."""

from __future__ import annotations

import json
import socket
import ssl
import struct
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

_LENGTHS = struct.Struct("!IQ")  # of the JSON text, of the bytes beside it
_CHUNK = 1 << 20


class BadFrame(Exception):
    """The other end does not speak this protocol."""


def pack(message: Message, payload: bytes = b"") -> bytes:
    text = json.dumps(message).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


class Frames:
    """The frames that arrive at one end of a connection, after what `take` takes."""

    def __init__(self, connection: socket.socket) -> None:
        self.received = 0  # bytes
        self.error: OSError | None = None  # that ended the connection
        self._connection = connection
        self._buffer = bytearray()

    def read(self, most: int = _CHUNK) -> bool:
        """Read `most` bytes of what has arrived; False at the end of the connection."""
        try:
            data = self._connection.recv(most)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except OSError as error:
            self.error = error
            return False
        self._buffer += data
        self.received += len(data)
        return bool(data)

    def take(self, size: int) -> bytes | None:
        """The first `size` bytes, read up to there and no further; None before all are there.

        Raises `BadFrame` where the connection ends before.
        """
        if not self.read(size - len(self._buffer)):
            raise BadFrame("no hello")
        if len(self._buffer) < size:
            return None
        taken = bytes(self._buffer)
        self._buffer.clear()
        return taken

    def complete(self) -> Iterator[tuple[Message, bytes]]:
        """The frames that have arrived as a whole."""
        while len(self._buffer) >= _LENGTHS.size:
            text, payload = _LENGTHS.unpack_from(self._buffer)
            end = _LENGTHS.size + text + payload
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTHS.size : end])
            del self._buffer[:end]
            try:
                message = json.loads(body[:text])
            except ValueError as error:
                raise BadFrame("not JSON") from error
            if not isinstance(message, dict):
                raise BadFrame("not a JSON object")
            yield message, body[text:]
