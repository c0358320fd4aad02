"""Schedules of every algorithm, drawn by hypothesis."""

from __future__ import annotations

from orchestra.schedules import (
    ALL_REDUCE,
    Schedule,
    broadcast,
    hierarchical,
    ring_all_gather,
    ring_reduce_scatter,
)

RANKS = range(1, 18)
NODES = [
    (1,), (4,), (1, 1, 1), (2, 2), (2, 1), (1, 2), (3, 3, 3), (4, 4), (2, 2, 1), (1, 3, 2),
    (8, 1), (5, 3, 4), (3, 7), (1, 1, 5, 2), (17,),
]  # fmt: skip


def lengths(ranks: int) -> list[int]:
    return sorted({0, 1, ranks - 1, ranks, ranks + 1, 2 * ranks, 7, 97, 128})


def schedules(ranks: int) -> list[Schedule]:
    reductions = [make(ranks) for make in ALL_REDUCE.values()]
    halves = [ring_reduce_scatter(ranks), ring_all_gather(ranks)]
    nodes = [hierarchical(sizes) for sizes in NODES if sum(sizes) == ranks]
    return [*reductions, *halves, *nodes, *(broadcast(ranks, root) for root in range(ranks))]
