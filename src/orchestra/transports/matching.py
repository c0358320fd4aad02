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
from orchestra.transports.framing import Header, byte_view
from orchestra.transports.protocol import Traffic

LEFT = "it has left"


class Progress(Protocol):
    """Whoever moves the bytes."""

    def wait(self, operation: Operation) -> None:
        """Return once `operation` is finished; raise where the whole transport has failed."""
        ...

    def test(self, operation: Operation) -> bool:
        """True if `wait` would return or raise at once."""
        ...


@dataclass(eq=False)
class Flow:
    """One thread of communication of a rank."""

    rank: int
    progress: Progress
    traffic: Traffic = field(default_factory=Traffic)
    reported: set[int] = field(default_factory=set)
    """Lost ranks that a receive from any source of this flow has already raised."""


class Operation:
    """A send or a receive.

    `finished` is set last, so that it may be read without a lock. `awaited`: a flow is blocked
    for this one, so that its end is worth waking somebody.
    """

    __slots__ = ("awaited", "error", "finished", "flow")

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.finished = False
        self.awaited = False
        self.error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Finish with `error`, which `wait` raises."""
        self.error = error
        self.finished = True

    def done(self) -> bool:
        """True if `wait` would return or raise at once."""
        return self.flow.progress.test(self)

    def _finish(self) -> None:
        self.flow.progress.wait(self)
        if self.error is not None:
            raise self.error


class Send(Operation):
    """Bytes on their way to one rank."""

    __slots__ = ("header", "payload", "tensor", "to")

    def __init__(
        self, flow: Flow, to: int, tensor: Tensor, header: bytes, payload: memoryview
    ) -> None:
        super().__init__(flow)
        self.to = to
        self.tensor = tensor
        self.header = memoryview(header)
        self.payload = payload

    @property
    def source(self) -> int:
        """The sending rank."""
        return self.flow.rank

    def advance(self, count: int) -> None:
        """`count` more bytes have been handed to the kernel."""
        in_header = min(count, len(self.header))
        self.header = self.header[in_header:]
        self.payload = self.payload[count - in_header :]

    def wait(self) -> Tensor:
        """The tensor that was sent, free to be changed again."""
        self._finish()
        return self.tensor


class Receive(Operation):
    """A posted receive; `landed` is the memory that the message is read into.

    `frame_bytes` are those of the message with its header, from when it begins to arrive; 0 for one
    from the rank itself. `began_at` is when that was, if it was posted before and time is virtual.
    """

    __slots__ = (
        "began_at",
        "frame_bytes",
        "into",
        "landed",
        "requested",
        "sender",
        "sequence",
        "tag",
    )

    def __init__(self, flow: Flow, requested: int | None, tag: int, into: Tensor | None) -> None:
        super().__init__(flow)
        self.requested = requested
        self.tag = tag
        self.into = into
        self.sequence = 0
        self.sender = requested
        self.landed: Tensor | None = None
        self.frame_bytes = 0
        self.began_at = 0.0

    @property
    def source(self) -> int:
        """The rank that sent; known for a receive from any source once it is done."""
        assert self.sender is not None, "the source of a receive from any is known once done"
        return self.sender

    def wait(self) -> Tensor:
        """The received tensor: `into` where it was given."""
        self._finish()
        landed = self.landed
        assert landed is not None
        if self.into is None:
            return landed
        if landed is not self.into:
            self.into.detach().view(-1).copy_(landed.view(-1))
            self.landed = self.into
        return self.into


class Incoming:
    """A message of which at least the header has arrived; `view` is where its bytes go.

    One that has `come` in whole needs none.
    """

    __slots__ = ("complete", "frame_bytes", "header", "receive", "source", "tensor", "view")

    def __init__(
        self,
        source: int,
        header: Header,
        tensor: Tensor,
        receive: Receive | None,
        *,
        come: bool = False,
    ) -> None:
        self.source = source
        self.header = header
        self.tensor = tensor
        self.receive = receive
        self.view = memoryview(b"") if come else byte_view(tensor)
        self.frame_bytes = header.frame_bytes
        self.complete = False


class Mailbox:
    """Posted receives and unexpected messages of one rank. The caller holds the lock."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.gone: dict[int, str] = {}
        self.lost: set[int] = set()
        self.news = False
        """A receive that a flow waits for was finished since this was last cleared."""
        self._posted: dict[tuple[int | None, int], deque[Receive]] = {}
        self._unexpected: dict[int, list[Incoming]] = {}
        self._sequence = 0

    def post(self, receive: Receive) -> None:
        """Give `receive` its message, or queue it, or fail it where no message can come."""
        message = self._take(receive.requested, receive.tag)
        if message is not None:
            self._attach(message, receive)
            return
        if receive.requested is None:
            departed = self.lost - receive.flow.reported
        else:
            departed = {receive.requested} & self.gone.keys()
        if departed:
            self._fail_lost(receive, min(departed))
            return
        self._sequence += 1
        receive.sequence = self._sequence
        self._posted.setdefault((receive.requested, receive.tag), deque()).append(receive)

    def begin(self, source: int, header: Header, content: Tensor | None = None) -> Incoming:
        """A header has arrived: the message to be filled through its `view`.

        With `content`, what will be in it is known, and given away.
        """
        receive = self._claim(source, header.tag)
        fits = receive is None or self._fits(receive, source, header)
        taker = receive if fits else None
        into = None if taker is None else taker.into
        landing = content
        if landing is None or into is not None:
            # The receiver's own memory wherever possible.
            on_gpu = into is not None and into.is_cuda
            if into is not None and not on_gpu:
                landing = into
            else:
                landing = torch.empty(header.shape, dtype=header.dtype, pin_memory=on_gpu)
        message = Incoming(source, header, landing, taker, come=content is not None)
        if taker is not None:
            taker.sender = source
            taker.frame_bytes = message.frame_bytes
        elif fits:
            self._unexpected.setdefault(header.tag, []).append(message)
        return message

    def complete(self, message: Incoming) -> None:
        """The last byte of `message` has arrived."""
        message.complete = True
        if message.receive is not None:
            self._deliver(message, message.receive)

    def deliver_local(self, tensor: Tensor, tag: int) -> None:
        """A message from this rank to itself; `tensor` is given away."""
        header = Header(0, tensor.dtype, tuple(tensor.shape), tag, tensor.nbytes)
        message = Incoming(self.rank, header, tensor, None, come=True)
        message.frame_bytes = 0
        message.complete = True
        receive = self._claim(self.rank, tag)
        if receive is None:
            self._unexpected.setdefault(tag, []).append(message)
        else:
            self._attach(message, receive)

    def depart(self, rank: int, reason: str, partial: Incoming | None, *, lost: bool) -> None:
        """Nothing more will come from `rank`; `partial` is a message that was cut off."""
        if rank in self.gone:
            return
        self.gone[rank] = reason
        if lost:
            self.lost.add(rank)
        if partial is not None and partial.receive is not None:
            self._fail_lost(partial.receive, rank)
        elif partial is not None:
            queue = self._unexpected.get(partial.header.tag, [])
            if partial in queue:  # not so where no receive could take it
                queue.remove(partial)
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

    def _take(self, source: int | None, tag: int) -> Incoming | None:
        """The oldest unexpected message for a receive, no longer unexpected."""
        queue = self._unexpected.get(tag)
        if queue is None:
            return None
        for index, message in enumerate(queue):
            if source is None or message.source == source:
                del queue[index]
                if not queue:
                    del self._unexpected[tag]
                return message
        return None

    def _claim(self, source: int, tag: int) -> Receive | None:
        """The receive that was posted first for a message, no longer posted."""
        named = self._posted.get((source, tag))
        open_to_any = self._posted.get((None, tag))
        if named and (not open_to_any or named[0].sequence < open_to_any[0].sequence):
            receive = named[0]
        elif open_to_any:
            receive = open_to_any[0]
        else:
            return None
        self._remove_posted(receive)
        return receive

    def _remove_posted(self, receive: Receive) -> None:
        key = (receive.requested, receive.tag)
        queue = self._posted[key]
        queue.remove(receive)
        if not queue:
            del self._posted[key]

    def _attach(self, message: Incoming, receive: Receive) -> None:
        """An unexpected message, perhaps still arriving, meets its receive."""
        if not self._fits(receive, message.source, message.header):
            return
        receive.sender = message.source
        receive.frame_bytes = message.frame_bytes
        message.receive = receive
        if message.complete:
            self._deliver(message, receive)

    def _deliver(self, message: Incoming, receive: Receive) -> None:
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
