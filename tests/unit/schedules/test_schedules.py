"""Invariant 1 of schedules: exact sums on every rank, and the bytes that the formulas say."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.all_schedules import NODES, RANKS, lengths, schedules
from tests.support.interpreter import buffer_elements, elements_sent, interpret
from tests.support.lab import some

from orchestra.schedules import (
    ALL_REDUCE,
    COPY,
    REDUCE,
    Schedule,
    broadcast,
    hierarchical,
    ring_all_gather,
    ring_reduce_scatter,
)

EVERY = [(name, ranks) for name in ALL_REDUCE for ranks in RANKS]
NOTHING = np.empty((0, 5), dtype=np.int64)
REDUCTIONS = [
    *(pytest.param(ALL_REDUCE[name](ranks), id=f"{name}-{ranks}") for name, ranks in EVERY),
    *(pytest.param(hierarchical(nodes), id=f"hierarchical-{nodes}") for nodes in NODES),
]


def sizes_of_pieces(length: int, pieces: int) -> NDArray[np.int64]:
    """Of `length` elements cut as evenly as can be, at length * k // pieces."""
    return np.diff([length * k // pieces for k in range(pieces + 1)])


@pytest.mark.parametrize("schedule", REDUCTIONS)
def test_every_rank_ends_with_the_exact_sum(schedule: Schedule) -> None:
    random = np.random.default_rng(schedule.ranks)
    for length in lengths(schedule.ranks):
        vectors = list(random.integers(-1000, 1000, (schedule.ranks, length)).astype(np.float64))
        for result in interpret(schedule, vectors):
            np.testing.assert_array_equal(result, np.sum(vectors, axis=0))


@pytest.mark.parametrize("schedule", REDUCTIONS)
def test_all_ranks_end_with_the_same_bits(schedule: Schedule) -> None:
    random = np.random.default_rng(schedule.ranks)
    for length in lengths(schedule.ranks):
        vectors = list(random.standard_normal((schedule.ranks, length)).astype(np.float32))
        results = interpret(schedule, vectors)
        assert len({result.tobytes() for result in results}) == 1
        np.testing.assert_allclose(results[0], np.sum(vectors, axis=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", RANKS)
def test_halves_of_the_ring(ranks: int) -> None:
    """Rank i has the sum of piece i + 1 after the first, and all of them after the second."""
    random = np.random.default_rng(ranks)
    for length in lengths(ranks):
        vectors = list(random.standard_normal((ranks, length)).astype(np.float32))
        edges = ring_reduce_scatter(ranks).edges(length)
        whole = interpret(ALL_REDUCE["ring"](ranks), vectors)[0]
        halfway = interpret(ring_reduce_scatter(ranks), vectors)
        for rank in range(ranks):
            owned = slice(edges[(rank + 1) % ranks], edges[(rank + 1) % ranks + 1])
            assert halfway[rank][owned].tobytes() == whole[owned].tobytes()
        for result in interpret(ring_all_gather(ranks), halfway):
            assert result.tobytes() == whole.tobytes()


@pytest.mark.parametrize("ranks", RANKS)
def test_broadcast_from_every_root(ranks: int) -> None:
    random = np.random.default_rng(ranks)
    for root in range(ranks):
        for length in (0, 1, 97):
            vectors = list(random.standard_normal((ranks, length)).astype(np.float32))
            for result in interpret(broadcast(ranks, root), vectors):
                assert result.tobytes() == vectors[root].tobytes()


@pytest.mark.parametrize("ranks", RANKS)
def test_elements_sent_are_those_of_the_closed_formulas(ranks: int) -> None:
    for n in lengths(ranks):
        sizes = sizes_of_pieces(n, ranks)
        sent = {name: elements_sent(make(ranks), n) for name, make in ALL_REDUCE.items()}
        # Reduce-scatter passes on every piece but the one that the rank comes to own, and
        # all-gather every piece but the one that its successor owns: 2n(N-1)/N where N divides n.
        mine, next_one = np.roll(sizes, -1), np.roll(sizes, -2)
        ring = 2 * n - mine - next_one if ranks > 1 else np.zeros(1)
        np.testing.assert_array_equal(sent["ring"], ring)
        if n % ranks == 0:
            assert set(sent["ring"]) == {2 * n * (ranks - 1) // ranks}
        assert sent["ring_gather"].tolist() == [(ranks - 1) * n] * ranks
        assert sent["parallel"].tolist() == [(ranks - 1) * n] * ranks
        root = (ranks - 1) * n
        assert sent["reduce_to_one"].tolist() == [root] + [n] * (ranks - 1)
        assert sent["halving_doubling"].tolist() == halving_doubling_elements(ranks, n)
        assert sent["butterfly"].tolist() == butterfly_elements(ranks, n)
        children = [sum(c < ranks for c in (2 * i + 1, 2 * i + 2)) for i in range(ranks)]
        assert sent["tree"].tolist() == [((i > 0) + children[i]) * n for i in range(ranks)]
        for name in ("ring", "halving_doubling", "tree", "reduce_to_one"):
            assert sent[name].sum() == 2 * (ranks - 1) * n


def core_of(ranks: int) -> int:
    """The largest power of two up to `ranks`."""
    return max(p for p in (1, 2, 4, 8, 16) if p <= ranks)


def halving_doubling_elements(ranks: int, n: int) -> list[int]:
    """In halving a rank passes on all but its own piece; in doubling all that it has so far."""
    p = core_of(ranks)
    sizes = sizes_of_pieces(n, p)
    sent = []
    for i in range(p):
        doubling = 0
        for bit in range(p.bit_length() - 1):
            doubling += sum(sizes[j] for j in range(p) if j >> bit == i >> bit)
        sent.append(n - sizes[i] + doubling + (n if i + p < ranks else 0))
        if n % p == 0:
            assert sent[i] == 2 * n * (p - 1) // p + (n if i + p < ranks else 0)
    return sent + [n] * (ranks - p)


def butterfly_elements(ranks: int, n: int) -> list[int]:
    """A whole vector a round; and one more to the rank whose vector was folded in."""
    p = core_of(ranks)
    rounds = p.bit_length() - 1
    return [(rounds + (i + p < ranks)) * n for i in range(p)] + [n] * (ranks - p)


@pytest.mark.parametrize("nodes", NODES)
def test_a_hierarchy_sends_little_between_nodes(nodes: tuple[int, ...]) -> None:
    schedule, ranks, count = hierarchical(nodes), sum(nodes), len(nodes)
    node_of = np.repeat(np.arange(count), nodes)
    for n in lengths(ranks):
        edges = np.array(schedule.edges(n))
        between, inside = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for source, target, first, end, _ in np.concatenate([*schedule.rounds(), NOTHING]):
            crosses = node_of[source] != node_of[target]
            (between if crosses else inside)[node_of[source]] += edges[end] - edges[first]
        assert inside.tolist() == [2 * (size - 1) * n for size in nodes]
        assert between.sum() == 2 * (count - 1) * n
        if n % (max(nodes) * count) == 0:
            assert between.tolist() == [2 * n * (count - 1) // count] * count
        if n % (max(nodes) * count) == 0 and len(set(nodes)) == 1:
            g = nodes[0]
            own = 2 * n * (g - 1) // g + 2 * (n // g) * (count - 1) // count
            assert elements_sent(schedule, n).tolist() == [own] * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_flat_hierarchies_are_the_ring(ranks: int) -> None:
    ring = list(ALL_REDUCE["ring"](ranks).rounds())
    for nodes in ((1,) * ranks, (ranks,)):
        rounds = list(hierarchical(nodes).rounds())
        assert len(rounds) == len(ring)
        for ours, theirs in zip(rounds, ring, strict=True):
            assert sorted(ours.tolist()) == sorted(theirs.tolist())


@pytest.mark.parametrize("ranks", RANKS)
def test_broadcast_sends_from_its_root_alone(ranks: int) -> None:
    for root in range(ranks):
        expected = [0] * ranks
        expected[root] = (ranks - 1) * 97
        assert elements_sent(broadcast(ranks, root), 97).tolist() == expected


@pytest.mark.parametrize("ranks", some(RANKS))
def test_buffers_are_those_of_the_closed_formulas(ranks: int) -> None:
    for n in lengths(ranks):
        sizes = sizes_of_pieces(n, ranks)
        for rank in range(ranks):
            needed = {name: buffer_elements(f(ranks), rank, n) for name, f in ALL_REDUCE.items()}
            slots = ranks * n if ranks > 1 else 0
            p = core_of(ranks)
            folded, halves = rank + p < ranks, sizes_of_pieces(n, max(2, p))
            half = halves[: p // 2] if rank < p // 2 else halves[p // 2 :]
            children = sum(child < ranks for child in (2 * rank + 1, 2 * rank + 2))
            assert needed == {
                "ring": max(np.delete(sizes, rank), default=0),
                "halving_doubling": n if folded else sum(half) if 1 < p > rank else 0,
                "butterfly": n if folded or 1 < p > rank else 0,
                "tree": children * n,
                "ring_gather": slots,
                "parallel": slots,
                "reduce_to_one": (ranks - 1) * n if rank == 0 else 0,
            }
            assert buffer_elements(broadcast(ranks, 0), rank, n) == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_rounds(ranks: int) -> None:
    counts = {name: len(list(make(ranks).rounds())) for name, make in ALL_REDUCE.items()}
    more = ranks > 1
    p = core_of(ranks)
    folding = 2 * (p < ranks)
    assert counts == {
        "ring": 2 * (ranks - 1),
        "halving_doubling": 2 * (p.bit_length() - 1) + folding,
        "butterfly": p.bit_length() - 1 + folding,
        "tree": 2 * (ranks.bit_length() - 1),
        "ring_gather": ranks - 1,
        "parallel": int(more),
        "reduce_to_one": 2 * more,
    }
    operations = [int(op) for r in ALL_REDUCE["ring"](ranks).rounds() for op in set(r[:, 4])]
    assert operations == [REDUCE] * (ranks - 1) + [COPY] * (ranks - 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_round_is_free_of_conflicts(ranks: int) -> None:
    """What a rank sends in a round it overwrites not in it; it may add to exactly the same run."""
    for schedule in schedules(ranks):
        for transfers in schedule.rounds():
            source, target, first, end, operation = transfers.T
            assert transfers.shape[1] == 5
            assert transfers.dtype == np.int64
            assert len(transfers)
            assert ((source >= 0) & (source < ranks)).all()
            assert ((target >= 0) & (target < ranks)).all()
            assert ((first >= 0) & (first < end) & (end <= schedule.pieces)).all()
            assert (source != target).all()
            for i, j in np.argwhere(source[:, None] == target):
                same = (first[i], end[i]) == (first[j], end[j]) and operation[j] == REDUCE
                assert same or end[i] <= first[j] or end[j] <= first[i]


@pytest.mark.parametrize("ranks", range(2, 18))
@pytest.mark.parametrize("name", ["ring", "ring_gather"])
def test_in_a_ring_each_rank_sends_once_a_round_to_its_successor(name: str, ranks: int) -> None:
    for transfers in ALL_REDUCE[name](ranks).rounds():
        assert sorted(transfers[:, 0]) == list(range(ranks))
        np.testing.assert_array_equal(transfers[:, 1], (transfers[:, 0] + 1) % ranks)


def test_pieces_cover_the_vector_in_order() -> None:
    for ranks in RANKS:
        schedule = ALL_REDUCE["ring"](ranks)
        for length in lengths(ranks):
            edges = schedule.edges(length)
            assert (edges[0], edges[-1]) == (0, length)
            sizes = np.diff(edges)
            assert len(sizes) == ranks
            assert max(sizes) - min(sizes) <= 1
