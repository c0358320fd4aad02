"""Interceptors between the flows of a rank and its engine.

An interceptor looks at what a rank's program asks of its engine, or changes the answer: the view of
the watcher, a timeline, a record of what cannot be foreseen, its replay. Any number of them share
one wrapper of the transport, and each method of one gets the rest of the chain as `proceed`.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from orchestra.transports.background import Begun, HandOver, Turns
from orchestra.transports.protocol import (
    CollectiveCall,
    Group,
    Handle,
    Pending,
    ReceiveHandle,
    SharedTensor,
    Transport,
)
from orchestra.worker.runtime import Compute, PassingReporter, Runtime, Work

T = TypeVar("T")
Begins = TypeVar("Begins", bound=Handle | Pending[Any])


@dataclass(eq=False)
class HookedFlow:
    """A flow of a rank: the main one, or one in the background."""

    name: str = "main"  # for the n-th flow that a flow has begun: that one's name with ".n"
    label: str = "main"  # what it does, in words
    transport: Transport = field(init=False)  # without interceptors
    waiting: HookedCall | None = None  # what it is blocked on, where somebody keeps an eye on that
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def begin(self, function: Callable[..., Any]) -> HookedFlow:
        label = getattr(function, "__name__", "background").strip("_").replace("_", " ")
        return HookedFlow(f"{self.name}.{next(self.numbers)}", label)


@dataclass(eq=False, slots=True)
class HookedCall:
    """A message, a collective or a background flow that a flow has begun, and may wait for.

    Its kind is "send", "receive", "collective" (or what else the background flow executes),
    "native" (a collective of torch.distributed) or "flow". Interceptors may change `peer` and `tag`
    before a message begins, and the `tag` of a collective; and set `message_by_message`: whether
    the messages of a collective should be sent even where an engine could do without them.
    """

    kind: str
    peer: int | None = None  # the rank at the other end; None: any rank
    tag: int = 0
    size: int = 0  # bytes that are sent, or those of a collective's vector
    ranks: int = 0  # how many take part in a collective
    message_by_message: bool = False
    label: str = ""  # the name of a collective's schedule
    flow: HookedFlow | None = (
        None  # the background flow that has begun, or that executes a collective
    )
    begun: Handle | Pending[Any] | None = None  # the handle, once it has begun
    marks: dict[Interceptor, int] = field(default_factory=dict)  # what interceptors remember of it

    @property
    def source(self) -> int:
        source: int = self.begun.source  # type: ignore[union-attr]
        return source


class Interceptor:
    """The base of interceptors: lets everything proceed.

    Attributes:
        detach: takes it out of the chain that it is in.
        heeds_messages: whether it is called for sends and receives; otherwise only for collectives
            and flows. Nothing is spent on messages that nobody heeds.
    """

    heeds_messages = True
    detach: Callable[[], None] = staticmethod(lambda: None)

    def begin(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        """Called when `flow` begins `operation`; `proceed` returns its handle."""
        return proceed()

    def wait(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        """Called when `flow` waits for `operation`; `proceed` returns its result."""
        return proceed()

    def executed(
        self,
        flow: HookedFlow,
        operation: HookedCall,
        start: float,
        moving: float,
        sent: int,
    ) -> None:
        """Called when the engine has executed a collective on `flow` without messages. See
        `Transport.executed`. The operation is none that was begun."""

    def compute(self, flow: HookedFlow, work: Work, proceed: Callable[[], T]) -> T:
        return proceed()

    def ask(
        self,
        flow: HookedFlow,
        what: str,
        proceed: Callable[[], T],
        operation: HookedCall | None = None,
    ) -> T:
        """Called when `flow` asks for what depends on chance: "now", "lost", "done" (of
        `operation`), "turns" (which one it takes), "stop", "seconds" (of computation), or "memory"
        (that ranks share)."""
        return proceed()

    def progress(self, step: int) -> None:
        """Called when the rank has finished `step` steps."""


class Chain:
    """The interceptors of a rank, the outermost first. `main` is the rank's main flow."""

    def __init__(self, interceptors: Sequence[Interceptor]) -> None:
        self.main = HookedFlow()
        self._hold(list(interceptors))
        self._of_thread = threading.local()
        for interceptor in self.interceptors:
            interceptor.detach = functools.partial(self._remove, interceptor)

    def _remove(self, interceptor: Interceptor) -> None:
        self._hold([other for other in self.interceptors if other is not interceptor])

    def _hold(self, interceptors: list[Interceptor]) -> None:
        self.interceptors = interceptors
        self.heeds_messages = any(each.heeds_messages for each in interceptors)
        self._heeding: dict[str, list[Callable[..., Any]]] = {}

    def call(self, method: str, *given: Any, proceed: Callable[[], T], **more: Any) -> T:
        """Call `proceed` through `method` of every interceptor, the outermost first."""
        # From the inside out: each one's `proceed` is the rest of the chain.
        for own in self.heeding(method):
            proceed = functools.partial(own, *given, proceed=proceed, **more)
        return proceed()

    def heeding(self, method: str) -> list[Callable[..., Any]]:
        """Return `method` of the interceptors that have one of their own, the innermost first."""
        known = self._heeding
        if method not in known:
            base = getattr(Interceptor, method)
            methods = [getattr(each, method) for each in reversed(self.interceptors)]
            known[method] = [own for own in methods if getattr(own, "__func__", own) is not base]
        return known[method]

    @property
    def flow(self) -> HookedFlow:
        flow: HookedFlow = getattr(self._of_thread, "flow", self.main)
        return flow

    def enter(self, flow: HookedFlow) -> None:
        self._of_thread.flow = flow


class InterceptedTransport(Transport):
    """The transport `inner` of `flow`, behind the interceptors of `chain`."""

    def __init__(self, inner: Transport, chain: Chain, flow: HookedFlow) -> None:
        self.inner, self.chain, self.flow = inner, chain, flow
        self.rank, self.size, self.traffic = inner.rank, inner.size, inner.traffic
        flow.transport = inner

    @property
    def bytes_sent(self) -> int:
        return self.inner.bytes_sent

    def send(self, tensor: Tensor, to: int, tag: int, **options: Any) -> Handle:
        if not self.chain.heeds_messages:
            return self.inner.send(tensor, to, tag, **options)
        operation = HookedCall("send", to, tag, tensor.nbytes)
        return self._begun(operation, lambda: self.inner.send(tensor, to, operation.tag, **options))

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> ReceiveHandle:
        if not self.chain.heeds_messages:
            return self.inner.receive(source, tag, into)
        asked = HookedCall("receive", source, tag)
        return self._begun(asked, lambda: self.inner.receive(asked.peer, asked.tag, into))

    def collective(self, call: CollectiveCall) -> Pending[int]:
        if not (self.chain.interceptors or self._foreground or self._background):
            return self.inner.collective(call)  # nobody looks: the engine does as it likes
        operation = HookedCall(
            "collective" if call.schedule else "native",
            tag=call.tag,
            size=call.vector.nbytes,
            ranks=len(call.group),
            message_by_message=call.message_by_message,
        )
        begin = super().collective

        def proceed() -> Pending[int]:
            messages = operation.message_by_message
            return begin(call._replace(tag=operation.tag, message_by_message=messages))

        return self._begun_behind(operation, proceed)

    def in_background(self, function: Callable[[Transport], T], lane: int = 0) -> Pending[T]:
        begin = super().in_background
        return self._begun_behind(HookedCall("collective"), lambda: begin(function, lane))

    def done_by(self, flow: Pending[Any], finish: Callable[[Begun], None]) -> Pending[Any]:
        wait_for = super().done_by
        return self._begun_behind(HookedCall("collective"), lambda: wait_for(flow, finish))

    def _begun_behind(self, operation: HookedCall, proceed: Callable[[], Pending[T]]) -> Pending[T]:
        begun = self._begun(operation, proceed)
        executing = operation.begun.flow if isinstance(operation.begun, Begun) else None
        # The flow behind this one, whose waits the watcher can follow to what it waits for.
        if isinstance(executing, InterceptedHandle):
            operation.flow = executing.operation.flow
        return begun

    def end_background(self) -> None:
        super().end_background()
        self.inner.end_background()

    def execute(self, call: CollectiveCall, over: Transport | None = None) -> int:
        return self.inner.execute(call, over or self)

    def native_all_reduce(self, vector: Tensor) -> Pending[int]:
        return self.inner.native_all_reduce(vector)

    def share(self, like: Tensor, group: Group, tag: int) -> SharedTensor:
        share = functools.partial(self.inner.share, like, group, tag)
        return self.chain.call("ask", self.flow, "memory", proceed=share)

    def new_hand_over(self) -> HandOver:
        return self.inner.new_hand_over()

    def handle(self) -> None:
        self.inner.handle()

    def take_turn(self, turns: Turns) -> None:
        number = self.chain.call("ask", self.flow, "turns", proceed=turns.take_number)
        turns.wait(number, self.traffic)

    def executed(self, call: CollectiveCall, start: float, moving: float, sent: int) -> None:
        """From the engine: see `Transport.executed`."""
        assert call.schedule is not None
        operation = HookedCall(
            "collective", tag=call.tag, size=call.vector.nbytes, label=call.schedule.name
        )
        for interceptor in self.chain.interceptors:
            interceptor.executed(self.flow, operation, start, moving, sent)

    def spawn(self, function: Callable[[Transport], T]) -> Pending[T]:
        flow = self.flow.begin(function)

        # Flows are named by their function.
        @functools.wraps(function)
        def intercepted(transport: Transport) -> T:
            self.chain.enter(flow)
            return function(InterceptedTransport(transport, self.chain, flow))

        operation = HookedCall("flow", flow=flow)
        return self._begun(operation, lambda: self.inner.spawn(intercepted))

    def _begun(self, operation: HookedCall, proceed: Callable[[], Begins]) -> Begins:
        if not self.chain.interceptors:
            return proceed()
        flow = self.flow
        operation.begun = self.chain.call("begin", flow, operation, proceed=proceed)
        return InterceptedHandle(self.chain, flow, operation)  # type: ignore[return-value]

    def add(self, own: Tensor, *arrived: Tensor) -> None:
        self.inner.add(own, *arrived)

    def now(self) -> float:
        return self.chain.call("ask", self.flow, "now", proceed=self.inner.now)

    def blocked(self) -> float:
        return self.chain.call("ask", self.flow, "now", proceed=self.inner.blocked)

    def arrived(self) -> dict[int, tuple[float, float]]:
        return self.inner.arrived()

    def lost(self) -> frozenset[int]:
        return self.chain.call("ask", self.flow, "lost", proceed=self.inner.lost)


@dataclass(slots=True)
class InterceptedHandle:
    """A handle or task of `flow`, behind the interceptors of `chain`."""

    chain: Chain
    flow: HookedFlow
    operation: HookedCall

    @property
    def source(self) -> int:
        return self.operation.source

    def withdraw(self) -> None:
        begun: Any = self.operation.begun
        begun.withdraw()

    def wait(self) -> Any:
        begun: Any = self.operation.begun
        return self.chain.call("wait", self.flow, self.operation, proceed=begun.wait)

    def done(self) -> bool:
        operation, begun = self.operation, self.operation.begun
        assert begun is not None
        return self.chain.call("ask", self.flow, "done", proceed=begun.done, operation=operation)


@dataclass
class InterceptedCompute:
    """The compute of a rank, behind the interceptors of `chain`."""

    inner: Compute
    chain: Chain

    @property
    def seconds(self) -> float:
        inner = self.inner
        return self.chain.call("ask", self.chain.flow, "seconds", proceed=lambda: inner.seconds)

    @property
    def main_seconds(self) -> float:
        return self.inner.main_seconds

    def run(self, work: Work, function: Callable[[], T]) -> T:
        proceed = functools.partial(self.inner.run, work, function)
        return self.chain.call("compute", self.chain.flow, work, proceed=proceed)

    def advance_to(self, slot: int) -> None:
        self.inner.advance_to(slot)

    def wait_before_using(self, slot: int, wait: Callable[[], object]) -> None:
        self.inner.wait_before_using(slot, wait)


@dataclass
class InterceptedReporter(PassingReporter):
    """The reporter of a rank, behind the interceptors of `chain`."""

    chain: Chain

    def progress(self, *, step: int, **facts: Any) -> None:
        super().progress(step=step, **facts)
        for interceptor in self.chain.interceptors:
            interceptor.progress(step)

    def stop_requested(self) -> bool:
        proceed = self.inner.stop_requested
        return self.chain.call("ask", self.chain.flow, "stop", proceed=proceed)


def intercepted(runtime: Runtime, *interceptors: Interceptor) -> Runtime:
    """Put `interceptors`, the outermost first, before those that `runtime` has already."""
    transport, compute, reporter = runtime.transport, runtime.compute, runtime.reporter
    inner: Sequence[Interceptor] = ()
    if isinstance(transport, InterceptedTransport):
        inner, transport = transport.chain.interceptors, transport.inner
    if isinstance(compute, InterceptedCompute):
        compute = compute.inner
    if isinstance(reporter, InterceptedReporter):
        reporter = reporter.inner
    chain = Chain((*interceptors, *inner))
    if chain.heeding("compute") or chain.heeding("ask"):
        compute = InterceptedCompute(compute, chain)
    return replace(
        runtime,
        transport=InterceptedTransport(transport, chain, chain.main),
        compute=compute,
        reporter=InterceptedReporter(reporter, chain),
    )
