"""A clock of virtual time for what needs no flows, which counts what happens."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from orchestra.engines.simulation.kernel import Events, Timer


class VirtualClock(Events):
    """Virtual time, which passes in `run` alone.

    Attributes:
        events: how many calls have been carried out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events = 0

    def at(self, time: float, call: Callable[[], object]) -> Timer:
        def counted() -> None:
            self.events += 1
            call()

        return super().at(time, counted)

    def after(self, seconds: float, call: Callable[[], object]) -> Timer:
        return self.at(self.now() + seconds, call)

    def run(self, until: float = inf) -> None:
        """Carry out all that is due up to `until`, and let it be that time, unless it is never."""
        if until < inf:
            self.run_until(until)
        while until == inf and self._due:
            self.run_until(self._due[0][0])
