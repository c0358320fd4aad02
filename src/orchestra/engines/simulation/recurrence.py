"""The times of rings that nobody else disturbs, for all ranks at once, round by round.

Each rank sends to one other in a round, and receives from one; no link carries what two ranks
send. Then the times of a round follow from those of the round before by sums and maxima alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from orchestra.cluster.costs import Overhead
from orchestra.engines.simulation.plan import Plan
from orchestra.engines.simulation.waves import Floats, Wave, waves_of

if TYPE_CHECKING:
    from orchestra.engines.simulation.streams import Stream
    from orchestra.engines.simulation.walk import Pair


@dataclass(frozen=True)
class Times:
    """Of every rank, before round number `round`: when it is there, and where the time went.

    Attributes:
        free: when what it has sent has crossed.
    """

    round: int
    clock: Floats
    free: Floats
    waiting: Floats
    communicating: Floats

    def later(self, seconds: float) -> Times:
        """The same, so much later."""
        return Times(
            self.round,
            self.clock + seconds,
            self.free + seconds,
            self.waiting,
            self.communicating,
        )


class Recurrence:
    """Of `plan` on `streams`, where rank i computes at `rates[i]`."""

    def __init__(
        self,
        plan: Plan,
        overhead: Overhead,
        rates: Sequence[float],
        streams: Mapping[Pair, Stream],
    ) -> None:
        by_rank = np.array(rates)
        self._rounds = waves_of(plan, overhead, by_rank, streams)
        self._last = overhead.add * plan.added_slots_bytes / by_rank

    def run(self, arrivals: Floats, free: Floats, until: float = inf) -> Times:
        """From when each rank begins to the end, or to a round that is not over at `until`."""
        clock, free = arrivals.copy(), free.copy()
        waiting, communicating = np.zeros_like(clock), np.zeros_like(clock)
        for number, waves in enumerate(self._rounds):
            if until < inf:
                before = Times(number, *(a.copy() for a in (clock, free, waiting, communicating)))
            self._round(waves, clock, free, waiting, communicating)
            if until < inf and clock.max() > until:
                return before
        if until == inf:
            clock += self._last
            communicating += self._last
        return Times(len(self._rounds), clock, free, waiting, communicating)

    def _round(
        self,
        waves: list[Wave],
        clock: Floats,
        free: Floats,
        waiting: Floats,
        communicating: Floats,
    ) -> None:
        crossings = []
        held = False
        gone = np.full_like(clock, -inf)
        for wave in waves:
            source = wave.source
            sent = clock[source] + wave.first
            clock[source] = left = sent + wave.rest
            communicating[source] += wave.first + wave.rest
            began = np.maximum(sent + wave.latency, free[source])
            free[source] = ended = np.maximum(began + wave.cross, left)
            crossings.append((began, ended))
            if len(wave.held):
                held = True
                gone[source[wave.held]] = ended[wave.held]
        for wave, (began, ended) in zip(waves, crossings, strict=True):
            target = wave.target
            started = clock[target]
            moving = np.maximum(started, began)
            clock[target] = done = np.maximum(moving + wave.take_in, ended) + wave.adding
            waiting[target] += moving - started
            communicating[target] += done - moving
        if held:
            done = np.maximum(clock, gone)
            waiting += done - clock
            clock[:] = done
