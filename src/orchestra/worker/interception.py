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

from orchestra.schedules import Schedule
from orchestra.transports.collective import Begun
from orchestra.transports.protocol import Group, Handle, Task, Transport
from orchestra.worker.runtime import Compute, Reporter, Runtime, Work

T = TypeVar("T")


@dataclass(eq=False)
class Flow:
    """A flow of a rank: the main one, or one in the background.

    Attributes:
        name: "main", and for the n-th flow that a flow has begun its name with ".n".
        label: what it does, in words.
        transport: its transport, without interceptors.
        waiting: the operation that it is blocked on, where somebody keeps an eye on that.
    """

    name: str = "main"
    label: str = "main"
    transport: Transport = field(init=False)
    waiting: Operation | None = None
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def begin(self, function: Callable[..., Any]) -> Flow:
        """The flow that is to run `function`."""
        label = getattr(function, "__name__", "background").strip("_").replace("_", " ")
        return Flow(f"{self.name}.{next(self.numbers)}", label)


@dataclass(eq=False)
class Operation:
    """A message, a collective or a background flow that a flow has begun, and may wait for.

    Attributes:
        kind: "send", "receive", "collective", "native" (one of torch.distributed) or "flow".
        peer: the rank at the other end; None: any rank. Interceptors may change it, and `tag`,
            before a message begins.
        size: bytes that are sent, or those of a collective's vector.
        ranks: how many take part in a collective.
        visible: whether the messages of a collective should be sent even where an engine could
            do without them. Interceptors may set it.
        label: the name of a collective's schedule.
        flow: the background flow that has begun, or that executes a collective.
        begun: the handle, once it has begun.
        marks: what interceptors remember of it, by interceptor.
    """

    kind: str
    peer: int | None = None
    tag: int = 0
    size: int = 0
    ranks: int = 0
    visible: bool = False
    label: str = ""
    flow: Flow | None = None
    begun: Handle | Task[Any] | None = None
    marks: dict[Interceptor, int] = field(default_factory=dict)

    @property
    def source(self) -> int:
        """Who has sent what was received."""
        source: int = self.begun.source  # type: ignore[union-attr]
        return source


class Interceptor:
    """The base of interceptors: lets everything proceed.

    Attributes:
        detach: takes it out of the chain that it is in.
    """

    detach: Callable[[], None] = staticmethod(lambda: None)

    def begin(self, flow: Flow, operation: Operation, proceed: Callable[[], T]) -> T:
        """`flow` begins `operation`; `proceed` returns its handle."""
        return proceed()

    def wait(self, flow: Flow, operation: Operation, proceed: Callable[[], T]) -> T:
        """`flow` waits for `operation`; `proceed` returns what it gives."""
        return proceed()

    def executed(self, flow: Flow, operation: Operation, start: float, moving: float) -> None:
        """The engine has executed a collective on `flow` without messages: it began at `start`, and
        waited for other ranks until `moving`. The operation is none that was begun."""

    def compute(self, flow: Flow, work: Work, proceed: Callable[[], T]) -> T:
        """`flow` computes."""
        return proceed()

    def told(
        self, flow: Flow, what: str, proceed: Callable[[], T], operation: Operation | None = None
    ) -> T:
        """`flow` asks for what depends on chance: "now", "lost", "done" (of `operation`), "stop"
        or "seconds" (of computation)."""
        return proceed()

    def progress(self, step: int) -> None:
        """The rank has finished `step` steps."""


class Chain:
    """The interceptors of a rank, the outermost first. `main` is the rank's main flow."""

    def __init__(self, interceptors: Sequence[Interceptor]) -> None:
        self.interceptors = list(interceptors)
        self.main = Flow()
        self._of_thread = threading.local()
        for interceptor in self.interceptors:
            interceptor.detach = functools.partial(self._remove, interceptor)

    def _remove(self, interceptor: Interceptor) -> None:
        self.interceptors = [other for other in self.interceptors if other is not interceptor]

    def call(self, method: str, *given: Any, proceed: Callable[[], T], **more: Any) -> T:
        """`proceed`, through `method` of every interceptor."""
        for interceptor in reversed(self.interceptors):
            step = getattr(interceptor, method)
            proceed = functools.partial(step, *given, proceed=proceed, **more)
        return proceed()

    def begin(self, flow: Flow, operation: Operation, proceed: Callable[[], Any]) -> Any:
        """The handle of `operation`, which begins by `proceed`; waiting for it is intercepted."""
        if not self.interceptors:
            return proceed()
        operation.begun = self.call("begin", flow, operation, proceed=proceed)
        return InterceptedHandle(operation.begun, self, flow, operation)

    def ask(self, what: str, proceed: Callable[[], T]) -> T:
        """What the flow of this thread is told of `what`."""
        return self.call("told", self.flow, what, proceed=proceed)

    @property
    def flow(self) -> Flow:
        """The flow of this thread."""
        flow: Flow = getattr(self._of_thread, "flow", self.main)
        return flow

    def enter(self, flow: Flow) -> None:
        """This thread is that of `flow`."""
        self._of_thread.flow = flow


class _Around:
    """Stands for `inner`, which does all that is not intercepted."""

    def __init__(self, inner: Any, chain: Chain) -> None:
        self.inner = inner
        self.chain = chain

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class InterceptedTransport(_Around):
    """The transport `inner` of `flow`, behind the interceptors of `chain`."""

    inner: Transport

    def __init__(self, inner: Transport, chain: Chain, flow: Flow) -> None:
        super().__init__(inner, chain)
        self.rank, self.size = inner.rank, inner.size
        self.flow = flow
        flow.transport = inner

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        operation = Operation("send", to, tag, tensor.nbytes)
        return self.chain.begin(
            self.flow, operation, lambda: self.inner.send(tensor, to, operation.tag)
        )

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Any:
        operation = Operation("receive", source, tag)
        return self.chain.begin(
            self.flow,
            operation,
            lambda: self.inner.receive(operation.peer, operation.tag, into),
        )

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
    ) -> Any:
        operation = Operation(
            "collective", tag=tag, size=vector.nbytes, ranks=len(group), visible=visible
        )
        begun = self.chain.begin(
            self.flow,
            operation,
            lambda: self.inner.collective(
                schedule, vector, group, tag, edges,
                background=background, via=via or self, visible=operation.visible,
            ),
        )  # fmt: skip
        if isinstance(operation.begun, Begun):
            executing = operation.begun.flow
            if isinstance(executing, InterceptedHandle):
                operation.flow = executing.operation.flow
        return begun

    def end_background(self, via: Transport | None = None) -> None:
        self.inner.end_background(via or self)

    def executed(
        self, schedule: Schedule, vector: Tensor, tag: int, start: float, moving: float
    ) -> None:
        """From the engine: see `Interceptor.executed`."""
        operation = Operation("collective", tag=tag, size=vector.nbytes, label=schedule.name)
        for interceptor in self.chain.interceptors:
            interceptor.executed(self.flow, operation, start, moving)

    def spawn(self, function: Callable[[Transport], T]) -> Any:
        flow = self.flow.begin(function)

        @functools.wraps(function)
        def intercepted(transport: Transport) -> T:
            self.chain.enter(flow)
            around: Any = InterceptedTransport(transport, self.chain, flow)
            return function(around)

        operation = Operation("flow", flow=flow)
        return self.chain.begin(self.flow, operation, lambda: self.inner.spawn(intercepted))

    def now(self) -> float:
        return self.chain.call("told", self.flow, "now", proceed=self.inner.now)

    def lost(self) -> frozenset[int]:
        return self.chain.call("told", self.flow, "lost", proceed=self.inner.lost)


@dataclass(slots=True)
class InterceptedHandle:
    """A handle or task of `flow`, behind the interceptors of `chain`."""

    inner: Any
    chain: Chain
    flow: Flow
    operation: Operation

    @property
    def source(self) -> int:
        source: int = self.inner.source
        return source

    def wait(self) -> Any:
        return self.chain.call("wait", self.flow, self.operation, proceed=self.inner.wait)

    def done(self) -> bool:
        done: bool = self.chain.call(
            "told", self.flow, "done", proceed=self.inner.done, operation=self.operation
        )
        return done


class InterceptedCollectives(_Around):
    """The collectives of torch.distributed, behind the interceptors of `chain`."""

    def all_reduce(self, tensor: Tensor) -> Any:
        return self.start_all_reduce(tensor).wait()

    def start_all_reduce(self, tensor: Tensor) -> Any:
        operation = Operation("native", size=tensor.nbytes)
        proceed = functools.partial(self.inner.start_all_reduce, tensor)
        return self.chain.begin(self.chain.flow, operation, proceed)


class InterceptedCompute(_Around):
    """The compute of a rank, behind the interceptors of `chain`."""

    inner: Compute

    @property
    def seconds(self) -> float:
        return self.chain.ask("seconds", lambda: self.inner.seconds)

    def run(self, work: Work, function: Callable[[], T]) -> T:
        proceed = functools.partial(self.inner.run, work, function)
        return self.chain.call("compute", self.chain.flow, work, proceed=proceed)


class InterceptedReporter(_Around):
    """The reporter of a rank, behind the interceptors of `chain`."""

    inner: Reporter

    def progress(self, *, step: int, **figures: Any) -> None:
        self.inner.progress(step=step, **figures)
        for interceptor in self.chain.interceptors:
            interceptor.progress(step)

    def stop_requested(self) -> bool:
        return self.chain.ask("stop", self.inner.stop_requested)


def intercepted(runtime: Runtime, *interceptors: Interceptor) -> Runtime:
    """`runtime` behind `interceptors`, the outermost first, and those that it has already."""
    parts: list[Any] = [runtime.transport, runtime.compute, runtime.reporter]
    inner: Sequence[Interceptor] = ()
    if isinstance(runtime.transport, InterceptedTransport):
        inner = runtime.transport.chain.interceptors
    parts = [part.inner if isinstance(part, _Around) else part for part in parts]
    chain = Chain((*interceptors, *inner))
    native: Any = runtime.native
    transport: Any = InterceptedTransport(parts[0], chain, chain.main)
    compute: Any = InterceptedCompute(parts[1], chain)
    reporter: Any = InterceptedReporter(parts[2], chain)
    around: Any = None if native is None else lambda: InterceptedCollectives(native(), chain)
    return replace(runtime, transport=transport, compute=compute, reporter=reporter, native=around)
