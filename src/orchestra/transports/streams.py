"""One TCP connection to one rank, non-blocking: frames out of a queue, frames into a mailbox."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections import deque

from orchestra.transports.framing import FAREWELL, unpack_header
from orchestra.transports.matching import Incoming, Mailbox, Send

# Bytes in one call of the kernel: enough to hide its cost, few enough that both directions and
# all streams take turns.
CALL_BYTES = 1 << 20
# What is read ahead of a header: small messages then need one call each.
INBOX_BYTES = 1 << 16
TCP_INFO_BYTES_ACKED = 120  # offset of tcpi_bytes_acked in Linux's struct tcp_info

_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class StreamEnded(ConnectionError):
    """The other end closed the connection."""


class Stream:
    """Frames to and from `rank`. The caller holds the lock and watches the socket."""

    def __init__(self, connection: socket.socket, rank: int, mailbox: Mailbox) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.rank = rank
        self.events = 0
        """The selector's events for this stream."""
        self.backlog: deque[Send] = deque()
        self.incoming: Incoming | None = None
        self.farewell = False
        """The other end has said that it leaves."""
        self.encrypted = isinstance(connection, ssl.SSLSocket)
        self.read_wants_write = False
        self._mailbox = mailbox
        self._position = 0  # bytes of `incoming` that are in place
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        self._filled = 0

    @property
    def wants_write(self) -> bool:
        """Something waits for room in the kernel's buffer."""
        return bool(self.backlog) or self.read_wants_write

    def write(self) -> bool:
        """Hand over what the kernel takes; whether a send was finished that a flow waits for.

        Raises OSError where the connection is broken; what had arrived before is then read.
        """
        news = False
        while self.backlog:
            send = self.backlog[0]
            count = self._transmit(send)
            if count == 0:
                break
            send.advance(count)
            if not send.header and not send.payload:
                self.backlog.popleft()
                send.finished = True
                news = news or send.awaited
        return news

    def _transmit(self, send: Send) -> int:
        """Bytes taken by the kernel; 0: no room now."""
        try:
            if not self.encrypted:
                return self.connection.sendmsg((send.header, send.payload[:CALL_BYTES]))
            return self.connection.send(send.header or send.payload[:CALL_BYTES])
        except _NOT_NOW:
            return 0
        except OSError:
            self._drain()
            raise

    def read(self) -> int:
        """Move what has arrived into its messages, a few calls' worth at most; bytes moved.

        Raises `StreamEnded` at the end of the stream, another OSError where it is broken.
        """
        moved = 0
        while moved < CALL_BYTES or self._pending():
            place = self._place()
            count = self._receive(place)
            if count < 0:
                break
            if count == 0:
                raise StreamEnded("its connection closed")
            moved += count
            self._take_in(count)
            if count < len(place) and not self.encrypted:
                break
        return moved

    def _drain(self) -> None:
        """Messages that arrived whole before the connection broke still count."""
        with contextlib.suppress(OSError):
            while self.read():
                pass

    def _pending(self) -> bool:
        """Decrypted bytes lie where no selector sees them."""
        return isinstance(self.connection, ssl.SSLSocket) and self.connection.pending() > 0

    def _place(self) -> memoryview:
        """Where the next bytes belong: in the message under way, or before a header."""
        if self.incoming is not None:
            return self.incoming.view[self._position : self._position + CALL_BYTES]
        return self._inbox[self._filled :]

    def _receive(self, place: memoryview) -> int:
        """Bytes read; 0: end of the stream; -1: nothing there now."""
        try:
            count = self.connection.recv_into(place)
        except ssl.SSLWantWriteError:
            self.read_wants_write = True
            return -1
        except _NOT_NOW:
            return -1
        self.read_wants_write = False
        return count

    def _take_in(self, count: int) -> None:
        if self.incoming is None:
            self._filled += count
            self._parse()
            return
        self._position += count
        self._complete_if_full(self.incoming)

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

    def acknowledged_bytes(self) -> int:
        """Bytes that the other end's kernel has confirmed, hello included (Linux)."""
        info = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        (count,) = struct.unpack_from("Q", info, TCP_INFO_BYTES_ACKED)
        return int(count)
