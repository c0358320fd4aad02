"""The progress engine, which moves the byte streams of a rank: a flow that waits moves all of them.

It has no thread of its own. One of the waiting flows leads: it blocks in the selector and serves
every stream. The others sleep on a condition until their operation is finished or the lead is free.
One lock guards all state and is held except while blocked.
"""

from __future__ import annotations

import ctypes
import math
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn, Protocol

import numpy as np
import torch

from orchestra.errors import PeerLost
from orchestra.transports.compiled import AWAKE_SECONDS
from orchestra.transports.framing import FAREWELL, Signal, Stream, StreamEnded, pack_signal
from orchestra.transports.large_messages import Outbox, Segment, byte_view
from orchestra.transports.matching import LEFT, Flow, Mailbox, Operation, Receive, Send

BUFFERED_BYTES = 1 << 17
"""Up to here a message that has to wait is copied, as the kernel would take it at once."""
_PR_SET_TIMERSLACK = 29


class SideChannel(Protocol):
    """Memory or connections in addition to the streams. They end together with the streams."""

    def shut(self, rank: int | None = None, /) -> None:
        """Tell the threads that wait there that `rank` is gone; None: that all ranks are gone."""
        ...

    def close(self) -> None: ...


class ProgressEngine:
    """The streams and the mailbox of `rank`, shared by its flows; every method is thread-safe.

    Args:
        report: called with the loss of a rank whose connection has ended without a farewell. Flows
            that wait for that rank then go on waiting until a call of `disconnect` or `abort`.
            None: the rank is lost at once.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        report: Callable[[PeerLost], None] | None = None,
    ) -> None:
        self.rank = rank
        self.size = len(connections) + 1
        self.flows: list[Flow] = []  # that have not ended
        self._ended_bytes = 0  # that flows sent which have ended
        self.side_channels: list[SideChannel] = []
        self.waits = 0  # for messages, that have ended
        self._report = report
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._leading = False  # a flow is blocked in the selector, without the lock
        self._followers = 0
        self._woken = False
        self._closed = self._released = False
        self._awake = 0.0  # seconds for which it looks for messages before it sleeps
        self._latency: Callable[[int, float], float] | None = None
        self._held = threading.Condition(self._lock)
        self._wakes_at = math.inf  # the thread that sees held messages off
        self._mailbox = Mailbox(rank)
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._streams = {
            peer: Stream(connection, peer, self._mailbox)
            for peer, connection in connections.items()
        }
        self._reported: dict[int, Stream] = {}  # to ranks that wait for a verdict
        self._corked: set[Stream] = set()  # with a message that leaves with the next one
        for stream in self._streams.values():
            self._selector.register(stream.connection, stream.events, stream)
        _engines.add(self)

    def share_memory(self, neighbours: Collection[int]) -> None:
        """Let large messages to `neighbours` go in memory that they map, too."""
        with self._lock:
            for rank in self._streams.keys() & set(neighbours):
                self._streams[rank].outbox = Outbox()
        if self._streams.keys() <= set(neighbours):
            self._awake = AWAKE_SECONDS

    def segment(self, to: int, length: int) -> Segment | None:
        """Return a segment for a message to rank `to`; None where it has to go over the socket."""
        stream = self._streams.get(to)
        if stream is None or stream.outbox is None:
            return None
        with self._lock:
            segment = stream.segment(length)
            # The other end is told of a new one, unless a message waits to leave with this one.
            if stream.wants_write and stream not in self._corked and to in self._streams:
                self._serve(stream, selectors.EVENT_WRITE)
            return segment

    def hold(self, latency: Callable[[int, float], float]) -> None:
        """From now on, let a message to rank r that is sent at time t (of `perf_counter`) leave
        `latency(r, t)` seconds later, as if it had been on its way meanwhile."""
        self._latency = latency
        threading.Thread(target=self._see_off, name="latency", daemon=True).start()

    def send(self, send: Send, *, more: bool = False) -> None:
        """Queue `send`; hand over what the kernel takes, with `more` at the next send or wait."""
        with self._lock:
            self._raise_failure()
            if send.to in self._mailbox.gone:
                send.fail(PeerLost(send.to, self._mailbox.gone[send.to]))
                return
            if send.to in self._reported:
                self._reported[send.to].backlog.append(send)
                return
            stream = self._streams[send.to]
            if send.is_shared:
                stream.shared_bytes += send.tensor.nbytes
            if not (self._latency is not None and self._keep_back(stream, send)):
                stream.backlog.append(send)
                if more:
                    self._corked.add(stream)
                elif not stream.events & selectors.EVENT_WRITE:
                    self._serve(stream, selectors.EVENT_WRITE)
            self._announce()

    def move_rest(self, send: Send, buffer: torch.Tensor) -> None:
        """Copy what has not left of `send` into `buffer`, which is like its tensor: that may be
        changed from now on."""
        with self._lock:
            if len(send.payload) and not send.finished:
                rest = byte_view(buffer)[-len(send.payload) :]
                np.copyto(np.frombuffer(rest, np.uint8), np.frombuffer(send.payload, np.uint8))
                send.payload = rest

    def _keep_back(self, stream: Stream, send: Send) -> bool:
        """Queue `send` if it may not leave yet; a small one is copied and counts as finished."""
        assert self._latency is not None
        now = time.perf_counter()
        seconds = self._latency(stream.rank, now)
        if seconds <= 0.0:
            return False
        due = now + seconds
        if len(send.payload) <= BUFFERED_BYTES:
            stream.backlog.append(Signal(send.header + bytes(send.payload), due=due))
            send.finished = True
        else:
            send.due = due
            stream.backlog.append(send)
        if due < self._wakes_at:
            self._held.notify()  # else it sleeps beyond `due`
        return True

    def _see_off(self) -> None:
        """Begin to write each message that had to wait, once it may leave.

        It is not left to the next flow that waits: a long computation may come before.
        """
        _wake_in_time()
        with self._lock:
            while not self._released:
                now = time.perf_counter()
                for stream in list(self._streams.values()):
                    if stream.wants_write:
                        self._serve(stream, selectors.EVENT_WRITE)
                self._mailbox.news |= self._closed  # whoever closes waits for what has to leave
                self._announce()
                streams = self._streams.values()
                self._wakes_at = min((s.next_due(now) for s in streams), default=math.inf)
                pause = self._wakes_at - time.perf_counter()
                self._held.wait(None if pause == math.inf else max(pause, 0.0))

    def deliver_local(self, tensor: torch.Tensor, tag: int) -> None:
        """Deliver a message from this rank to itself; `tensor` is given away."""
        with self._lock:
            self._raise_failure()
            self._mailbox.deliver_local(tensor, tag)
            self._announce()

    def post(self, receive: Receive) -> None:
        with self._lock:
            self._raise_failure()
            self._mailbox.post(receive)

    def withdraw(self, receive: Receive) -> None:
        """Let `receive` take no message, unless one has begun."""
        with self._lock:
            self._mailbox.withdraw(receive)

    def wait(self, operation: Operation) -> None:
        """Move bytes, or let the leader move them, until `operation` is finished."""
        if not operation.finished:
            started = time.perf_counter()
            blocked = 0.0
            operation.flow.waiting = operation
            with self._lock:
                operation.awaited = True  # from now on its end wakes somebody
                try:
                    while not operation.finished and self._failure is None:
                        moving = isinstance(operation, Receive) and operation.frame_bytes > 0
                        seconds = self._advance(None)
                        blocked += 0.0 if moving else seconds
                finally:
                    operation.flow.waiting = None
                    self._hand_over()
            traffic = operation.flow.traffic
            traffic.seconds_waiting += blocked
            traffic.seconds_communicating += time.perf_counter() - started - blocked
        self.waits += 1
        self._raise_failure()

    def test(self, operation: Operation) -> bool:
        """True if `wait` would return or raise at once; moves what can be moved without blocking.

        Without that, a flow that only polls would never see what lies in the kernel's buffers.
        """
        if not operation.finished:
            started = time.perf_counter()
            with self._lock:
                self._move()
            operation.flow.traffic.seconds_communicating += time.perf_counter() - started
        return operation.finished or self._failure is not None

    def check(self, ranks: Collection[int] = ()) -> None:
        """Raise what a flow that waits for one of `ranks` would raise; move what can be moved."""
        with self._lock:
            if ranks:
                self._move()
            self._raise_failure()
            for rank in self._mailbox.gone.keys() & set(ranks):
                raise PeerLost(rank, self._mailbox.gone[rank])

    @property
    def news(self) -> int:
        """A descriptor that can be read when there is something to `move` (Linux)."""
        return self._selector.fileno()

    def move(self) -> None:
        """Move what can be moved without blocking; raise what a flow that waits would raise."""
        with self._lock:
            self._move()
            self._raise_failure()

    def flush(self) -> None:
        """Hand over what was left to messages that have not come, before this flow blocks."""
        with self._lock:
            while self._corked:
                self._serve(self._corked.pop(), selectors.EVENT_WRITE)

    def raise_loss(self, ranks: Collection[int], ended: int) -> NoReturn:
        """Block until a stream says why a side channel to `ended` has ended, and raise that.

        The other end may have closed it because another one of `ranks` is lost.
        """
        with self._lock:
            try:
                while True:
                    self._raise_failure()
                    for rank, reason in self._mailbox.gone.items():
                        if rank == ended or (rank in ranks and rank in self._mailbox.lost):
                            raise PeerLost(rank, reason)
                    self._advance(None)
            finally:
                self._hand_over()

    def count(self, source: int, size: int, seconds: float) -> None:
        """Count bytes from `source` that came in a side channel: see `arrived`."""
        with self._lock:
            self._mailbox.count(source, size, seconds)

    def lost(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._mailbox.lost)

    def connection(self, rank: int) -> socket.socket | None:
        """Return the connection to `rank`; None without an open one."""
        with self._lock:
            return self._streams[rank].connection if rank in self._streams else None

    def disconnect(self, rank: int, reason: str) -> None:
        """Treat `rank` as lost, as the end of its stream would."""
        with self._lock:
            stream = self._streams.get(rank) or self._reported.pop(rank, None)
            if stream is not None:
                if rank in self._streams:
                    self._unhook(stream)
                self._depart(stream, reason, lost=True)
            self._announce()

    def abort(self, error: Exception) -> None:
        """Let every operation of every flow, pending or to come, raise `error`.

        The first call counts.
        """
        with self._lock:
            self._fail(error)

    def close(self, timeout: float) -> None:
        """Hand over what is queued, and a farewell, within `timeout` seconds; then disconnect.

        After `abort` there is neither: to the other ranks this one is lost.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._failure is None:
                self._say_farewell(time.perf_counter() + timeout)
            self._fail(AssertionError(f"rank {self.rank} uses its transport after closing it"))
            while self._leading:  # that flow still uses the selector
                self._advance(None)
            for stream in self._streams.values():
                stream.close()
            self.release()
            self._held.notify_all()

    def begin(self, flow: Flow) -> None:
        """`flow` sends and receives from now on."""
        with self._lock:
            self.flows.append(flow)

    def end(self, flow: Flow) -> None:
        """`flow` sends nothing more."""
        with self._lock:
            self.flows.remove(flow)
            self._ended_bytes += flow.traffic.bytes_sent

    def bytes_sent(self) -> int:
        """Return the payload and headers that all flows have sent."""
        with self._lock:
            return self._ended_bytes + sum(flow.traffic.bytes_sent for flow in self.flows)

    def arrived(self) -> dict[int, tuple[float, float]]:
        with self._lock:
            return dict(self._mailbox.arrived)

    def acknowledged_bytes(self) -> int:
        """Bytes of all flows that the other ends have confirmed, hellos included: their kernels, or
        for those in segments, that they were handed over.

        Linux only, and before `close`: a check on `Traffic.bytes_sent`.
        """
        with self._lock:
            return sum(stream.acknowledged_bytes() for stream in self._streams.values())

    def release(self) -> None:
        """Close this process's copies of the sockets."""
        self._released = True
        for stream in self._streams.values():
            stream.connection.close()
        for channel in self.side_channels:
            channel.close()
        self._streams = {}
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _say_farewell(self, deadline: float) -> None:
        for stream in list(self._streams.values()):
            stream.backlog.append(Signal(pack_signal(FAREWELL)))
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
        for channel in self.side_channels:
            channel.shut()
        self._mailbox.news = True
        self._announce()

    def _advance(self, timeout: float | None) -> float:
        """Lead or follow for one turn; return the seconds blocked."""
        started = time.perf_counter()
        # No selector knows of what was left to a message that has not come.
        while self._corked:
            self._serve(self._corked.pop(), selectors.EVENT_WRITE)
            timeout = 0.0  # it may be what this flow waits for
        if self._leading:
            self._followers += 1
            try:
                self._changed.wait(timeout)
            finally:
                self._followers -= 1
            return time.perf_counter() - started
        self._leading = True
        self._lock.release()  # others may send and post while this flow is blocked
        try:
            ready = self._select(started, timeout)
        finally:
            blocked = time.perf_counter() - started
            self._lock.acquire()
            self._leading = False
            self._mailbox.blocked += blocked
        for key, events in ready:
            stream: Stream | None = key.data
            if stream is None:
                self._wake_in.recv(64)
                self._woken = False
            elif stream.rank in self._streams:  # else dropped since
                self._serve(stream, events)
        self._announce()
        return blocked

    def _select(
        self, started: float, timeout: float | None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until something can be read or written, and return what.

        Where all ranks are on this host, an answer often comes sooner than a core falls asleep and
        wakes up again. Not beside another flow, which may need the core, and the interpreter.
        """
        end = started + (self._awake if timeout != 0 and len(self.flows) == 1 else 0.0)
        while time.perf_counter() < end:
            ready = self._selector.select(0)
            if ready:
                return ready
            os.sched_yield()  # as there may be more ranks than cores
        return self._selector.select(timeout)

    def _move(self) -> None:
        """Move what can be moved without blocking."""
        if not self._leading and not self._closed:  # a leader moves bytes anyhow
            self._advance(0)
            self._hand_over()

    def _hand_over(self) -> None:
        """Let a follower take the lead, from a flow that stops waiting."""
        if self._followers and not self._leading:
            self._changed.notify()

    def _announce(self) -> None:
        """Let the flows that wait look again, if something was finished."""
        if not self._mailbox.news:
            return
        self._mailbox.news = False
        if self._followers:
            self._changed.notify_all()
        self._wake_leader()

    def _wake_leader(self) -> None:
        """Interrupt the flow that is blocked in the selector, if there is one."""
        if self._leading and not self._woken:
            self._woken = True  # one byte wakes it, however many ask
            self._wake_out.send(b"\0")

    def _serve(self, stream: Stream, events: int) -> None:
        """Write and read what is possible now; a broken stream means a lost rank."""
        self._corked.discard(stream)
        try:
            # Under TLS either direction may wait for the other.
            if (events & selectors.EVENT_WRITE or stream.encrypted) and stream.write():
                self._mailbox.news = True
            if events & selectors.EVENT_READ or stream.encrypted:
                stream.read()
        except OSError as error:
            reason = str(error) if isinstance(error, StreamEnded) else f"its connection: {error}"
            if not stream.farewell:  # else it has left, and nothing is lost
                self._unhook(stream)
                if self._report is None:
                    self._depart(stream, reason, lost=True)
                else:
                    self._reported[stream.rank] = stream
                    self._report(PeerLost(stream.rank, reason))
        if stream.farewell:
            self._unhook(stream)
            self._depart(stream, LEFT, lost=False)
        elif stream.rank in self._streams:
            events = selectors.EVENT_READ
            if stream.wants_write or stream.read_wants_write:
                events |= selectors.EVENT_WRITE
            if events != stream.events:
                stream.events = events
                self._selector.modify(stream.connection, events, stream)
                self._wake_leader()  # not every selector sees the change while it blocks

    def _unhook(self, stream: Stream) -> None:
        """Move no more bytes over `stream`."""
        del self._streams[stream.rank]
        self._corked.discard(stream)
        self._selector.unregister(stream.connection)
        stream.close()

    def _depart(self, stream: Stream, reason: str, *, lost: bool) -> None:
        """Tell all that wait for the rank at the other end of `stream` that it is gone."""
        self._mailbox.depart(stream.rank, reason, stream.incoming, lost=lost)
        for send in stream.backlog:
            if isinstance(send, Send):
                send.fail(PeerLost(stream.rank, reason))
        if lost:
            for channel in self.side_channels:
                channel.shut(stream.rank)
        self._mailbox.news = True


def _wake_in_time() -> None:
    """Have the kernel wake this thread without the 50 us by which it groups timers (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


_engines: weakref.WeakSet[ProgressEngine] = weakref.WeakSet()


def _release_after_fork() -> None:
    """Close a forked process's sockets: a data loader would keep those of a dead rank open."""
    for engine in list(_engines):
        engine.release()


os.register_at_fork(after_in_child=_release_after_fork)
