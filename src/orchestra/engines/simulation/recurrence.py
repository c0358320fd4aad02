"""The times of rings that nobody else disturbs, for all ranks at once, round by round.

Each rank sends to one other in a round, and receives from one; no link carries what two ranks
send. Then the times of a round follow from those of the round before by sums and maxima alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

import numpy as np
from numpy.typing import NDArray

from orchestra.cluster.costs import Cost, Overhead
from orchestra.engines.simulation.plan import HEADER, Plan
from orchestra.schedules import REDUCE

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


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


@dataclass(frozen=True)
class _Wave:
    """The messages of a round that are the first of their runs, or the second, ..."""

    source: Integers
    target: Integers
    first: Floats  # seconds of the sender until it is on its way, and then until it has left
    rest: Floats
    latency: Floats
    cross: Floats
    take_in: Floats  # of the receiver, from its first byte on; and then to add it
    adding: Floats
    held: Integers  # the places of those that do not leave their sender free at once


class Recurrence:
    """Of `plan`, where rank i computes at `rates[i]` and what it sends takes `latency[i]`, then
    crosses at `bandwidth[i]` bytes/s."""

    def __init__(
        self,
        plan: Plan,
        overhead: Overhead,
        rates: Sequence[float],
        latency: Sequence[float],
        bandwidth: Sequence[float],
    ) -> None:
        self._overhead = overhead
        self._rates = np.array(rates)
        self._latency = np.array(latency)
        self._bandwidth = np.array(bandwidth)
        self._rounds = [list(self._waves(plan, transfers)) for transfers in plan.rounds]
        self._last = overhead.add * plan.added_slots_bytes / self._rates

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
        waves: list[_Wave],
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

    def _waves(self, plan: Plan, transfers: Integers) -> Iterator[_Wave]:
        overhead = self._overhead
        for number in count():
            rows = transfers[transfers[:, 5] > number * plan.segment]
            if not len(rows):
                return
            source, target = rows[:, 0], rows[:, 1]
            elements = np.minimum(rows[:, 5] - number * plan.segment, plan.segment)
            payload = elements * plan.itemsize
            frame = payload + HEADER
            adding = np.where(rows[:, 4] == REDUCE, overhead.add * payload, 0.0)
            first = overhead.send.at(0)
            yield _Wave(
                source,
                target,
                first / self._rates[source],
                (costs_of(overhead.send, frame) - first) / self._rates[source],
                self._latency[source],
                frame * overhead.wire / self._bandwidth[source],
                costs_of(overhead.receive, frame) / self._rates[target],
                adding / self._rates[target],
                np.flatnonzero(frame > overhead.buffer_bytes),
            )


def costs_of(cost: Cost, amounts: Integers) -> Floats:
    """Of each of `amounts`, few of which differ."""
    distinct, places = np.unique(amounts, return_inverse=True)
    return np.array([cost.at(int(amount)) for amount in distinct])[places]
