"""Max-min fair shares of what activities have in common, by progressive filling.

The rates of all activities rise together. One stops where it reaches its bound, or where a
resource that it crosses is used up (D. Bertsekas and R. Gallager, Data Networks, 2nd edition,
section 6.5.2: then no activity could have more without taking from one that has no more than it).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestra.engines.simulation.pool import Pool

ROUNDING = 1 + 1e-12
"""Rates this close are the same: what rounding makes of sums in unlike orders."""

Level = tuple[float, int, "Resource"]


class Resource:
    """What activities share: `capacity` is an amount a second, of bytes or of core-seconds.

    Attributes:
        log: set it to an empty list before the first use, and every change of the rate at which
            the resource is used is appended as (time, rate from then on). None: no log.
        past: the amount carried for activities that have ended.
        tight: whether it holds an activity back, as far as known.
        pool: of all that cross it, where they share it evenly; see pool.py.
    """

    __slots__ = (
        *("activities", "capacity", "log", "mark", "name", "open"),
        *("past", "pool", "spare", "tight"),
    )

    def __init__(self, name: str, capacity: float) -> None:
        assert 0 < capacity < inf, f"{name} has the capacity {capacity}"
        self.name = name
        self.capacity = capacity
        self.log: list[tuple[float, float]] | None = None
        self.past = 0.0
        self.activities: dict[Activity, None] = {}  # a set in the order of insertion
        self.tight = False
        self.pool: Pool | None = None
        self.mark = 0  # the sharing that came by last; while filling, also:
        self.open = 0  # activities that still rise
        self.spare = 0.0  # what the others leave

    def __repr__(self) -> str:
        return f"Resource({self.name!r}, {self.capacity!r})"

    def load(self) -> float:
        """The rate at which it is used."""
        used = 0.0
        for activity in self.activities:
            used += activity.rate if activity.pool is None else activity.pool.rate
        return used

    def fits(self, rate: float) -> bool:
        """Whether one more may have `rate` without taking anything from the others."""
        return not self.tight and self.load() + rate <= self.capacity * ROUNDING

    def note(self, now: float) -> None:
        """Write the present rate into the log."""
        log = self.log
        if log is not None:
            if log and log[-1][0] == now:
                log.pop()
            load = self.load()
            if load != (log[-1][1] if log else 0.0):
                log.append((now, load))


class Activity:
    """Something that uses all of `resources` at one rate, of at most `bound`, until it ends.

    Attributes:
        rate: amount a second, since `updated_at`; in a pool, that of the pool.
        left: of the amount, at `updated_at`.
        finish: when it ends at this rate; infinite while it stalls, and once it has ended.
        pool: that it shares in; then that knows its rate, and what is left is told by `until`.
    """

    __slots__ = (
        *("amount", "bound", "resources", "then", "started_at", "order", "running"),
        *("rate", "left", "updated_at", "finish", "pool", "until"),
        *("mark", "limit", "share"),
    )

    def __init__(
        self,
        order: int,
        amount: float,
        resources: tuple[Resource, ...],
        then: Callable[[], None],
        bound: float,
        now: float,
    ) -> None:
        self.order = order
        self.amount = self.left = amount
        self.resources = resources
        self.then = then
        self.bound = bound
        self.started_at = self.updated_at = now
        self.running = True
        self.rate = 0.0
        self.finish = inf
        self.pool: Pool | None = None
        self.until = inf
        self.mark = 0  # the sharing that came by last; while filling, also:
        self.limit = 0.0  # the most it can have
        self.share = 0.0  # what it gets; negative while its rate rises

    def left_at(self, time: float) -> float:
        """Of the amount, at a `time` since the rate last changed."""
        if time >= self.finish:
            return 0.0
        if self.pool is not None:
            return max(0.0, self.until - self.pool.given_at(time))
        return max(0.0, self.left - self.rate * (time - self.updated_at))


def share(seed: Resource, mark: int) -> tuple[list[Activity], list[Resource], list[Resource]]:
    """Compute `share` of every activity that is connected with `seed` by shared resources.

    `mark` is higher than in any sharing before. Returns the activities, the resources that several
    of them have in common, and those of all their resources that keep a log.
    """
    activities, shared, logged = _connected(seed, mark)
    _fill(activities, shared)
    return activities, shared, logged


def _connected(seed: Resource, mark: int) -> tuple[list[Activity], list[Resource], list[Resource]]:
    """All activities, the resources of several, and the resources of one or several with a log.

    A resource of one activity only limits it.
    """
    activities: list[Activity] = []
    logged: list[Resource] = []
    seed.mark = mark
    reached = [seed]
    for resource in reached:  # it grows
        for activity in resource.activities:
            if activity.mark == mark:
                continue
            activity.mark = mark
            limit = activity.bound
            for other in activity.resources:
                if len(other.activities) == 1:
                    other.mark = mark
                    other.tight = False
                    if other.capacity < limit:
                        limit = other.capacity
                    if other.log is not None:
                        logged.append(other)
                elif other.mark != mark:
                    other.mark = mark
                    reached.append(other)
            activity.limit = limit
            activity.share = -1.0
            activities.append(activity)
    shared = [resource for resource in reached if len(resource.activities) > 1]
    logged += [resource for resource in shared if resource.log is not None]
    return activities, shared, logged


def _fill(activities: list[Activity], shared: list[Resource]) -> None:
    levels: list[Level] = []
    for index, common in enumerate(shared):
        common.tight = False
        common.open = len(common.activities)
        common.spare = common.capacity
        levels.append((common.capacity / common.open, index, common))
    heapq.heapify(levels)
    limited = [activity for activity in activities if activity.limit < inf]
    limited.sort(key=lambda activity: activity.limit, reverse=True)
    reached = 0.0
    while True:
        level, resource = _lowest(levels)
        if level <= reached * ROUNDING:
            level = reached
        if limited and limited[-1].limit <= level * ROUNDING:
            activity = limited.pop()
            if activity.share < 0:
                reached = max(reached, activity.limit)
                _stop(activity, activity.limit)
        elif resource is not None:
            resource.tight = True
            reached = level
            for activity in resource.activities:
                if activity.share < 0:
                    _stop(activity, level)
        else:
            break


def _lowest(levels: list[Level]) -> tuple[float, Resource | None]:
    """The resource that is used up first as rates rise, and the rate at which it is.

    A level in the heap may be too low, since others have left its resource room meanwhile.
    """
    while levels:
        noted, index, resource = levels[0]
        if not resource.open:
            heapq.heappop(levels)
            continue
        level = resource.spare / resource.open
        if level <= noted * ROUNDING:
            return level, resource
        heapq.heapreplace(levels, (level, index, resource))
    return inf, None


def _stop(activity: Activity, rate: float) -> None:
    activity.share = rate
    for resource in activity.resources:
        resource.spare -= rate
        resource.open -= 1
