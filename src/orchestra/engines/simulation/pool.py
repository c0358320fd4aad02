"""Activities that have one resource in common, and nothing else to share: all get the same.

When one comes or goes, the rate of each changes, but for all alike. So it is enough to know what
each would have got that was there from the beginning: an activity that comes when that is g, with
an amount a, ends when it is g + a. Nothing of the others has to be touched: a thousand messages
that share a link cost a thousand times the logarithm of their number, and not its square.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import inf

from orchestra.engines.simulation.sharing import Activity, Resource

LEAST = 32
"""So many activities, from which on it pays to keep them in a pool."""


class Pool:
    """The activities that cross `resource`, from the time `now` on.

    Attributes:
        rate: of each of them.
        limit: what one of them can have at most; the least of all that there have been.
        newcomers: those that have begun, and have no share yet.
        head: the one that ends first, as far as that was looked up.
    """

    def __init__(self, resource: Resource, now: float) -> None:
        self.resource = resource
        self.rate = 0.0
        self.limit = inf
        self.newcomers: list[Activity] = []
        self.head: Activity | None = None
        self._given = 0.0
        self._updated_at = now
        self._ends: list[tuple[float, int, Activity]] = []

    def given_at(self, time: float) -> float:
        """What each would have got that was there from the beginning."""
        return self._given + self.rate * (time - self._updated_at)

    def change_rate(self, rate: float, now: float) -> None:
        """From now on each gets `rate`."""
        self._given, self._updated_at = self.given_at(now), now
        self.rate = rate

    def take_in(self, activities: Iterable[Activity], now: float) -> None:
        """These share, too; `limit` of each says what it can have at most."""
        given = self.given_at(now)
        for activity in activities:
            activity.until = given + activity.left_at(now)
            activity.pool = self
            activity.finish = inf
            self.limit = min(self.limit, activity.limit)
            heapq.heappush(self._ends, (activity.until, activity.order, activity))

    def first(self) -> Activity | None:
        """The one that ends first."""
        ends = self._ends
        while ends and not (ends[0][2].running and ends[0][2].pool is self):
            heapq.heappop(ends)
        return ends[0][2] if ends else None

    def end(self, now: float) -> list[Activity]:
        """All that end now, with the first one, in the order of their start."""
        first = self.first()
        assert first is not None
        self._given, self._updated_at = first.until, now
        ended = []
        while first is not None and first.until <= self._given:
            heapq.heappop(self._ends)
            ended.append(first)
            first = self.first()
        return ended


def is_only_shared(resource: Resource, activity: Activity) -> bool:
    """Whether `activity` has all else on its way for itself; its `limit` is what that gives it."""
    limit = activity.bound
    for other in activity.resources:
        if other is not resource:
            if len(other.activities) > 1 or other.log is not None:
                return False
            limit = min(limit, other.capacity)
    activity.limit = limit
    return True
