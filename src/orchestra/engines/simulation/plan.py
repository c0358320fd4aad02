"""The messages of a collective for all of its ranks at once, in numbers."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from orchestra.cluster.nodes import MemoryCosts
from orchestra.engines.simulation.shared_memory import (
    NodeStage,
    NodeStages,
    Phase,
)
from orchestra.schedules import REDUCE, Schedule
from orchestra.transports import collective
from orchestra.transports.collective import RoundPart, Step
from orchestra.transports.framing import header_bytes
from orchestra.transports.shared_memory import buffer_bytes

Integers = NDArray[np.int64]

HEADER = header_bytes(1)
NO_STAGES = NodeStages()


@functools.lru_cache(maxsize=2)
def _transfers(schedule: Schedule) -> tuple[Integers, Integers, int]:
    """Return the transfers of all rounds, shape [5, transfers], their rounds, and how many."""
    rounds = list(schedule.rounds()) or [np.empty((0, 5), np.int64)]  # one rank alone
    number = np.repeat(np.arange(len(rounds)), [len(transfers) for transfers in rounds])
    return np.ascontiguousarray(np.concatenate(rounds).T), number, len(rounds)


class Plan:
    """All messages of `schedule`, for a vector of `length` elements cut at `edges`.

    Ranks are numbered as in the schedule. A run of pieces that is empty makes no message; a long
    one makes several, as in transports/collective.py.

    Attributes:
        pairs: every (source, target) that there is a message for, with the bytes of all of them.
        cuts: where its pieces begin, and the end.
        segment: elements of the longest message.
        bytes_sent, messages_sent, bytes_received, messages_received, buffer_bytes: of each rank.
        is_synchronizing: no rank can finish before every rank has begun.
        added_slots_bytes: what each rank adds up at the end, beside what it added before.
        streamed: every (source, target) that there is a message for; others are `stages`.
        stages: what ranks do in shared memory. Bytes and messages are counted as if it were sent,
            and of each rank the bytes also as `bytes_in_memory`.
    """

    def __init__(
        self,
        schedule: Schedule,
        length: int,
        edges: Sequence[int] | None,
        itemsize: int,
        stages: NodeStages = NO_STAGES,
    ) -> None:
        self.schedule = schedule
        self.itemsize = itemsize
        self.segment = collective.SEGMENT_BYTES // itemsize
        self.length = length
        self.stages = stages
        self._slot_bytes = length * itemsize if schedule.slots and not stages else 0
        self.added_slots_bytes = self._slot_bytes * (schedule.ranks - 1)
        self.cuts = tuple(schedule.edges(length) if edges is None else edges)
        cuts = np.array(self.cuts)
        transfers, number, self._count = _transfers(schedule)
        elements = cuts[transfers[3]] - cuts[transfers[2]]
        kept = slice(None) if elements.all() else elements > 0  # a slice copies nothing
        self._transfers, self._number = transfers[:, kept], number[kept]
        self._elements = elements[kept]
        source, target = self._transfers[:2]
        messages = -(-self._elements // self.segment)
        wire = self._elements * itemsize + messages * HEADER
        self.pairs = self._by_pair(source * schedule.ranks + target, wire)
        self.messages_sent, self.bytes_sent = self._by(source, messages, wire)
        self.messages_received, self.bytes_received = self._by(target, messages, wire)
        self.streamed: Iterable[tuple[int, int]] = self.pairs
        self.bytes_in_memory = [0] * schedule.ranks
        if stages:
            held = stages.hold(self._number, source)
            (self.bytes_in_memory,) = self._by(source[held], wire[held])
            sent = ~held
            self._transfers, self._number = self._transfers[:, sent], self._number[sent]
            self._elements, source, target = self._elements[sent], source[sent], target[sent]
            self.streamed = self._by_pair(source * schedule.ranks + target, self._elements)
        self.buffer_bytes = self._buffers()
        for place in stages.sections:
            used = buffer_bytes(length * itemsize)
            self.buffer_bytes[place] = max(self.buffer_bytes[place], used)
        # An empty piece makes no message: a rank could be through before its neighbour has begun.
        self.is_synchronizing = schedule.all_reduce or (
            schedule.synchronizing and bool(np.diff(cuts).all())
        )
        self._parts: dict[int, dict[int, RoundPart]] = {}

    @cached_property
    def rounds(self) -> list[Integers]:
        """Of each round the transfers, shape [transfers, 7]: source, target, first, end, operation,
        elements, whether others go the other way."""
        ends = np.searchsorted(self._number, np.arange(1, self._count))
        columns = [*self._transfers, self._elements, self._both_ways]
        return np.split(np.column_stack(columns), ends)

    @cached_property
    def _both_ways(self) -> NDArray[np.bool_]:
        """Of each transfer, whether its source receives in the same round, or its target sends."""
        source, target = map(self._place_of, self._transfers[:2])
        sends, receives = np.zeros((2, self._count * self.schedule.ranks), dtype=bool)
        sends[source] = receives[target] = True
        return receives[source] | sends[target]

    def goes_both_ways(self, pair: tuple[int, int], number: int) -> bool:
        """Return whether other messages go the other way at the same time as `number` of a pair."""
        # So it is in a ring, whose messages need not be listed then.
        if self._both_ways[0] and self._both_ways.all():
            return True
        return self._messages_both_ways[pair][number]

    @cached_property
    def _messages_both_ways(self) -> Mapping[tuple[int, int], Sequence[bool]]:
        found: dict[tuple[int, int], list[bool]] = defaultdict(list)
        messages = -(-self._elements // self.segment)
        columns = (*self._transfers[:2], messages, self._both_ways)
        for source, target, count, both_ways in zip(*(c.tolist() for c in columns), strict=True):
            found[source, target] += [both_ways] * count
        return found

    @property
    def sends_one_at_a_time(self) -> bool:
        """True if each rank sends and receives at most one run of pieces in a round."""
        ends = map(self._place_of, self._transfers[:2])
        return all(np.bincount(places, minlength=1).max() <= 1 for places in ends)

    def peers(self, *, last: bool) -> Integers:
        """Return whom each rank sends to, and receives from, first or last; shape [2, ranks]."""
        # Of several assignments to one place the last one counts: backwards, that is the first
        # message.
        source, target = self._transfers[:2, :: 1 if last else -1]
        peers = np.full((2, self.schedule.ranks), -1)
        peers[0, source], peers[1, target] = target, source
        return peers

    def frame_bytes(self, elements: int) -> int:
        """Return the bytes of a message of `elements` with its header."""
        return elements * self.itemsize + HEADER

    def parts(self, rank: int, first: int = 0, end: int | None = None) -> Iterator[RoundPart]:
        """Yield what `rank` does in each round, from `first` to before `end`."""
        for number in range(len(self.rounds))[first:end]:
            if number not in self._parts:
                parts: dict[int, RoundPart] = defaultdict(lambda: RoundPart([], []))
                for source, target, piece, end, operation, *_ in self.rounds[number].tolist():
                    sends, receives = parts[source].sends, parts[target].receives
                    assert isinstance(sends, list)
                    assert isinstance(receives, list)
                    sends.append((target, piece, end))
                    receives.append((source, piece, end, operation))
                self._parts[number] = dict(parts)
            part = self._parts[number].get(rank)
            if part is not None:
                yield part

    def steps(self, rank: int, first: int = 0, end: int | None = None) -> Iterator[Step]:
        """Yield what the executor does on `rank` in these rounds."""
        return collective.steps(self.parts(rank, first, end), self.cuts, self.segment)

    def phases(self, stage: NodeStage, rank: int, costs: MemoryCosts) -> Sequence[Phase]:
        """Return what `rank` does in `stage`."""
        cuts = (0, self.length) if self.schedule.slots else self.cuts
        return stage.phases(rank, cuts, self.itemsize, costs)

    def _place_of(self, rank: Integers) -> Integers:
        """Return a number for each combination of a transfer's round and its `rank`."""
        return self._number * self.schedule.ranks + rank

    def _by_pair(self, pair: Integers, amount: Integers) -> dict[tuple[int, int], int]:
        """Return `amount` summed by (source, target)."""
        sums = np.bincount(pair, amount)
        pairs = np.flatnonzero(sums)
        ends = (divmod(pair, self.schedule.ranks) for pair in pairs.tolist())
        return dict(zip(ends, sums[pairs].astype(np.int64).tolist(), strict=True))

    def _by(self, rank: Integers, *amounts: Integers) -> list[list[int]]:
        """Return each of `amounts` summed by `rank`."""
        sums = (np.bincount(rank, amount, self.schedule.ranks) for amount in amounts)
        return [each.astype(np.int64).tolist() for each in sums]

    def _buffers(self) -> list[int]:
        """Return the bytes that the executor allocates on each rank beside the vector."""
        ranks = self.schedule.ranks
        if self._slot_bytes:
            return [ranks * self._slot_bytes] * ranks
        # Two segments for each: one is filled while the other is added. Copies arrive in place.
        reduces = self._transfers[4] == REDUCE
        scratch = np.minimum(self._elements[reduces], 2 * self.segment) * self.itemsize
        places = self._place_of(self._transfers[1])[reduces]
        at_once = np.bincount(places, scratch, self._count * ranks)
        peak = at_once.reshape(-1, ranks).max(axis=0, initial=0)
        return peak.astype(np.int64).tolist()  # type: ignore[no-any-return]
