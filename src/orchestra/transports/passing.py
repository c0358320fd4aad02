"""A transport that passes everything on: the base of those that look at, or change, some of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from orchestra.schedules import Schedule
from orchestra.transports.protocol import Group, Handle, Task, Traffic, Transport

T = TypeVar("T")


class PassingTransport:
    """`inner`, under another name; its background flows get transports of their own."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def traffic(self) -> Traffic:
        return self.inner.traffic

    @property
    def bytes_sent(self) -> int:
        return self.inner.bytes_sent

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        return self.inner.send(tensor, to, tag)

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Handle:
        return self.inner.receive(source, tag, into)

    def collective(
        self,
        schedule: Schedule,
        vector: Tensor,
        group: Group,
        tag: int,
        edges: Sequence[int] | None = None,
        *,
        background: bool = False,
        via: Transport | None = None,
        visible: bool = False,
    ) -> Task[int]:
        return self.inner.collective(
            schedule, vector, group, tag, edges,
            background=background, via=via or self, visible=visible,
        )  # fmt: skip

    def end_background(self, via: Transport | None = None) -> None:
        self.inner.end_background(via or self)

    def done_without_messages(
        self, schedule: Schedule, vector: Tensor, tag: int, start: float, moving: float
    ) -> None:
        """From the engine: it has executed a collective of this flow, which began at `start` and
        waited for others until `moving`, and has sent no messages."""
        if isinstance(self.inner, PassingTransport):
            self.inner.done_without_messages(schedule, vector, tag, start, moving)

    def add(self, own: Tensor, *arrived: Tensor) -> None:
        self.inner.add(own, *arrived)

    def now(self) -> float:
        return self.inner.now()

    def spawn(self, function: Callable[[Transport], T]) -> Task[T]:
        return self.inner.spawn(function)

    def lost(self) -> frozenset[int]:
        return self.inner.lost()
