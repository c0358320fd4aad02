"""Collectives as data: rounds of transfers as integer arrays, free of any transport.

All-reduce algorithms: every rank ends with the sum over the ranks, bit for bit the same.

What a rank sends, with N ranks, n elements, and p the largest power of two up to N:

    algorithm           elements
    ring                2(N-1)/N n
    halving_doubling    2(p-1)/p n
    butterfly           log2(p) n
    tree                at most 3 n
    ring_gather         (N-1) n
    parallel            (N-1) n
    reduce_to_one       n; rank 0: (N-1) n

In halving_doubling and butterfly each of the N - p extra ranks sends its n elements to one of the
first ranks, which sends n elements more than the table says, to return the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from orchestra.schedules.ring_order import ring_order as ring_order

Integers = NDArray[np.int64]
Round = Integers
"""One round: [transfers, 5] with the columns source, target, first, end, operation.

A transfer is one message: the pieces from `first` to before `end`, which lie side by side. All
transfers of a round may be under way together, and carry what their source held when the round
began; a rank begins a round when it has finished its part of the one before. A target reduces
what arrives in one round in the order of the rows.
"""

REDUCE = 0
"""The target adds the arriving pieces to its own."""
COPY = 1
"""The target overwrites its own pieces with the arriving ones."""


@dataclass(frozen=True)
class Schedule:
    """A collective over `ranks` ranks.

    With `slots` false the vector is cut into `pieces` contiguous parts. With `slots` true every
    rank keeps a buffer of `pieces` whole vectors, slot r holding the vector of rank r; when the
    last round is over they are added in the order of the ranks.

    With `all_reduce` true every rank ends with the sum over the ranks, bit for bit the same. In
    an all-reduce no rank can finish before every rank has begun. `synchronizing` says that this
    also holds for another schedule, provided that no piece is empty. `result` gives the one piece
    that counts of a rank, where the others are left with sums of some ranks only.
    """

    name: str
    ranks: int
    pieces: int
    rounds: Callable[[], Iterator[Round]]
    slots: bool = False
    all_reduce: bool = False
    synchronizing: bool = False
    result: Callable[[int], int] | None = None

    def edges(self, length: int) -> tuple[int, ...]:
        """Return the start of each piece of a vector (or buffer of slots), and the end."""
        cut = 1 if self.slots else self.pieces
        return tuple(length * piece // cut for piece in range(self.pieces + 1))


def ring(ranks: int) -> Schedule:
    """Reduce-scatter, then all-gather, round a ring (Patarasuk and Yuan, 2009)."""

    def rounds() -> Iterator[Round]:
        yield from ring_reduce_scatter(ranks).rounds()
        yield from ring_all_gather(ranks).rounds()

    return Schedule("ring", ranks, ranks, rounds, all_reduce=True)


# Made once, as all others are: results are kept by schedule, and a second one would not be equal,
# as its functions are not.
@functools.cache
def ring_reduce_scatter(ranks: int) -> Schedule:
    """Return the first half of `ring`: rank i ends with the sum of piece (i + 1) mod N.

    In round k, rank i passes piece (i - k) mod N on to rank i + 1, which adds it.
    """
    rounds = functools.partial(_passed_on, ranks, 0, REDUCE)
    return Schedule(
        "ring_reduce_scatter", ranks, ranks, rounds, synchronizing=True,
        result=lambda rank: (rank + 1) % ranks,
    )  # fmt: skip


@functools.cache
def ring_all_gather(ranks: int) -> Schedule:
    """Return the second half of `ring`: piece (i + 1) mod N of rank i becomes everybody's."""
    rounds = functools.partial(_passed_on, ranks, 1, COPY)
    return Schedule("ring_all_gather", ranks, ranks, rounds, synchronizing=True)


def _passed_on(ranks: int, offset: int, operation: int) -> Iterator[Round]:
    """Round a ring: rank i begins with piece i + `offset`, then passes on what has arrived."""
    source = np.arange(ranks)
    for k in range(ranks - 1):
        yield _single(source, (source + 1) % ranks, (source + offset - k) % ranks, operation)


def halving_doubling(ranks: int) -> Schedule:
    """Recursive halving, then recursive doubling (Rabenseifner, 2004): 2 log2(N) rounds.

    The first half is a reduce-scatter: partners at distance p/2, then p/4 ... 1 split what they
    both hold, and each adds up its part, until rank i owns piece i. The second half, an
    all-gather, goes back the same way. Ranks beyond p fold theirs into the first ones.
    """
    core = _power_of_two(ranks)

    def rounds() -> Iterator[Round]:
        rank = np.arange(core)
        yield from _fold(ranks, core, core, REDUCE)
        for distance in reversed(_distances(core)):
            # The half that the partner goes on with; the sender is done with it.
            given = (rank ^ distance) // distance * distance
            yield _columns(rank, rank ^ distance, given, given + distance, REDUCE)
        for distance in _distances(core):
            held = rank // distance * distance
            yield _columns(rank, rank ^ distance, held, held + distance, COPY)
        yield from _fold(ranks, core, core, COPY)

    return Schedule("halving_doubling", ranks, core, rounds, all_reduce=True)


def butterfly(ranks: int) -> Schedule:
    """Recursive doubling: partners exchange whole vectors, in log2(N) rounds.

    The task-based all-reduce of Li, Davis and Jarvis (2017). Both partners add the same two
    vectors, and a + b has the bits of b + a. Ranks beyond p fold theirs into the first ones.
    """
    core = _power_of_two(ranks)

    def rounds() -> Iterator[Round]:
        rank = np.arange(core)
        yield from _fold(ranks, core, 1, REDUCE)
        for distance in _distances(core):
            yield _single(rank, rank ^ distance, np.zeros_like(rank), REDUCE)
        yield from _fold(ranks, core, 1, COPY)

    return Schedule("butterfly", ranks, 1, rounds, all_reduce=True)


def tree(ranks: int) -> Schedule:
    """Sums go up a binary tree to rank 0, and the result comes down: two rounds a level.

    Rank i is the parent of ranks 2i+1 and 2i+2. Each vector travels whole.
    """
    child = np.arange(1, ranks)
    level = np.frexp(child + 1)[1] - 1  # the whole logarithm: 1 is right under the root

    def rounds() -> Iterator[Round]:
        depths = range(1, ranks.bit_length())
        for lower in (child[level == depth] for depth in reversed(depths)):
            yield _single(lower, (lower - 1) // 2, np.zeros_like(lower), REDUCE)
        for lower in (child[level == depth] for depth in depths):
            yield _single((lower - 1) // 2, lower, np.zeros_like(lower), COPY)

    return Schedule("tree", ranks, 1, rounds, all_reduce=True)


def ring_gather(ranks: int) -> Schedule:
    """Whole gradients forwarded round the ring: N-1 rounds and a buffer of N gradients.

    The ring of older notes on distributed training: N/2 times the bytes of `ring`.
    """
    rounds = functools.partial(_passed_on, ranks, 0, COPY)
    return Schedule("ring_gather", ranks, ranks, rounds, slots=True, all_reduce=True)


def parallel(ranks: int) -> Schedule:
    """Every rank sends its whole gradient to every other, in one round (all-to-all)."""

    def rounds() -> Iterator[Round]:
        if ranks > 1:
            source, distance = np.divmod(np.arange(ranks * (ranks - 1)), ranks - 1)
            yield _single(source, (source + 1 + distance) % ranks, source, COPY)

    return Schedule("parallel", ranks, ranks, rounds, slots=True, all_reduce=True)


def reduce_to_one(ranks: int) -> Schedule:
    """Rank 0 adds up everybody's gradient in the order of the ranks, and broadcasts the sum."""

    def rounds() -> Iterator[Round]:
        if ranks > 1:
            others = np.arange(1, ranks)
            yield _single(others, np.zeros_like(others), np.zeros_like(others), REDUCE)
            # All get the bits of rank 0's sum, in whatever order others would have added.
            yield from broadcast(ranks, 0).rounds()

    return Schedule("reduce_to_one", ranks, 1, rounds, all_reduce=True)


@functools.cache
def broadcast(ranks: int, root: int) -> Schedule:
    """`root` sends its whole vector to every other rank."""

    def rounds() -> Iterator[Round]:
        if ranks > 1:
            others = np.delete(np.arange(ranks), root)
            zeros = np.zeros_like(others)
            yield _single(zeros + root, others, zeros, COPY)

    return Schedule("broadcast", ranks, 1, rounds)


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
    assert min(nodes) > 0, "a node without ranks"
    blocks, count = max(nodes), len(nodes)
    first_ranks = [0, *accumulate(nodes)]

    def owner(block: int, node: int) -> int:
        """After the reduce-scatter the rank at place i of a node owns run i + 1 of the blocks."""
        size = nodes[node]
        run = next(run for run in range(size) if block < blocks * (run + 1) // size)
        return first_ranks[node] + (run - 1) % size

    # A reduce-scatter begins with a rank's own run; an all-gather with the next, which it owns.

    def inside(operation: int) -> Iterator[Round]:
        """A ring in each node at the same time, over runs of blocks."""
        for k in range(blocks - 1):
            rows = []
            for size, first in zip(nodes, first_ranks, strict=False):
                for place in range(size if k < size - 1 else 0):
                    run = (place - k + (operation == COPY)) % size
                    start, end = (blocks * each // size * count for each in (run, run + 1))
                    rows.append((first + place, first + (place + 1) % size, start, end, operation))
            yield np.array(rows, dtype=np.int64)

    def between(operation: int) -> Iterator[Round]:
        """A ring for each block at the same time, over the nodes' owners of it."""
        for k in range(count - 1):
            rows = []
            for block in range(blocks):
                for node in range(count):
                    piece = block * count + (node - k + (operation == COPY)) % count
                    ends = owner(block, node), owner(block, (node + 1) % count)
                    rows.append((*ends, piece, piece + 1, operation))
            yield np.array(rows, dtype=np.int64)

    def rounds() -> Iterator[Round]:
        yield from inside(REDUCE)
        yield from between(REDUCE)
        yield from between(COPY)
        yield from inside(COPY)

    return Schedule("hierarchical", sum(nodes), blocks * count, rounds, all_reduce=True)


def _fold(ranks: int, core: int, pieces: int, operation: int) -> Iterator[Round]:
    """Ranks from `core` on hand their vector to rank i - core, or take the sum from there."""
    extra = np.arange(core, ranks)
    if len(extra):
        ends = (extra, extra - core) if operation == REDUCE else (extra - core, extra)
        yield _columns(*ends, np.zeros_like(extra), np.full_like(extra, pieces), operation)


def _power_of_two(ranks: int) -> int:
    return 1 << ranks.bit_length() - 1


def _distances(core: int) -> list[int]:
    """Return 1, 2, 4 ... below `core`."""
    return [1 << bit for bit in range(core.bit_length() - 1)]


def _single(source: Integers, target: Integers, piece: Integers, operation: int) -> Round:
    """Return a round in which each message is one piece; arrays have an element for each."""
    return _columns(source, target, piece, piece + 1, operation)


def _columns(
    source: Integers, target: Integers, first: Integers, end: Integers, operation: int
) -> Round:
    """Return a round of messages with the pieces from `first` to before `end`."""
    return np.stack([source, target, first, end, np.full_like(source, operation)], axis=1)


ALL_REDUCE: Mapping[str, Callable[[int], Schedule]] = {
    make.__name__: functools.cache(make)
    for make in (ring, halving_doubling, butterfly, tree, ring_gather, parallel, reduce_to_one)
}
"""The algorithms that depend only on the number of ranks, by name; each schedule is made once."""
