"""Sends and receives under way: the handles that a caller waits for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from orchestra.transports.protocol import Traffic


class Progress(Protocol):
    """Whoever moves the bytes."""

    def wait(self, operation: Operation) -> None:
        """Return once `operation` is finished; raise where the whole transport has failed."""
        ...

    def test(self, operation: Operation) -> bool:
        """True if `wait` would return or raise at once."""
        ...


@dataclass
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
