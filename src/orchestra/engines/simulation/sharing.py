"""Max-min fair shares of what activities have in common, by progressive filling.

The rates of all activities rise together, in proportion to their weights. One stops where it
reaches its bound, or where a resource that it crosses is used up (D. Bertsekas and R. Gallager,
Data Networks, 2nd edition, section 6.5.2: then no activity could have more without taking from one
that has no more than it, by its weight).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

ROUNDING = 1 + 1e-12
"""Rates this close are the same: what rounding makes of sums in unlike orders."""

LEAST = 32
"""So many activities, from which on it pays to keep them as `EqualShares`."""


@dataclass(eq=False, slots=True)
class Resource:
    """What activities share."""

    name: str
    capacity: float  # amount a second, of bytes or of core-seconds
    nominal: float = field(init=False)  # the capacity while no acknowledgements cross it
    acknowledged: int = 0  # activities whose acknowledgements cross it
    activities: dict[Activity, None] = field(default_factory=dict)  # a set in order of insertion
    tight: bool = False  # whether it holds an activity back, as far as known
    fastest: float = 0.0  # no activity on it has a higher rate
    equal: EqualShares | None = None  # of all that cross it, if they have nothing else to share
    mark: int = 0  # the sharing that came by last; while filling, also:
    open: int = 0  # activities that still rise
    rising: float = 0.0  # their weights
    spare: float = 0.0  # what the others leave

    def __post_init__(self) -> None:
        assert 0 < self.capacity < inf, f"{self.name} has the capacity {self.capacity}"
        self.nominal = self.capacity

    def __repr__(self) -> str:
        return f"Resource({self.name!r}, {self.capacity!r})"

    def fits(self, rate: float) -> bool:
        """Return whether one more may have `rate` without taking anything from the others."""
        if self.tight:
            return False
        if (len(self.activities) + 1) * max(rate, self.fastest) <= self.capacity:
            return True  # without adding up
        return self._used() + rate <= self.capacity * ROUNDING

    def carries(self, capacity: float) -> bool:
        """Return whether less than `capacity` is used."""
        if len(self.activities) * self.fastest * ROUNDING < capacity:
            return True  # without adding up
        return self._used() * ROUNDING < capacity

    def _used(self) -> float:
        used = 0.0
        for activity in self.activities:  # `sum` would round otherwise
            used += activity.present_rate
        return used

    def fits_shares(self, mark: int, highest: float) -> bool:
        """Return whether it has room for the shares that the sharing `mark` gives to activities.

        No share is above `highest`.
        """
        if len(self.activities) * max(highest, self.fastest) <= self.capacity:
            return True  # without adding up
        used = 0.0
        for activity in self.activities:
            used += activity.share if activity.mark == mark else activity.present_rate
        return used <= self.capacity * ROUNDING

    def fair_share(self, further: int = 0) -> float:
        """Return the rate of each, with `further` more, if all get the same; 0 if one has more.

        Those that share another resource equally do not, if it becomes their `limit`.
        """
        fair = self.capacity / (len(self.activities) + further)
        # `fastest` only rises as activities come and go: look again before it decides anything.
        if self.fastest > fair * ROUNDING:
            self.fastest = max(
                activity.rate
                if activity.equal is None
                else max(activity.present_rate, min(activity.weight * activity.equal.limit, fair))
                for activity in self.activities
            )
        return fair if self.fastest <= fair * ROUNDING else 0.0


@dataclass(eq=False, slots=True)
class Activity:
    """Something that uses all of `resources` at one rate until it ends."""

    order: int
    left: float  # of the amount, at `updated_at`
    resources: tuple[Resource, ...]
    then: Callable[[], None]
    updated_at: float
    weight: float  # of its shares, where it is held back
    rate: float = 0.0  # amount a second, since `updated_at`; not with `equal`
    finish: float = inf  # when it ends at this rate; infinite if it stalls, and once it has ended
    running: bool = True
    equal: EqualShares | None = None  # among which it is; they know its rate
    until: float = inf  # with `equal` it tells what is left
    back: tuple[Resource, ...] = ()  # that its acknowledgements cross
    mark: int = 0  # the sharing that came by last; while filling, also:
    limit: float = 0.0  # the most it can have
    share: float = 0.0  # what it gets; negative while its rate rises

    @property
    def present_rate(self) -> float:
        return self.rate if self.equal is None else self.weight * self.equal.rate

    def left_at(self, time: float) -> float:
        """Return what is left of the amount at `time`, which is not before `updated_at`."""
        # Exactly 0: the product below may leave a remainder by rounding.
        if time >= self.finish:
            return 0.0
        if self.equal is not None:
            return max(0.0, self.until - self.equal.given_at(time)) * self.weight
        return max(0.0, self.left - self.rate * (time - self.updated_at))


@dataclass(eq=False)
class EqualShares:
    """Activities that share one resource, which alone holds them back: all get the same for equal
    weights.

    What else they cross gives each activity on it more than that, even if all took the same there.

    When one comes or goes, the rate of each changes, but for all alike. So it is enough to know
    what one of weight 1 would have got that was there from the beginning: an activity that comes
    when that is g, with an amount a and a weight w, ends when it is g + a / w. Nothing of the
    others has to be touched: a thousand messages that share a link cost a thousand times the
    logarithm of their number, not its square.
    """

    resource: Resource
    weight: float | None  # of each of them; None where they are unlike
    updated_at: float
    rate: float = 0.0  # for a weight of 1, since `updated_at`
    given: float = 0.0  # to one of weight 1, from the beginning until then
    limit: float = inf  # the most that this rate can be; the least of all that there have been
    newcomers: list[Activity] = field(default_factory=list)  # that have no share yet
    head: Activity | None = None  # the one that ends first, as far as that was looked up
    ends: list[tuple[float, int, Activity]] = field(default_factory=list)  # a heap

    def given_at(self, time: float) -> float:
        """Return the amount that one of weight 1 would have got by `time` since the beginning."""
        return self.given + self.rate * (time - self.updated_at)

    def change_rate(self, rate: float, now: float) -> None:
        """From now on each gets `rate` times its weight."""
        self.given, self.updated_at = self.given_at(now), now
        self.rate = rate

    def take_in(self, activities: Iterable[Activity], now: float) -> None:
        """Add `activities`, whose `limit` is the most that each can have."""
        given = self.given_at(now)
        for activity in activities:
            activity.until = given + activity.left_at(now) / activity.weight
            activity.equal = self
            activity.finish = inf
            self.limit = min(self.limit, activity.limit / activity.weight)
            if activity.weight != self.weight:
                self.weight = None
            for other in activity.resources:
                if other is not self.resource:
                    other.fastest = max(other.fastest, activity.limit)
            # `until` does not depend on the rate: the heap stays in order when that changes.
            heapq.heappush(self.ends, (activity.until, activity.order, activity))

    def fair_rate(self) -> float:
        """Return the rate for a weight of 1 if all that cross the resource share it."""
        activities = self.resource.activities
        if self.weight is not None and all(a.weight == self.weight for a in self.newcomers):
            return self.resource.capacity / (len(activities) * self.weight)
        return self.resource.capacity / sum([activity.weight for activity in activities])

    def first(self) -> Activity | None:
        """Return the running activity that ends first; None if no activity runs."""
        ends = self.ends
        # Entries of those that have ended elsewhere (cancelled, parted) are removed only here.
        while ends and not (ends[0][2].running and ends[0][2].equal is self):
            heapq.heappop(ends)
        return ends[0][2] if ends else None

    def end(self, now: float) -> list[Activity]:
        """Remove all that end together with the first one, and return them by their start."""
        first = self.first()
        assert first is not None
        # Not `given_at(now)`: rounding may put that just before `until` of those that end together.
        self.given, self.updated_at = first.until, now
        ended = []
        while first is not None and first.until <= self.given:
            heapq.heappop(self.ends)
            ended.append(first)
            first = self.first()
        return ended


class Shared(NamedTuple):
    """Activities with a new `share`, the resources that several of them have in common, and those
    that were left out and have no room for these shares."""

    activities: list[Activity]
    resources: list[Resource]
    overfull: list[Resource]


def share(seed: Resource, mark: int) -> Shared:
    """Compute `share` of every activity that is connected with `seed` by tight resources.

    What holds nobody back passes no change on, as long as it has room for the shares. A resource of
    one activity only limits it. `mark` is higher than in any sharing before.
    """
    activities: list[Activity] = []
    loose: list[Resource] = []
    seed.mark = mark
    reached = [seed]
    # Breadth first over tight resources: only these pass a change on to other activities.
    for resource in reached:  # it grows
        for activity in resource.activities:
            if activity.mark == mark:
                continue
            activity.mark = mark
            limit = inf
            for other in activity.resources:
                if len(other.activities) == 1:
                    other.mark = mark
                    other.tight = False
                    if other.capacity < limit:
                        limit = other.capacity
                elif other.mark != mark:
                    other.mark = mark
                    # A loose one is not filled, but checked for room afterwards (`overfull`).
                    (reached if other.tight else loose).append(other)
            activity.limit = limit
            activity.share = -1.0  # still rising, for `_fill`
            activities.append(activity)
    shared = [resource for resource in reached if len(resource.activities) > 1]
    _fill(activities, shared)
    highest = max((activity.share for activity in activities), default=0.0)
    overfull = [other for other in loose if not other.fits_shares(mark, highest)]
    return Shared(activities, shared, overfull)


def _fill(activities: list[Activity], shared: list[Resource]) -> None:
    levels: list[tuple[float, int, Resource]] = []
    for index, common in enumerate(shared):
        # The level of a resource: the rate for a weight of 1 at which it is used up.
        common.tight = False
        common.open = len(common.activities)
        common.rising = sum(activity.weight for activity in common.activities)
        common.spare = common.capacity
        levels.append((common.capacity / common.rising, index, common))
    heapq.heapify(levels)
    limited = [activity for activity in activities if activity.limit < inf]
    limited.sort(key=lambda each: each.limit / each.weight, reverse=True)  # lowest last, for `pop`
    # Invariant: all that still rise have `reached` times their weight, and `reached` never falls.
    reached = 0.0
    while True:
        level, resource = _lowest(levels)
        # Equal activities have to get equal shares, to the bit, or they would end apart.
        if level <= reached * ROUNDING:
            level = reached
        if limited and limited[-1].limit / limited[-1].weight <= level * ROUNDING:
            activity = limited.pop()
            if activity.share < 0:
                reached = max(reached, activity.limit / activity.weight)
                _stop(activity, activity.limit)
        elif resource is not None:
            resource.tight = True
            reached = level
            for activity in resource.activities:
                if activity.share < 0:
                    _stop(activity, level * activity.weight)
        else:
            break


def _lowest(levels: list[tuple[float, int, Resource]]) -> tuple[float, Resource | None]:
    """The resource that is used up first as rates rise, and the rate for a weight of 1 there.

    A level in the heap may be too low, since others have left its resource room meanwhile.
    """
    while levels:
        noted, index, resource = levels[0]
        if not resource.open:
            heapq.heappop(levels)
            continue
        # Levels only rise: who stops leaves the others at least as much as before. So an entry,
        # which may be too low, is corrected when it comes first.
        level = resource.spare / resource.rising
        if level <= noted * ROUNDING:
            return level, resource
        heapq.heapreplace(levels, (level, index, resource))
    return inf, None


def _stop(activity: Activity, rate: float) -> None:
    activity.share = rate
    for resource in activity.resources:
        resource.spare -= rate
        resource.open -= 1
        resource.rising -= activity.weight


def set_limit(activity: Activity, resource: Resource) -> None:
    """Set `limit` of `activity`: what it has for certain of all that it crosses beside `resource`.

    It is 0 where it may be held back there.
    """
    limit = inf
    for other in activity.resources:
        if other is not resource:
            limit = min(limit, 0.0 if other.tight else other.fair_share())
    activity.limit = limit
