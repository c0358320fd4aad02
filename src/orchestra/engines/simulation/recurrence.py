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


class Whole:
    """A round in which each rank sends one message and receives one: in the order of the ranks.

    `back`: the sender of what each receives.
    """

    def __init__(self, wave: Wave) -> None:
        by_source, by_target = np.argsort(wave.source), np.argsort(wave.target)
        self._back = wave.source[by_target]
        self._first, self._rest = wave.first[by_source], wave.rest[by_source]
        self._sending = self._first + self._rest
        self._latency, self._cross = wave.latency[by_source], wave.cross[by_source]
        self._take_in, self._adding = wave.take_in[by_target], wave.adding[by_target]
        self._held = wave.source[wave.held]

    @staticmethod
    def is_one(waves: list[Wave], ranks: int) -> bool:
        """Whether a round of these `waves` is."""
        return len(waves) == 1 and len(waves[0].source) == ranks

    def pass_through(
        self, clock: Floats, free: Floats, waiting: Floats, communicating: Floats
    ) -> None:
        """Bring all of them, by rank, from the beginning of the round to its end."""
        sent = clock + self._first
        left = sent + self._rest
        began = np.maximum(sent + self._latency, free)
        np.maximum(began + self._cross, left, out=free)
        moving = np.maximum(left, began[self._back])
        done = np.maximum(moving + self._take_in, free[self._back]) + self._adding
        waiting += moving - left
        communicating += self._sending
        communicating += done - moving
        if len(self._held):
            gone = done.copy()
            gone[self._held] = np.maximum(gone[self._held], free[self._held])
            waiting += gone - done
            done = gone
        clock[:] = done


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
        self._rounds = [
            Whole(waves[0]) if Whole.is_one(waves, len(by_rank)) else waves
            for waves in waves_of(plan, overhead, by_rank, streams)
        ]
        self._last = overhead.add * plan.added_slots_bytes / by_rank

    def run(self, arrivals: Floats, free: Floats, until: float = inf) -> Times:
        """From when each rank begins to the end, or to a round that is not over at `until`."""
        clock, free = arrivals.copy(), free.copy()
        waiting, communicating = np.zeros_like(clock), np.zeros_like(clock)
        state = clock, free, waiting, communicating
        for number, waves in enumerate(self._rounds):
            if until < inf:
                before = Times(number, *(a.copy() for a in state))
            if isinstance(waves, Whole):
                waves.pass_through(*state)
            else:
                self._round(waves, *state)
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
