"""Computation in virtual time: done for real, and charged as a cost model says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestra.engines.simulation.costs import Costs
from orchestra.engines.simulation.kernel import Flow, Kernel
from orchestra.worker.runtime import Work

T = TypeVar("T")


@dataclass
class _Gradient:
    """The gradient under way: all of its seconds, and those that are left."""

    whole: float
    left: float


class SimulatedCompute:
    """One rank's; `jitter` gives the factor of the piece of work that begins in a flow.

    The rank's main flow computes with `threads`, others with one. `on_step` is called at the
    beginning of each step. What surrounds its gradient takes time, but does not count as
    computation, as it does not on processes.
    """

    def __init__(
        self,
        kernel: Kernel,
        costs: Costs,
        jitter: Callable[[Flow], float],
        on_step: Callable[[], None] = lambda: None,
        threads: int = 1,
    ) -> None:
        self._threads = threads
        self._seconds = 0.0
        self._kernel = kernel
        self._costs = costs
        self._jitter = jitter
        self._on_step = on_step
        self._gradient = _Gradient(0.0, 0.0)

    @property
    def seconds(self) -> float:
        """Charged so far, to all flows of the rank."""
        self._kernel.catch_up_with_own()
        return self._seconds

    def run(self, work: Work, function: Callable[[], T]) -> T:
        """Do `function`, and let virtual time pass.

        Raises:
            ValueError: the cost model says that it takes no time.
        """
        if work.kind == "gradient":
            self._gather()
        flow = self._kernel.current
        seconds = self._costs.seconds(work, self._threads if flow.main else 1)
        if not seconds > 0:
            raise ValueError(f"{work} takes {seconds} s: the simulation has no figure for it")
        began = self._kernel.here()
        seconds *= self._jitter(flow)
        if work.kind == "gradient":
            gradient = self._gradient = _Gradient(seconds, seconds)
            result = function()
            seconds = gradient.left
        else:
            result = function()
        flow.processor.compute(seconds)
        if work.kind == "step":
            self._on_step()
        else:
            self._seconds += self._kernel.here() - began
        return result

    def _gather(self) -> None:
        """Begin a gradient only when its time has come for all.

        Else its rank goes ahead with it. What ranks do around their gradients is short; if they do
        it one right after the other, it is in the caches, of which a gradient leaves nothing.
        """
        self._kernel.catch_up()

    def reached(self, slot: int) -> None:
        """Inside a gradient: let time pass up to where `slot` is ready."""
        gradient = self._gradient
        left = gradient.whole * (1 - self._costs.ready(slot))
        if left < gradient.left:
            self._kernel.current.processor.compute(gradient.left - left)
            gradient.left = left


class ChargedCompute(SimulatedCompute):
    """Of a run without values: an update would only change these, so it is left out."""

    def run(self, work: Work, function: Callable[[], T]) -> T:
        """Let virtual time pass; see `SimulatedCompute`."""
        done: Callable[[], Any] = _nothing if work.kind == "update" else function
        result: T = super().run(work, done)
        return result

    def _gather(self) -> None:
        """Gradients are only charged here: they leave the caches as they are."""


def _nothing() -> None:
    pass
