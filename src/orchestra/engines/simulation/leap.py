"""The times of a ring of like ranks without its rounds: each piece goes its way undelayed.

In every round of a ring a rank passes on the piece that it received in the round before. As long as
each rank is ready when its next piece has come, a piece takes the same time from rank to rank, and
where it is after m rounds needs no others. Both sides of each condition grow evenly from round to
round, so that the first round and the last tell of all between.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orchestra.cluster.costs import Overhead
from orchestra.engines.simulation.plan import HEADER, Plan
from orchestra.engines.simulation.waves import Floats, Integers, costs_of

TRIED_AFTER = (0, 1, 2, 4, 8, 16, 32, 64)
"""Rounds that are gone through one by one before it is tried to leap over the rest of a half."""


class Pieces(NamedTuple):
    """In the order of the ranks that hold them: seconds until each piece has left, of crossing, of
    being taken in, and of being added."""

    rest: Floats
    cross: Floats
    take_in: Floats
    adding: Floats

    def rolled(self, by: int) -> Pieces:
        """As they are held `by` rounds later."""
        return Pieces(*(_rolled(each, by) for each in self))

    def gathered(self) -> Pieces:
        """As they are held when the second half begins."""
        return self._replace(adding=np.zeros_like(self.adding)).rolled(-1)


class Way:
    """What lies before `pieces`, of which rank i holds number i now. Rank i + k sends it in round
    k, after it has received it in the round before, and then receives piece i - 1."""

    def __init__(self, first: float, latency: float, pieces: Pieces) -> None:
        self.pieces = pieces
        self._begins = first + latency
        busy = first + _rolled(pieces.rest, -1) + pieces.take_in + pieces.adding
        crossed = np.maximum(latency + pieces.cross, pieces.rest)
        moved = np.maximum(crossed, latency + pieces.take_in)
        self._hop = first + moved + pieces.adding
        self._free_after = first + crossed
        self._slack = _rolled(moved - pieces.take_in, 1) - pieces.rest
        self._ranks_are_slow = bool(busy.min() >= (crossed - latency).max())
        self._links_are_slow = bool((pieces.rest <= latency + pieces.cross).all())
        behind = busy if self._ranks_are_slow else _rolled(pieces.cross, -1)
        self._queue = Queue(self._hop, behind)

    def leap(self, clock: Floats, free: Floats, rounds: int) -> tuple[Floats, Floats] | None:
        """So many rounds on; None: now a rank holds pieces up, and now a link."""
        if self._ranks_are_slow:
            if (clock + self._begins < free).any():
                return None
            last = self._queue.after(clock, rounds - 1)
            through = self._queue.after(clock, rounds)
        elif self._links_are_slow:
            begin = np.maximum(clock, free - self._begins)
            last = self._queue.after(begin, rounds - 1)
            undelayed = begin + (rounds - 1) * self._hop
            for ahead, behind in ((begin, begin), (last, undelayed)):
                if (ahead - _rolled(behind, 1) > self._slack).any():
                    return None
            through = last + self._hop
        else:
            return None
        return _rolled(through, rounds), _rolled(last + self._free_after, rounds - 1)


class Queue:
    """S(k), where S_i(k) = max(S_i(k - 1) + hop_i, S_(i+1)(k - 1) + behind_i).

    It is the longest of all ways that end at piece i. One from piece j = i + d goes on to the next
    piece in d rounds, and stays in all others at the one with the longest hop on its way. There are
    but two lengths of hops.
    """

    def __init__(self, hop: Floats, behind: Floats) -> None:
        count = len(hop)
        self._short, self._long = hop.min(), hop.max()
        self._here = np.arange(count)
        places = np.arange(2 * count)
        self._before = np.concatenate([[0.0], np.cumsum(np.tile(behind, 2))[:-1]])
        self._shorts, self._longs = places * self._short, places * self._long
        places[np.tile(hop < self._long, 2)] = 2 * count
        self._next_long = np.minimum.accumulate(places[::-1])[::-1][:count]

    def after(self, begin: Floats, rounds: int) -> Floats:
        """S(rounds), where S(0) is `begin`."""
        here, count = self._here, len(self._here)
        starts = np.concatenate([begin, begin]) + self._before
        near, far = self._ranges(rounds)
        ways = near.largest(starts - self._shorts) + (rounds + here) * self._short
        if far is not None:
            slow = far.largest(starts - self._longs)
            ways = np.maximum(ways, slow + (rounds + here) * self._long)
        whole: Floats = ways - self._before[:count]
        return whole

    @functools.lru_cache(maxsize=4)  # noqa: B019 - lives as long as the simulation
    def _ranges(self, rounds: int) -> tuple[Ranges, Ranges | None]:
        """Where ways of so many rounds begin; and those of them with a long hop, if there are."""
        first, count = self._here, len(self._here)
        last = first + min(rounds, count - 1)
        slow = None
        if self._long > self._short:
            slow = Ranges(np.minimum(self._next_long, last + 1), last)
        return Ranges(first, last), slow


class Ranges:
    """Of twice as many places, each from `first` to `last`, which is in it; `last` rises."""

    def __init__(self, first: Integers, last: Integers) -> None:
        half = self._half = len(first)
        self._first, self._last = first, last
        self._back, self._forth = np.minimum(first, half - 1), np.maximum(last - half, 0)
        self._early = np.flatnonzero(last < half).tolist()
        self._late = np.flatnonzero((first >= half) & (first <= last))
        self._empty = first > last

    def largest(self, values: Floats) -> Floats:
        """Of each range the largest value; -inf where it is empty."""
        half, late = self._half, self._late
        back = np.maximum.accumulate(values[:half][::-1])[::-1]
        forth = np.maximum.accumulate(values[half:])
        result: Floats = np.maximum(back[self._back], forth[self._forth])
        for place in self._early:
            inside = values[self._first[place] : self._last[place] + 1]
            result[place] = inside.max(initial=-np.inf)
        if len(late):  # all begin at the first such place of the second half
            begin = int(self._first[late[0]])
            result[late] = np.maximum.accumulate(values[begin:])[self._last[late] - begin]
        result[self._empty] = -np.inf
        return result


def _rolled(values: Floats, by: int) -> Floats:
    """`np.roll`, without what it does for arrays of more dimensions."""
    by %= len(values)
    return np.concatenate((values[-by:], values[:-by])) if by else values


@dataclass(frozen=True, eq=False)
class Leap:
    """A ring of `pieces`, each of which is on its way after `first` seconds, and arrives after
    `latency`."""

    first: float
    latency: float
    pieces: Pieces

    @staticmethod
    def of(
        plan: Plan, overhead: Overhead, rate: float, latency: float, bandwidth: float
    ) -> Leap | None:
        """Where ranks compute at `rate`; None: `plan` is not such a ring, or a rank that has sent
        a piece waits until it has crossed."""
        if plan.schedule.name != "ring" or plan.schedule.ranks < 3:
            return None
        elements = np.diff(plan.schedule.edges(plan.length))
        frames = elements * plan.itemsize + HEADER
        if elements.min() == 0 or elements.max() > plan.segment:
            return None
        if frames.max() > overhead.buffer_bytes:
            return None
        first = overhead.send.at(0) / rate
        pieces = Pieces(
            costs_of(overhead.send, frames) / rate - first,
            np.asarray(frames * overhead.wire / bandwidth, np.float64),
            costs_of(overhead.receive, frames) / rate,
            np.asarray(overhead.add * elements * plan.itemsize / rate, np.float64),
        )
        return Leap(first, latency, pieces)

    def run(self, clock: Floats, free: Floats) -> tuple[Floats, Floats] | None:
        """When each rank is through that begins at `clock`, and its link is free, which is in use
        until `free`; None: pieces are delayed again and again."""
        for half in (0, 1):
            number = 0
            while True:
                rounds = len(clock) - 1 - number
                if rounds < 2 or number > TRIED_AFTER[-1]:
                    return None
                way = self._way(half, number)
                leapt = way.leap(clock, free, rounds) if number in TRIED_AFTER else None
                if leapt is not None:
                    clock, free = leapt
                    break
                clock, free = self._round(clock, free, way.pieces)
                number += 1
        return clock, free

    def _round(self, clock: Floats, free: Floats, pieces: Pieces) -> tuple[Floats, Floats]:
        sent = clock + self.first
        left = sent + pieces.rest
        began = np.maximum(sent + self.latency, free)
        free = np.maximum(began + pieces.cross, left)
        moving = np.maximum(left, _rolled(began, 1))
        taken_in = np.maximum(moving + _rolled(pieces.take_in, 1), _rolled(free, 1))
        return taken_in + _rolled(pieces.adding, 1), free

    @functools.lru_cache(maxsize=8)  # noqa: B019 - lives as long as the simulation
    def _way(self, half: int, number: int) -> Way:
        """Of half 0 or 1, after `number` rounds of it."""
        pieces = self.pieces if half == 0 else self.pieces.gathered()
        return Way(self.first, self.latency, pieces.rolled(number))
