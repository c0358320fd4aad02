"""A wrapper of a transport that knows what its flow is blocked on, for the watcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from orchestra.engines.processes.control import Signs
from orchestra.schedules import Schedule
from orchestra.transports.collective import Background
from orchestra.transports.passing import PassingTransport
from orchestra.transports.protocol import Group, Handle, Task, Transport

T = TypeVar("T")


@dataclass
class _Moved:
    """Operations that any flow of this rank has completed."""

    operations: int = 0


class ObservedTransport(PassingTransport):
    """Passes everything on to `inner`, and notes what the flow waits for."""

    def __init__(self, inner: Transport, moved: _Moved | None = None) -> None:
        super().__init__(inner)
        self.moved = moved or _Moved()
        self.waits: Callable[[], Signs] | None = None
        self._flows: dict[str, ObservedTransport] = {}  # the newest of each name

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        return ObservedHandle(self.inner.send(tensor, to, tag), self, to, tag, "to send")

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Handle:
        handle = self.inner.receive(source, tag, into)
        return ObservedHandle(handle, self, source, tag, "to receive")

    def spawn(self, function: Callable[[Transport], T]) -> Task[T]:
        flow = ObservedTransport(self.inner, self.moved)

        self._flows[getattr(function, "__name__", "")] = flow

        @functools.wraps(function)
        def observed(transport: Transport) -> T:
            flow.inner = transport
            return function(flow)

        return ObservedTask(self.inner.spawn(observed), self, flow)

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
        task = super().collective(
            schedule, vector, group, tag, edges, background=background, via=via, visible=visible
        )
        if not background:
            return task
        return ObservedTask(task, self, self._flows[Background.sum_in_background.__name__])

    def signs(self) -> Signs:
        """What this flow waits for now, and how much has moved."""
        waits = self.waits
        return Signs(self.moved.operations) if waits is None else waits()

    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank != self.rank)


@dataclass
class ObservedHandle:
    inner: Handle
    flow: ObservedTransport
    peer: int | None
    tag: int
    verb: str

    @property
    def source(self) -> int:
        return self.inner.source

    def wait(self) -> Tensor:
        self.flow.waits = self._signs
        try:
            return self.inner.wait()
        finally:
            self.flow.waits = None
            self.flow.moved.operations += 1

    def done(self) -> bool:
        return self.inner.done()

    def _signs(self) -> Signs:
        peers = self.flow.others() if self.peer is None else (self.peer,)
        return Signs(self.flow.moved.operations, peers, f"{self.verb}, tag {self.tag}")


@dataclass
class ObservedTask(Task[T]):
    inner: Task[T]
    spawner: ObservedTransport
    flow: ObservedTransport

    def wait(self) -> T:
        self.spawner.waits = self.flow.signs
        try:
            return self.inner.wait()
        finally:
            self.spawner.waits = None
            self.spawner.moved.operations += 1

    def done(self) -> bool:
        return self.inner.done()
