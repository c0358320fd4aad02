"""All ranks in the midst of a collective, and what is on the links between them, as arrays.

In a round each rank sends to one other and receives from one other, and each link belongs to one
sender or to one receiver. So a message can only meet the one before it at either end. One to the
same rank queues up behind it. With one of another pair it shares the link: each crosses at half of
the bandwidth as long as both are there. The earlier one belongs to a round that is over: that is
evaluated once more, and it is known then when its messages are met.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

EARLY = 1 - 1e-12
"""A message that begins so little before another one's end begins with it: sums are rounded."""
NOBODY = -1
SAME = 16
"""Times that differ by so many units in the last place of the clock are the same."""
MAX_BETWEEN = 256
"""The most rounds until it is looked again whether some can be skipped: a look costs some 20."""


@dataclass(frozen=True)
class Segment:
    """The k-th message of every transfer of a round, as arrays: long transfers are cut.

    Seconds are in the order of `source` and `target` up to `crossing`; then in that of `target`
    taken at `arriving`. With a `shift` each rank sends one, as it did before, to the rank so many
    places on, and all or none are held, and none is freed; else it is 0.
    """

    source: Integers
    target: Integers
    arriving: Integers
    shift: int
    rolled: bool  # whether its seconds are those of the one before, moved on by `shift` places
    way: Integers  # the number of the pair of `source` and `target`
    leaving: Floats  # shape [2, messages]: until its first byte could be there, and it has left
    crossing: Floats
    receiving: Floats  # of the receiver, from its first byte on
    adding: Floats  # and then to add it
    held: Integers  # those that keep their sender's memory until they have arrived
    freed: Integers  # of those, by receiver, that are added to what the receiver itself sends here


class Rolls:
    """Arrays whose columns are often those of the one before, rolled.

    So it is with the rounds of a ring among equal ranks. All of these arrays are views of one, so
    that they stay in the processor's caches.
    """

    def __init__(self) -> None:
        self._twice = np.empty((0, 0))
        self._first = 0

    def take_in(self, array: Floats, shift: int) -> tuple[Floats, bool]:
        """Return an array equal to `array`, and whether it is the last one rolled by `shift`."""
        columns = array.shape[1]
        first = (self._first - shift) % columns
        view = self._twice[:, first : first + columns]
        rolled = np.array_equal(view, array)
        if not rolled:
            first, self._twice = 0, np.concatenate([array, array], axis=1)
            view = self._twice[:, :columns]
        self._first = first
        return view, rolled


class Met(Exception):
    """Messages of the round with this number, or later ones, are met unlike what was assumed.

    None: too many meet at a time, or it is too late to take that into account, or a connection
    starts slowly.
    """


class Ring:
    """All ranks in the midst of rounds of a ring, of which those that go on alike are skipped.

    Each rank sends to the one `shift` places on. Pieces go round: among equal ranks the messages of
    one piece take the same seconds in every round. So the times of a piece, wherever it is, grow by
    the same seconds from round to round, as long as every maximum in them is decided in the same
    way. By how much each is decided grows evenly, too: that tells how many rounds can be skipped.

    The `clock` and `waiting` of each rank are changed in place, and `gone`: when what it has sent
    last is all there. `longest` are the seconds from then until the next first byte from which on a
    connection starts slowly: `Met` is raised. None: never.
    """

    def __init__(
        self, clock: Floats, waiting: Floats, gone: Floats, shift: int, longest: Floats | None
    ) -> None:
        self.shift, self._longest = shift, longest
        self._clock, self._waiting = clock, waiting
        # The messages by sender are the columns from `shift` on. Before them the last ones are
        # repeated, so that the first columns are the same messages by receiver.
        self._messages = np.empty((3, len(clock) + shift))
        self.gone = self._messages[2, shift:]
        self.gone[:] = gone

    def pass_rounds(self, segments: Sequence[Segment]) -> None:
        """Bring all ranks to the end of these rounds, of a segment each."""
        # Of each round, how far those after it have the same seconds, rolled.
        alike_until = [len(segments)] * len(segments)
        for number in reversed(range(1, len(segments))):
            alike_until[number - 1] = alike_until[number] if segments[number].rolled else number
        done, between = 0, 1
        while done < len(segments):
            # Three rounds are noted: two differences tell whether times grow evenly.
            start, stop = done + between, done + between + 3
            if stop > len(segments) or alike_until[start] < stop:
                self._evaluate(segments[done:stop], np.maximum)
                skipped = 0
            else:
                self._evaluate(segments[done:start], np.maximum)
                noted = [self._note(segment) for segment in segments[start:stop]]
                skipped = self._skip(noted, alike_until[start] - stop)
            done = stop + skipped
            # Where nothing could be skipped look less often: a look costs more than a round.
            between = 0 if skipped else min(2 * between + 1, MAX_BETWEEN)

    def _evaluate(self, segments: Sequence[Segment], maximum: Callable[..., object]) -> None:
        """One round after the other, with few operations: a thousand ranks have two thousand."""
        add, subtract, clock, waiting = np.add, np.subtract, self._clock, self._waiting
        moving = np.empty_like(clock)
        messages, ranks = self._messages, len(clock)
        first, last = messages[:, : self.shift], messages[:, ranks:]
        leaving = messages[:2, self.shift :]
        began, left, gone = messages[:, self.shift :]
        arriving, _, ended = messages[:, :ranks]
        for segment in segments:
            add(clock, segment.leaving, out=leaving)
            if self._longest is not None and (began - gone > self._longest).any():
                raise Met(None)
            maximum(began, gone, out=began)
            add(began, segment.crossing, out=gone)
            maximum(gone, left, out=gone)
            # Brings messages into the order of their receivers: no indexed copy (see `__init__`).
            first[:] = last
            maximum(left, arriving, out=moving)
            subtract(moving, left, out=left)  # from here on `left` holds what was waited
            add(waiting, left, out=waiting)
            add(moving, segment.receiving, out=moving)
            maximum(moving, ended, out=moving)
            add(moving, segment.adding, out=clock)
            if len(segment.held):
                maximum(clock, gone, out=moving)
                subtract(moving, clock, out=left)
                add(waiting, left, out=waiting)
                clock[:] = moving

    def _note(self, segment: Segment) -> Floats:
        """Evaluate a round; return `clock` and `gone` after it, and the margins of its maxima."""
        margins: list[Floats] = []

        def maximum(one: Floats, other: Floats, out: Floats) -> None:
            margins.append(one - other)
            np.maximum(one, other, out=out)

        self._evaluate([segment], maximum)
        return np.array([self._clock, self.gone, *margins])

    def _skip(self, noted: Sequence[Floats], most: int) -> int:
        """Skip as many rounds, up to `most`, as go on like the last three; return how many."""
        tolerance = SAME * np.spacing(self._clock.max())
        for rows in slice(1), slice(None):  # of the clocks alone it is soon known
            if not self._grows_alike([each[rows] for each in noted], tolerance):
                return 0
        _, second, third = noted
        # Growth in a round, followed along a piece, which has moved on by `shift` ranks.
        now = third - _rolled(second, self.shift)
        margins, changes = third[2:], now[2:]
        moving = np.abs(changes) > tolerance
        if (moving & (np.sign(margins - changes) != np.sign(margins))).any():
            return 0  # decided otherwise a round before
        # These margins shrink: the first to reach 0 ends the regularity.
        closing = moving & (margins * changes < 0)
        rounds = int(min(most, (margins[closing] / -changes[closing]).min(initial=most)))
        latest = margins[0] + rounds * np.maximum(changes[0], 0.0)
        if self._longest is not None and latest.max() > self._longest.min():
            return 0
        self._waiting += self._waits(margins, changes, rounds)
        self._clock[:], self.gone[:] = _rolled(third[:2] + rounds * now[:2], rounds * self.shift)
        return rounds

    def _grows_alike(self, noted: Sequence[Floats], tolerance: float) -> bool:
        """Return whether all have grown as much in the last round as in the one before it."""
        first, second, third = noted
        before = _rolled(second, self.shift)
        growth, earlier = third - before, before - _rolled(first, 2 * self.shift)
        return bool(np.abs(growth - earlier).max() <= tolerance)

    def _waits(self, margins: Floats, changes: Floats, rounds: int) -> Floats:
        """Return the seconds that each rank waits in the next `rounds`, to receive and to send."""
        # The maxima of `_evaluate`, in order: when a message begins, and is all there; the wait
        # for what arrives (2); when that is taken in; the wait until the own one has left (4).
        of_waits = margins[2::2]
        now = -np.minimum(of_waits, 0.0).sum(axis=0)
        growth = -np.where(of_waits < 0, changes[2::2], 0.0).sum(axis=0)
        # After m rounds more rank i meets what is m places before it now, so that its waits are
        # the sum over m of now[i - m] + m * growth[i - m]: differences of sums from the left.
        now, growth = now.reshape(-1, self.shift), growth.reshape(-1, self.shift)
        places = np.arange(-rounds, len(now))
        now, growth = now[places % len(now)], growth[places % len(now)]
        places = places[:, None]
        sums = np.zeros((3, len(places) + 1, self.shift))
        np.cumsum([now, growth, places * growth], axis=1, out=sums[:, 1:])
        of_now, of_growth, of_weighted = sums[:, rounds:-1] - sums[:, : -rounds - 1]
        result: Floats = of_now + places[rounds:] * of_growth - of_weighted
        return result.ravel()


def _rolled(array: Floats, places: int) -> Floats:
    """`np.roll` along the last axis, in less time."""
    places %= array.shape[-1]
    return np.concatenate([array[:, -places:], array[:, :-places]], axis=1) if places else array


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
    """Of the links of every rank, by place, shape [ranks] each."""

    up: Floats  # until when the links that the rank sends on are in use
    down: Floats  # the same of those that it receives on
    to: Integers  # whom it has sent to last
    by: Integers  # from whom it has received last

    @classmethod
    def none(cls, ranks: int) -> Usage:
        return cls(*np.full((2, ranks), -inf), *np.full((2, ranks), NOBODY))

    def later(self, seconds: float) -> Usage:
        """Return the same, `seconds` later."""
        return Usage(self.up + seconds, self.down + seconds, self.to, self.by)

    def copy(self) -> Usage:
        """The same, in arrays of its own."""
        return Usage(self.up.copy(), self.down.copy(), self.to.copy(), self.by.copy())


class State:
    """All ranks at the beginning of a round: `clock` tells when each is there.

    With `halves`, two messages that share a link have half of the bandwidth each, whatever their
    ways; without, they must not meet. What is known of the last message on each link has the shape
    [2, ranks], by sender and by receiver.

    Attributes:
        carried: from when until when each of the `connections` is used, shape [2, connections];
            infinite for none.
    """

    def __init__(
        self, arrivals: Floats, before: Usage, halves: bool, connections: Connections | None
    ) -> None:
        self.connections, self._halves = connections, halves
        self.carried = np.full((2, 0 if connections is None else len(connections.pauses)), inf)
        self.clock = arrivals.copy()
        self.waiting = np.zeros(len(arrivals))
        self.usage = before.copy()
        # When messages are met by later ones, by round and segment, shape [2, ranks].
        self._meetings: dict[tuple[int, int], Floats] = {}
        self._forget(before.up, before.down)

    def copy(self) -> State:
        """The same, in arrays of its own; what is known of meetings is common to both."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if name not in ("connections", "_halves", "_meetings"):
                setattr(other, name, value.copy())
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
        met = self._meetings.get(key, np.full(ends[1].shape, inf))[:, : len(source)]
        # First as if they were met at their other end only, then at both.
        times = np.array([*met[::-1], met.min(axis=0)])
        # What is left of it at `times` takes twice as long: times + 2 (alone - times).
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
        if not self._halves or (numbers == NOBODY).any():
            raise Met(None)
        sides = np.broadcast_to(ends[0], changed.shape)[changed]
        columns = (numbers.tolist(), places.tolist(), sides, messages, begins[changed])
        for number, place, side, message, begin in zip(*columns, strict=True):
            unmet = np.full((2, len(self.clock)), inf)
            self._meetings.setdefault((number, place), unmet)[side, message] = begin
        raise Met(int(numbers.min()))
