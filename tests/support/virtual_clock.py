"""A clock of virtual time for what needs no flows, which counts what happens."""

from __future__ import annotations

import heapq
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
        while self._due and (until == inf or self._due[0][0] <= until):
            self._now, _, call, argument = heapq.heappop(self._due)
            call(argument)
        self._now = max(self._now, until if until < inf else 0.0)
