"""Invariant 1 of schedules: exact sums on every rank, and the bytes that the formulas say."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.interpreter import interpret

from orchestra.schedules import ALL_REDUCE, COPY, REDUCE, Schedule, broadcast

RANKS = range(1, 18)
EVERY = [(name, ranks) for name in ALL_REDUCE for ranks in RANKS]


def lengths(ranks: int) -> list[int]:
    return sorted({0, 1, ranks - 1, ranks, ranks + 1, 2 * ranks, 7, 97, 128})


def schedules(ranks: int) -> list[Schedule]:
    reductions = [make(ranks) for make in ALL_REDUCE.values()]
    return reductions + [broadcast(ranks, root) for root in range(ranks)]


def sizes_of_pieces(length: int, ranks: int) -> NDArray[np.int64]:
    """Of `length` elements cut as evenly as can be, at length * k // ranks."""
    return np.diff([length * k // ranks for k in range(ranks + 1)])


@pytest.mark.parametrize(("name", "ranks"), EVERY)
def test_every_rank_ends_with_the_exact_sum(name: str, ranks: int) -> None:
    random = np.random.default_rng(ranks)
    for length in lengths(ranks):
        vectors = list(random.integers(-1000, 1000, (ranks, length)).astype(np.float64))
        for result in interpret(ALL_REDUCE[name](ranks), vectors):
            np.testing.assert_array_equal(result, np.sum(vectors, axis=0))


@pytest.mark.parametrize(("name", "ranks"), EVERY)
def test_all_ranks_end_with_the_same_bits(name: str, ranks: int) -> None:
    random = np.random.default_rng(ranks)
    for length in lengths(ranks):
        vectors = list(random.standard_normal((ranks, length)).astype(np.float32))
        results = interpret(ALL_REDUCE[name](ranks), vectors)
        assert len({result.tobytes() for result in results}) == 1
        np.testing.assert_allclose(results[0], np.sum(vectors, axis=0), rtol=1e-4, atol=1e-4)


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
        sent = {name: make(ranks).elements_sent(n) for name, make in ALL_REDUCE.items()}
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
        assert sent["ring"].sum() == sent["reduce_to_one"].sum() == 2 * (ranks - 1) * n


@pytest.mark.parametrize("ranks", RANKS)
def test_broadcast_sends_from_its_root_alone(ranks: int) -> None:
    for root in range(ranks):
        expected = [0] * ranks
        expected[root] = (ranks - 1) * 97
        assert broadcast(ranks, root).elements_sent(97).tolist() == expected


@pytest.mark.parametrize("ranks", RANKS)
def test_buffers_are_those_of_the_closed_formulas(ranks: int) -> None:
    for n in lengths(ranks):
        sizes = sizes_of_pieces(n, ranks)
        for rank in range(ranks):
            needed = {name: f(ranks).buffer_elements(rank, n) for name, f in ALL_REDUCE.items()}
            slots = ranks * n if ranks > 1 else 0
            assert needed == {
                "ring": max(np.delete(sizes, rank), default=0),
                "ring_gather": slots,
                "parallel": slots,
                "reduce_to_one": (ranks - 1) * n if rank == 0 else 0,
            }
            assert broadcast(ranks, 0).buffer_elements(rank, n) == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_rounds(ranks: int) -> None:
    counts = {name: len(list(make(ranks).rounds())) for name, make in ALL_REDUCE.items()}
    more = ranks > 1
    assert counts == {
        "ring": 2 * (ranks - 1),
        "ring_gather": ranks - 1,
        "parallel": int(more),
        "reduce_to_one": 2 * more,
    }
    operations = [int(op) for r in ALL_REDUCE["ring"](ranks).rounds() for op in set(r[:, 3])]
    assert operations == [REDUCE] * (ranks - 1) + [COPY] * (ranks - 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_round_is_free_of_conflicts(ranks: int) -> None:
    """What a rank sends in a round it does not receive in it, and it never sends to itself."""
    for schedule in schedules(ranks):
        for transfers in schedule.rounds():
            source, target, piece, _ = transfers.T
            assert transfers.shape[1] == 4
            assert transfers.dtype == np.int64
            assert ((source >= 0) & (source < ranks)).all()
            assert ((target >= 0) & (target < ranks)).all()
            assert ((piece >= 0) & (piece < schedule.pieces)).all()
            assert (source != target).all()
            sent = set(zip(source.tolist(), piece.tolist(), strict=True))
            assert sent.isdisjoint(zip(target.tolist(), piece.tolist(), strict=True))


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
            cuts = [schedule.cut(piece, length) for piece in range(ranks)]
            assert cuts[0][0] == 0
            assert cuts[-1][1] == length
            assert all(end == first for (_, end), (first, _) in pairwise(cuts))
            sizes = [end - first for first, end in cuts]
            assert max(sizes) - min(sizes) <= 1
