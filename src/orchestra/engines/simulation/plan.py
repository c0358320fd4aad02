"""A collective for all of its ranks at once: its messages, in numbers, and the sums that it gives.

An all-reduce is added up once for all ranks, with the bits of its own order. a + b has the bits of
b + a, so a sum is known by its tree of pairs. Where the tree is a chain, as in a ring, pieces that
begin at different ranks are added up together: rank after rank, each adds to all pieces whose turn
it is, which lie side by side.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestra.schedules import REDUCE, Schedule
from orchestra.transports import collective
from orchestra.transports.collective import RoundPart, Step
from orchestra.transports.framing import header_bytes

Integers = NDArray[np.int64]

HEADER = header_bytes(1)


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
        self.buffer_bytes = self._buffers()
        self.is_synchronizing = schedule.all_reduce or (
            schedule.synchronizing and bool(np.diff(cuts).all())
        )
        self._parts: dict[int, dict[int, RoundPart]] = {}

    @cached_property
    def rounds(self) -> list[Integers]:
        """Of each round the transfers, shape [transfers, 6]: source, target, first, end, operation,
        elements."""
        ends = np.searchsorted(self._number, np.arange(1, self._count))
        return np.split(np.column_stack([*self._transfers, self._elements]), ends)

    @property
    def sends_one_at_a_time(self) -> bool:
        """Whether each rank sends and receives at most one run of pieces in a round."""
        ends = map(self._place_of, self._transfers[:2])
        return all(np.bincount(places, minlength=1).max() <= 1 for places in ends)

    def frame_bytes(self, elements: int) -> int:
        """Of a message with its header."""
        return elements * self.itemsize + HEADER

    def parts(self, rank: int) -> Iterator[RoundPart]:
        """What `rank` does in each round."""
        for number in range(len(self.rounds)):
            if number not in self._parts:
                parts: dict[int, RoundPart] = defaultdict(lambda: RoundPart([], []))
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

    def steps(self, rank: int) -> Iterator[Step]:
        """What the executor does on `rank`."""
        return collective.steps(self.parts(rank), self.cuts, self.segment)

    def _place_of(self, rank: Integers) -> Integers:
        """A number for each pair of a round and the `rank` of a transfer in it."""
        return self._number * self.schedule.ranks + rank

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
        reduces = self._transfers[4] == REDUCE
        scratch = np.minimum(self._elements[reduces], 2 * self.segment) * self.itemsize
        places = self._place_of(self._transfers[1])[reduces]
        at_once = np.bincount(places, scratch, self._count * ranks)
        peak = at_once.reshape(-1, ranks).max(axis=0, initial=0)
        return peak.astype(np.int64).tolist()  # type: ignore[no-any-return]


Tree = int | tuple["Tree", "Tree"]
"""A rank, or the sum of two trees."""


class PieceRun(NamedTuple):
    """Pieces side by side whose sum is formed alike."""

    first: int
    end: int
    tree: Tree


class Chained(NamedTuple):
    """Pieces to which the vector of `rank` is added next, or with which it `begins`."""

    first: int
    end: int
    rank: int
    begins: bool


class Order(NamedTuple):
    """How the sums of a schedule are formed: in chains, as far as they are chains."""

    chained: list[Chained]
    others: list[PieceRun]


def add_up(schedule: Schedule, vectors: Sequence[Tensor], edges: Sequence[int] | None) -> None:
    """Replace each of `vectors`, in the order of the ranks, by what `schedule` makes of it."""
    if vectors[0].is_meta:
        return  # shapes only
    order = _order(schedule)
    length = vectors[0].numel()
    cuts = schedule.edges(length) if edges is None else edges
    if schedule.slots:
        cuts = (0, length)
    total = torch.empty_like(vectors[0])
    with torch.no_grad():
        for first, end, rank, begins in order.chained:
            part = slice(cuts[first], cuts[end])
            if begins:
                total[part] = vectors[rank][part]
            else:
                total[part].add_(vectors[rank][part])
        for first, end, tree in order.others:
            part = slice(cuts[first], cuts[end])
            total[part] = _value(tree, vectors, part)
        for vector in vectors:
            vector.copy_(total)


def _value(tree: Tree, vectors: Sequence[Tensor], part: slice) -> Tensor:
    if isinstance(tree, int):
        return vectors[tree][part]
    return _value(tree[0], vectors, part) + _value(tree[1], vectors, part)


@functools.lru_cache(maxsize=64)
def _order(schedule: Schedule) -> Order:
    chains, others = [], []
    for run in _runs(schedule):
        chain = _chain(run.tree)
        if chain is None:
            others.append(run)
        else:
            chains.append((run.first, run.end, chain))
    return Order(_interleaved(chains, schedule.ranks), others)


def _interleaved(chains: list[tuple[int, int, list[int]]], ranks: int) -> list[Chained]:
    """Rank after rank, round and round; side by side means in one go."""
    done = [0] * len(chains)
    left = sum(len(chain) for _, _, chain in chains)
    order: list[Chained] = []
    while left:
        for rank in range(ranks):
            for place, (first, end, chain) in enumerate(chains):
                if done[place] < len(chain) and chain[done[place]] == rank:
                    begins = done[place] == 0
                    last = order[-1] if order else None
                    if last and last[1:] == (first, rank, begins):
                        order[-1] = last._replace(end=end)
                    else:
                        order.append(Chained(first, end, rank, begins))
                    done[place] += 1
                    left -= 1
    return order


def _chain(tree: Tree) -> list[int] | None:
    """The ranks in the order in which one after the other is added; None for other trees."""
    chain: list[int] = []
    while not isinstance(tree, int):
        a, b = tree
        if isinstance(b, int):
            chain.append(b)
            tree = a
        elif isinstance(a, int):
            chain.append(a)
            tree = b
        else:
            return None
    return [tree, *reversed(chain)]


def _runs(schedule: Schedule) -> list[PieceRun]:
    """Which pieces of the vector are summed how: found by running the schedule on names."""
    if schedule.slots:
        tree: Tree = 0
        for rank in range(1, schedule.ranks):
            tree = (tree, rank)
        return [PieceRun(0, 1, tree)]
    trees: list[Tree] = list(range(schedule.ranks))
    names: dict[tuple[int, int], int] = {}
    held = [[rank] * schedule.pieces for rank in range(schedule.ranks)]
    for transfers in schedule.rounds():
        arriving = [
            (target, piece, operation, held[source][piece])
            for source, target, first, end, operation in transfers.tolist()
            for piece in range(first, end)
        ]
        for target, piece, operation, name in arriving:
            if operation == REDUCE:
                own = held[target][piece]
                pair = (min(own, name), max(own, name))
                if pair not in names:
                    names[pair] = len(trees)
                    trees.append((trees[pair[0]], trees[pair[1]]))
                name = names[pair]
            held[target][piece] = name
    assert all(pieces == held[0] for pieces in held), f"{schedule.name} is no all-reduce"
    runs, first = [], 0
    for name, group in groupby(held[0]):
        end = first + len(list(group))
        runs.append(PieceRun(first, end, trees[name]))
        first = end
    return runs
