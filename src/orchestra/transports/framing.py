"""Tensors on a byte stream: a header, the dimensions, and the elements as they lie in memory.

    kind (1 byte), dtype (1), dimensions (1), tag (8), payload bytes (8), then 8 bytes a dimension

All integers are little-endian. A farewell is a header of its own kind, without payload.

Between processes of one host a large message is an offer: one more number behind the dimensions
says where its elements lie in the memory of the sender. The receiver copies them from there and
says that it has taken them. Which memory can be read, each end finds out once: it is shown a key
there, and says whether it can read it.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from orchestra.transports.large_messages import OfferedMemory, PeerMemory

if TYPE_CHECKING:
    from orchestra.transports.matching import Incoming, Mailbox, Send

MESSAGE = 1
FAREWELL = 2
OFFER = 3  # a message whose elements are in the sender's memory
TAKEN = 4  # the oldest message offered has been copied
KEY = 5  # process, address, and the key that is there
READABLE = 6  # the key can be read

# The position of a dtype in this list is its code on the wire: only append.
_NAMES = (
    "float32 float64 float16 bfloat16 bool uint8 int8 int16 int32 int64 complex64 complex128 "
    "uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
)
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _NAMES.split())
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_FIXED = struct.Struct("<BBBqQ")
_KEY = struct.Struct("<qq16s")

# Bytes in one call of the kernel: enough to hide its cost, few enough that both directions and
# all streams take turns.
CALL_BYTES = 1 << 20
COPIED_BYTES = 1 << 22  # from another process in one turn
INBOX_BYTES = 1 << 16  # read ahead of a header: small messages then need one call each
# Of the rest of a message, how much has to be there before the kernel wakes its rank: a segment of
# TCP is 1.4 KB, and Python takes longer for it than a link does.
LOW_WATER = 1 << 16
_INTERNET = (socket.AF_INET, socket.AF_INET6)
# From here on a message is offered to a rank of the same host: measured there and back, offers are
# as fast from 256 KB on, and take less processor time from 512 KB on (decision 83).
OFFERED_BYTES = 1 << 19


class MalformedFrame(ConnectionError):
    """The other end does not speak this protocol."""


class Header(NamedTuple):
    """What arrives of a message before its first element."""

    kind: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    tag: int
    payload_bytes: int
    address: int = 0

    @property
    def head_bytes(self) -> int:
        """Bytes on the wire before the first element."""
        return header_bytes(len(self.shape) + (self.kind == OFFER))

    @property
    def frame_bytes(self) -> int:
        """Bytes of the whole message, wherever its elements travel."""
        return header_bytes(len(self.shape)) + self.payload_bytes


def header_bytes(dimensions: int) -> int:
    """Bytes that go before the elements of a tensor."""
    return _FIXED.size + 8 * dimensions


def pack_header(tensor: Tensor, tag: int) -> bytes:
    """Return the header of a message that carries `tensor`."""
    return _pack(MESSAGE, tensor, tag, tuple(tensor.shape))


def pack_offer(tensor: Tensor, tag: int) -> bytes:
    """Return the frame that offers `tensor`, which must not change until it has been taken."""
    return _pack(OFFER, tensor, tag, (*tensor.shape, tensor.data_ptr()))


def _pack(kind: int, tensor: Tensor, tag: int, numbers: tuple[int, ...]) -> bytes:
    fixed = _FIXED.pack(kind, _CODES[tensor.dtype], len(numbers), tag, tensor.nbytes)
    return fixed + struct.pack(f"<{len(numbers)}q", *numbers)


def pack_signal(kind: int) -> bytes:
    """A frame without content; FAREWELL says: I leave on purpose."""
    return _FIXED.pack(kind, 0, 0, 0, 0)


def pack_key(memory: OfferedMemory) -> bytes:
    """Return the frame that tells the other end where a key lies in this process's memory."""
    content = _KEY.pack(memory.pid, memory.address, memory.key)
    return _FIXED.pack(KEY, 0, len(content) // 8, 0, 0) + content


def unpack_key(header: Header) -> PeerMemory:
    """Return the memory in which the other end says that its key lies."""
    return PeerMemory(*_KEY.unpack(struct.pack("<4q", *header.shape)))


def unpack_header(buffer: memoryview) -> Header | None:
    """Return the header at the start of `buffer`, or None where more bytes are needed.

    Raises `MalformedFrame` for bytes that no `pack_...` made.
    """
    if len(buffer) < _FIXED.size:
        return None
    kind, code, dimensions, tag, payload_bytes = _FIXED.unpack_from(buffer)
    if not MESSAGE <= kind <= READABLE or code >= len(DTYPES):
        raise MalformedFrame(f"a frame of kind {kind} with dtype code {code}")
    if len(buffer) < header_bytes(dimensions):
        return None
    shape = struct.unpack_from(f"<{dimensions}q", buffer, _FIXED.size)
    dtype = DTYPES[code]
    shape, address = (shape[:-1], shape[-1]) if kind == OFFER and shape else (shape, 0)
    if kind in (MESSAGE, OFFER) and math.prod(shape) * dtype.itemsize != payload_bytes:
        raise MalformedFrame(f"{payload_bytes} bytes for {dtype} of shape {shape}")
    if kind == KEY and len(shape) != _KEY.size // 8:
        raise MalformedFrame(f"a key of {len(shape)} numbers")
    return Header(kind, dtype, shape, tag, payload_bytes, address)


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


@dataclass(eq=False, slots=True)
class Signal:
    """A frame of which nobody waits for the end, and what the kernel has not taken of it.

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
        offered: messages that the other end has still to take from this end's memory.
        takes_offers: the other end can read this end's memory.
        taken_bytes: of the messages that it has taken from there.
        farewell: the other end has said that it leaves.
        read_wants_write: under TLS, reading goes on once something can be written.
    """

    def __init__(self, connection: socket.socket, rank: int, mailbox: Mailbox) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.rank = rank
        self.events = selectors.EVENT_READ
        self.backlog: deque[Send | Signal] = deque()
        self.offered: deque[Send] = deque()
        self.takes_offers = False
        self.taken_bytes = 0
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
        self._own_memory: OfferedMemory | None = None
        self._peer_memory: PeerMemory | None = None

    @property
    def copies(self) -> bool:
        """A message is being copied from the other end's memory, which no selector sees."""
        return self.incoming is not None and self.incoming.header.kind == OFFER

    @property
    def wants_write(self) -> bool:
        """Something is still to be written, and may leave by now."""
        return bool(self.backlog) and self.backlog[0].due <= time.perf_counter()

    def next_due(self, now: float) -> float:
        """Return when the first message that has to wait may leave; infinite if there is none."""
        return next((send.due for send in self.backlog if send.due > now), math.inf)

    def show_memory(self) -> None:
        """Let the other end find out whether it can read the memory of this process."""
        self._own_memory = OfferedMemory()
        self._signal(pack_key(self._own_memory))

    def withdraw(self) -> None:
        """Invalidate all offers: what the other end copies from now on does not count."""
        if self._own_memory is not None:
            self._own_memory.close()

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
                    count = self.connection.sendmsg((send.header, send.payload[:CALL_BYTES]))
            except _NOT_NOW:
                break
            except OSError:
                with contextlib.suppress(OSError):
                    while self.read():
                        pass
                raise
            send.payload = send.payload[max(count - len(send.header), 0) :]
            send.header = send.header[count:]
            if not send.header and not send.payload:
                self.backlog.popleft()
                if not isinstance(send, Signal) and send.offers:
                    self.offered.append(send)
                    continue  # finished once TAKEN arrives
                send.finished = True
                news = news or send.awaited
        return news

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
            if message is not None and self.copies:
                moved += self._copy(message)
                continue
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
            if count < len(place) and not self.encrypted and not self.copies:
                break  # the kernel had no more: a further call would only say so
        self._set_low_water()
        return moved

    def _set_low_water(self) -> None:
        """Let the kernel wake this rank when the rest of a message is there, or a good part of it,
        and not for each of its segments."""
        missing, message = 1, self.incoming
        if message is not None and not self.copies:
            missing = min(message.header.payload_bytes - self._position, LOW_WATER)
        if missing != self._low_water and self._has_low_water:
            self._low_water = missing
            with contextlib.suppress(OSError):  # it only saves wake-ups
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, missing)

    def _parse(self) -> None:
        """Turn the bytes of the inbox into messages; the rest moves to its front."""
        start = 0
        while self.incoming is None:
            header = unpack_header(self._inbox[start : self._filled])
            if header is None:
                break
            start += header.head_bytes
            if header.kind not in (MESSAGE, OFFER):
                self._hear(header)
                continue
            message = self.incoming = self._mailbox.begin(self.rank, header)
            self._position = 0
            if self.copies:
                break
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
        elif signal.kind == KEY:
            memory = unpack_key(signal)
            if memory.is_open():
                self._peer_memory = memory
                self._signal(pack_signal(READABLE))
        elif signal.kind == READABLE:
            self.takes_offers = True
        elif self.offered:
            send = self.offered.popleft()
            self.taken_bytes += send.tensor.nbytes
            send.finished = True
            self._mailbox.news = self._mailbox.news or send.awaited

    def _copy(self, message: Incoming) -> int:
        """Copy the next part of a message from the other end's memory; return the bytes copied."""
        memory, header = self._peer_memory, message.header
        if memory is None:
            raise MalformedFrame("an offer, but no key that can be read")
        length = min(COPIED_BYTES, header.payload_bytes - self._position)
        into = message.tensor.data_ptr() + self._position
        try:
            count = memory.read(header.address + self._position, into, length)
        except OSError as error:
            raise StreamEnded(f"its memory cannot be read: {error.strerror}") from error
        self._position += count
        if self._position == header.payload_bytes:
            if not memory.is_open():  # else the tensor may have changed while it was read
                raise StreamEnded("its connection closed")
            self._complete_if_full(message)
            self._parse()  # what else has come counts, even if the other end does not read this:
            self._signal(pack_signal(TAKEN))
        return count

    def _complete_if_full(self, message: Incoming) -> None:
        if self._position == message.header.payload_bytes:
            self.incoming = None
            self._mailbox.complete(message)

    def close(self) -> None:
        """Give the socket back; what the kernel has taken is still delivered."""
        self.withdraw()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        self.connection.close()
