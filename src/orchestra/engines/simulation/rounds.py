"""The times of a collective whose messages meet on no link: all ranks at once, over arrays.

A round is computed in one go for all ranks. That holds as long as each rank sends to one other and
receives from one other in a round, and each link belongs to one sender or to one receiver: then a
message can only meet the one before it at either end. One to the same rank queues up behind it;
with one of another pair it would share the link, and messages have to be followed one by one
(participant.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf

import numpy as np
from numpy.typing import NDArray

from orchestra.engines.simulation.fluid import Resource
from orchestra.engines.simulation.network import Net
from orchestra.engines.simulation.plan import HEADER, Plan
from orchestra.schedules import REDUCE

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Ranks = tuple[int, ...]

EARLY = 1 - 1e-12
"""A message that begins so little before another one's end begins with it: sums are rounded."""

SAME = 16
"""Arrivals that differ by so many units in the last place of the clock are the same."""

MOST_KEPT = 64
"""Results that are kept for equal arrivals: more than a step has buckets, usually."""

NOBODY = -1


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
        """The same, so much later."""
        return Usage(self.up + seconds, self.down + seconds, self.to, self.by)


@dataclass(frozen=True)
class Ends:
    """When each rank is through, where its time went, and the links after it."""

    clock: Floats
    waiting: Floats
    communicating: Floats
    usage: Usage

    def later(self, seconds: float) -> Ends:
        """The same, so much later."""
        clock, usage = self.clock + seconds, self.usage.later(seconds)
        return Ends(clock, self.waiting, self.communicating, usage)


@dataclass(frozen=True)
class Segment:
    """The k-th message of every transfer of a round, as arrays: long transfers are cut.

    Seconds are in the order of `source` and `target` up to `crossing`; then in that of `target`
    taken at `arriving`.

    Attributes:
        is_ring: whether each rank sends one, with the same ends as the message before it at both,
            all or none are held, and none is freed; both orders are those of the ranks then.
        arrives: from the sender's start until its first byte is there, if the way is free.
        sending: of the sender until it has left.
        receiving, adding: of the receiver, from its first byte on; and then to add it.
        held: of those that keep their sender's memory until they have arrived.
        freed: of those, by receiver, that are added to what the receiver itself sends here.
    """

    source: Integers
    target: Integers
    arriving: Integers
    is_ring: bool
    arrives: Floats
    sending: Floats
    crossing: Floats
    receiving: Floats
    adding: Floats
    held: Integers
    freed: Integers


class PlacedPlan:
    """The messages of `plan` between `ranks`, on the links of `net`.

    Attributes:
        group: a number for the same ranks on the same net.
        place: of each rank among `ranks`.
        streams: of each pair of places.
        sent: by place, the bytes that the rank there sends to each other rank.
        links: every link that is used, with the only place that sends on it and the only one that
            receives from it, each `NOBODY` where there are several.
        contention_free: whether no link is shared by several pairs at a time, as far as the
            schedule tells: then the times can be evaluated over arrays.
    """

    def __init__(self, net: Net, ranks: Ranks, plan: Plan, group: int) -> None:
        self.net = net
        self.group = group
        self.ranks = ranks
        self.plan = plan
        self.place = {rank: place for place, rank in enumerate(ranks)}
        self.streams = {
            (source, target): net.stream(ranks[source], ranks[target])
            for source, target in plan.pairs
        }
        self.sent: list[dict[int, int]] = [{} for _ in ranks]
        for (source, target), size in plan.pairs.items():
            self.sent[source][ranks[target]] = size
        self.links: dict[Resource, tuple[int, int]] = {}
        for ends, stream in self.streams.items():
            for link in stream.resources:
                known = self.links.setdefault(link, ends)
                if known != ends:
                    self.links[link] = _common(known, ends)
        self.contention_free = plan.sends_one_at_a_time and all(
            ends != (NOBODY, NOBODY) and link.log is None for link, ends in self.links.items()
        )
        self._follows: dict[PlacedPlan, bool] = {}
        self._rates: tuple[float, ...] = ()
        self._rounds: list[list[Segment]] = []
        self._known: deque[tuple[Usage, Floats, Ends | None]] = deque(maxlen=MOST_KEPT)

    def may_follow(self, before: PlacedPlan) -> bool:
        """Whether `usage` after that one says all of the links of this one."""
        if before is self:
            return True
        if before not in self._follows:
            self._follows[before] = (before.net, before.ranks) == (self.net, self.ranks) and all(
                _common(before.links[link], ends) != (NOBODY, NOBODY)
                for link, ends in self.links.items()
                if link in before.links
            )
        return self._follows[before]

    def ends(
        self, arrivals: Sequence[float], rates: tuple[float, ...], before: Usage | None = None
    ) -> Ends | None:
        """Evaluate all rounds; None where two messages would share a link.

        Given by place when each rank arrives and at what rate it computes, and the links `before`.
        Training repeats itself: the last results are kept.
        """
        if rates != self._rates:
            self._rates, self._rounds = rates, list(self._segments(np.array(rates)))
            self._known.clear()
        begin = min(arrivals)
        clock = np.array(arrivals) - begin
        usage = Usage.none(len(clock)) if before is None else before.later(-begin)
        tolerance = SAME * np.spacing(max(arrivals))
        for known, came, ends in self._known:
            if np.abs(came - clock).max() <= tolerance and _alike(known, usage, tolerance):
                return None if ends is None else ends.later(begin)
        ends = self._evaluate(clock, usage)
        self._known.append((usage, clock, ends))
        return None if ends is None else ends.later(begin)

    def _evaluate(self, arrivals: Floats, usage: Usage) -> Ends | None:
        state = State(arrivals, usage)
        for segments in self._rounds:
            if len(segments) == 1 and segments[0].is_ring:
                state.pass_ring(segments[0])
            elif not state.pass_round(segments):
                return None
        last = self.net.overhead.add * self.plan.added_slots_bytes / np.array(self._rates)
        clock = state.clock + last
        return Ends(clock, state.waiting, clock - arrivals - state.waiting, state.usage)

    # The messages as arrays

    def _segments(self, rates: Floats) -> Iterator[list[Segment]]:
        ranks, streams = len(self.ranks), self.streams
        codes = np.array([source * ranks + target for source, target in streams])
        order = np.argsort(codes)
        latency = np.array([stream.latency for stream in streams.values()])[order]
        bandwidth = np.array([stream.bandwidth for stream in streams.values()])[order]
        to, by = np.full(ranks, NOBODY), np.full(ranks, NOBODY)
        for transfers in self.plan.rounds:
            segments = []
            leaving = np.full((ranks, 2), NOBODY)
            leaving[transfers[:, 0]] = transfers[:, 2:4]
            for number in count():
                rows = transfers[transfers[:, 5] > number * self.plan.segment]
                if not len(rows):
                    break
                rows = rows[np.argsort(rows[:, 0])]
                source, target = rows[:, 0], rows[:, 1]
                follows = bool(((to[source] == target) & (by[target] == source)).all())
                to[source], by[target] = target, source
                way = np.searchsorted(codes[order], source * ranks + target)
                segment = partial(self._segment, rows, number, rates, leaving, follows)
                segments.append(segment(latency[way], bandwidth[way]))
            yield segments

    def _segment(
        self,
        rows: Integers,
        number: int,
        rates: Floats,
        leaving: Integers,
        follows: bool,
        latency: Floats,
        bandwidth: Floats,
    ) -> Segment:
        plan, overhead = self.plan, self.net.overhead
        source, target = rows[:, 0], rows[:, 1]
        arriving = np.argsort(target)
        payload = np.minimum(rows[:, 5] - number * plan.segment, plan.segment) * plan.itemsize
        distinct, kinds = np.unique(payload + HEADER, return_inverse=True)
        charges = [overhead.message(int(frame)) for frame in distinct]
        first, rest, receiving, on_wire = np.array(charges)[kinds].T
        reduces = rows[:, 4] == REDUCE
        adding = np.where(reduces, overhead.add * payload, 0.0)
        held = payload + HEADER > overhead.buffer
        freed = reduces & (leaving[target] == rows[:, 2:4]).all(axis=1)
        is_ring = follows and len(rows) == len(rates) and not freed.any()
        return Segment(
            source, target, arriving, bool(is_ring and (held.all() or not held.any())),
            first / rates[source] + latency, (first + rest) / rates[source], on_wire / bandwidth,
            (receiving / rates[target])[arriving], (adding / rates[target])[arriving],
            np.flatnonzero(held),
            np.flatnonzero(freed[arriving]),
        )  # fmt: skip


class State:
    """All ranks in the midst of a collective: `clock` tells when each is there."""

    def __init__(self, arrivals: Floats, before: Usage) -> None:
        self.clock = arrivals.copy()
        self.waiting = np.zeros_like(arrivals)
        self._crossing = np.array([before.up, before.up])  # when it begins, and ends: by sender
        self._arriving = np.array([before.down, before.down])  # the same by receiver
        to, by = before.to.copy(), before.by.copy()
        self.usage = Usage(self._crossing[1], self._arriving[1], to, by)
        self._left, self._moving, self._done = np.empty((3, len(arrivals)))

    def pass_ring(self, segment: Segment) -> None:
        """`pass_round`, where each rank sends to the same one as before: with few operations, since
        a thousand ranks have two thousand such rounds."""
        clock, waiting = self.clock, self.waiting
        left, moving, done = self._left, self._moving, self._done
        began, gone = self._crossing
        np.add(clock, segment.arrives, out=began)
        np.maximum(began, gone, out=began)
        np.add(clock, segment.sending, out=left)
        np.add(began, segment.crossing, out=gone)
        np.maximum(gone, left, out=gone)
        np.take(self._crossing, segment.arriving, axis=1, out=self._arriving, mode="clip")
        began, ended = self._arriving
        np.maximum(left, began, out=moving)
        np.subtract(moving, left, out=left)
        np.add(waiting, left, out=waiting)
        np.add(moving, segment.receiving, out=done)
        np.maximum(done, ended, out=done)
        np.add(done, segment.adding, out=done)
        if len(segment.held):
            np.maximum(done, gone, out=clock)
            np.subtract(clock, done, out=left)
            np.add(waiting, left, out=waiting)
        else:
            clock[:] = done

    def pass_round(self, segments: list[Segment]) -> bool:
        """Bring all ranks to the end of the round; False: two messages meet."""
        clock, usage = self.clock, self.usage
        arriving = []
        gone = np.full_like(clock, -inf)
        for segment in segments:
            there = clock[segment.source] + segment.arrives
            clock[segment.source] += segment.sending
            began = self._begin(segment, there)
            if began is None:
                return False
            ended = np.maximum(began + segment.crossing, clock[segment.source])
            usage.up[segment.source] = usage.down[segment.target] = ended
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
        return True

    def _wait_until(self, places: Integers, times: Floats) -> None:
        free = np.maximum(self.clock[places], times[places])
        self.waiting[places] += free - self.clock[places]
        self.clock[places] = free

    def _begin(self, segment: Segment, there: Floats) -> Floats | None:
        """When each message, whose first byte could be `there`, begins to arrive."""
        source, target, usage = segment.source, segment.target, self.usage
        busy = np.maximum(usage.up[source], usage.down[target])
        same = (usage.to[source] == target) & (usage.by[target] == source)
        if ((there < busy * EARLY) & ~same).any():
            return None
        usage.to[source], usage.by[target] = target, source
        return np.where(same, np.maximum(there, busy), there)


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    sender, receiver = (a if a == b else NOBODY for a, b in zip(one, other, strict=True))
    return sender, receiver


def _alike(one: Usage, other: Usage, tolerance: float) -> bool:
    """Whether links are in use alike after the time 0; before that it does not matter."""
    for a, b in ((one.up, other.up), (one.down, other.down)):
        if np.abs(np.maximum(a, 0.0) - np.maximum(b, 0.0)).max() > tolerance:
            return False
    if max(one.up.max(), one.down.max()) <= 0.0:
        return True
    return np.array_equal(one.to, other.to) and np.array_equal(one.by, other.by)
