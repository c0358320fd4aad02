"""What ranks of a simulation tell while they train."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestra.records.report import Counters
from orchestra.worker.runtime import Reporter

if TYPE_CHECKING:
    from orchestra.engines.simulation.simulate import Simulation


@dataclass
class SimulatedReporter:
    """One rank's; what it says goes to the `outer` one, that of the process."""

    rank: int
    outer: Reporter
    simulation: Simulation
    current_phase: str = ""
    current_step: int = 0
    is_set_up: bool = False
    is_expendable: bool = False
    counters: Counters | None = None

    def progress(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        fraction: float | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.current_step = step
        whole = self.simulation.count(self.rank, samples)
        self.counters = counters
        self.outer.progress(step=step, samples=whole, loss=loss, fraction=fraction)
        self.simulation.look(fraction)

    def phase(self, name: str) -> None:
        if name != self.current_phase:
            self.current_phase = name
            if name == "training" and not self.is_set_up:
                self.is_set_up = True
                gc.freeze()  # what was made until now lives as long as the run
            if self.rank == 0:
                self.outer.phase(name)

    def expendable(self, yes: bool) -> None:
        self.is_expendable = yes

    def notice(self, text: str) -> None:
        self.simulation.notice(text)

    def stop_requested(self) -> bool:
        return self.outer.stop_requested()
