"""What an all-reduce gives, evaluated once for all ranks, with the bits of its own order.

a + b has the bits of b + a, so a sum is known by its tree of pairs. Where the tree is a chain, as
in a ring, pieces that begin at different ranks are added up together: rank after rank, each adds
to all pieces whose turn it is, which lie side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from orchestra.schedules import REDUCE, Schedule

Tree = int | tuple["Tree", "Tree"]
"""A rank, or the sum of two trees."""


class Run(NamedTuple):
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
    others: list[Run]


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


def _runs(schedule: Schedule) -> list[Run]:
    """Which pieces of the vector are summed how: found by running the schedule on names."""
    if schedule.slots:
        tree: Tree = 0
        for rank in range(1, schedule.ranks):
            tree = (tree, rank)
        return [Run(0, 1, tree)]
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
        runs.append(Run(first, end, trees[name]))
        first = end
    return runs
