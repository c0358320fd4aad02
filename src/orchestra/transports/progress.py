"""The byte streams of a rank, and what moves them: whoever waits moves the bytes of everybody.

There is no thread of its own. Of the flows that wait, one leads: it blocks in the selector and
serves every stream. The others sleep on a condition until their operation is finished or the lead
is free. One lock guards all state and is held except while blocked.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping

import torch

from orchestra.errors import PeerLost
from orchestra.transports.framing import FAREWELL, pack_farewell, unpack_header
from orchestra.transports.matching import LEFT, Flow, Incoming, Mailbox, Operation, Receive, Send

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
        self.encrypted = isinstance(connection, ssl.SSLSocket)
        self.read_wants_write = False
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
        while moved < CALL_BYTES or self._pending():
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

    def _pending(self) -> bool:
        """Decrypted bytes lie where no selector sees them."""
        return isinstance(self.connection, ssl.SSLSocket) and self.connection.pending() > 0

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


class ProgressEngine:
    """The streams and the mailbox of `rank`, shared by its flows; every method is thread-safe."""

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self.size = len(connections) + 1
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._leading = False  # a flow is blocked in the selector, without the lock
        self._followers = 0
        self._woken = False
        self._closed = False
        self._mailbox = Mailbox(rank)
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._streams = {
            peer: Stream(connection, peer, self._mailbox)
            for peer, connection in connections.items()
        }
        for stream in self._streams.values():
            self._selector.register(stream.connection, stream.events, stream)
        _engines.add(self)

    def send(self, send: Send) -> None:
        """Queue `send`, and hand over at once what the kernel takes."""
        with self._lock:
            self._raise_failure()
            if send.to in self._mailbox.gone:
                send.fail(PeerLost(send.to, self._mailbox.gone[send.to]))
                return
            stream = self._streams[send.to]
            stream.backlog.append(send)
            if len(stream.backlog) == 1:
                self._serve(stream, selectors.EVENT_WRITE)
            self._announce()

    def deliver_local(self, tensor: torch.Tensor, tag: int) -> None:
        """A message from this rank to itself; `tensor` is given away."""
        with self._lock:
            self._raise_failure()
            self._mailbox.deliver_local(tensor, tag)
            self._announce()

    def post(self, receive: Receive) -> None:
        """Match `receive` with a message that has arrived, or queue it."""
        with self._lock:
            self._raise_failure()
            self._mailbox.post(receive)

    def wait(self, operation: Operation) -> None:
        """Move bytes, or let the leader move them, until `operation` is finished."""
        if not operation.finished:
            started = time.perf_counter()
            blocked = 0.0
            with self._lock:
                operation.awaited = True
                try:
                    while not operation.finished and self._failure is None:
                        moving = isinstance(operation, Receive) and operation.frame_bytes > 0
                        seconds = self._advance(None)
                        blocked += 0.0 if moving else seconds
                finally:
                    self._hand_over()
            traffic = operation.flow.traffic
            traffic.seconds_waiting += blocked
            traffic.seconds_communicating += time.perf_counter() - started - blocked
        self._raise_failure()

    def test(self, operation: Operation) -> bool:
        """True if `wait` would return or raise at once; moves what can be moved without blocking.

        Without that, a flow that only polls would never see what lies in the kernel's buffers.
        """
        if not operation.finished:
            started = time.perf_counter()
            with self._lock:
                if not self._leading and not self._closed:
                    self._advance(0)
                    self._hand_over()
            operation.flow.traffic.seconds_communicating += time.perf_counter() - started
        return operation.finished or self._failure is not None

    def lost(self) -> frozenset[int]:
        """The ranks known to be gone without a farewell."""
        with self._lock:
            return frozenset(self._mailbox.lost)

    def disconnect(self, rank: int, reason: str) -> None:
        """Treat `rank` as lost, as the end of its stream would."""
        with self._lock:
            if rank in self._streams:
                self._drop(self._streams[rank], reason, lost=True)
            self._announce()

    def abort(self, error: Exception) -> None:
        """Let every operation of every flow, pending or to come, raise `error`.

        The first call counts.
        """
        with self._lock:
            self._fail(error)

    def close(self, flow: Flow, timeout: float) -> None:
        """Hand over what is queued, and a farewell, within `timeout` seconds; then disconnect.

        After `abort` there is neither: to the other ranks this one is lost.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._failure is None:
                self._say_farewell(flow, time.perf_counter() + timeout)
            self._fail(AssertionError(f"rank {self.rank} uses its transport after closing it"))
            while self._leading:
                self._advance(None)
            for stream in self._streams.values():
                stream.close()
            self._release()

    def acknowledged_bytes(self) -> int:
        """Bytes of all flows that the other ends' kernels have confirmed, hellos included.

        Linux only, and before `close`: a check on `Traffic.bytes_sent`.
        """
        with self._lock:
            infos = [
                stream.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                for stream in self._streams.values()
            ]
        return sum(struct.unpack_from("Q", info, TCP_INFO_BYTES_ACKED)[0] for info in infos)

    def release_after_fork(self) -> None:
        """In a child process: close the copies of the sockets.

        Otherwise a data loader's worker would keep the streams of its dead rank open.
        """
        for stream in self._streams.values():
            stream.connection.close()
        self._release()

    def _release(self) -> None:
        self._streams = {}
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _say_farewell(self, flow: Flow, deadline: float) -> None:
        nothing, farewell = torch.empty(0), pack_farewell()
        for stream in list(self._streams.values()):
            stream.backlog.append(Send(flow, stream.rank, nothing, farewell, memoryview(b"")))
            self._serve(stream, selectors.EVENT_WRITE)
        while self._failure is None and any(s.backlog for s in self._streams.values()):
            remaining = deadline - time.perf_counter()
            if remaining <= 0:
                return
            self._advance(remaining)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._mailbox.news = True
        self._announce()

    def _advance(self, timeout: float | None) -> float:
        """Lead or follow for one turn; the seconds blocked."""
        started = time.perf_counter()
        if self._leading:
            self._followers += 1
            try:
                self._changed.wait(timeout)
            finally:
                self._followers -= 1
            return time.perf_counter() - started
        self._leading = True
        self._lock.release()
        try:
            ready = self._selector.select(timeout)
        finally:
            blocked = time.perf_counter() - started
            self._lock.acquire()
            self._leading = False
        for key, events in ready:
            stream: Stream | None = key.data
            if stream is None:
                self._wake_in.recv(64)
                self._woken = False
            elif stream.rank in self._streams:  # else dropped since
                self._serve(stream, events)
        self._announce()
        return blocked

    def _hand_over(self) -> None:
        """Leaving flows let a follower take the lead."""
        if self._followers and not self._leading:
            self._changed.notify()

    def _announce(self) -> None:
        """Something was finished: let the flows that wait look again."""
        if not self._mailbox.news:
            return
        self._mailbox.news = False
        if self._followers:
            self._changed.notify_all()
        self._wake_leader()

    def _wake_leader(self) -> None:
        """Interrupt the flow that is blocked in the selector, if there is one."""
        if self._leading and not self._woken:
            self._woken = True
            self._wake_out.send(b"\0")

    def _serve(self, stream: Stream, events: int) -> None:
        """Write and read what is possible now; a broken stream means a lost rank."""
        try:
            # Under TLS either direction may wait for the other.
            if (events & selectors.EVENT_WRITE or stream.encrypted) and stream.write():
                self._mailbox.news = True
            if events & selectors.EVENT_READ or stream.encrypted:
                stream.read()
        except OSError as error:
            reason = str(error) if isinstance(error, StreamEnded) else f"its connection: {error}"
            if not stream.farewell:
                self._drop(stream, reason, lost=True)
        if stream.farewell:
            self._drop(stream, LEFT, lost=False)
        elif stream.rank in self._streams:
            events = selectors.EVENT_READ
            if stream.backlog or stream.read_wants_write:
                events |= selectors.EVENT_WRITE
            if events != stream.events:
                stream.events = events
                self._selector.modify(stream.connection, events, stream)
                self._wake_leader()  # not every selector sees the change while it blocks

    def _drop(self, stream: Stream, reason: str, *, lost: bool) -> None:
        del self._streams[stream.rank]
        self._selector.unregister(stream.connection)
        stream.close()
        self._mailbox.depart(stream.rank, reason, stream.incoming, lost=lost)
        for send in stream.backlog:
            send.fail(PeerLost(stream.rank, reason))
        self._mailbox.news = True


_engines: weakref.WeakSet[ProgressEngine] = weakref.WeakSet()


def _release_after_fork() -> None:
    for engine in list(_engines):
        engine.release_after_fork()


os.register_at_fork(after_in_child=_release_after_fork)
