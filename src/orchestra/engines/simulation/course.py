"""A plan on the links of a cluster, and its times where nobody else uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from orchestra.engines.simulation.alternation import Alternation, alternates
from orchestra.engines.simulation.fluid import Resource
from orchestra.engines.simulation.plan import Plan
from orchestra.engines.simulation.recurrence import Recurrence, Times
from orchestra.engines.simulation.walk import Pair
from orchestra.engines.simulation.waves import Floats

if TYPE_CHECKING:
    from orchestra.engines.simulation.transport import Net

Ranks = tuple[int, ...]

SAME = 16
"""Arrivals that differ by so many units in the last place of the clock are the same."""


class Course:
    """The messages of `plan` between `ranks`, with the streams that carry them.

    Attributes:
        sent: by place, the bytes that the rank there sends to each other rank.
        links: every link that is used, with the pair of ranks that uses it.
        apart: whether none is used by two pairs.
        follows: whether `times` can tell.
        alternates: else, whether `alternation` perhaps can.
    """

    def __init__(self, net: Net, ranks: Ranks, plan: Plan) -> None:
        self.net = net
        self.ranks = ranks
        self.plan = plan
        self.overhead = net.overhead
        self.streams = {
            (source, target): net.stream(ranks[source], ranks[target])
            for source, target in plan.pairs
        }
        self.sent: list[dict[int, int]] = [{} for _ in ranks]
        for (source, target), size in plan.pairs.items():
            self.sent[source][ranks[target]] = size
        self.links: dict[Resource, Pair] = {}
        self.apart = True
        for (source, target), stream in self.streams.items():
            for link in stream.resources:
                self.apart = self.apart and link not in self.links and link.log is None
                self.links[link] = (ranks[source], ranks[target])
        senders = {source for source, _ in plan.pairs}
        self.follows = self.apart and len(senders) == len(plan.pairs) and plan.is_plain
        self.alternates = not self.follows and alternates(plan, self.streams)
        self._recurrences: dict[tuple[float, ...], Recurrence] = {}
        self._alternations: dict[tuple[float, ...], Alternation] = {}
        self._recent: deque[tuple[Floats, Times]] = deque(maxlen=4)

    def times(
        self,
        arrivals: Sequence[float],
        free: dict[Pair, float],
        rates: tuple[float, ...],
        until: float = inf,
    ) -> Times:
        """The times of all ranks at the end, or where a round is not over at `until`.

        Given when each arrives, until when each stream is taken, and at what rate each computes.
        Clusters repeat themselves: the last results are kept.
        """
        begin = min(arrivals)
        before = np.zeros((2, len(self.ranks)))  # relative arrivals, and how long streams are taken
        before[0] = np.array(arrivals) - begin
        for (source, _), time in free.items():
            before[1, source] = max(time - begin, 0.0)
        recurrence = self._recurrence(rates)
        if until < inf:
            return recurrence.run(before[0], before[1], until - begin).later(begin)
        tolerance = SAME * np.spacing(max(arrivals))
        for known, times in self._recent:
            if np.abs(known - before).max() <= tolerance:
                return times.later(begin)
        times = recurrence.run(before[0], before[1])
        self._recent.append((before, times))
        return times.later(begin)

    def alternation(self, rates: tuple[float, ...]) -> Alternation:
        """The times where messages may meet on a link."""
        if rates not in self._alternations:
            alternation = Alternation(self.plan, self.overhead, rates, self.streams)
            self._alternations = {rates: alternation}
        return self._alternations[rates]

    def _recurrence(self, rates: tuple[float, ...]) -> Recurrence:
        if rates not in self._recurrences:
            recurrence = Recurrence(self.plan, self.overhead, rates, self.streams)
            self._recurrences = {rates: recurrence}
            self._recent.clear()
        return self._recurrences[rates]
