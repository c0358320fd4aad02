"""Costs that were measured."""

from __future__ import annotations

import functools

from orchestra.cluster.calibration import Calibration, Parameter, TaskCosts
from orchestra.worker.runtime import Work


class CalibratedCosts:
    """How long work takes on the machine that was calibrated; see `Costs`.

    Args:
        accumulation: micro-batches that a worker's batch is split into.
    """

    def __init__(self, calibration: Calibration, task: TaskCosts, *, accumulation: int = 1) -> None:
        self._work = calibration.work
        self._task = task
        self._accumulation = accumulation
        self._parameters = {parameter.name: parameter for parameter in task.parameters}
        self._ready = [parameter.ready for parameter in task.parameters]
        self._turn = sum(parameter.forward for parameter in task.parameters)

    @property
    def flops(self) -> float:
        """Floating-point operations a second of one thread in a gradient of the task."""
        return self._task.flops

    @functools.cache  # noqa: B019 - lives as long as the simulation
    def seconds(self, work: Work, threads: int = 1) -> float:
        """Always above 0. Work that is the same for every task was measured with one thread."""
        match work.kind:
            case "gradient":
                parts = self._accumulation
                return parts * self._task.seconds("gradient", work.amount / parts, threads)
            case "forward" | "backward":
                share = self._share(work.kind, work.parameters)
                return self._task.seconds("gradient", work.amount, threads) * share
            case "update" | "step":
                return self._task.seconds(work.kind, work.amount, threads)
            case kind:
                return self._work.get(kind, self._work["mix"]).at(work.amount)

    def ready(self, slot: int) -> float:
        """What part of a gradient's seconds has passed when `slot` has its gradient.

        Of several micro-batches the last one counts.
        """
        return (self._accumulation - 1 + self._ready[slot]) / self._accumulation

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
