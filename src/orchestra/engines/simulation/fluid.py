"""Activities that share resources as a fluid: messages the links, computations the cores of a node.

At a given rate the time at which an activity ends is known: it is computed anew only when the
rate changes, and rates change only where what has happened can be felt (sharing.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from math import inf

from orchestra.engines.simulation import sharing
from orchestra.engines.simulation.kernel import Call, Events, Timer
from orchestra.engines.simulation.sharing import (
    ROUNDING,
    Activity,
    EqualShares,
    Resource,
    Shared,
    set_limit,
    share,
)

MARKS = itertools.count(1)
"""Numbers of sharings, of all fluids: a replay has one of its own, on the same resources."""

__all__ = ["Activity", "Fluid", "Resource"]


class Fluid:
    """The activities that run, at the virtual time of `events`.

    Whatever happens at one instant is shared out once, after it. Activities that end at the same
    instant end together, in the order of their start.

    `acknowledgements` is the capacity that acknowledgements take, per unit of the data that they
    confirm.
    """

    def __init__(self, events: Events, acknowledgements: float = 0.0) -> None:
        self.shares = 0  # that have been computed in all
        self._carries = 1 / (1 + acknowledgements)  # of a capacity, beside acknowledgements
        self._events = events
        self._started = 0
        self._running = 0
        self._ends: list[tuple[float, int, Activity]] = []  # a heap; obsolete ones are left in it
        self._alarm: Timer | None = None
        self._alarm_at = inf
        self._dirty: dict[Resource, None] = {}  # a set in the order of insertion
        self._equal = 0  # how many resources are shared equally
        self._places: dict[tuple[Resource, ...], list[Activity]] = {}  # of what ends now
        self._stale: dict[EqualShares, None] = {}  # of which another one may end first now

    def start(
        self,
        amount: float,
        resources: Sequence[Resource],
        then: Call,
        back: tuple[Resource, ...] = (),
        weight: float = 1.0,
    ) -> Activity:
        """Start an activity of `amount`, and call `then` when it ends.

        It crosses each of `resources` once, and its acknowledgements those `back`. An amount of 0
        ends at the present time, but after this call.
        """
        assert 0 <= amount < inf, f"an amount of {amount}"
        now = self._events.now()
        # An activity of 0 crosses nothing, so that it changes no shares.
        path = tuple(resources) if amount else ()
        self._started += 1
        self._running += 1
        activity = Activity(self._started, amount, path, then, now, weight)
        # One that ends at this instant on the same resources hands on its rate, as long as all that
        # determines the rate is equal. Messages of one connection follow each other like this, and
        # nothing is shared anew.
        places = self._places.get(path)
        if places and (not amount or (places[-1].back, places[-1].weight) == (back, weight)):
            self._take_place(activity, places.pop(), now)
            return activity
        # Before rates are looked at: acknowledgements may lower capacities.
        if back and amount:
            activity.back = back
            for resource in back:
                self._acknowledge(resource, 1)
        # The rate that it would have alone.
        rate = inf
        for resource in path:
            if resource.capacity < rate:
                rate = resource.capacity
        # A tight resource has nothing to spare. Without one it is worth adding up what is used.
        tight = [resource for resource in path if resource.tight and resource.activities]
        crowded = tight or [r for r in path if r.activities and not r.fits(rate)]
        for resource in path:
            if resource.activities:
                self._part_beside(resource, 1)
            else:
                # It was idle, so that what is known of its last activities no longer holds.
                resource.fastest = 0.0
                resource.tight = False
            resource.activities[activity] = None
            if resource.equal is not None:
                resource.equal.newcomers.append(activity)
        for resource in crowded:
            self._share_anew(resource)
        # Nobody else is affected: no shares have to be computed.
        if not crowded:
            self._change_rate(activity, rate, now)
            if activity.finish < self._alarm_at:
                self._set_alarm()
        return activity

    def cancel(self, activity: Activity) -> None:
        """End `activity` now, without calling its `then`."""
        # It may have ended at this instant already, with the call still to come.
        activity.then = lambda: None
        if activity.running:
            self._end(activity)
            self._release([activity])

    def set_capacity(self, resource: Resource, capacity: float) -> None:
        """Change the capacity of `resource` from now on; at 0 all activities on it stall."""
        assert 0 <= capacity < inf, f"{resource.name} gets the capacity {capacity}"
        resource.nominal = capacity
        resource.capacity = capacity * self._carries if resource.acknowledged else capacity
        if resource.activities:
            self._share_anew(resource)

    def _acknowledge(self, resource: Resource, change: int) -> None:
        """Add `change` to the number of activities that have acknowledgements on `resource`.

        While there are any, they are assumed to take as much as those of data at its capacity.
        """
        alone, before = resource.acknowledged == 0, resource.capacity
        resource.acknowledged += change
        if alone == (resource.acknowledged == 0):
            return
        resource.capacity = resource.nominal * self._carries if alone else resource.nominal
        if not resource.activities:
            return
        if resource.tight or not resource.carries(min(before, resource.capacity)):
            self._share_anew(resource)
        else:
            self._part_beside(resource)

    def _change_rate(self, activity: Activity, rate: float, now: float) -> None:
        # From the last change of the rate: by small steps, rounding errors would add up.
        activity.left = left = activity.left_at(now)
        activity.updated_at = now
        activity.rate = rate
        for resource in activity.resources:
            if rate > resource.fastest:
                resource.fastest = rate
                if self._equal:
                    self._part_beside(resource)
        if left and not rate:
            activity.finish = inf
            return
        activity.finish = now + left / rate if left else now
        # Earlier entries of this activity stay in the heap, and are recognized by another `finish`.
        heapq.heappush(self._ends, (activity.finish, activity.order, activity))

    def _end(self, activity: Activity) -> None:
        """Mark `activity` as ended; it keeps its rate until it is replaced or released."""
        self._running -= 1
        activity.running = False
        activity.finish = inf
        if activity.equal is not None:
            activity.rate, activity.equal = activity.present_rate, None
        activity.left = 0.0

    def _take_place(self, activity: Activity, before: Activity, now: float) -> None:
        """Let `activity` take over the rate of `before`, which ends now: no other rate changes."""
        activity.back, before.back = before.back, ()
        for resource in activity.resources:
            del resource.activities[before]
            resource.activities[activity] = None
        equal = next((r.equal for r in activity.resources if r.equal is not None), None)
        if equal is None:
            self._change_rate(activity, before.rate, now)
        else:
            activity.limit = before.limit
            equal.take_in([activity], now)
            self._stale[equal] = None

    def _release(self, ended: Sequence[Activity]) -> None:
        """Remove `ended`, and share anew the resources on which they held others back."""
        # All are removed first, so that nothing below counts one that has ended.
        for activity in ended:
            for resource in activity.resources:
                del resource.activities[activity]
        for activity in ended:
            for resource in activity.back:
                self._acknowledge(resource, -1)
            for resource in activity.resources:
                # Where a resource is not tight nobody can gain from what becomes free.
                if resource.tight and resource.activities:
                    self._share_anew(resource)
                elif resource.equal is not None:
                    self._part(resource.equal)

    # What happens at one instant is shared out once

    def _share_anew(self, resource: Resource) -> None:
        resource.tight = True
        self._part_beside(resource)
        if not self._dirty:
            # At the end of this instant: whatever else happens at it is shared out together.
            self._events.at(self._events.now(), self._solve)
        self._dirty[resource] = None

    def _solve(self) -> None:
        """Compute new shares for all activities connected with resources that have changed."""
        now = self._events.now()
        dirty, self._dirty = self._dirty, {}
        # Equal shares first, as those that have to be parted take part in the sharings below.
        begun = next(MARKS)
        for seed in dirty:
            if seed.equal is not None and not self._share_equally(seed.equal, now):
                self._part(seed.equal)
        for seed in dirty:
            # A higher mark: the sharing from an earlier seed has reached this one.
            if seed.equal is None and seed.mark < begun and seed.activities:
                self._share_out(seed, now)
        self._set_alarm()

    def _share_out(self, seed: Resource, now: float) -> None:
        while True:
            shared = share(seed, next(MARKS))
            if not shared.overfull:
                break
            for resource in shared.resources:
                resource.tight = True  # else those whom it held back until now would be left out
            for resource in shared.overfull:
                resource.tight = True
                self._part_beside(resource)
        self.shares += len(shared.activities)
        if _are_equal(shared):
            self._join(shared.resources[0], shared.activities, now)
            return
        for activity in shared.activities:
            # A change of rate costs an entry in the heap: equal rates are left alone.
            if activity.share != activity.rate:
                self._change_rate(activity, activity.share, now)

    # Many that one resource alone holds back

    def _join(self, resource: Resource, activities: Sequence[Activity], now: float) -> None:
        self._equal += 1
        resource.equal = equal = EqualShares(resource, activities[0].weight, now)
        equal.take_in(activities, now)
        equal.change_rate(activities[0].share / activities[0].weight, now)
        self._look_up_first(equal, now)

    def _share_equally(self, equal: EqualShares, now: float) -> bool:
        """Give newcomers their equal shares, if no other resource can hold them back.

        Returns whether that was possible.
        """
        resource = equal.resource
        rate = equal.fair_rate()
        newcomers = [activity for activity in equal.newcomers if activity.running]
        equal.newcomers.clear()
        # Half of the number at which they join: groups near it do not join and part all the time.
        if 2 * len(resource.activities) < sharing.LEAST or not resource.capacity:
            return False
        for activity in newcomers:
            set_limit(activity, resource)
        limit = min((activity.limit / activity.weight for activity in newcomers), default=inf)
        # Another resource may hold one of them back at this rate.
        if min(limit, equal.limit) * ROUNDING < rate:
            return False
        self.shares += 1 + len(newcomers)
        equal.change_rate(rate, now)
        equal.take_in(newcomers, now)
        self._look_up_first(equal, now)
        return True

    def _look_up_first(self, equal: EqualShares, now: float) -> None:
        """Set the end of the activity that ends first; the others' ends stay infinite."""
        first = equal.first()
        if equal.head is not None and equal.head is not first:
            equal.head.finish = inf  # its entry in the heap becomes obsolete
        equal.head = first
        if first is not None:
            left = max(first.until - equal.given_at(now), 0.0)
            first.finish = now + left / equal.rate
            heapq.heappush(self._ends, (first.finish, first.order, first))

    def _part_beside(self, resource: Resource, further: int = 0) -> None:
        """Part equal shares that `resource`, with `further` more activities, may hold back."""
        if self._equal and resource.equal is None:
            fair: float | None = None
            for activity in resource.activities:
                if (equal := activity.equal) is not None:
                    if fair is None:
                        fair = 0.0 if resource.tight else resource.fair_share(further)
                    equal.limit = min(equal.limit, fair / activity.weight)
                    if equal.limit * ROUNDING < equal.rate:
                        self._part(equal)
                        self._share_anew(equal.resource)

    def _part(self, equal: EqualShares) -> None:
        """Dissolve `equal`: each of its activities gets a rate and an end of its own again."""
        now = self._events.now()
        self._equal -= 1
        equal.resource.equal = None
        for activity in equal.resource.activities:
            if activity.equal is equal:
                activity.left, activity.updated_at = activity.left_at(now), now
                activity.equal = None
                activity.finish = inf
                activity.rate = 0.0
                self._change_rate(activity, activity.weight * equal.rate, now)

    # The next end

    def _set_alarm(self) -> None:
        ends = self._ends
        # At least half of the entries are obsolete here: rebuilding costs O(1) for each push.
        if len(ends) > 64 + 2 * self._running:
            self._ends = ends = [entry for entry in ends if entry[2].finish == entry[0]]
            heapq.heapify(ends)
        while ends and ends[0][2].finish != ends[0][0]:
            heapq.heappop(ends)
        due = ends[0][0] if ends else inf
        if due != self._alarm_at:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at = due
            self._alarm = self._events.at(due, self._ring) if due < inf else None

    def _ring(self) -> None:
        """End all that ends now; those that follow from it start at a later event."""
        now = self._events.now()
        self._alarm, self._alarm_at = None, inf
        ends = self._ends
        ended = []
        while ends and ends[0][0] <= now:
            finish, _, activity = heapq.heappop(ends)
            if activity.finish == finish:
                over = [activity] if activity.equal is None else activity.equal.end(now)
                for each in over:
                    self._end(each)
                ended += over
        for activity in ended:
            # What the calls below start on the same resources may take these places.
            self._places.setdefault(activity.resources, []).append(activity)
        for activity in ended:
            activity.then()
        # Those whose places nobody has taken.
        self._release([activity for left in self._places.values() for activity in left])
        self._places.clear()
        for equal in self._stale:
            if equal.resource.equal is equal:
                self._look_up_first(equal, now)
        self._stale.clear()
        if not self._dirty:  # else it is set when that is done
            self._set_alarm()


def _are_equal(shared: Shared) -> bool:
    """Return whether these are many, and one resource alone holds them back, each by its weight."""
    activities = shared.activities
    if len(activities) < sharing.LEAST or len(shared.resources) != 1:
        return False
    (resource,) = shared.resources
    rate = activities[0].share / activities[0].weight
    # Those that have less are held back by their own limits.
    alike = all(abs(a.share - rate * a.weight) * 1e12 <= a.share for a in activities)
    if not (resource.tight and resource.capacity and alike):
        return False
    for activity in activities:
        set_limit(activity, resource)
    return all(activity.limit * ROUNDING >= activity.share for activity in activities)
