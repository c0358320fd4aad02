"""All ranks in the midst of a collective, and what is on the links between them, as arrays.

In a round each rank sends to one other and receives from one other, and each link belongs to one
sender or to one receiver. So a message can only meet the one before it at either end. One to the
same rank queues up behind it. With one of another pair it shares the link: each crosses at half of
the bandwidth as long as both are there. The earlier one belongs to a round that is over: that is
evaluated once more, and it is known then when its messages are met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

import numpy as np

from orchestra.engines.simulation.ring import Floats, Integers, Met, Ring, Segment

EARLY = 1 - 1e-12
"""A message that begins so little before another one's end begins with it: sums are rounded."""

NOBODY = -1


@dataclass(frozen=True)
class Connections:
    """What TCP connections do not take by themselves: each has started already, and starts slowly
    again after `pauses` seconds without a message (infinite: it does not). By connection, as are
    the seconds of `latency`.
    """

    pauses: Floats
    latency: Floats


@dataclass(frozen=True)
class Usage:
    """Of the links of every rank, by place, shape [ranks] each.

    Attributes:
        up, down: until when the links that the rank sends, or receives, on are in use.
        to, by: whom it has sent to last, and from whom it has received.
    """

    up: Floats
    down: Floats
    to: Integers
    by: Integers

    @classmethod
    def none(cls, ranks: int) -> Usage:
        """Nothing was sent."""
        return cls(*np.full((2, ranks), -inf), *np.full((2, ranks), NOBODY))

    def later(self, seconds: float) -> Usage:
        """Return the same, `seconds` later."""
        return Usage(self.up + seconds, self.down + seconds, self.to, self.by)

    def copy(self) -> Usage:
        """The same, in arrays of its own."""
        return Usage(self.up.copy(), self.down.copy(), self.to.copy(), self.by.copy())


class Meetings:
    """When the messages of a collective are met by later ones on their links.

    With `halves`, two messages that share a link have half of the bandwidth each, whatever their
    ways; without, they must not meet.
    """

    def __init__(self, halves: bool) -> None:
        self.halves = halves
        self.begins: dict[tuple[int, int], Floats] = {}  # of a round and segment, [2, ranks]


class State:
    """All ranks at the beginning of a round: `clock` tells when each is there.

    What is known of the last message on each link has the shape [2, ranks], by sender and by
    receiver.

    Attributes:
        carried: from when until when each of the `connections` is used, shape [2, connections];
            infinite for none.
    """

    def __init__(
        self,
        arrivals: Floats,
        before: Usage,
        meetings: Meetings,
        connections: Connections | None = None,
    ) -> None:
        ranks = len(arrivals)
        self.connections = connections
        self.carried = np.full((2, 0 if connections is None else len(connections.pauses)), inf)
        self.clock = arrivals.copy()
        self.waiting = np.zeros(ranks)
        self.usage = before.copy()
        self._meetings = meetings
        self._forget(before.up, before.down)

    def copy(self) -> Self:
        """The same, in arrays of its own."""
        other = object.__new__(type(self))
        vars(other).update(
            (name, value if name in ("_meetings", "connections") else value.copy())
            for name, value in vars(self).items()
        )
        return other

    def _forget(self, up: Floats, down: Floats) -> None:
        """Take messages on the links until `up` and `down` as given: none can be met now."""
        self._crossed = np.array([up, down])
        self._unmet = self._crossed.copy()  # when they would have, were they not met here
        self._before = np.full_like(self._crossed, -inf)  # when those before them had crossed
        self._met = np.full_like(self._crossed, inf)
        self._which = np.full((3, *self._crossed.shape), NOBODY)  # round, segment, message

    def pass_ring(self, segments: Sequence[Segment]) -> None:
        """`pass_round` for rounds of a ring, of a segment each; none of their messages is met."""
        if not segments:
            return
        way, longest = segments[0].way, None
        if self.connections is not None:
            longest = self.connections.pauses[way] + self.connections.latency[way]
        ring = Ring(self.clock, self.waiting, self.usage.up, segments[0].shift, longest)
        ring.pass_rounds(segments)
        if self.connections is not None:
            self.carried[1, way] = ring.gone
        self.usage.up[:], self.usage.down[:] = ring.gone, np.roll(ring.gone, ring.shift)
        self._forget(self.usage.up, self.usage.down)

    def pass_round(self, number: int, segments: Sequence[Segment]) -> None:
        """Bring all ranks to the end of the round. Raises `Met`."""
        clock, usage = self.clock, self.usage
        arriving = []
        gone = np.full_like(clock, -inf)
        for place, segment in enumerate(segments):
            there = clock[segment.source] + segment.leaving[0]
            clock[segment.source] += segment.leaving[1]
            began, crossed = self._cross((number, place), segment, there)
            # The network and the sender's processor work at the same time: the later one decides.
            ended = np.maximum(crossed, clock[segment.source])
            usage.up[segment.source] = usage.down[segment.target] = ended
            if self.connections is not None:
                self._carry(self.connections, segment.way, there, ended)
            own = np.full_like(clock, -inf)
            own[segment.source[segment.held]] = ended[segment.held]
            np.maximum(gone, own, out=gone)
            arriving.append((began[segment.arriving], ended[segment.arriving], own))
        for segment, (began, ended, own) in zip(segments, arriving, strict=True):
            receiver = segment.target[segment.arriving]
            moving = np.maximum(clock[receiver], began)
            self.waiting[receiver] += moving - clock[receiver]
            clock[receiver] = np.maximum(moving + segment.receiving, ended)
            self._wait_until(receiver[segment.freed], own)
            clock[receiver] += segment.adding
        self._wait_until(np.arange(len(clock)), gone)

    def _carry(self, of: Connections, way: Integers, there: Floats, ended: Floats) -> None:
        """Messages whose first byte could be `there` use the connections `way`. Raises `Met`."""
        sent = there - of.latency[way]
        # A connection that has paused starts slowly, which only a `Stream` knows.
        if (sent - self.carried[1, way] > of.pauses[way]).any():
            raise Met(None)
        self.carried[0, way] = np.minimum(self.carried[0, way], sent)
        self.carried[1, way] = ended

    def _wait_until(self, places: Integers, times: Floats) -> None:
        free = np.maximum(self.clock[places], times[places])
        self.waiting[places] += free - self.clock[places]
        self.clock[places] = free

    def _cross(
        self, key: tuple[int, int], segment: Segment, there: Floats
    ) -> tuple[Floats, Floats]:
        """Compute when each message begins to arrive, and when it has crossed.

        `there` is when its first byte could be there; `key` is the round, and the segment in it.
        """
        source, target, usage = segment.source, segment.target, self.usage
        ends = (np.array([[0], [1]]), np.array([source, target]))
        same = (usage.to[source] == target) & (usage.by[target] == source)
        usage.to[source], usage.by[target] = target, source
        busy = np.maximum(usage.up[source], usage.down[target])
        began = np.where(same, np.maximum(there, busy), there)
        # Compared with when the earlier one would have crossed if this one were not there.
        meets = ~same & (there < self._unmet[ends] * EARLY)
        self._note(np.where(meets, there, inf), ends)
        shares_until = np.where(meets, self._crossed[ends], -inf).max(axis=0)
        # At half of the bandwidth for d seconds, a message takes d / 2 seconds longer.
        alone = began + segment.crossing + np.maximum(shares_until - began, 0.0) / 2
        # Three at a time, or one that overtakes another: neither is modelled here.
        third = began < self._before[ends] * EARLY
        if third.any() or (alone < shares_until * EARLY).any():
            raise Met(None)
        met = self._meetings.begins.get(key, np.full(ends[1].shape, inf))[:, : len(source)]
        # First as if they were met at their other end only, then at both.
        times = np.array([*met[::-1], met.min(axis=0)])
        # What is left of it at `times` takes twice as long from there on: times + 2 (alone -
        # times).
        shared = np.minimum(2 * alone - times, began + 2 * segment.crossing)
        *unmet, crossed = np.where(times < alone, shared, alone)
        self._before[ends] = self._crossed[ends]
        self._crossed[ends], self._unmet[ends], self._met[ends] = crossed, unmet, met
        for each, value in zip(self._which, (*key, np.arange(len(source))), strict=True):
            each[ends] = value
        return began, crossed

    def _note(self, begins: Floats, ends: tuple[Integers, Integers]) -> None:
        """Note when the next messages begin on the links at `ends`; infinite where they share none.

        Raises:
            Met: an earlier round was evaluated without knowing it.
        """
        changed = begins != self._met[ends]
        if not changed.any():
            return
        numbers, places, messages = self._which[:, *ends][:, changed]
        if not self._meetings.halves or (numbers == NOBODY).any():
            raise Met(None)
        sides = np.broadcast_to(ends[0], changed.shape)[changed]
        known = self._meetings.begins
        for number, place, side, message, begin in zip(
            numbers.tolist(),
            places.tolist(),
            sides.tolist(),
            messages.tolist(),
            begins[changed],
            strict=True,
        ):
            if (number, place) not in known:
                known[number, place] = np.full((2, len(self.clock)), inf)
            known[number, place][side, message] = begin
        raise Met(int(numbers.min()))
