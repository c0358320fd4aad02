"""Costs that were measured."""

from __future__ import annotations

import functools

from orchestra.cluster.calibration import Calibration, Parameter, TaskCosts
from orchestra.worker.runtime import Work


class CalibratedCosts:
    """How long work takes on the machine that was calibrated; see `Costs`.

    Args:
        threads: that a rank computes with: 1 where there are several ranks, else the node's.
        accumulation: micro-batches that a worker's batch is split into.
    """

    def __init__(
        self, calibration: Calibration, task: TaskCosts, *, threads: int = 1, accumulation: int = 1
    ) -> None:
        self._work = calibration.work
        self._task = task
        self._threads = threads
        self._accumulation = accumulation
        self._parameters = {parameter.name: parameter for parameter in task.parameters}
        self._ready = [parameter.ready for parameter in task.parameters]
        self._turn = sum(parameter.forward for parameter in task.parameters)

    @property
    def flops(self) -> float:
        """Floating-point operations a second of one thread in a gradient of the task."""
        return self._task.flops

    def seconds(self, work: Work) -> float:
        """Always above 0."""
        match work.kind:
            case "gradient":
                parts = self._accumulation
                part = work.amount / parts
                return parts * self._with_threads(
                    self._task.one.gradient.at(part), self._task.all.gradient.at(part)
                )
            case "forward" | "backward":
                share = self._share(work.kind, work.parameters)
                return self._task.one.gradient.at(work.amount) * share
            case "update":
                one, many = self._task.one.update, self._task.all.update
                return self._with_threads(one.at(work.amount), many.at(work.amount))
            case "step":
                one, many = self._task.one.step, self._task.all.step
                return self._with_threads(one.at(work.amount), many.at(work.amount))
            case kind:
                return self._work.get(kind, self._work["mix"]).at(work.amount)

    def ready(self, slot: int) -> float:
        """What part of a gradient's seconds has passed when `slot` has its gradient.

        Of several micro-batches the last one counts.
        """
        return (self._accumulation - 1 + self._ready[slot]) / self._accumulation

    def _with_threads(self, one: float, many: float) -> float:
        """Amdahl's law through both measurements; more threads never take longer than one."""
        if self._threads == 1 or self._task.threads == 1:
            return one
        measured = self._task.threads
        serial = (many / one - 1 / measured) / (1 - 1 / measured)
        serial = min(max(serial, 0.0), 1.0)
        return one * (serial + (1 - serial) / self._threads)

    @functools.cache  # noqa: B019 - lives as long as the simulation
    def _share(self, kind: str, names: tuple[str, ...]) -> float:
        """What part of a gradient's seconds one pass of the stage with these parameters takes."""
        if kind == "forward":
            share = sum(self._parameters[name].forward for name in names)
            whole = self._turn
        else:
            share = sum(self._backward[name] for name in names)
            whole = 1 - self._turn
        return share or whole * len(names) / len(self._parameters)

    @functools.cached_property
    def _backward(self) -> dict[str, float]:
        """Of each parameter: from the gradient that was ready before its own to its own."""
        before, found = self._turn, {}
        rising: list[Parameter] = sorted(self._parameters.values(), key=lambda p: p.ready)
        for parameter in rising:
            found[parameter.name] = max(parameter.ready - before, 0.0)
            before = max(before, parameter.ready)
        return found
