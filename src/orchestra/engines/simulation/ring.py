"""Messages of a round of all ranks as arrays, and rounds of a ring.

Rounds of a ring that go on alike are skipped. Each rank sends to the one `shift` places on. Pieces
go round: among equal ranks the messages of one piece take the same seconds in every round. So the
times of a piece, wherever it is, grow by the same seconds from round to round, as long as every
maximum in them is decided in the same way. By how much each is decided grows evenly, too: that
tells how many rounds can be skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SAME = 16
"""Times that differ by so many units in the last place of the clock are the same."""
MAX_BETWEEN = 256
"""The most rounds until it is looked again whether some can be skipped: a look costs some 20."""


@dataclass(frozen=True)
class Segment:
    """The k-th message of every transfer of a round, as arrays: long transfers are cut.

    Seconds are in the order of `source` and `target` up to `crossing`; then in that of `target`
    taken at `arriving`.

    Attributes:
        shift: where each rank sends one, as it did before, to the rank so many places on, and all
            or none are held, and none is freed; else 0.
        rolled: whether its seconds are those of the one before, moved on by `shift` places.
        way: the number of the pair of `source` and `target`.
        leaving: of the sender, shape [2, messages]: from its start until the first byte is there,
            if the way is free, and until it has left.
        receiving, adding: of the receiver, from its first byte on; and then to add it.
        held: of those that keep their sender's memory until they have arrived.
        freed: of those, by receiver, that are added to what the receiver itself sends here.
    """

    source: Integers
    target: Integers
    arriving: Integers
    shift: int
    rolled: bool
    way: Integers
    leaving: Floats
    crossing: Floats
    receiving: Floats
    adding: Floats
    held: Integers
    freed: Integers


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
    """Messages of the round `number`, or later ones, are met unlike what was assumed.

    None: too many meet at a time, or it is too late to take that into account, or a connection
    starts slowly.
    """

    def __init__(self, number: int | None) -> None:
        super().__init__(number)
        self.number = number


Maximum = Callable[..., object]


class Ring:
    """All ranks in the midst of rounds; `clock` and `waiting`, of each, are changed in place.

    `longest` are the seconds from then until the next first byte from which on a connection starts
    slowly: `Met` is raised. None: never.

    Attributes:
        gone: when what each rank has sent last is all there.
    """

    def __init__(
        self,
        clock: Floats,
        waiting: Floats,
        gone: Floats,
        shift: int,
        longest: Floats | None = None,
    ) -> None:
        self.shift = shift
        self._longest = longest
        self._clock = clock
        self._waiting = waiting
        # The messages by sender are the columns from `shift` on. Before them the last ones are
        # repeated, so that the first columns are the same messages by receiver.
        self._messages = np.empty((3, len(clock) + shift))
        self.gone = self._messages[2, shift:]
        self.gone[:] = gone

    def pass_rounds(self, segments: Sequence[Segment]) -> None:
        """Bring all ranks to the end of these rounds, of a segment each."""
        # Of each round, how far those after it have the same seconds, rolled.
        alike_until = [len(segments)] * len(segments)
        for number in range(len(segments) - 1, 0, -1):
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
            # Where nothing could be skipped look less and less often: a look costs more than a
            # round.
            between = 0 if skipped else min(2 * between + 1, MAX_BETWEEN)

    def _evaluate(self, segments: Sequence[Segment], maximum: Maximum) -> None:
        """One round after the other, with few operations: a thousand ranks have two thousand."""
        add, subtract, clock, waiting = np.add, np.subtract, self._clock, self._waiting
        moving = np.empty_like(clock)
        messages, ranks = self._messages, len(clock)
        leaving, first, last = (
            messages[:2, self.shift :],
            messages[:, : self.shift],
            messages[:, ranks:],
        )
        began, left, gone = messages[:, self.shift :]
        arriving, _, ended = messages[:, :ranks]
        for segment in segments:
            add(clock, segment.leaving, out=leaving)
            if self._longest is not None and (began - gone > self._longest).any():
                raise Met(None)
            maximum(began, gone, out=began)
            add(began, segment.crossing, out=gone)
            maximum(gone, left, out=gone)
            # Brings messages into the order of their receivers without an indexed copy (see
            # `__init__`).
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
        first, second, third = noted
        if not self._grows_alike(first[:1], second[:1], third[:1], tolerance):
            return 0  # of the clocks alone that is soon known
        if not self._grows_alike(first, second, third, tolerance):
            return 0
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
        both = _rolled(third[:2] + rounds * now[:2], rounds * self.shift)
        self._clock[:], self.gone[:] = both
        return rounds

    def _grows_alike(self, first: Floats, second: Floats, third: Floats, tolerance: float) -> bool:
        """Return whether all have grown as much in the last round as in the one before it."""
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
