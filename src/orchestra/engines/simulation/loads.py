"""The load that evaluated collectives put on links, for messages that start later.

The times of an evaluated collective are never revised. A message that starts on one of its links
before it ends gets the capacity that the collective leaves on average, and at least half of it. So
do messages that are on this link already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

from numpy.typing import NDArray

from orchestra.engines.simulation.evaluate import Floats, idle
from orchestra.engines.simulation.fluid import Activity, Fluid, Resource
from orchestra.engines.simulation.kernel import Events
from orchestra.engines.simulation.placed import SEVERAL, Ends, PlacedPlan
from orchestra.engines.simulation.processor import Thread

LEAST_LEFT = 0.5
"""The least part of a link's capacity that an evaluated collective leaves to others."""

MAX_KEPT = 64
"""Number of groups and threads above which collectives that have ended are removed."""


@dataclass(frozen=True, eq=False)
class EvaluatedLoad:
    """An evaluated collective, from its first message until its last byte.

    `links` is the state of the links after it (dtype `evaluate.RANK`).
    """

    placed: PlacedPlan
    first: float
    last: float
    links: NDArray[Any]

    def rate(self, link: Resource) -> float:
        """Return the mean bytes per second of the collective on `link`."""
        seconds = self.last - self.first
        return self.placed.wire_bytes.get(link, 0.0) / seconds if seconds > 0 else 0.0


class Loads:
    """All loads on the links of a world, whose messages are activities of `fluid`."""

    def __init__(self, events: Events, fluid: Fluid) -> None:
        self._events, self._fluid = events, fluid
        # By group and thread of its first rank: one thread executes one collective at a time.
        self._latest: dict[tuple[int, Thread], EvaluatedLoad] = {}
        self._until = 0.0  # the end of the last load
        self._reduced: dict[Resource, float] = {}  # links with reduced capacity, and their own one

    def links_before(
        self, placed: PlacedPlan, thread: Thread, joined: Floats
    ) -> tuple[NDArray[Any], float]:
        """Return the state of the links when a collective starts, and a factor on message times.

        The messages of the same threads' previous collective leave the links first, and so do
        messages in flight. Collectives of other threads share the links: the factor says how much
        longer messages take for that.

        Args:
            joined: when each rank is ready, by place.

        Returns:
            The state, of dtype `evaluate.RANK`, and the factor.
        """
        first = float(joined.min())
        previous = self._latest.get((placed.group, thread))
        if previous is not None and first < previous.last:
            links = previous.links.copy()
        else:
            links = idle(len(joined))
        others = [
            load
            for load in self._latest.values()
            if load is not previous and load.first < joined.max() and first < load.last
        ]
        slowed = 1.0
        for link in placed.links if others else ():
            own = self._reduced.get(link, link.nominal)
            left = 1 - sum(load.rate(link) for load in others) / own
            slowed = max(slowed, 1 / max(LEAST_LEFT, left))
        for link, (sender, receiver) in placed.links.items():
            if link.activities:
                free = max(map(self._end, link.activities))
                if sender != SEVERAL:
                    links["up"][sender] = max(links["up"][sender], free)
                if receiver != SEVERAL:
                    links["down"][receiver] = max(links["down"][receiver], free)
        return links, slowed

    def add(self, placed: PlacedPlan, thread: Thread, joined: Floats, ends: Ends) -> None:
        """Add the load of a collective that has been evaluated."""
        last = float(max(ends.clock.max(), ends.links["up"].max(), ends.links["down"].max()))
        if len(self._latest) > MAX_KEPT:
            now = self._events.now()
            self._latest = {key: load for key, load in self._latest.items() if load.last > now}
        key = placed.group, thread
        self._latest[key] = EvaluatedLoad(placed, float(joined.min()), last, ends.links)
        self._until = max(self._until, last)

    def start_message(self, links: Iterable[Resource]) -> None:
        """Reduce the capacity of `links` by their load; called before a message crosses them."""
        now = self._events.now()
        if now < self._until:
            for link in links:
                if link not in self._reduced:
                    self._reduce(link, now)

    def _reduce(self, link: Resource, now: float) -> None:
        present = (load for load in self._latest.values() if load.first <= now < load.last)
        loads = [load for load in present if load.rate(link)]
        if loads:
            own = self._reduced.setdefault(link, link.nominal)
            left = own - sum(load.rate(link) for load in loads)
            self._fluid.set_capacity(link, max(LEAST_LEFT * own, left))
            self._events.call_at(min(load.last for load in loads), self._restore, link)

    def _restore(self, link: Resource) -> None:
        """Give `link` its own capacity again at the end of a load, less what other loads take."""
        self._fluid.set_capacity(link, self._reduced.pop(link))
        if link.activities:
            self._reduce(link, self._events.now())

    def _end(self, activity: Activity) -> float:
        """Return when `activity` ends if it keeps its present rate."""
        now, rate = self._events.now(), activity.present_rate
        return now + activity.left_at(now) / rate if rate > 0 else -inf
