"""Tensors on a byte stream: a header, the dimensions, and the elements as they lie in memory.

    kind (1 byte), dtype (1), dimensions (1), tag (8), payload bytes (8), then 8 bytes a dimension

All integers are little-endian. A farewell is a header of its own kind, without payload.

Between processes of one host the elements of a large message are in memory that both have mapped:
one more number behind the dimensions says in which segment. The sender tells of each new segment,
and the receiver says when it has mapped it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import selectors
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestra.transports.large_messages import Outbox, PeerSegments, Segment

if TYPE_CHECKING:
    from orchestra.transports.matching import Incoming, Mailbox, Send

MESSAGE = 1
FAREWELL = 2
SHARED = 3  # a message whose elements are in a segment
SEGMENT = 4  # a new segment, whose number is the tag: process, descriptor, and key
MAPPED = 5  # the segment with this number can be used

# The position of a dtype in this list is its code on the wire: only append.
_NAMES = (
    "float32 float64 float16 bfloat16 bool uint8 int8 int16 int32 int64 complex64 complex128 "
    "uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
)
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _NAMES.split())
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_FIXED = struct.Struct("<BBBqQ")
_SEGMENT = struct.Struct("<qq16s")

# Bytes in one call of the kernel: enough to hide its cost, few enough that both directions and
# all streams take turns.
CALL_BYTES = 1 << 20
INBOX_BYTES = 1 << 16  # read ahead of a header: small messages then need one call each
# Of a smaller message a copy is made faster than a place is found for its bytes.
COPIED_BYTES = 1 << 12
# Of the rest of a message, how much has to be there before the kernel wakes its rank: a segment of
# TCP is 1.4 KB, and Python takes longer for it than a link does.
LOW_WATER = 1 << 19
_INTERNET = (socket.AF_INET, socket.AF_INET6)
# A message to a rank of the same host goes into a segment from this size on.
SHARED_BYTES = 1 << 17
TCP_INFO_BYTES_ACKED = 120  # offset of tcpi_bytes_acked in Linux's struct tcp_info


class MalformedFrame(ConnectionError):
    """The other end does not speak this protocol."""


@dataclass(frozen=True)
class Header:
    """What arrives of a message before its first element."""

    kind: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    tag: int
    payload_bytes: int
    segment: int = -1

    @functools.cached_property
    def head_bytes(self) -> int:
        """Bytes on the wire before the first element."""
        return header_bytes(len(self.shape) + (self.kind == SHARED))

    @functools.cached_property
    def frame_bytes(self) -> int:
        """Bytes of the whole message, wherever its elements travel."""
        return header_bytes(len(self.shape)) + self.payload_bytes


def header_bytes(dimensions: int) -> int:
    """Bytes that go before the elements of a tensor."""
    return _FIXED.size + 8 * dimensions


def pack_header(tensor: Tensor, tag: int) -> bytes:
    """Return the header of a message that carries `tensor`."""
    return _pack(MESSAGE, tensor, tag, tuple(tensor.shape))


def pack_shared(tensor: Tensor, tag: int, segment: Segment) -> bytes:
    """Return the frame of a message whose elements are in `segment`."""
    return _pack(SHARED, tensor, tag, (*tensor.shape, segment.number))


def _pack(kind: int, tensor: Tensor, tag: int, numbers: tuple[int, ...]) -> bytes:
    return _head(kind, tensor.dtype, tag, tensor.nbytes, numbers)


# Messages repeat: each header is made and read once.


@functools.lru_cache(maxsize=1024)
def _head(
    kind: int, dtype: torch.dtype, tag: int, payload_bytes: int, numbers: tuple[int, ...]
) -> bytes:
    fixed = _FIXED.pack(kind, _CODES[dtype], len(numbers), tag, payload_bytes)
    return fixed + struct.pack(f"<{len(numbers)}q", *numbers)


def pack_signal(kind: int, number: int = 0) -> bytes:
    """A frame without content; FAREWELL says: I leave on purpose."""
    return _FIXED.pack(kind, 0, 0, number, 0)


def pack_segment(segment: Segment) -> bytes:
    """Return the frame that tells the other end of a new segment."""
    content = _SEGMENT.pack(os.getpid(), segment.descriptor, segment.key)
    return _FIXED.pack(SEGMENT, 0, len(content) // 8, segment.number, 0) + content


def unpack_header(buffer: memoryview) -> Header | None:
    """Return the header at the start of `buffer`, or None where more bytes are needed.

    Raises `MalformedFrame` for bytes that no `pack_...` made.
    """
    if len(buffer) < _FIXED.size:
        return None
    kind, code, dimensions = buffer[:3]
    if not MESSAGE <= kind <= MAPPED or code >= len(DTYPES):
        raise MalformedFrame(f"a frame of kind {kind} with dtype code {code}")
    end = header_bytes(dimensions)
    return _unpack(bytes(buffer[:end])) if len(buffer) >= end else None


@functools.lru_cache(maxsize=1024)
def _unpack(head: bytes) -> Header:
    kind, code, dimensions, tag, payload_bytes = _FIXED.unpack_from(head)
    shape = struct.unpack_from(f"<{dimensions}q", head, _FIXED.size)
    dtype = DTYPES[code]
    shape, segment = (shape[:-1], shape[-1]) if kind == SHARED and shape else (shape, -1)
    if kind in (MESSAGE, SHARED) and math.prod(shape) * dtype.itemsize != payload_bytes:
        raise MalformedFrame(f"{payload_bytes} bytes for {dtype} of shape {shape}")
    if kind == SEGMENT and len(shape) != _SEGMENT.size // 8:
        raise MalformedFrame(f"a segment with {len(shape)} numbers")
    return Header(kind, dtype, shape, tag, payload_bytes, segment)


def acknowledged(connection: socket.socket) -> int:
    """Return the bytes that the other end's kernel has confirmed (Linux)."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("Q", info, TCP_INFO_BYTES_ACKED)[0])


_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class StreamEnded(ConnectionError):
    """The other end closed the connection."""


@dataclass(eq=False, slots=True)
class Signal:
    """A frame that the kernel has not taken as a whole. Nobody waits until it has.

    It leaves no earlier than `due`, a time of `perf_counter`.
    """

    header: bytes
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    finished: bool = False
    awaited: bool = False
    due: float = 0.0


class Stream:
    """Frames to and from `rank`: out of a queue, and into a mailbox; one TCP connection.

    The caller holds the lock and watches the socket.

    Attributes:
        events: the selector's events for this stream.
        backlog: what is still to be written.
        outbox: the segments for large messages to a rank of the same host.
        shared_bytes: of the messages that went in segments.
        farewell: the other end has said that it leaves.
        read_wants_write: under TLS, reading goes on once something can be written.
    """

    def __init__(self, connection: socket.socket, rank: int, mailbox: Mailbox) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.rank = rank
        self.events = selectors.EVENT_READ
        self.backlog: deque[Send | Signal] = deque()
        self.outbox: Outbox | None = None
        self.shared_bytes = 0
        self.incoming: Incoming | None = None
        self.farewell = False
        self.encrypted = isinstance(connection, ssl.SSLSocket)
        self.read_wants_write = False
        # Decrypted bytes lie where no selector sees them.
        self._decrypted: Callable[[], int] = getattr(connection, "pending", lambda: 0)
        self._mailbox = mailbox
        self._position = 0  # bytes of `incoming` that are in place
        self._blocked = 0.0  # of the mailbox, when `incoming` began
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        self._filled = 0
        self._has_low_water = not self.encrypted and connection.family in _INTERNET
        self._low_water = 1
        self._segments = PeerSegments()

    @property
    def wants_write(self) -> bool:
        """Something is still to be written, and may leave by now."""
        return bool(self.backlog) and self.backlog[0].due <= time.perf_counter()

    def next_due(self, now: float) -> float:
        """Return when the first message that has to wait may leave; infinite if none waits."""
        return next((send.due for send in self.backlog if send.due > now), math.inf)

    def acknowledged_bytes(self) -> int:
        """Return the bytes that the other end's kernel has confirmed, or that went in segments."""
        return self.shared_bytes + acknowledged(self.connection)

    def segment(self, length: int) -> Segment | None:
        """Return a segment for a message of `length` bytes, now this message's; None: it has to
        go over the socket."""
        if self.outbox is None:
            return None
        segment = self.outbox.take(length)
        # A much larger one serves, too, but a message of its size may want it meanwhile.
        if segment is None or segment.capacity >= 4 * length:
            new = self.outbox.grow(length)
            if new is not None:
                self.backlog.append(Signal(pack_segment(new)))
        return segment

    def write(self) -> bool:
        """Hand over what the kernel takes. True if a send was finished that a flow waits for.

        Raises OSError where the connection is broken; what had arrived whole before still counts.
        """
        news = False
        while self.wants_write:
            send = self.backlog[0]
            try:
                if self.encrypted:  # an SSLSocket has no sendmsg
                    count = self.connection.send(send.header or send.payload[:CALL_BYTES])
                else:
                    count = self.connection.sendmsg(self._gathered())
            except _NOT_NOW:
                break
            except OSError:
                with contextlib.suppress(OSError):
                    while self.read():
                        pass
                raise
            while count:
                send = self.backlog[0]
                head, whole = len(send.header), len(send.header) + len(send.payload)
                if count < whole:
                    send.header = send.header[count:]
                    send.payload = send.payload[max(count - head, 0) :]
                    break
                count -= whole
                self.backlog.popleft()
                send.finished = True
                news = news or send.awaited
        return news

    def _gathered(self) -> list[bytes | memoryview]:
        """Return what leaves in one call: small messages together with the one behind them."""
        first = self.backlog[0]
        parts: list[bytes | memoryview] = [first.header, first.payload[:CALL_BYTES]]
        if len(first.payload) < CALL_BYTES and len(self.backlog) > 1:
            second = self.backlog[1]
            if second.due <= first.due:
                parts += [second.header, second.payload[: CALL_BYTES - len(first.payload)]]
        return parts

    def _signal(self, frame: bytes) -> None:
        self.backlog.append(Signal(frame))
        if len(self.backlog) == 1:  # else a selector waits until it can be written
            self.write()

    def read(self) -> int:
        """Move what has arrived into its messages, a few calls' worth at most; return the bytes.

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
                if self._position == message.header.payload_bytes:
                    seconds = self._mailbox.blocked - self._blocked
                    self._mailbox.count(self.rank, message.frame_bytes, seconds)
                self._complete_if_full(message)
            if count < len(place) and not self.encrypted:
                break  # the kernel had no more: a further call would only say so
        self._set_low_water()
        return moved

    def _set_low_water(self) -> None:
        """Let the kernel wake this rank when the rest of a message is there, or a good part of it,
        and not for each of its segments."""
        missing, message = 1, self.incoming
        if message is not None:
            missing = min(message.header.payload_bytes - self._position, LOW_WATER)
        if missing != self._low_water and self._has_low_water:
            self._low_water = missing
            with contextlib.suppress(OSError):  # it only saves wake-ups
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, missing)

    def _parse(self) -> None:
        """Turn the bytes of the inbox into messages; the rest moves to its front."""
        start = 0
        while self.incoming is None and self._filled - start >= _FIXED.size:
            header = unpack_header(self._inbox[start : self._filled])
            if header is None:
                break
            start += header.head_bytes
            end = start + header.payload_bytes
            if header.kind == SHARED:
                self._take(header, self._in_segment(header))
                continue
            if header.kind != MESSAGE:
                self._hear(header)
                continue
            if start < end <= min(self._filled, start + COPIED_BYTES):
                self._take(header, bytearray(self._inbox[start:end]))
                start = end
                continue
            message = self.incoming = self._mailbox.begin(self.rank, header)
            count = min(header.payload_bytes, self._filled - start)
            message.view[:count] = self._inbox[start : start + count]
            start += count
            self._position = count
            self._blocked = self._mailbox.blocked
            self._complete_if_full(message)
        rest = self._filled - start
        self._inbox[:rest] = bytes(self._inbox[start : self._filled])  # both may overlap
        self._filled = rest

    def _hear(self, signal: Header) -> None:
        if signal.kind == FAREWELL:
            self.farewell = True
        elif signal.kind == SEGMENT:
            told = _SEGMENT.unpack(struct.pack("<4q", *signal.shape))
            if self._segments.map(signal.tag, *told):
                self._signal(pack_signal(MAPPED, signal.tag))
        elif self.outbox is not None:
            self.outbox.mapped(signal.tag)

    def _in_segment(self, header: Header) -> memoryview:
        if not self._segments.holds(header.segment, header.payload_bytes):
            raise MalformedFrame("a message in a segment that is not mapped")
        return self._segments.message(header.segment, header.payload_bytes)

    def _take(self, header: Header, payload: bytearray | memoryview) -> None:
        """Deliver a message that has arrived in full; `payload` is given away."""
        content = torch.frombuffer(payload, dtype=header.dtype)
        if len(header.shape) != 1:
            content = content.view(header.shape)
        self._mailbox.complete(self._mailbox.begin(self.rank, header, content))

    def _complete_if_full(self, message: Incoming) -> None:
        if self._position == message.header.payload_bytes:
            self.incoming = None
            self._mailbox.complete(message)

    def close(self) -> None:
        """Give the socket back; what the kernel has taken is still delivered."""
        if self.outbox is not None:
            self.outbox.close()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        self.connection.close()
