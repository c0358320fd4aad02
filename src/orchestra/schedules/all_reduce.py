"""All-reduce algorithms: every rank ends with the sum over the ranks, bit for bit the same.

N ranks, n elements, p the largest power of two up to N. A rank sends: ring 2(N-1)/N n;
halving_doubling 2(p-1)/p n; butterfly log2(p) n; both n more where it stands in for one of the
N - p others, which send n; tree at most 3 n; ring_gather and parallel (N-1) n; reduce_to_one n,
its root (N-1) n.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from orchestra.schedules.schedule import COPY, REDUCE, Round, Schedule


def ring(ranks: int) -> Schedule:
    """Reduce-scatter, then all-gather, round a ring (Patarasuk and Yuan, 2009)."""

    def rounds() -> Iterator[Round]:
        yield from ring_reduce_scatter(ranks).rounds()
        yield from ring_all_gather(ranks).rounds()

    return Schedule("ring", ranks, ranks, rounds, all_reduce=True)


@functools.cache
def ring_reduce_scatter(ranks: int) -> Schedule:
    """The first half of `ring`: rank i ends with the sum of piece (i + 1) mod N.

    In round k, rank i passes piece (i - k) mod N on to rank i + 1, which adds it.
    """

    def rounds() -> Iterator[Round]:
        source = np.arange(ranks)
        for k in range(ranks - 1):
            yield _single(source, (source + 1) % ranks, (source - k) % ranks, REDUCE)

    return Schedule("ring_reduce_scatter", ranks, ranks, rounds, joint=True)


@functools.cache
def ring_all_gather(ranks: int) -> Schedule:
    """The second half of `ring`: piece (i + 1) mod N of rank i becomes everybody's."""

    def rounds() -> Iterator[Round]:
        source = np.arange(ranks)
        for k in range(ranks - 1):
            yield _single(source, (source + 1) % ranks, (source + 1 - k) % ranks, COPY)

    return Schedule("ring_all_gather", ranks, ranks, rounds, joint=True)


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
        distance = core // 2
        while distance:
            given = (rank ^ distance) // distance * distance
            yield _columns(rank, rank ^ distance, given, given + distance, REDUCE)
            distance //= 2
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
    """Sums go up a binary tree to rank 0, and the result comes down; rank i is over 2i+1 and 2i+2.

    Twice as many rounds as the tree has levels; each vector travels whole.
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

    def rounds() -> Iterator[Round]:
        source = np.arange(ranks)
        for k in range(ranks - 1):
            yield _single(source, (source + 1) % ranks, (source - k) % ranks, COPY)

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
            yield from broadcast(ranks, 0).rounds()

    return Schedule("reduce_to_one", ranks, 1, rounds, all_reduce=True)


def broadcast(ranks: int, root: int) -> Schedule:
    """`root` sends its whole vector to every other rank."""

    def rounds() -> Iterator[Round]:
        if ranks > 1:
            others = np.delete(np.arange(ranks), root)
            zeros = np.zeros_like(others)
            yield _single(zeros + root, others, zeros, COPY)

    return Schedule("broadcast", ranks, 1, rounds)


def _fold(ranks: int, core: int, pieces: int, operation: int) -> Iterator[Round]:
    """Ranks from `core` on hand their vector to rank i - core, or take the sum from there."""
    extra = np.arange(core, ranks)
    if len(extra):
        ends = (extra, extra - core) if operation == REDUCE else (extra - core, extra)
        yield _columns(*ends, np.zeros_like(extra), np.full_like(extra, pieces), operation)


def _power_of_two(ranks: int) -> int:
    """The largest one up to `ranks`."""
    return 1 << ranks.bit_length() - 1


def _distances(core: int) -> Iterator[int]:
    """1, 2, 4 ... below `core`."""
    yield from (1 << bit for bit in range(core.bit_length() - 1))


def _single(source: Round, target: Round, piece: Round, operation: int) -> Round:
    """A round in which each transfer carries one piece."""
    return _columns(source, target, piece, piece + 1, operation)


def _columns(source: Round, target: Round, first: Round, end: Round, operation: int) -> Round:
    return np.stack([source, target, first, end, np.full_like(source, operation)], axis=1)


ALL_REDUCE: Mapping[str, Callable[[int], Schedule]] = {
    make.__name__: functools.cache(make)
    for make in (ring, halving_doubling, butterfly, tree, ring_gather, parallel, reduce_to_one)
}
"""Every algorithm that needs to know the number of ranks alone, by its name; each made once."""
