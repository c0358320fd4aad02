"""Wrappers of a transport that write down when its flow sends, receives and waits.

Messages are numbered all the time, so that both ends give one message the same number whenever
their windows open. Everything else happens only while a window is open.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from orchestra.records.timeline import Message
from orchestra.schedules import Schedule
from orchestra.transports.passing import PassingTransport
from orchestra.transports.protocol import Collectives, Group, Handle, Task, Transport
from orchestra.transports.tags import tag_name
from orchestra.transports.tracer import MAIN, Tracer

T = TypeVar("T")

SHOWN = 16
"""Of an all-reduce of more ranks, no messages are shown where the engine can do without them."""


class TracedTransport(PassingTransport):
    """Passes everything on to `inner`, the transport of `flow`."""

    def __init__(self, inner: Transport, tracer: Tracer, flow: int = MAIN) -> None:
        super().__init__(inner)
        self.tracer = tracer
        self.flow = flow

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        tracer = self.tracer
        number = next(tracer.sent[to, tag])
        if not tracer.is_open:
            return self.inner.send(tensor, to, tag)
        traffic = self.inner.traffic
        bytes_before, start = traffic.bytes_sent, tracer.now()
        handle = self.inner.send(tensor, to, tag)
        tracer.add(
            self.flow,
            "send",
            f"send {size_text(tensor.nbytes)} to {self.name_of(to)}",
            start,
            tracer.now(),
            {
                "payload_bytes": tensor.nbytes,
                "bytes_sent": traffic.bytes_sent - bytes_before,
                "tag": tag_name(tag),
                "peer": to,
            },
            Message(self.rank, to, tag, number),
        )
        return TracedSend(handle, self, to, tag)

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Handle:
        handle = self.inner.receive(source, tag, into)
        tracer = self.tracer
        if source is None:
            tracer.awaits_request()
            return TracedReceive(handle, self, None, tag, None)
        number = next(tracer.received[source, tag])
        return TracedReceive(handle, self, source, tag, number) if tracer.is_open else handle

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
        """Its messages are to be seen, as far as there are not too many."""
        visible = visible or (self.tracer.is_open and len(group) <= SHOWN)
        task = super().collective(
            schedule, vector, group, tag, edges, background=background, via=via, visible=visible
        )
        if not background:
            return task
        return TracedCollective(task, self)

    def done_without_messages(
        self, schedule: Schedule, vector: Tensor, tag: int, start: float, moving: float
    ) -> None:
        tracer = self.tracer
        if tracer.is_open:
            name = f"all-reduce ({schedule.name}), {size_text(vector.nbytes)}"
            about: dict[str, Any] = {"tag": tag_name(tag)}
            tracer.add(self.flow, "wait", "wait for the others", start, moving, dict(about))
            about["payload_bytes"] = vector.nbytes
            tracer.add(self.flow, "native", name, moving, tracer.now(), about)
        super().done_without_messages(schedule, vector, tag, start, moving)

    def spawn(self, function: Callable[[Transport], T]) -> Task[T]:
        name = getattr(function, "__name__", "background").strip("_").replace("_", " ")
        flow = self.tracer.new_flow(name)

        @functools.wraps(function)
        def traced(transport: Transport) -> T:
            self.tracer.enter(flow)
            return function(TracedTransport(transport, self.tracer, flow))

        task = self.inner.spawn(traced)
        return TracedTask(task, self.tracer, self.flow, "wait", f"wait for: {name}")

    def name_of(self, rank: int) -> str:
        """`rank` as seen from here."""
        return "another flow" if rank == self.rank else f"rank {rank}"

    def timed(self, handle: Handle, peer: int | None, tag: int) -> tuple[Tensor, float, float]:
        """What `handle` gives in the end; from when to when it did more than wait.

        The transport counts how long it had nothing to move, but not when: here that comes first.
        """
        traffic, tracer = self.inner.traffic, self.tracer
        waiting_before, start = traffic.seconds_waiting, tracer.now()
        tensor = handle.wait()
        end = tracer.now()
        moving = min(start + traffic.seconds_waiting - waiting_before, end)
        if moving > start:
            name = "wait for " + ("any rank" if peer is None else self.name_of(peer))
            tracer.add(self.flow, "wait", name, start, moving, {"tag": tag_name(tag), "peer": peer})
        return tensor, moving, end


@dataclass(slots=True)
class TracedSend:
    """A send whose beginning was written down."""

    inner: Handle
    transport: TracedTransport
    to: int
    tag: int

    @property
    def source(self) -> int:
        return self.inner.source

    def wait(self) -> Tensor:
        transport = self.transport
        if not transport.tracer.is_open:
            return self.inner.wait()
        before = transport.traffic.seconds_communicating
        tensor, start, end = transport.timed(self.inner, self.to, self.tag)
        if transport.traffic.seconds_communicating > before:  # else it had been complete
            name = f"send the rest to {transport.name_of(self.to)}"
            about = {"tag": tag_name(self.tag), "peer": self.to}
            transport.tracer.add(transport.flow, "send", name, start, end, about)
        return tensor

    def done(self) -> bool:
        return self.inner.done()


@dataclass(slots=True)
class TracedReceive:
    """A receive; its message is number `number`, which from any source is known at the end."""

    inner: Handle
    transport: TracedTransport
    requested: int | None
    tag: int
    number: int | None

    @property
    def source(self) -> int:
        return self.inner.source

    def wait(self) -> Tensor:
        tracer = self.transport.tracer
        if not tracer.is_open:
            tensor = self.inner.wait()
            self._number()
            return tensor
        tensor, start, end = self.transport.timed(self.inner, self.requested, self.tag)
        source, number = self.source, self._number()
        tracer.add(
            self.transport.flow,
            "receive",
            f"receive {size_text(tensor.nbytes)} from {self.transport.name_of(source)}",
            start,
            end,
            {"payload_bytes": tensor.nbytes, "tag": tag_name(self.tag), "peer": source},
            Message(source, self.transport.rank, self.tag, number),
        )
        return tensor

    def _number(self) -> int:
        if self.number is None:
            self.number = next(self.transport.tracer.received[self.source, self.tag])
        return self.number

    def done(self) -> bool:
        return self.inner.done()


@dataclass(slots=True)
class TracedTask(Task[T]):
    """Something under way that `flow` will wait for."""

    inner: Task[T]
    tracer: Tracer
    flow: int
    category: str
    name: str
    payload_bytes: int | None = None

    def wait(self) -> T:
        if not self.tracer.is_open:
            return self.inner.wait()
        start = self.tracer.now()
        result = self.inner.wait()
        args = {} if self.payload_bytes is None else {"payload_bytes": self.payload_bytes}
        self.tracer.add(self.flow, self.category, self.name, start, self.tracer.now(), args)
        return result

    def done(self) -> bool:
        return self.inner.done()


@dataclass(slots=True)
class TracedCollective:
    """A collective that goes on in the background of `transport`."""

    inner: Task[int]
    transport: TracedTransport

    def wait(self) -> int:
        tracer, traffic = self.transport.tracer, self.transport.traffic
        before, start = traffic.seconds_waiting, tracer.now()
        buffer_bytes = self.inner.wait()
        end = start + traffic.seconds_waiting - before
        if tracer.is_open and end > start:
            tracer.add(self.transport.flow, "wait", "wait for another flow", start, end, {})
        return buffer_bytes

    def done(self) -> bool:
        return self.inner.done()


@dataclass
class TracedCollectives:
    """Writes down how long each all-reduce of `inner` blocked the main flow."""

    inner: Collectives
    tracer: Tracer

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.start_all_reduce(tensor).wait()

    def start_all_reduce(self, tensor: Tensor) -> Task[Tensor]:
        name = f"all-reduce (native), {size_text(tensor.nbytes)}"
        task = self.inner.start_all_reduce(tensor)
        return TracedTask(task, self.tracer, MAIN, "native", name, tensor.nbytes)

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        return self.inner.broadcast(tensor, root)

    def barrier(self) -> None:
        self.inner.barrier()


def size_text(count: int) -> str:
    """A number of bytes for people, such as 1.2 MB."""
    if count < 1000:
        return f"{count} B"
    size, units = count / 1000, ["kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.1f} {units[0]}"
