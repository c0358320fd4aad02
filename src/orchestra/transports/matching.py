"""Which message belongs to which receive: pure bookkeeping, without input or output.

Messages of one (source, tag) meet its receives in order. A message takes the receive that was
posted first among those for its source and those for any source. A message that nobody asked for
yet waits in memory of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.transports.framing import Header, byte_view
from orchestra.transports.operations import Receive

LEFT = "it has left"


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
        for rank in self._departed(receive):
            self._fail_lost(receive, rank)
            return
        self._sequence += 1
        receive.sequence = self._sequence
        self._posted.setdefault((receive.requested, receive.tag), deque()).append(receive)

    def begin(self, source: int, header: Header, content: Tensor | None = None) -> Incoming:
        """A header has arrived: the message to be filled through its `view`.

        With `content`, what will be in it is known, and given away.
        """
        receive = self._claim(source, header.tag)
        if receive is not None and not self._fits(receive, source, header):
            if content is not None:
                return Incoming(source, header, content, None, come=True)
            return Incoming(source, header, _empty(header), None)
        into = None if receive is None else receive.into
        landing = content if into is None and content is not None else _landing(receive, header)
        message = Incoming(source, header, landing, receive, come=content is not None)
        if receive is None:
            self._unexpected.setdefault(header.tag, []).append(message)
        else:
            receive.sender = source
            receive.frame_bytes = message.frame_bytes
        return message

    def complete(self, message: Incoming) -> None:
        """The last byte of `message` has arrived."""
        message.complete = True
        if message.receive is not None:
            self._deliver(message, message.receive)

    def deliver_local(self, tensor: Tensor, tag: int) -> None:
        """A message from this rank to itself; `tensor` is given away."""
        header = Header(0, tensor.dtype, tuple(tensor.shape), tag, tensor.nbytes)
        receive = self._claim(self.rank, tag)
        message = Incoming(self.rank, header, tensor, None, come=True)
        message.frame_bytes = 0
        message.complete = True
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
        if partial is not None:
            self._discard(partial)
        for key in [key for key in self._posted if key[0] == rank]:
            for receive in self._posted.pop(key):
                self._fail_lost(receive, rank)
        if lost:
            self._report_to_flows(rank)

    def _report_to_flows(self, rank: int) -> None:
        """The oldest receive from any source of each flow learns that `rank` is lost."""
        waiting = [r for key, queue in self._posted.items() if key[0] is None for r in queue]
        for receive in sorted(waiting, key=lambda receive: receive.sequence):
            if rank not in receive.flow.reported:
                self._remove_posted(receive)
                self._fail_lost(receive, rank)

    def _discard(self, partial: Incoming) -> None:
        if partial.receive is not None:
            self._fail_lost(partial.receive, partial.source)
            return
        queue = self._unexpected.get(partial.header.tag, [])
        if partial in queue:  # not so where no receive could take it
            queue.remove(partial)

    def _departed(self, receive: Receive) -> Iterator[int]:
        """The ranks whose absence `receive` has to raise."""
        if receive.requested is None:
            yield from sorted(self.lost - receive.flow.reported)
        elif receive.requested in self.gone:
            yield receive.requested

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


def _empty(header: Header, *, pinned: bool = False) -> Tensor:
    return torch.empty(header.shape, dtype=header.dtype, pin_memory=pinned)


def _landing(receive: Receive | None, header: Header) -> Tensor:
    """The host memory that a message is read into: the receiver's own wherever possible."""
    if receive is None or receive.into is None:
        return _empty(header)
    return _empty(header, pinned=True) if receive.into.is_cuda else receive.into
