"""A fluid on a clock of its own, and a notebook of what ends."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from tests.support.virtual_clock import VirtualClock

from orchestra.engines.simulation.fluid import Activity, Fluid, Resource
from orchestra.engines.simulation.kernel import Kernel


def nothing() -> None:
    pass


class Laboratory:
    """A clock, a fluid, and a notebook of what ended when, in the order in which it did."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.fluid = Fluid(self.clock)
        self.ended: list[tuple[str, float]] = []

    def start(
        self,
        name: str,
        amount: float,
        *resources: Resource,
        bound: float = inf,
        weight: float = 1.0,
        then: Callable[[], object] = nothing,
    ) -> Activity:
        """Begin one whose rate is at most `bound`, the capacity of a resource of its own."""

        def end() -> None:
            self.ended.append((name, self.clock.now()))
            then()

        own = [] if bound == inf else [Resource(f"{name}'s own", bound)]
        return self.fluid.start(amount, [*resources, *own], end, weight=weight)

    def run(self) -> dict[str, float]:
        """When each has ended."""
        self.clock.run()
        return dict(self.ended)


def sleep(kernel: Kernel, seconds: float) -> None:
    """Let so many virtual seconds pass for the present flow."""
    kernel.call_at(kernel.now() + seconds, kernel.resume, kernel.current)
    kernel.park()
