"""Sends and receives under way, and which message belongs to which receive.

Pure bookkeeping, without input or output. Messages of one (source, tag) meet its receives in order.
A message takes the receive that was posted first among those for its source and those for any
source. A message that nobody asked for yet waits in memory of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.transports.framing import Header
from orchestra.transports.large_messages import KeptMemory, byte_view
from orchestra.transports.protocol import Traffic

LEFT = "it has left"


class Progress(Protocol):
    """The part of a transport that moves the bytes."""

    def wait(self, operation: Operation) -> None:
        """Return once `operation` is finished; raise where the whole transport has failed."""
        ...

    def test(self, operation: Operation) -> bool:
        """True if `wait` would return or raise at once."""
        ...

    def withdraw(self, receive: Receive) -> None:
        """Let `receive` take no message, unless one has begun."""
        ...


class Collective(Protocol):
    """A collective that a flow is in, without messages."""

    @property
    def awaited(self) -> int | None:
        """The rank that it waits for, if it waits."""
        ...


@dataclass(eq=False)
class Flow:
    """One thread of communication of a rank.

    Attributes:
        reported: lost ranks that a receive from any source of this flow has already raised.
        in_collective: the collective that it carries out without messages now.
        waiting: the message that it is blocked on.
    """

    rank: int
    progress: Progress
    traffic: Traffic = field(default_factory=Traffic)
    reported: set[int] = field(default_factory=set)
    in_collective: Collective | None = None
    waiting: Operation | None = None


@dataclass(eq=False, slots=True)
class Operation:
    """A send or a receive.

    Attributes:
        finished: set last, so that it may be read without a lock.
        awaited: a flow is blocked for this one, so that its end is worth waking somebody.
        error: what `wait` raises.
    """

    flow: Flow
    finished: bool = field(default=False, init=False)
    awaited: bool = field(default=False, init=False)
    error: Exception | None = field(default=None, init=False)

    def fail(self, error: Exception) -> None:
        self.error = error
        self.finished = True

    def done(self) -> bool:
        return self.flow.progress.test(self)

    def _finish(self) -> None:
        self.flow.progress.wait(self)
        if self.error is not None:
            raise self.error


@dataclass(eq=False, slots=True)
class Send(Operation):
    """Bytes on their way to one rank: what the kernel has not taken of `header` and `payload`.

    Where it `is_shared`, the elements are where the receiver finds them. It leaves no earlier than
    `due`, a time of `perf_counter`.
    """

    to: int
    tensor: Tensor
    header: bytes
    payload: memoryview
    tag: int
    is_shared: bool = False
    due: float = 0.0

    @property
    def source(self) -> int:
        return self.flow.rank

    def wait(self) -> Tensor:
        """Return the tensor that was sent, free to be changed again."""
        self._finish()
        return self.tensor


@dataclass(eq=False, slots=True)
class Receive(Operation):
    """A posted receive.

    Attributes:
        requested: the rank to receive from; None: any.
        landed: the memory that the message is read into.
        frame_bytes: of the message with its header, from when it begins to arrive; 0 for one from
            the rank itself.
        began_at: when that was, if it was posted before and time is virtual.
    """

    requested: int | None
    tag: int
    into: Tensor | None
    sequence: int = field(default=0, init=False)
    sender: int | None = field(default=None, init=False)
    landed: Tensor | None = field(default=None, init=False)
    frame_bytes: int = field(default=0, init=False)
    began_at: float = field(default=0.0, init=False)

    @property
    def source(self) -> int:
        """The rank that sent; known for a receive from any source once it is done."""
        source = self.sender if self.requested is None else self.requested
        assert source is not None, "the source of a receive from any is known once done"
        return source

    def withdraw(self) -> None:
        self.flow.progress.withdraw(self)

    def wait(self) -> Tensor:
        """Return the received tensor: `into` where it was given."""
        self._finish()
        landed = self.landed
        assert landed is not None
        if self.into is None:
            return landed
        # It came before the receive was posted, or in a segment, or `into` is on a GPU: the waiting
        # flow copies.
        if landed is not self.into:
            self.into.detach().view(-1).copy_(landed.view(-1))
            self.landed = self.into
        return self.into


_NO_BYTES = memoryview(b"")


@dataclass(eq=False, slots=True)
class Incoming:
    """A message whose header has arrived; `view` is where its bytes go."""

    source: int
    header: Header
    tensor: Tensor
    receive: Receive | None = None
    view: memoryview = _NO_BYTES
    frame_bytes: int = 0
    complete: bool = False


class Mailbox:
    """Posted receives and unexpected messages of one rank. The caller holds the lock.

    Attributes:
        gone: why nothing more comes from a rank, by rank.
        lost: those of them that went without a farewell.
        news: a receive that a flow waits for was finished since this was last cleared.
        blocked: seconds for which somebody was ready to read whatever came.
        arrived: of each rank that sent messages which took time, their bytes, and the seconds.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.gone: dict[int, str] = {}
        self.lost: set[int] = set()
        self.news = False
        self.blocked = 0.0
        self.arrived: dict[int, tuple[float, float]] = {}
        self._posted: dict[tuple[int | None, int], deque[Receive]] = {}
        # By source (None: any) and tag, each a set in the order of insertion.
        self._unexpected: dict[tuple[int | None, int], dict[Incoming, None]] = {}
        self._sequence = 0
        self._memory = KeptMemory()

    def post(self, receive: Receive) -> None:
        """Give `receive` its message, or queue it, or fail it where no message can come."""
        source = receive.requested
        key = source, receive.tag
        if key in self._unexpected:
            message = next(iter(self._unexpected[key]))  # the oldest
            self._forget(message)
            self._attach(message, receive)
            return
        # Whoever receives from any source learns of each loss once, and may then go on with the
        # others.
        if source is None and (unknown := self.lost - receive.flow.reported):
            self._fail_lost(receive, min(unknown))
        elif source is not None and source in self.gone:
            self._fail_lost(receive, source)
        else:
            self._sequence += 1
            receive.sequence = self._sequence
            self._posted.setdefault(key, deque()).append(receive)

    def withdraw(self, receive: Receive) -> None:
        """Let `receive` take no message, unless one has begun."""
        if receive in self._posted.get((receive.requested, receive.tag), ()):
            self._remove_posted(receive)

    def begin(self, source: int, header: Header, content: Tensor | None = None) -> Incoming:
        """Begin a message whose header has arrived, to be filled through its `view`.

        With `content`, what will be in it is known, and given away.
        """
        receive = self._claim(source, header.tag)
        taker = receive if receive is not None and self._fits(receive, source, header) else None
        into = None if taker is None else taker.into
        if content is not None:
            landing = content
        elif into is not None and not into.is_cuda:
            landing = into
        elif into is not None:
            landing = torch.empty(header.shape, dtype=header.dtype, pin_memory=True)
        else:
            landing = self._memory.empty(header.shape, header.dtype, header.payload_bytes)
        view = byte_view(landing) if content is None else _NO_BYTES
        message = Incoming(source, header, landing, taker, view, header.frame_bytes)
        if taker is not None:
            taker.sender = source
            taker.frame_bytes = message.frame_bytes
        # One that claimed a receive without fitting is not kept: that receive has failed.
        elif receive is None:
            self._keep(message)
        return message

    def complete(self, message: Incoming) -> None:
        """Deliver `message`, whose last byte has arrived."""
        message.complete = True
        if message.receive is not None:
            self._deliver(message, message.receive)

    def count(self, source: int, size: int, seconds: float) -> None:
        """Count `size` bytes from `source`, which took `seconds` to arrive."""
        before, passed = self.arrived.get(source, (0.0, 0.0))
        self.arrived[source] = before + size, passed + seconds

    def deliver_local(self, tensor: Tensor, tag: int) -> None:
        """Deliver a message from this rank to itself; `tensor` is given away."""
        header = Header(0, tensor.dtype, tuple(tensor.shape), tag, tensor.nbytes)
        message = Incoming(self.rank, header, tensor, complete=True)
        receive = self._claim(self.rank, tag)
        if receive is None:
            self._keep(message)
        else:
            self._attach(message, receive)

    def depart(self, rank: int, reason: str, partial: Incoming | None, *, lost: bool) -> None:
        """Fail what waits for `rank`, which is gone; `partial` is a message that was cut off."""
        if rank in self.gone:
            return
        self.gone[rank] = reason
        if lost:
            self.lost.add(rank)
        if partial is not None and partial.receive is not None:
            self._fail_lost(partial.receive, rank)
        elif partial is not None and partial in self._unexpected.get(
            (None, partial.header.tag), ()
        ):
            # Half a message will never be complete, and must not meet a later receive.
            self._forget(partial)  # it is not there where no receive could take it
        for key in [key for key in self._posted if key[0] == rank]:
            for receive in self._posted.pop(key):
                self._fail_lost(receive, rank)
        if lost:  # which the oldest receive from any source of each flow learns
            waiting = [r for key, queue in self._posted.items() if key[0] is None for r in queue]
            for receive in sorted(waiting, key=lambda receive: receive.sequence):
                if rank not in receive.flow.reported:
                    self._remove_posted(receive)
                    self._fail_lost(receive, rank)

    def _fail_lost(self, receive: Receive, rank: int) -> None:
        if receive.requested is None:
            receive.flow.reported.add(rank)
        self._fail(receive, PeerLost(rank, self.gone[rank]))

    def _fail(self, receive: Receive, error: Exception) -> None:
        receive.fail(error)
        self.news = self.news or receive.awaited

    def _keep(self, message: Incoming) -> None:
        """Keep `message`, which nobody has asked for yet."""
        for source in (message.source, None):
            self._unexpected.setdefault((source, message.header.tag), {})[message] = None

    def _forget(self, message: Incoming) -> None:
        """Take `message` out of the unexpected ones."""
        for source in (message.source, None):
            key = source, message.header.tag
            del self._unexpected[key][message]
            if not self._unexpected[key]:
                del self._unexpected[key]

    def _claim(self, source: int, tag: int) -> Receive | None:
        """Remove and return the receive that was posted first for a message; None: none was."""
        queue, open_to_any = self._posted.get((source, tag)), self._posted.get((None, tag))
        # Both queues are in the order of posting, so that their heads decide.
        if open_to_any and not (queue and queue[0].sequence < open_to_any[0].sequence):
            queue = open_to_any
        if not queue:
            return None
        receive = queue.popleft()
        if not queue:
            del self._posted[receive.requested, tag]
        return receive

    def _remove_posted(self, receive: Receive) -> None:
        key = (receive.requested, receive.tag)
        queue = self._posted[key]
        queue.remove(receive)
        if not queue:
            del self._posted[key]

    def _attach(self, message: Incoming, receive: Receive) -> None:
        """Join an unexpected message, which may still be arriving, with its receive."""
        if not self._fits(receive, message.source, message.header):
            return
        receive.sender = message.source
        receive.frame_bytes = message.frame_bytes
        message.receive = receive
        if message.complete:
            self._deliver(message, receive)

    def _deliver(self, message: Incoming, receive: Receive) -> None:
        # `finished` comes last, since others read it without the lock.
        receive.landed = message.tensor
        receive.flow.traffic.messages_received += 1
        receive.flow.traffic.bytes_received += message.frame_bytes
        receive.finished = True
        self.news = self.news or receive.awaited

    def _fits(self, receive: Receive, source: int, header: Header) -> bool:
        """True if the message can land in `into`; otherwise the receive fails."""
        into = receive.into
        if into is None:
            return True
        if into.dtype == header.dtype and into.nbytes == header.payload_bytes:
            return True
        mistake = AssertionError(
            f"tag {header.tag}: rank {source} sent {header.dtype} of shape {header.shape}, and "
            f"rank {self.rank} receives it into {into.dtype} of shape {tuple(into.shape)}"
        )
        self._fail(receive, mistake)
        return False
