"""The best order of a ring: against all orders where they can be tried, and on built cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from orchestra.errors import InputError
from orchestra.schedules import ring_order
from orchestra.schedules.ring_order import EXACT, Order, _improved, _nearest

Costs = NDArray[np.float64]


def random_costs(ranks: int, seed: int, *, symmetric: bool = False) -> Costs:
    costs = np.random.default_rng(seed).integers(1, 30, (ranks, ranks)).astype(np.float64)
    return costs + costs.T if symmetric else costs


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("ranks", [3, 4, 5, 6, 7])
def test_no_order_is_better(ranks: int, symmetric: bool) -> None:
    for seed in range(6):
        costs = random_costs(ranks, seed, symmetric=symmetric)
        orders = [(0, *rest) for rest in itertools.permutations(range(1, ranks))]
        prices = [(max(links := ring(costs, order)), sum(links)) for order in orders]
        found = ring_order(costs.tolist())
        assert found[0] == 0
        assert sorted(found) == list(range(ranks))
        assert (max(ring(costs, found)), sum(ring(costs, found))) == min(prices)


def ring(costs: Costs, order: Order) -> list[float]:
    """The cost of each link."""
    return [float(costs[a, b]) for a, b in itertools.pairwise((*order, order[0]))]


def test_the_slowest_link_counts_before_the_sum() -> None:
    """By number the links cost 1 + 1 + 1 + 10; an order without the link of 10 costs 4 x 4."""
    costs = np.full((4, 4), 4.0)
    for source, target, cost in ((0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 0, 10)):
        costs[source, target] = cost
    assert ring(costs, (0, 1, 2, 3)) == [1, 1, 1, 10]
    assert max(ring(costs, ring_order(costs.tolist()))) == 4


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_with_up_to_two_ranks_there_is_one_order(ranks: int) -> None:
    assert ring_order([[1.0] * ranks] * ranks) == tuple(range(ranks))


def racks(ranks: int, size: int) -> Costs:
    """1 inside a rack, 10 between racks; the ranks are dealt out to the racks like cards."""
    rack = np.arange(ranks) % (ranks // size)
    return np.where(rack[:, None] == rack, 1.0, 10.0)


@pytest.mark.parametrize(("ranks", "size"), [(6, 3), (12, 4), (16, 4), (24, 6), (40, 5)])
def test_a_rack_is_left_once(ranks: int, size: int) -> None:
    found = ring_order(racks(ranks, size).tolist())
    assert found[0] == 0
    assert sorted(found) == list(range(ranks))
    count = ranks // size
    assert sum(ring(racks(ranks, size), found)) == 10 * count + ranks - count


def test_a_planted_ring_is_found_among_many() -> None:
    """One order has links of 1 throughout; nearest neighbours alone are led astray from it."""
    random = np.random.default_rng(5)
    for _ in range(3):
        ranks = 18
        planted = [0, *(random.permutation(ranks - 1) + 1).tolist()]
        costs = random.uniform(2.0, 9.0, (ranks, ranks))
        for a, b in itertools.pairwise([*planted, 0]):
            costs[a, b] = 1.0
        assert list(ring_order(costs.tolist())) == planted


@pytest.mark.parametrize("seed", range(5))
def test_beyond_the_exact_it_is_near_the_best(seed: int) -> None:
    """Judged where the best is known; points in the plane, whose distances are the costs."""
    points = np.random.default_rng(seed).uniform(size=(EXACT - 2, 2))
    costs = np.linalg.norm(points[:, None] - points, axis=2)
    best, found = ring_order(costs.tolist()), _improved(costs)
    assert max(ring(costs, found)) <= 1.2 * max(ring(costs, best))
    by_number = tuple(range(len(points)))
    assert max(ring(costs, found)) < max(ring(costs, by_number))


@pytest.mark.parametrize("seed", range(3))
def test_beyond_the_exact_exchanges_shorten_the_first_guess(seed: int) -> None:
    points = np.random.default_rng(seed).uniform(size=(2 * EXACT, 2))
    costs = np.linalg.norm(points[:, None] - points, axis=2)
    found = ring(costs, ring_order(costs.tolist()))
    guesses = [ring(costs, _nearest(costs, start)) for start in range(len(points))]
    assert max(found) < 0.8 * min(map(max, guesses))
    assert sum(found) < min(map(sum, guesses))


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ([[0, 1], [1]], "row 1 of the costs has 1 entries"),
        ([[0, 1, 2], [1, 0, 2]], "row 0 of the costs has 3 entries, but there are 2 rows"),
        ([[0, 1, 1], [1, 0, -2], [1, 1, 0]], "from rank 1 to rank 2 is -2.0"),
        ([[0, 1, 1], [1, 0, 1], [float("nan"), 1, 0]], "from rank 2 to rank 0 is nan"),
    ],
)
def test_what_is_no_matrix_of_costs_is_refused(costs: list[list[float]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ring_order(costs)
