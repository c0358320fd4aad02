"""All-reduce on nodes of several ranks each: most bytes stay inside a node."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate

from orchestra.schedules.schedule import COPY, REDUCE, Round, Schedule, transfers

Row = tuple[int, int, int, int, int]


def hierarchical(nodes: Sequence[int]) -> Schedule:
    """Three rings: reduce-scatter inside each node, all-reduce between nodes, all-gather inside.

    `nodes` has the number of ranks of each node; ranks are numbered node by node. The vector is
    cut into as many blocks as the largest node has ranks, each block into one piece a node. Inside
    a node every rank comes to own some blocks; between the nodes each block has a ring of its
    own, through its owners. With K nodes of G ranks a rank sends 2(G-1)/G n elements inside its
    node and 2(K-1)/K n/G to another one. A node may have fewer ranks than others: they then own
    more blocks each. With one node, or one rank a node, it is the plain ring.
    """
    return _hierarchical(tuple(nodes))


@functools.cache
def _hierarchical(nodes: tuple[int, ...]) -> Schedule:
    plan = _Nodes(nodes)

    def rounds() -> Iterator[Round]:
        yield from plan.inside(REDUCE)
        yield from plan.between(REDUCE)
        yield from plan.between(COPY)
        yield from plan.inside(COPY)

    ranks, pieces = sum(plan.sizes), plan.blocks * len(plan.sizes)
    return Schedule("hierarchical", ranks, pieces, rounds, all_reduce=True)


class _Nodes:
    """Who owns which blocks, and what each phase transfers."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        assert min(sizes) > 0, "a node without ranks"
        self.sizes = sizes
        self.blocks = max(sizes)
        self._first_ranks = [0, *accumulate(sizes)]

    def inside(self, operation: int) -> Iterator[Round]:
        """A ring in each node at the same time, over runs of blocks."""
        for k in range(self.blocks - 1):
            yield transfers(
                *(
                    self._inside(node, place, (place - k + _shift(operation)) % size, operation)
                    for node, size in enumerate(self.sizes)
                    if k < size - 1
                    for place in range(size)
                )
            )

    def _inside(self, node: int, place: int, run: int, operation: int) -> Row:
        """A rank passes a run of blocks on to the next rank of its node."""
        size, first = self.sizes[node], self._first_ranks[node]
        pieces = [self.blocks * end // size * len(self.sizes) for end in (run, run + 1)]
        return (first + place, first + (place + 1) % size, pieces[0], pieces[1], operation)

    def between(self, operation: int) -> Iterator[Round]:
        """A ring for each block at the same time, over the nodes' owners of it."""
        count = len(self.sizes)
        for k in range(count - 1):
            yield transfers(
                *(
                    self._between(block, node, (node - k + _shift(operation)) % count, operation)
                    for block in range(self.blocks)
                    for node in range(count)
                )
            )

    def _between(self, block: int, node: int, part: int, operation: int) -> Row:
        """The owner of a block passes one piece of it on to the owner in the next node."""
        count = len(self.sizes)
        piece = block * count + part
        target = self._owner(block, (node + 1) % count)
        return (self._owner(block, node), target, piece, piece + 1, operation)

    def _owner(self, block: int, node: int) -> int:
        """After the reduce-scatter the rank at place i of a node owns run (i + 1) of the blocks."""
        size = self.sizes[node]
        run = next(r for r in range(size) if block < self.blocks * (r + 1) // size)
        return self._first_ranks[node] + (run - 1) % size


def _shift(operation: int) -> int:
    """A reduce-scatter begins with a rank's own run; an all-gather with the next, which it owns."""
    return 1 if operation == COPY else 0
