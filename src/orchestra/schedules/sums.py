"""The sums that a schedule forms, and the order in which it adds, which decides their bits.

Both are found by running the schedule on names in place of numbers. a + b has the bits of b + a,
so a sum is known by its tree of pairs. Where the tree is a chain, as in a ring, pieces that
begin at different ranks are added up together: rank after rank, each is added to all pieces
whose turn it is, which lie side by side.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestra.schedules import COPY, REDUCE, Round, Schedule

T = TypeVar("T")

Tree = int | tuple["Tree", "Tree"]
"""A rank, or the sum of two trees."""

Vectors = Sequence[Tensor] | Mapping[int, Tensor]


class PieceRun(NamedTuple):
    """Pieces side by side whose sum is formed alike."""

    first: int
    end: int
    tree: Tree


class Chained(NamedTuple):
    """Pieces to which the vector of `rank` is added: to `other`'s, or to the sum so far (None)."""

    first: int
    end: int
    rank: int
    other: int | None


class Sums:
    """The structure of the sums of some pieces: chains, as far as possible."""

    def __init__(self, runs: Iterable[PieceRun]) -> None:
        self.copied: list[tuple[int, int, int]] = []
        self.others: list[PieceRun] = []
        chains = []
        for run in runs:
            chain = _chain(run.tree)
            if chain is None:
                self.others.append(run)
            elif len(chain) > 1:
                chains.append((run.first, run.end, chain))
            else:
                self.copied.append((run.first, run.end, chain[0]))
        self.chained = _interleaved(chains)

    def __bool__(self) -> bool:
        return bool(self.copied or self.chained or self.others)

    def read(self, cuts: Sequence[int]) -> int:
        """Return the number of elements of all vectors together that are read for these sums."""
        reads = [(first, end, 1) for first, end, _ in self.copied]
        reads += [(*run[:2], 1 if run.other is None else 2) for run in self.chained]
        reads += [(*run[:2], len(list(_leaves(run.tree)))) for run in self.others]
        return sum((cuts[end] - cuts[first]) * times for first, end, times in reads)

    def form(
        self, vectors: Vectors, out: Tensor, cuts: Sequence[int], first: int, end: int
    ) -> None:
        """Write the elements [first, end) of the sums to `out`, which is none of `vectors`.

        Args:
            vectors: these elements of each rank's vector, by rank.
            out: these elements of the result; those of other pieces are left alone.
            cuts: where each piece of the whole vector begins, and its end.
        """

        def within(runs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
            """Yield the part of each run that is among these elements, and what is summed there."""
            for begin, stop, *what in runs:
                start, past = max(cuts[begin], first) - first, min(cuts[stop], end) - first
                if start < past:
                    yield slice(start, past), *what

        for here, rank in within(self.copied):
            out[here].copy_(vectors[rank][here])
        for here, rank, other in within(self.chained):
            before = out[here] if other is None else vectors[other][here]
            torch.add(before, vectors[rank][here], out=out[here])
        for here, tree in within(self.others):
            out[here] = _value(tree, vectors, here)


def _value(tree: Tree, vectors: Vectors, here: slice) -> Tensor:
    if isinstance(tree, int):
        return vectors[tree][here]
    return _value(tree[0], vectors, here) + _value(tree[1], vectors, here)


def _chain(tree: Tree) -> list[int] | None:
    """Return the ranks in the order in which one after the other is added; None for other trees."""
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


def _interleaved(chains: list[tuple[int, int, list[int]]]) -> list[Chained]:
    """Return the additions rank after rank, round and round, of adjacent pieces in one go."""
    additions = []
    for place, (first, end, chain) in enumerate(chains):
        turn = 0
        for number, (before, rank) in enumerate(pairwise(chain)):
            turn += number > 0 and rank < before
            chained = Chained(first, end, rank, None if number else before)
            additions.append((turn, rank, place, chained))
    order: list[Chained] = []
    # By rank, so that pieces whose turn it is follow one another in `order`, and become one
    for *_, each in sorted(additions, key=itemgetter(0, 1, 2)):
        last = order[-1] if order else None
        if last and last[1:] == (each.first, each.rank, each.other):
            order[-1] = last._replace(end=each.end)
        else:
            order.append(each)
    return order


class _Names:
    """Runs rounds on names: of each rank that takes part, and piece, the tree that it holds."""

    def __init__(self, schedule: Schedule, ranks: Iterable[int]) -> None:
        self.trees: list[Tree] = list(range(schedule.ranks))
        self.held = {rank: [rank] * schedule.pieces for rank in ranks}
        self._pairs: dict[tuple[int, int], int] = {}

    def run(self, rounds: Iterable[Round]) -> None:
        held = self.held
        for transfers in rounds:
            # First all of the round is read: a transfer carries what its source held when the round
            # began.
            arriving = [
                (target, piece, operation, held[source][piece])
                for source, target, first, end, operation in transfers.tolist()
                for piece in range(first, end)
            ]
            for target, piece, operation, name in arriving:
                own = held[target]
                own[piece] = self._sum(own[piece], name) if operation == REDUCE else name

    def _sum(self, own: int, other: int) -> int:
        pair = (min(own, other), max(own, other))  # a + b has the bits of b + a
        if pair not in self._pairs:
            self._pairs[pair] = len(self.trees)
            self.trees.append((self.trees[pair[0]], self.trees[pair[1]]))
        return self._pairs[pair]


def _runs(values: Iterable[T]) -> Iterator[tuple[int, int, T]]:
    """Runs of equal values: the first place, the one after the last, and the value."""
    first = 0
    for value, group in groupby(values):
        end = first + len(list(group))
        yield first, end, value
        first = end


def _true(values: Iterable[bool]) -> list[tuple[int, int]]:
    """Runs of true values."""
    return [(first, end) for first, end, value in _runs(values) if value]


def _tree_runs(trees: Iterable[Tree | None]) -> list[PieceRun]:
    """Runs of pieces of one tree; None stands for pieces that are left alone."""
    return [PieceRun(first, end, tree) for first, end, tree in _runs(trees) if tree is not None]


@functools.lru_cache(maxsize=64)
def sums_of(schedule: Schedule) -> Sums:
    """Return the sums that every rank ends with after an all-reduce; with slots of one piece."""
    if schedule.slots:
        return Sums([PieceRun(0, 1, _in_order(schedule.ranks))])
    names = _Names(schedule, range(schedule.ranks))
    names.run(schedule.rounds())
    same = all(pieces == names.held[0] for pieces in names.held.values())
    assert same, f"{schedule.name} is no all-reduce"
    runs = _runs(names.held[0])
    return Sums(PieceRun(first, end, names.trees[name]) for first, end, name in runs)


def _in_order(ranks: int) -> Tree:
    tree: Tree = 0
    for rank in range(1, ranks):
        tree = (tree, rank)
    return tree


def add_up(schedule: Schedule, vectors: Sequence[Tensor], edges: Sequence[int] | None) -> None:
    """Replace each of `vectors`, in the order of the ranks, by the sums of an all-reduce."""
    if vectors[0].is_meta:
        return  # shapes only
    length = vectors[0].numel()
    cuts = schedule.edges(length) if edges is None else edges
    if schedule.slots:
        cuts = (0, length)
    with torch.no_grad():
        if len(vectors) > 1:  # the sum of one is itself
            total = torch.empty_like(vectors[0])
            sums_of(schedule).form(vectors, total, cuts, 0, length)
            for vector in vectors:
                vector.copy_(total)


def move(schedule: Schedule, vectors: Sequence[Tensor], edges: Sequence[int] | None) -> None:
    """Carry out a schedule without slots on the vectors of all ranks, in their order."""
    assert not schedule.slots
    cuts = schedule.edges(vectors[0].numel()) if edges is None else edges
    with torch.no_grad():
        for transfers in schedule.rounds():
            arriving = [
                (vectors[target][cuts[first] : cuts[end]], operation, sent)
                for source, target, first, end, operation in transfers.tolist()
                # A transfer carries what its source held when the round began.
                for sent in [vectors[source][cuts[first] : cuts[end]].clone()]
            ]
            for own, operation, sent in arriving:
                (own.add_ if operation == REDUCE else own.copy_)(sent)


# What some of the ranks do among themselves


Pieces = Sequence[tuple[int, int]]
"""Runs of pieces, each as the first piece and the one after the last."""

Rounds = tuple[int, int]
"""The number of the first round, and of the one after the last."""


@dataclass(frozen=True)
class SumStage:
    """Consecutive rounds that `ranks` carry out among themselves, as sums of what each holds."""

    ranks: tuple[int, ...]
    rounds: Rounds
    shared: Sums  # that several ranks end with
    taken: Mapping[int, Pieces]  # of them, those that a rank ends with
    alone: Mapping[int, Sums]  # what only this rank ends with
    whole: Mapping[int, Sums]  # `shared` and `alone` together
    shown: Mapping[int, Pieces]  # those of a rank that these sums are formed of

    @functools.cached_property
    def chained_pieces(self) -> int:
        """The number of pieces, if every rank ends with all sums and each is a chain; else 0."""
        covered = {piece for run in self.shared.chained for piece in range(*run[:2])}
        everything = [(0, len(covered))]
        if self.shared.others or any(self.alone.values()):
            return 0
        return len(covered) * all(taken == everything for taken in self.taken.values())


# For 256 ranks on 32 nodes making them anew for each node took longer than all else.
@functools.lru_cache(maxsize=1)
def rounds_of(schedule: Schedule) -> Sequence[Round]:
    """Return all rounds, for callers that need them for each host."""
    return tuple(schedule.rounds())


@functools.lru_cache(maxsize=256)
def local_stages(schedule: Schedule, local: frozenset[int]) -> tuple[SumStage | Rounds, ...]:
    """Divide the rounds into those that the ranks `local` carry out among themselves, and others.

    A stage gives these ranks what later rounds, and the result, depend on; other pieces may keep
    other values than after its rounds.
    """
    if schedule.slots:
        count = len(rounds_of(schedule))
        if len(local) < schedule.ranks:
            return ((0, count),)
        tree = _in_order(schedule.ranks)
        ends: dict[int, list[Tree | None]] = {rank: [tree] for rank in range(schedule.ranks)}
        return (_stage(ends, (0, count)),)
    rounds = [_of_ranks(transfers, local) for transfers in rounds_of(schedule)]
    inside = [local.issuperset(transfers[:, :2].flat) for transfers in rounds]
    runs = list(_runs(inside))
    live = _live(schedule, frozenset(end for _, end, is_inside in runs if is_inside))
    return tuple(
        _local(schedule, rounds, (first, end), live[end]) if is_inside else (first, end)
        for first, end, is_inside in runs
    )


def _of_ranks(transfers: Round, ranks: Collection[int]) -> Round:
    """Return the transfers from or to `ranks`."""
    return transfers[np.isin(transfers[:, :2], list(ranks)).any(axis=1)]


@functools.lru_cache(maxsize=4)
def _live(schedule: Schedule, wanted: frozenset[int]) -> Mapping[int, NDArray[np.bool_]]:
    """Return what the result depends on before each `wanted` round; shape [ranks, pieces]."""
    live = np.ones((schedule.ranks, schedule.pieces), dtype=bool)
    if schedule.result is not None:
        for rank in range(schedule.ranks):
            live[rank] = np.arange(schedule.pieces) == schedule.result(rank)
    rounds = rounds_of(schedule)
    found = {len(rounds): live}
    for number in range(len(rounds) - 1, min(wanted, default=len(rounds)) - 1, -1):
        before = live.copy()
        rows = rounds[number].tolist()
        for _, target, first, end, operation in rows:
            # What is overwritten does not matter before.
            if operation == COPY:
                before[target, first:end] = False
        for source, target, first, end, _ in rows:
            before[source, first:end] |= live[target, first:end]
        live = before
        if number in wanted:
            found[number] = live
    return found


def _local(
    schedule: Schedule, rounds: Sequence[Round], span: Rounds, live: NDArray[np.bool_]
) -> SumStage | Rounds:
    """Return the rounds of `span` as a stage, where it can be one."""
    within = rounds[span[0] : span[1]]
    ranks = sorted({int(rank) for transfers in within for rank in transfers[:, :2].flat})
    names = _Names(schedule, ranks)
    names.run(within)
    ends: dict[int, list[Tree | None]] = {
        rank: [
            names.trees[name] if counts and name != rank else None
            for counts, name in zip(live[rank].tolist(), names.held[rank], strict=True)
        ]
        for rank in ranks
    }
    return _stage(ends, span) if ends else span


def _stage(ends: Mapping[int, Sequence[Tree | None]], rounds: Rounds) -> SumStage:
    """Return the stage that gives each rank the trees `ends`, one a piece (None: it keeps its own).

    Of the sums of one piece that several ranks end with, the first is formed by all together.
    """
    ranks = tuple(ends)
    shared: list[Tree | None] = []
    for first, end, column in _runs(zip(*ends.values(), strict=True)):
        sums = Counter(tree for tree in column if isinstance(tree, tuple))
        common = next((tree for tree, count in sums.items() if count > 1), None)
        shared += [common] * (end - first)
    taken, alone, whole, shown = {}, {}, {}, {}
    leaves: dict[int, set[int]] = {rank: set() for rank in ranks}
    for rank, trees in ends.items():
        pairs = list(zip(trees, shared, strict=True))
        taken[rank] = _true(tree is not None and tree == common for tree, common in pairs)
        alone[rank] = Sums(_tree_runs(None if tree == common else tree for tree, common in pairs))
        whole[rank] = Sums(_tree_runs(trees))
        for first, end, tree in _runs(trees):
            for leaf in _leaves(tree):
                leaves[leaf].update(range(first, end))
    for rank in ranks:
        shown[rank] = _true(piece in leaves[rank] for piece in range(len(shared)))
    return SumStage(ranks, rounds, Sums(_tree_runs(shared)), taken, alone, whole, shown)


def _leaves(tree: Tree | None) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
    elif tree is not None:
        for part in tree:
            yield from _leaves(part)
