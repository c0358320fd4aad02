"""The times of a collective whose links are its own: all ranks at once, over arrays.

A round is computed in one go for all ranks (round_state.py), as long as messages that share a link
are two at a time. Else they have to be followed one by one (participant.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from math import inf
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np

from orchestra.engines.simulation.fluid import Resource
from orchestra.engines.simulation.network import Net, Port
from orchestra.engines.simulation.plan import HEADER, CollectivePlan, NodeStage
from orchestra.engines.simulation.round_state import (
    NOBODY,
    SAME,
    Connections,
    Floats,
    Integers,
    Met,
    Rolls,
    Segment,
    State,
    Usage,
)
from orchestra.schedules import REDUCE
from orchestra.transports.collective import StepKind

# Attributes of an Enum are slow to look up.
SEND, TAKE, FREE, ADD = StepKind.SEND, StepKind.TAKE, StepKind.FREE, StepKind.ADD
BARRIER: Literal["barrier"] = "barrier"
ChargedStep = tuple[StepKind | Literal["barrier"], int, int, int, float, float]
"""A `Step`: kind, number, peer, bytes of the message with its header, seconds of computation; of
SEND until the first byte leaves, and then until the last one has. BARRIER: its number and
its ranks, seconds of computation before it, and those that pass from the last arrival on."""

Ranks = tuple[int, ...]

Turn = tuple[bool, list[Segment]]
"""True with rounds of a ring, of one segment each; False with the segments of one round."""

MAX_KEPT = 64
"""Results that are kept for equal arrivals: more than a step has buckets, usually."""

MAX_STEPS_KEPT = 1 << 16
"""The steps of all ranks are kept for schedules with so many messages at most."""

MAX_RETURNS = 200
"""How often a collective is evaluated from an earlier round again, since its messages meet."""


@dataclass(frozen=True)
class Ends:
    """When each rank is through, where its time went, and the links after it.

    `carried`: as in `State`, of the pairs in their order.
    """

    clock: Floats
    waiting: Floats
    communicating: Floats
    usage: Usage
    carried: Floats

    def later(self, seconds: float) -> Ends:
        """Return the same, `seconds` later."""
        clock, usage = self.clock + seconds, self.usage.later(seconds)
        return Ends(clock, self.waiting, self.communicating, usage, self.carried + seconds)


class PlacedPlan:
    """The messages of `plan` between `ranks`, on the links of `net`.

    `group` is a number for the same ranks on the same net.

    Attributes:
        contention_free: whether no link is shared by several pairs at a time, as far as the
            schedule tells: then the times can be evaluated over arrays.
        goes_ahead: whether several in a row follow from when ranks have begun them, as long as
            nothing disturbs them.
    """

    def __init__(self, net: Net, ranks: Ranks, plan: CollectivePlan, group: int) -> None:
        self.net, self.group, self.ranks, self.plan = net, group, ranks, plan
        self.place = {rank: place for place, rank in enumerate(ranks)}
        self._host = np.array([net.hosts[rank] for rank in ranks])  # equal: they share memory
        self.streams = {  # of each pair of places
            (source, target): net.stream(ranks[source], ranks[target])
            for source, target in plan.streamed
        }
        ways = [self.streams[pair].route for pair in sorted(self.streams)]
        # By the number of the pair.
        self.slow_starts = {n: way.slow_start for n, way in enumerate(ways) if way.slow_start}
        self._connections: Connections | None = None
        if self.slow_starts:
            pauses = [way.slow_start.pause if way.slow_start else inf for way in ways]
            latency = [way.latency for way in ways]
            self._connections = Connections(np.array(pauses), np.array(latency))
        # By place, the bytes that the rank there sends to each other rank.
        self.sent: list[dict[int, int]] = [{} for _ in ranks]
        for (source, target), size in plan.pairs.items():
            self.sent[source][ranks[target]] = size
        # Those that it gets from each, and the seconds that they cross links of their own.
        self.arriving: list[dict[int, tuple[int, float]]] = [{} for _ in ranks]
        for (source, target), stream in self.streams.items():
            size = self.sent[source].get(ranks[target], 0)
            seconds = stream.on_wire(size, None) / stream.bandwidth
            self.arriving[target][ranks[source]] = size, seconds
        # With the only place that sends on it, and that receives; `NOBODY` where there are several.
        self.links: dict[Resource, tuple[int, int]] = {}
        for ends, stream in self.streams.items():
            for link in stream.route.resources:
                self.links[link] = _common(self.links.get(link, ends), ends)
        self.contention_free = (
            not plan.stages
            and plan.sends_one_at_a_time
            and all(ends != (NOBODY, NOBODY) for ends in self.links.values())
        )
        # Processor seconds of each rank before all of it.
        self.beginning = net.overhead.collective if self.links or not plan.stages else 0.0
        # Two messages that share a link have half of it each only where no other link is narrower.
        self._halves = len({link.capacity for link in self.links}) == 1
        self._steps: dict[int, Sequence[ChargedStep]] = {}
        self.first_peers = plan.peers(last=False)
        # Weak: each plan would keep those before it, and so all that there ever were.
        self._follows: WeakKeyDictionary[PlacedPlan, bool] = WeakKeyDictionary()
        self._elsewhere: WeakKeyDictionary[PlacedPlan, bool] = WeakKeyDictionary()
        self.goes_ahead = (
            self.contention_free
            and not self.slow_starts
            and not net.overhead.cold
            and len(ranks) > 1
            and plan.length > 0
            and not self.begins_elsewhere(self)
        )
        self._rates: tuple[float, ...] = ()
        self._turns: list[Turn] = []
        self._known: deque[tuple[Usage, Floats, Ends | None]] = deque(maxlen=MAX_KEPT)

    def shares_fairly(self, place: int) -> bool:
        """Return whether messages of the rank at `place` get even shares of links.

        Random ones could not be evaluated over arrays. Outside of the stopwatch nothing is
        drawn, so that runs with and without an evaluation agree.
        """
        return self.contention_free or not self.net.ports[self.ranks[place]].meter.running

    def count(self, index: int, port: Port, times: int, *, arriving: bool) -> None:
        """Count on `port`, of the rank at place `index`, what it has sent, and what arrived."""
        port.bytes_sent += times * self.plan.bytes_sent[index]
        port.meter.count_all(self.sent[index], times)
        for source, (size, seconds) in self.arriving[index].items() if arriving else ():
            port.mailbox.count(source, times * size, times * seconds)

    def may_follow(self, before: PlacedPlan) -> bool:
        """Return whether `usage` after `before` describes all links that both use."""
        if before not in self._follows:
            self._follows[before] = (before.net, before.ranks) == (self.net, self.ranks) and all(
                _common(before.links.get(link, ends), ends) != (NOBODY, NOBODY)
                for link, ends in self.links.items()
            )
        return self._follows[before]

    def begins_elsewhere(self, before: PlacedPlan) -> bool:
        """Return whether ranks first send to others than they do last in `before`."""
        if before not in self._elsewhere:
            first, last = self.first_peers, before.plan.peers(last=True)
            self._elsewhere[before] = not np.array_equal(first, last)
        return self._elsewhere[before]

    def may_meet(self, index: int, time: float, before: Usage) -> bool:
        """Return whether what place `index` first sends, from `time` on, may share a link with
        messages of `before`."""
        target = self.first_peers[0, index]
        if target == NOBODY or (before.to[index], before.by[target]) == (target, index):
            return False
        there = time + self.streams[index, target].route.latency
        return bool(there < max(before.up[index], before.down[target]))

    def steps(self, index: int) -> Sequence[ChargedStep]:
        """What the rank at place `index` does, message by message, and what it computes for it."""
        steps = self._steps.get(index)
        if steps is None:
            steps = tuple(self._charged(index))
            if sum(self.plan.messages_sent) <= MAX_STEPS_KEPT:
                self._steps[index] = steps
        return steps

    def _charged(self, index: int) -> Iterator[ChargedStep]:
        plan, stages = self.plan, self.plan.stages
        for section in stages.sections.get(index, [(0, None)]):
            if isinstance(section, NodeStage):
                cuts = (0, plan.length) if plan.schedule.slots else plan.cuts
                costs = self.net.overhead.in_memory
                phases = section.phases(index, cuts, plan.itemsize, costs)
                for part, (seconds, wake) in enumerate(phases):
                    if wake is None:
                        yield ADD, -1, -1, 0, seconds, 0.0
                    else:
                        number = len(phases) * stages.numbers[section] + part
                        yield BARRIER, number, len(section.places), 0, seconds, wake
            else:
                yield from self._messages(index, *section)
        if plan.added_slots_bytes:
            yield ADD, -1, -1, 0, self.net.overhead.add * plan.added_slots_bytes, 0.0

    def _messages(self, index: int, begin: int, stop: int | None) -> Iterator[ChargedStep]:
        plan, overhead = self.plan, self.net.overhead
        for kind, number, peer, first, end, _ in plan.steps(index, begin, stop):
            frame_bytes = (end - first) * plan.itemsize + HEADER
            near = peer >= 0 and self._host[index] == self._host[peer]
            if kind is SEND:
                cost = self.net.message_cost(frame_bytes, near)
                yield kind, number, peer, frame_bytes, cost.send_setup, cost.send_rest
            elif kind is TAKE:
                receiving = self.net.message_cost(frame_bytes, near).receiving
                yield kind, number, peer, frame_bytes, receiving, 0.0
            elif kind is ADD:
                yield kind, number, peer, 0, overhead.add * (end - first) * plan.itemsize, 0.0
            elif kind is FREE and not overhead.is_buffered(frame_bytes, near):
                yield kind, number, peer, 0, 0.0, 0.0

    def ends(
        self, arrivals: Sequence[float] | Floats, rates: tuple[float, ...], before: Usage | None
    ) -> Ends | None:
        """Evaluate all rounds; None where two messages would share a link.

        Given by place when each rank arrives and at what rate it computes, and the links `before`.
        Training repeats itself: the last results are kept.
        """
        # All seconds below are divided by the rates.
        if rates != self._rates:
            self._rates, self._turns = rates, _turns(self._segments(np.array(rates)))
            self._known.clear()
        arrivals = np.array(arrivals)
        begin = float(arrivals.min())
        # Relative to the first: the same step at another time is found among the known ones.
        clock = arrivals - begin
        usage = Usage.none(len(clock)) if before is None else before.later(-begin)
        tolerance = SAME * np.spacing(arrivals.max())
        for known, came, ends in self._known:
            if np.abs(came - clock).max() <= tolerance and _alike(known, usage, tolerance):
                return None if ends is None else ends.later(begin)
        ends = self._evaluate(clock, usage)
        self._known.append((usage, clock, ends))
        return None if ends is None else ends.later(begin)

    def _evaluate(self, arrivals: Floats, usage: Usage) -> Ends | None:
        state = State(arrivals, usage, self._halves, self._connections)
        kept: dict[int, State] = {}
        number = returns = 0
        while number < len(self._turns):
            is_ring, segments = self._turns[number]
            try:
                if is_ring:
                    state.pass_ring(segments)
                else:
                    # A message of this round may turn out to be met by a later one. The evaluation
                    # then returns to this state. It settles: no effect precedes its cause.
                    kept[number] = state.copy()
                    state.pass_round(number, segments)
                number += 1
            except Met as met:
                returns += 1
                (first,) = met.args
                if first is None or returns > MAX_RETURNS:
                    return None
                number, state = first, kept[first].copy()
        last = self.net.overhead.add * self.plan.added_slots_bytes / np.array(self._rates)
        clock = state.clock + last
        communicating = clock - arrivals - state.waiting
        return Ends(clock, state.waiting, communicating, state.usage, state.carried)

    # The messages as arrays

    def _segments(self, rates: Floats) -> Iterator[list[Segment]]:
        ranks, streams = len(self.ranks), self.streams
        codes = np.array([source * ranks + target for source, target in streams])
        order = np.argsort(codes)
        latency = np.array([stream.route.latency for stream in streams.values()])[order]
        bandwidth = np.array([stream.bandwidth for stream in streams.values()])[order]
        on_wire = np.array(
            [[s.on_wire(1, both_ways) for s in streams.values()] for both_ways in (False, True)]
        )[:, order]
        to, by = np.full(ranks, NOBODY), np.full(ranks, NOBODY)
        rolls = Rolls()
        for transfers in self.plan.rounds:
            segments = []
            own = np.full((ranks, 2), NOBODY)  # what each rank sends
            own[transfers[:, 0]] = transfers[:, 2:4]
            for number in count():
                rows = transfers[transfers[:, 5] > number * self.plan.segment]
                if not len(rows):
                    break
                rows = rows[np.argsort(rows[:, 0])]
                source, target = rows[:, 0], rows[:, 1]
                # All send to whom they sent before: messages queue up, and none meets another one.
                follows = bool(((to[source] == target) & (by[target] == source)).all())
                to[source], by[target] = target, source
                way = np.searchsorted(codes[order], source * ranks + target)
                crossing = on_wire[rows[:, 6], way] / bandwidth[way]
                alike = follows, rolls, way
                segments.append(
                    self._segment(rows, number, rates, own, *alike, latency[way], crossing)
                )
            yield segments

    def _segment(
        self,
        rows: Integers,
        number: int,
        rates: Floats,
        own: Integers,
        follows: bool,
        rolls: Rolls,
        way: Integers,
        latency: Floats,
        crossing: Floats,
    ) -> Segment:
        plan, overhead = self.plan, self.net.overhead
        source, target = rows[:, 0], rows[:, 1]
        arriving = np.argsort(target)
        payload = np.minimum(rows[:, 5] - number * plan.segment, plan.segment) * plan.itemsize
        near = self._host[source] == self._host[target]
        codes, kinds = np.unique(2 * (payload + HEADER) + near, return_inverse=True)
        distinct = [(int(code) // 2, bool(code % 2)) for code in codes]
        charges = [self.net.message_cost(*each) for each in distinct]
        first, rest, receiving = np.array(charges)[kinds].T
        reduces = rows[:, 4] == REDUCE
        adding = np.where(reduces, overhead.add * payload, 0.0)
        held = ~np.array([overhead.is_buffered(*each) for each in distinct])[kinds]
        # The receiver adds to what it sends itself, once that has left (as in `butterfly`).
        freed = reduces & (own[target] == rows[:, 2:4]).all(axis=1)
        shift = 0
        all_alike = held.all() or not held.any()
        if follows and len(rows) == len(rates) and all_alike and not freed.any():
            shift = int(target[0])
            if len(rows) % shift or not np.array_equal(target, np.roll(source, -shift)):
                shift = 0
        seconds = [
            first / rates[source] + latency,
            (first + rest) / rates[source],
            (payload + HEADER) * crossing,
            (receiving / rates[target])[arriving],
            (adding / rates[target])[arriving],
        ]
        of, rolled = rolls.take_in(np.array(seconds), shift)
        return Segment(
            source, target, arriving, shift, rolled, way,
            of[:2], of[2], of[3], of[4],
            np.flatnonzero(held), np.flatnonzero(freed[arriving]),
        )  # fmt: skip


def _turns(rounds: Iterable[list[Segment]]) -> list[Turn]:
    """Group rounds of a ring, but for its last one; other rounds stay one by one."""
    turns: list[Turn] = []
    for shift, group in groupby(rounds, _shift):
        *others, last = group
        if shift and others:
            turns.append((True, [segment for (segment,) in others]))
        else:
            turns += [(False, segments) for segments in others]
        # As any other round, since what follows may meet its messages.
        turns.append((False, last))
    return turns


def _shift(segments: list[Segment]) -> int:
    return segments[0].shift if len(segments) == 1 else 0


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    sender, receiver = (a if a == b else NOBODY for a, b in zip(one, other, strict=True))
    return sender, receiver


def _alike(one: Usage, other: Usage, tolerance: float) -> bool:
    """Return whether links are in use alike after the time 0; before that it does not matter."""
    until, others = (np.maximum([each.up, each.down], 0.0) for each in (one, other))
    if np.abs(until - others).max() > tolerance:
        return False
    unused = not until.any()
    return unused or (np.array_equal(one.to, other.to) and np.array_equal(one.by, other.by))
