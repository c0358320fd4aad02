"""The messages of a collective for all of its ranks at once, in numbers.

What ranks of one node do in the memory that they share is in stages: which rounds of a schedule
these are, transports/host.py decides. Each rank shows its elements, forms its share of the sums,
and takes the results, with a barrier after each of the first two.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestra.cluster.nodes import MemoryCosts
from orchestra.schedules import Schedule
from orchestra.schedules.sums import Rounds, SumStage, local_stages, rounds_of
from orchestra.schedules.table import Table, table_of
from orchestra.transports import collective
from orchestra.transports.collective import ScheduleStep
from orchestra.transports.framing import header_bytes
from orchestra.transports.shared_memory import CHUNK_BYTES, SMALL_BYTES, buffer_bytes

Integers = NDArray[np.int64]

HEADER = header_bytes(1)


class Phase(NamedTuple):
    """Processor seconds of a rank, and then those that pass between the arrival of the last rank at
    a barrier and that all go on; None: there is no barrier."""

    seconds: float
    wake: float | None


@dataclass(frozen=True, eq=False)
class NodeStage:
    """Rounds that the ranks at `places`, all of one node, carry out among themselves.

    `stage` says what each of them does; None: all of them do the whole of an all-reduce.
    """

    places: tuple[int, ...]
    rounds: Rounds
    stage: SumStage | None

    def phases(
        self, place: int, cuts: Sequence[int], itemsize: int, costs: MemoryCosts
    ) -> Sequence[Phase]:
        """Return what the rank at `place` does with a vector whose pieces begin at `cuts`."""
        shown, formed, taken, whole = (
            costs.copy * itemsize * elements for elements in self._elements(place, cuts)
        )
        barrier = costs.barrier * (len(self.places) - 1)
        if cuts[-1] * itemsize <= SMALL_BYTES:
            begin = Phase(costs.collective + shown + barrier, costs.wake)
            return begin, Phase(whole, None)
        chunks = ceil(cuts[-1] * itemsize / CHUNK_BYTES)
        # Chunks form a pipeline: only showing the first and taking the last overlap with nothing.
        # The chunks between are charged in one go instead of an event per barrier.
        first, last = shown / chunks, taken / chunks
        between = shown - first + formed + taken - last + chunks * barrier
        return (
            Phase(costs.collective + first + barrier, costs.wake),
            Phase(between, chunks * costs.wake),
            Phase(last, None),
        )

    def _elements(self, place: int, cuts: Sequence[int]) -> tuple[float, float, float, float]:
        """Return the elements that it shows, reads for its share of the sums, and takes, and those
        that it reads where each rank adds up everything by itself."""
        ranks, length = len(self.places), cuts[-1]
        stage = self.stage
        if stage is None:
            return length, length, length, ranks * length
        shown, taken = (
            sum(cuts[end] - cuts[first] for first, end in pieces[place])
            for pieces in (stage.shown, stage.taken)
        )
        formed = stage.shared.read(cuts) / ranks + stage.alone[place].read(cuts)
        return shown, formed, taken, stage.whole[place].read(cuts)


@dataclass(frozen=True, eq=False)
class NodeStages:
    """The stages of a schedule between ranks that are on known nodes.

    Attributes:
        sections: of each place that has stages, the rounds in their order: stages and others.
        numbers: of each stage, from 0 on.
    """

    sections: Mapping[int, Sequence[NodeStage | Rounds]] = field(default_factory=dict)
    numbers: Mapping[NodeStage, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.sections)

    def hold(self, rounds: Integers, places: NDArray[np.uint16]) -> NDArray[np.bool_]:
        """Return which transfers, given by round and source, go through memory."""
        shape = (rounds.max(initial=-1) + 1, int(places.max(initial=0)) + 1)
        held = np.zeros(shape, dtype=np.bool_)
        for place, sections in self.sections.items():
            for section in sections:
                if isinstance(section, NodeStage):
                    held[slice(*section.rounds), place : place + 1] = True
        return held[rounds, places]


@functools.lru_cache(maxsize=64)
def node_stages(schedule: Schedule, hosts: tuple[Hashable, ...]) -> NodeStages:
    """Return the stages of `schedule`, where ranks with equal `hosts` share memory.

    With no `hosts` nobody does.
    """
    places_of: dict[Hashable, list[int]] = defaultdict(list)
    for place, host in enumerate(hosts):
        places_of[host].append(place)
    sections: dict[int, Sequence[NodeStage | Rounds]] = {}
    numbers: dict[NodeStage, int] = {}
    for places in _with_rounds_of_their_own(schedule, list(places_of.values())):
        found: list[NodeStage | Rounds]
        if schedule.all_reduce and len(places) == schedule.ranks:
            found = [NodeStage(tuple(places), (0, len(rounds_of(schedule))), None)]
        else:
            found = [
                NodeStage(part.ranks, part.rounds, part) if isinstance(part, SumStage) else part
                for part in local_stages(schedule, frozenset(places))
            ]
        stages = [part for part in found if isinstance(part, NodeStage)]
        numbers |= {stage: len(numbers) + n for n, stage in enumerate(stages)}
        for place in places if stages else ():
            sections[place] = [
                part for part in found if isinstance(part, tuple) or place in part.places
            ]
    return NodeStages(sections, numbers)


def _with_rounds_of_their_own(
    schedule: Schedule, groups: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """Return those of `groups` that have a round with transfers among themselves alone."""
    group_of = np.zeros(schedule.ranks, dtype=np.int64)
    for number, places in enumerate(groups):
        group_of[places] = number
    found = np.zeros(len(groups), dtype=np.bool_)
    if 0 < len(groups) < schedule.ranks:
        for transfers in rounds_of(schedule):
            source, target = group_of[transfers[:, 0]], group_of[transfers[:, 1]]
            within = np.zeros_like(found)
            within[source[source == target]] = True
            within[np.concatenate([source, target])[np.tile(source != target, 2)]] = False
            found |= within
    return [places for places, is_found in zip(groups, found, strict=True) if is_found]


NO_STAGES = NodeStages()


class CollectivePlan:
    """All messages of `schedule`, for a vector of `length` elements cut at `edges`.

    Ranks are numbered as in the schedule. A run of pieces that is empty makes no message; a long
    one makes several, as in transports/collective.py.

    `stages` are what ranks do in shared memory. Bytes and messages are counted as if it were sent,
    and of each rank the bytes also as `bytes_in_memory`.

    Attributes:
        table: the transfers that have elements, and are not in `stages`.
        elements: of each of them.
        pairs: every (source, target) that has messages, with the bytes of all of them.
        streamed: those that have some which are not in `stages`.
        bytes_sent, messages_sent, bytes_received, messages_received, buffer_bytes: of each rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        length: int,
        edges: Sequence[int] | None,
        itemsize: int,
        stages: NodeStages = NO_STAGES,
    ) -> None:
        self.schedule, self.length, self.itemsize = schedule, length, itemsize
        self.segment = collective.SEGMENT_BYTES // itemsize  # elements of the longest message
        self.stages = stages
        self._slot_bytes = length * itemsize if schedule.slots and not stages else 0
        # What each rank adds up at the end, beside what it added before.
        self.added_slots_bytes = self._slot_bytes * (schedule.ranks - 1)
        self.cuts = tuple(schedule.edges(length) if edges is None else edges)
        cuts = np.array(self.cuts)
        table = table_of(schedule)
        elements = cuts[table.end] - cuts[table.first]
        if not elements.all():
            table, elements = table.only(elements > 0), elements[elements > 0]
        messages = -(-elements // self.segment)
        wire = elements * itemsize + messages * HEADER
        self.pairs = self._by_pair(table, wire)
        self.messages_sent, self.bytes_sent = self._by(table.source, messages, wire)
        self.messages_received, self.bytes_received = self._by(table.target, messages, wire)
        self.streamed: Iterable[tuple[int, int]] = self.pairs
        self.bytes_in_memory = [0] * schedule.ranks
        if stages:
            held = stages.hold(table.round_of, table.source)
            (self.bytes_in_memory,) = self._by(table.source[held], wire[held])
            table, elements = table.only(~held), elements[~held]
            self.streamed = self._by_pair(table, elements)
        self.table, self.elements = table, elements
        self.buffer_bytes = self._buffers()
        for place in stages.sections:
            used = buffer_bytes(length * itemsize)
            self.buffer_bytes[place] = max(self.buffer_bytes[place], used)
        # Else a rank could be through before another has begun: an empty piece makes no message.
        self.is_synchronizing = schedule.all_reduce or (
            schedule.synchronizing and bool(np.diff(cuts).all())
        )

    @cached_property
    def both_ways(self) -> NDArray[np.bool_]:
        """Of each transfer, whether its source receives in the same round, or its target sends."""
        source, target = map(self.place_of, (self.table.source, self.table.target))
        sends, receives = np.zeros((2, self.table.rounds * self.schedule.ranks), dtype=bool)
        sends[source] = receives[target] = True
        return receives[source] | sends[target]

    def goes_both_ways(self, pair: tuple[int, int], number: int) -> bool:
        """Return whether others go the other way at the same time as message `number` of a pair."""
        # So it is in a ring, whose messages need not be listed then.
        if self.both_ways[0] and self.both_ways.all():
            return True
        return self._messages_both_ways[pair][number]

    @cached_property
    def _messages_both_ways(self) -> Mapping[tuple[int, int], Sequence[bool]]:
        found: dict[tuple[int, int], list[bool]] = defaultdict(list)
        messages = -(-self.elements // self.segment)
        columns = (self.table.source, self.table.target, messages, self.both_ways)
        for source, target, count, both_ways in zip(*(c.tolist() for c in columns), strict=True):
            found[source, target] += [both_ways] * count
        return found

    @property
    def sends_one_at_a_time(self) -> bool:
        """True if each rank sends and receives at most one run of pieces in a round."""
        ends = map(self.place_of, (self.table.source, self.table.target))
        return all(np.bincount(places, minlength=1).max() <= 1 for places in ends)

    def steps(self, rank: int, first: int, end: int | None) -> Iterator[ScheduleStep]:
        """Yield what the executor does on `rank` in the rounds from `first` to before `end`."""
        return collective.steps(self.table.parts(rank, first, end), self.cuts, self.segment)

    def place_of(self, rank: NDArray[np.uint16]) -> Integers:
        """Return a number for each combination of a transfer's round and its `rank`."""
        return self.table.round_of * self.schedule.ranks + rank

    def _by_pair(self, table: Table, amount: Integers) -> dict[tuple[int, int], int]:
        """Return `amount` summed by (source, target)."""
        pair = table.source.astype(np.int64) * self.schedule.ranks + table.target
        sums = np.bincount(pair, amount)
        pairs = np.flatnonzero(sums)
        ends = (divmod(pair, self.schedule.ranks) for pair in pairs.tolist())
        return dict(zip(ends, sums[pairs].astype(np.int64).tolist(), strict=True))

    def _by(self, rank: NDArray[np.uint16], *amounts: Integers) -> list[list[int]]:
        """Return each of `amounts` summed by `rank`."""
        sums = (np.bincount(rank, amount, self.schedule.ranks) for amount in amounts)
        return [each.astype(np.int64).tolist() for each in sums]

    def _buffers(self) -> list[int]:
        """Return the bytes that the executor allocates on each rank in addition to the vector."""
        ranks = self.schedule.ranks
        if self._slot_bytes:
            return [ranks * self._slot_bytes] * ranks
        # Two segments for each: one is filled while the other is added. Copies arrive in place.
        reduces = self.table.reduces
        scratch = np.minimum(self.elements[reduces], 2 * self.segment) * self.itemsize
        places = self.place_of(self.table.target)[reduces]
        at_once = np.bincount(places, scratch, self.table.rounds * ranks)
        peak = at_once.reshape(-1, ranks).max(axis=0, initial=0)
        return peak.astype(np.int64).tolist()  # type: ignore[no-any-return]
