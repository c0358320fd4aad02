"""An all-reduce before it runs: its messages, in numbers, for a vector of a given length."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from orchestra.schedules import REDUCE, Schedule
from orchestra.transports import collective
from orchestra.transports.collective import Part, Step
from orchestra.transports.framing import header_bytes

Integers = NDArray[np.int64]

HEADER = header_bytes(1)


class Transfers:
    """The transfers of all rounds of a schedule of `ranks` ranks, of which there are `count`: the
    columns of a round, and `number`, that of the round."""

    def __init__(self, columns: Integers, number: Integers, ranks: int, count: int) -> None:
        self.source, self.target, self.first, self.end, self.operation = columns
        self.number = number
        self.count = count
        self._columns, self._ranks = columns, ranks

    def kept(self, which: NDArray[np.bool_]) -> Transfers:
        """Those of them."""
        if which.all():
            return self
        columns, number = self._columns[:, which], self.number[which]
        return Transfers(columns, number, self._ranks, self.count)

    def place_of(self, rank: Integers) -> Integers:
        """A number for each pair of a round and the `rank` of a transfer in it."""
        return self.number * self._ranks + rank

    @cached_property
    def one_at_a_time(self) -> bool:
        """Whether each rank sends and receives at most one run of pieces in a round."""
        ends = (self.place_of(self.source), self.place_of(self.target))
        return all(np.bincount(places, minlength=1).max() <= 1 for places in ends)


@functools.lru_cache(maxsize=2)
def _all_of(schedule: Schedule) -> Transfers:
    rounds = list(schedule.rounds()) or [np.empty((0, 5), np.int64)]  # one rank alone
    number = np.repeat(np.arange(len(rounds)), [len(transfers) for transfers in rounds])
    columns = np.ascontiguousarray(np.concatenate(rounds).T)
    return Transfers(columns, number, schedule.ranks, len(rounds))


class Plan:
    """All messages of `schedule`, for a vector of `length` elements cut at `edges`.

    Ranks are numbered as in the schedule. A run of pieces that is empty makes no message; a long
    one makes several, as in transports/collective.py.

    Attributes:
        pairs: every (source, target) that there is a message for, with the bytes of all of them.
        cuts: where its pieces begin, and the end.
        segment: elements of the longest message.
        bytes_sent, messages_sent, bytes_received, messages_received, buffer_bytes: of each rank.
        is_joint: whether no rank is through before all have begun.
        added_slots_bytes: what each rank adds up at the end, beside what it added before.
    """

    def __init__(
        self, schedule: Schedule, length: int, edges: Sequence[int] | None, itemsize: int
    ) -> None:
        self.schedule = schedule
        self.itemsize = itemsize
        self.segment = collective.SEGMENT_BYTES // itemsize
        self.length = length
        self._slot_bytes = length * itemsize if schedule.slots else 0
        self.added_slots_bytes = self._slot_bytes * (schedule.ranks - 1)
        self.cuts = tuple(schedule.edges(length) if edges is None else edges)
        cuts = np.array(self.cuts)
        every = _all_of(schedule)
        elements = cuts[every.end] - cuts[every.first]
        self._transfers, self._elements = every.kept(elements > 0), elements[elements > 0]
        source, target = self._transfers.source, self._transfers.target
        messages = -(-self._elements // self.segment)
        wire = self._elements * itemsize + messages * HEADER
        self.pairs = self._by_pair(source * schedule.ranks + target, wire)
        self.messages_sent, self.bytes_sent = self._by(source, messages, wire)
        self.messages_received, self.bytes_received = self._by(target, messages, wire)
        self.buffer_bytes = self._buffers()
        self.is_joint = schedule.all_reduce or (schedule.joint and bool(np.diff(cuts).all()))
        self._parts: dict[int, dict[int, Part]] = {}

    @cached_property
    def rounds(self) -> list[Integers]:
        """Of each round the transfers, shape [transfers, 6]: source, target, first, end, operation,
        elements."""
        every = self._transfers
        columns = (every.source, every.target, every.first, every.end, every.operation)
        ends = np.searchsorted(every.number, np.arange(1, every.count))
        return np.split(np.column_stack([*columns, self._elements]), ends)

    @property
    def sends_one_at_a_time(self) -> bool:
        """At most one send and one receive for each rank and round."""
        return self._transfers.one_at_a_time

    def frame_bytes(self, elements: int) -> int:
        """Of a message with its header."""
        return elements * self.itemsize + HEADER

    def parts(self, rank: int, first: int = 0) -> Iterator[Part]:
        """What `rank` does in each round from number `first` on."""
        for number in range(first, len(self.rounds)):
            if number not in self._parts:
                parts: dict[int, Part] = defaultdict(lambda: Part([], []))
                for source, target, piece, end, operation, _ in self.rounds[number].tolist():
                    sends, receives = parts[source].sends, parts[target].receives
                    assert isinstance(sends, list)
                    assert isinstance(receives, list)
                    sends.append((target, piece, end))
                    receives.append((source, piece, end, operation))
                self._parts[number] = dict(parts)
            part = self._parts[number].get(rank)
            if part is not None:
                yield part

    def steps(self, rank: int, first: int = 0) -> Iterator[Step]:
        """What the executor does on `rank` from round `first` on."""
        return collective.steps(self.parts(rank, first), self.cuts, self.segment)

    def _by_pair(self, pair: Integers, amount: Integers) -> dict[tuple[int, int], int]:
        """`amount`, summed by the pair that it goes between."""
        sums = np.bincount(pair, amount)
        pairs = np.flatnonzero(sums)
        ends = (divmod(pair, self.schedule.ranks) for pair in pairs.tolist())
        return dict(zip(ends, sums[pairs].astype(np.int64).tolist(), strict=True))

    def _by(self, rank: Integers, *amounts: Integers) -> list[list[int]]:
        """Each of `amounts`, summed by the rank that it falls to."""
        sums = (np.bincount(rank, amount, self.schedule.ranks) for amount in amounts)
        return [each.astype(np.int64).tolist() for each in sums]

    def _buffers(self) -> list[int]:
        """What the executor allocates beside the vector: all slots, or two messages a reduce."""
        ranks = self.schedule.ranks
        if self._slot_bytes:
            return [ranks * self._slot_bytes] * ranks
        reduces = self._transfers.operation == REDUCE
        scratch = np.minimum(self._elements[reduces], 2 * self.segment) * self.itemsize
        places = self._transfers.place_of(self._transfers.target)[reduces]
        at_once = np.bincount(places, scratch, self._transfers.count * ranks)
        peak = at_once.reshape(-1, ranks).max(axis=0, initial=0)
        return peak.astype(np.int64).tolist()  # type: ignore[no-any-return]
