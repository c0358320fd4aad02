"""Tensors on a byte stream: a header, the dimensions, and the elements as they lie in memory.

    kind (1 byte), dtype (1), dimensions (1), tag (8), payload bytes (8), then 8 bytes a dimension

All integers are little-endian. A farewell is a header of its own kind, without payload.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from orchestra.transports.matching import Incoming, Mailbox, Send

MESSAGE = 1
FAREWELL = 2

# The position of a dtype in this list is its code on the wire: only append.
_NAMES = (
    "float32 float64 float16 bfloat16 bool uint8 int8 int16 int32 int64 complex64 complex128 "
    "uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
)
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _NAMES.split())
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_FIXED = struct.Struct("<BBBqQ")

# Bytes in one call of the kernel: enough to hide its cost, few enough that both directions and
# all streams take turns.
CALL_BYTES = 1 << 20
# What is read ahead of a header: small messages then need one call each.
INBOX_BYTES = 1 << 16


class MalformedFrame(ConnectionError):
    """The other end does not speak this protocol."""


class Header(NamedTuple):
    """What arrives of a message before its first element."""

    kind: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    tag: int
    payload_bytes: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of the whole message on the wire."""
        return header_bytes(len(self.shape)) + self.payload_bytes


def header_bytes(dimensions: int) -> int:
    """Bytes that go before the elements of a tensor."""
    return _FIXED.size + 8 * dimensions


def pack_header(tensor: Tensor, tag: int) -> bytes:
    """The header of a message that carries `tensor`."""
    shape = tensor.shape
    fixed = _FIXED.pack(MESSAGE, _CODES[tensor.dtype], len(shape), tag, tensor.nbytes)
    return fixed + struct.pack(f"<{len(shape)}q", *shape)


def pack_farewell() -> bytes:
    """The frame that says: I leave on purpose."""
    return _FIXED.pack(FAREWELL, 0, 0, 0, 0)


def unpack_header(buffer: memoryview) -> Header | None:
    """The header at the start of `buffer`, or None where more bytes are needed.

    Raises `MalformedFrame` for bytes that no `pack_...` made.
    """
    if len(buffer) < _FIXED.size:
        return None
    kind, code, dimensions, tag, payload_bytes = _FIXED.unpack_from(buffer)
    if kind not in (MESSAGE, FAREWELL) or code >= len(DTYPES):
        raise MalformedFrame(f"a frame of kind {kind} with dtype code {code}")
    if len(buffer) < header_bytes(dimensions):
        return None
    shape = struct.unpack_from(f"<{dimensions}q", buffer, _FIXED.size)
    dtype = DTYPES[code]
    if kind == MESSAGE and math.prod(shape) * dtype.itemsize != payload_bytes:
        raise MalformedFrame(f"{payload_bytes} bytes for {dtype} of shape {shape}")
    return Header(kind, dtype, shape, tag, payload_bytes)


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU `tensor` as writable bytes, without a copy.

    The view keeps the memory alive.
    """
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class StreamEnded(ConnectionError):
    """The other end closed the connection."""


class Stream:
    """Frames to and from `rank`: out of a queue, and into a mailbox; one TCP connection.

    The caller holds the lock and watches the socket.

    Attributes:
        events: the selector's events for this stream.
        farewell: the other end has said that it leaves.
        read_wants_write: under TLS, reading goes on once something can be written.
    """

    def __init__(self, connection: socket.socket, rank: int, mailbox: Mailbox) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.rank = rank
        self.events = selectors.EVENT_READ
        self.backlog: deque[Send] = deque()
        self.incoming: Incoming | None = None
        self.farewell = False
        self.encrypted = False
        self.read_wants_write = False
        # Decrypted bytes lie where no selector sees them.
        self._decrypted: Callable[[], int] = lambda: 0
        if isinstance(connection, ssl.SSLSocket):
            self.encrypted, self._decrypted = True, connection.pending
        self._mailbox = mailbox
        self._position = 0  # bytes of `incoming` that are in place
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        self._filled = 0

    def write(self) -> bool:
        """Hand over what the kernel takes; whether a send was finished that a flow waits for.

        Raises OSError where the connection is broken; what had arrived whole before still counts.
        """
        news = False
        while self.backlog:
            send = self.backlog[0]
            try:
                if self.encrypted:
                    count = self.connection.send(send.header or send.payload[:CALL_BYTES])
                else:
                    count = self.connection.sendmsg((send.header, send.payload[:CALL_BYTES]))
            except _NOT_NOW:
                break
            except OSError:
                with contextlib.suppress(OSError):
                    while self.read():
                        pass
                raise
            in_header = min(count, len(send.header))
            send.header = send.header[in_header:]
            send.payload = send.payload[count - in_header :]
            if not send.header and not send.payload:
                self.backlog.popleft()
                send.finished = True
                news = news or send.awaited
        return news

    def read(self) -> int:
        """Move what has arrived into its messages, a few calls' worth at most; bytes moved.

        Raises `StreamEnded` at the end of the stream, another OSError where it is broken.
        """
        moved = 0
        self.read_wants_write = False
        while moved < CALL_BYTES or self._decrypted():
            message = self.incoming
            if message is None:
                place = self._inbox[self._filled :]
            else:
                place = message.view[self._position : self._position + CALL_BYTES]
            try:
                count = self.connection.recv_into(place)
            except _NOT_NOW as reason:
                self.read_wants_write = isinstance(reason, ssl.SSLWantWriteError)
                break
            if count == 0:
                raise StreamEnded("its connection closed")
            moved += count
            if message is None:
                self._filled += count
                self._parse()
            else:
                self._position += count
                self._complete_if_full(message)
            if count < len(place) and not self.encrypted:
                break
        return moved

    def _parse(self) -> None:
        """Turn the bytes of the inbox into messages; the rest moves to its front."""
        start = 0
        while self.incoming is None:
            header = unpack_header(self._inbox[start : self._filled])
            if header is None:
                break
            start += header.frame_bytes - header.payload_bytes
            if header.kind == FAREWELL:
                self.farewell = True
                continue
            message = self.incoming = self._mailbox.begin(self.rank, header)
            count = min(header.payload_bytes, self._filled - start)
            message.view[:count] = self._inbox[start : start + count]
            start += count
            self._position = count
            self._complete_if_full(message)
        rest = self._filled - start
        self._inbox[:rest] = bytes(self._inbox[start : self._filled])
        self._filled = rest

    def _complete_if_full(self, message: Incoming) -> None:
        if self._position == message.header.payload_bytes:
            self.incoming = None
            self._mailbox.complete(message)

    def close(self) -> None:
        """Give the socket back; what the kernel has taken is still delivered."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        self.connection.close()
