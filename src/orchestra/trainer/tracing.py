"""Tracing a run: the runtime of a rank in wrappers that write down what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from orchestra.transports.protocol import Collectives
from orchestra.transports.traced import TracedCollectives, TracedTransport
from orchestra.transports.tracer import Tracer
from orchestra.worker.runtime import Compute, Runtime, Work

T = TypeVar("T")


def traced(runtime: Runtime, tracer: Tracer) -> Runtime:
    """`runtime`, as a program sees it whose rank keeps a timeline."""
    make_native = runtime.native

    def native() -> Collectives:
        assert make_native is not None
        return TracedCollectives(make_native(), tracer)

    return replace(
        runtime,
        transport=TracedTransport(runtime.transport, tracer),
        compute=TracedCompute(runtime.compute, tracer),
        native=None if make_native is None else native,
    )


@dataclass
class TracedCompute:
    """Writes down each piece of computation in the flow of its thread."""

    inner: Compute
    tracer: Tracer

    @property
    def seconds(self) -> float:
        return self.inner.seconds

    def run(self, work: Work, function: Callable[[], T]) -> T:
        tracer = self.tracer
        if not tracer.is_open or work.kind == "step":  # which only stands for what is not traced
            return self.inner.run(work, function)
        start = tracer.now()
        result = self.inner.run(work, function)
        name = f"{work.kind} ({work.amount} samples)" if work.kind == "gradient" else work.kind
        tracer.add(tracer.flow, "compute", name, start, tracer.now(), {"amount": work.amount})
        return result

    def reached(self, slot: int) -> None:
        self.inner.reached(slot)
