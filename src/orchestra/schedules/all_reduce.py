"""All-reduce algorithms: every rank ends with the sum over the ranks, bit for bit the same.

N ranks, n elements. A rank sends: ring 2(N-1)/N n; ring_gather and parallel (N-1) n;
reduce_to_one n, its root (N-1) n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from orchestra.schedules.schedule import COPY, REDUCE, Round, Schedule, transfers


def ring(ranks: int) -> Schedule:
    """Reduce-scatter, then all-gather, round a ring (Patarasuk and Yuan, 2009).

    In round k, rank i passes piece (i - k) mod N on to rank i + 1, which adds it; after N-1
    rounds rank i owns the sum of piece (i + 1) mod N, and N-1 more rounds hand the sums round.
    """

    def rounds() -> Iterator[Round]:
        source = np.arange(ranks)
        target = (source + 1) % ranks
        for k in range(ranks - 1):
            yield _columns(source, target, (source - k) % ranks, REDUCE)
        for k in range(ranks - 1):
            yield _columns(source, target, (source + 1 - k) % ranks, COPY)

    return Schedule("ring", ranks, ranks, rounds)


def ring_gather(ranks: int) -> Schedule:
    """Whole gradients forwarded round the ring: N-1 rounds and a buffer of N gradients.

    The ring of older notes on distributed training: N/2 times the bytes of `ring`.
    """

    def rounds() -> Iterator[Round]:
        source = np.arange(ranks)
        for k in range(ranks - 1):
            yield _columns(source, (source + 1) % ranks, (source - k) % ranks, COPY)

    return Schedule("ring_gather", ranks, ranks, rounds, slots=True)


def parallel(ranks: int) -> Schedule:
    """Every rank sends its whole gradient to every other, in one round (all-to-all)."""

    def rounds() -> Iterator[Round]:
        if ranks > 1:
            source, distance = np.divmod(np.arange(ranks * (ranks - 1)), ranks - 1)
            yield _columns(source, (source + 1 + distance) % ranks, source, COPY)

    return Schedule("parallel", ranks, ranks, rounds, slots=True)


def reduce_to_one(ranks: int) -> Schedule:
    """Rank 0 adds up everybody's gradient in the order of the ranks, and broadcasts the sum."""

    def rounds() -> Iterator[Round]:
        if ranks > 1:
            yield transfers(*((source, 0, 0, REDUCE) for source in range(1, ranks)))
            yield from broadcast(ranks, 0).rounds()

    return Schedule("reduce_to_one", ranks, 1, rounds)


def broadcast(ranks: int, root: int) -> Schedule:
    """`root` sends its whole vector to every other rank."""

    def rounds() -> Iterator[Round]:
        if ranks > 1:
            yield transfers(*((root, other, 0, COPY) for other in range(ranks) if other != root))

    return Schedule("broadcast", ranks, 1, rounds)


def _columns(source: Round, target: Round, piece: Round, operation: int) -> Round:
    return np.stack([source, target, piece, np.full_like(source, operation)], axis=1)


ALL_REDUCE: Mapping[str, Callable[[int], Schedule]] = {
    "ring": ring,
    "ring_gather": ring_gather,
    "parallel": parallel,
    "reduce_to_one": reduce_to_one,
}
"""Every algorithm by the name that `AllReduce` takes."""
