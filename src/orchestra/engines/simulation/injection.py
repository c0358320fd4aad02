"""Faults that a simulated rank injects into itself, at the same operation as a real one."""

from __future__ import annotations

import os
from collections.abc import Callable

from orchestra.engines.injection import LOG, VARIABLE, Inject, Injector, injections
from orchestra.engines.simulation.kernel import Call, Kernel
from orchestra.errors import InputError

SIMULATED = "kill", "stop", "delay", "raise"


def simulated_injections(ranks: int) -> dict[int, list[Inject]]:
    """Return the faults that the environment has for each of `ranks` ranks that has some.

    Raises:
        InputError: one of them takes a process, a socket or a file.
    """
    found = {rank: faults for rank in range(ranks) if (faults := injections(os.environ, rank))}
    for fault in (fault for faults in found.values() for fault in faults):
        if fault.action not in SIMULATED or fault.at == "write" or fault.target != "rank":
            raise InputError(
                f"{VARIABLE}: {fault!r} cannot be simulated: use {', '.join(SIMULATED)} at an "
                "operation of the rank itself, or train on processes"
            )
    return found


class SimulatedInjector(Injector):
    """Injects `faults` into a simulated rank, from a flow of it.

    Args:
        die: called in an event, ends the rank.
        hold: called in an event, stops it for so many seconds.
    """

    def __init__(
        self,
        faults: list[Inject],
        kernel: Kernel,
        die: Call,
        hold: Callable[[float], None],
    ) -> None:
        super().__init__(faults, os.environ.get(LOG))
        self._kernel, self._die, self._hold = kernel, die, hold

    def inject(self, fault: Inject, peer: int | None) -> None:
        kernel, flow = self._kernel, self._kernel.current
        kernel.catch_up()
        if fault.action == "kill":
            kernel.after(0.0, self._die)
        elif fault.action == "stop":
            kernel.after(0.0, lambda: self._hold(fault.seconds))
        # Of a rank that is killed the turn does not come, of one that is stopped it comes later.
        seconds = fault.seconds if fault.action == "delay" else 0.0
        kernel.after(seconds, lambda: kernel.resume(flow))
        kernel.park()
