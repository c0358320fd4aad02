"""Graphs and mixing weights: sums, connection over a period, spreading."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.mixing import matrix_of

from orchestra.errors import InputError
from orchestra.settings import setting
from orchestra.strategies.gossip import Gossip
from orchestra.topologies import (
    Complete,
    Exponential,
    Graph,
    RandomRegular,
    Ring,
    Star,
    Topology,
    connected,
    doubly_stochastic,
    random_shares,
    sources_of,
    uniform_shares,
)

TOPOLOGIES = [
    Ring(), Star(), Complete(), Exponential(), Exponential(peers=1), Exponential(peers=2),
    Exponential(peers=5), RandomRegular(), RandomRegular(2, seed=4), RandomRegular(5),
]  # fmt: skip
SIZES = range(1, 18)


def every_graph(topology: Topology, ranks: int) -> list[Graph]:
    return topology.graphs(ranks)


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_gossip_weights_sum_to_one_both_ways(topology: Topology, ranks: int) -> None:
    for graph in every_graph(topology, ranks):
        matrix = matrix_of(graph)
        assert matrix.min() >= 0
        np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-15)
        np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-15)
        links = {(source, target) for source, own in enumerate(graph) for target in own}
        weighted = {(j, i) for i in range(ranks) for j in range(ranks) if matrix[i, j] and i != j}
        assert weighted == links


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_what_anyone_knows_reaches_everyone(topology: Topology, ranks: int) -> None:
    assert connected(topology.graphs(ranks))
    product = np.eye(ranks)
    for step in range(topology.period(ranks) * ranks):
        product = matrix_of(topology.graph(ranks, step)) @ product
    assert product.min() > 0


@dataclass(frozen=True, repr=False)
class OfLists(Topology):
    inside: bool = setting(False, "tuples of lists")

    def links(self, ranks: int, step: int) -> Any:
        lists = [[other for other in range(ranks) if other != rank] for rank in range(ranks)]
        return tuple(lists) if self.inside else lists


@pytest.mark.parametrize("inside", [False, True])
def test_links_in_lists_are_refused_in_one_line(inside: bool) -> None:
    with pytest.raises(InputError, match=r"OfLists.links has to return a tuple .* not a list: "):
        Gossip(OfLists(inside)).roles(3)


def test_a_graph_in_two_parts_is_not_connected() -> None:
    assert not connected([((1,), (0,), (3,), (2,))])
    assert not connected([((1,), ())])  # one way only


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_one_exponential_peer_agrees_exactly_after_a_period(ranks: int) -> None:
    """Assran et al., ICML 2019: after log2 n steps, where n is a power of 2."""
    topology = Exponential(peers=1)
    assert topology.period(ranks) == ranks.bit_length() - 1
    product = np.eye(ranks)
    for graph in every_graph(topology, ranks):
        product = matrix_of(graph) @ product
    np.testing.assert_allclose(product, 1 / ranks, atol=1e-15)


@pytest.mark.parametrize(
    ("peers", "ranks", "distances"),
    [
        (1, 8, [{1}, {2}, {4}]),
        (1, 9, [{1}, {2}, {4}, {8}]),
        (2, 10, [{1, 2}, {3, 6}, {9, 8}]),  # 18 is 8 on a circle of 10
        (2, 6, [{1, 2}, {3}]),  # 6 would be the rank itself
        (None, 10, [{1, 2, 4, 8}]),
        (1, 1, [set()]),
    ],
)
def test_distances_grow_by_powers(peers: int | None, ranks: int, distances: list[set[int]]) -> None:
    graphs = every_graph(Exponential(peers=peers), ranks)
    assert [set(graph[0]) for graph in graphs] == distances


@given(st.integers(1, 17), st.integers(2, 8), st.integers(0, 99))
def test_random_graphs_are_regular_undirected_connected_and_repeatable(
    ranks: int, degree: int, seed: int
) -> None:
    topology = RandomRegular(degree, seed=seed)
    graph = topology.links(ranks, 0)
    wanted = min(degree, ranks - 1)
    assert {len(own) for own in graph} == {wanted + ranks * wanted % 2}
    assert sources_of(graph) == graph
    assert all(rank not in own for rank, own in enumerate(graph))
    assert connected(topology.graphs(ranks))
    assert topology.links(ranks, 0) == graph


def test_the_seed_matters() -> None:
    assert len({RandomRegular(3, seed=seed).graph(12, 0) for seed in range(5)}) > 1


undirected = st.integers(1, 17).flatmap(
    lambda ranks: st.sets(
        st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1)).filter(
            lambda edge: edge[0] < edge[1]
        )
    ).map(lambda edges: graph_of(ranks, edges | {(b, a) for a, b in edges}))
)
directed = st.integers(1, 17).flatmap(
    lambda ranks: st.sets(
        st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1)).filter(
            lambda edge: edge[0] != edge[1]
        )
    ).map(lambda edges: graph_of(ranks, edges))
)


def graph_of(ranks: int, edges: set[tuple[int, int]]) -> Graph:
    return tuple(tuple(sorted(b for a, b in edges if a == rank)) for rank in range(ranks))


@given(undirected)
def test_metropolis_weights_of_any_undirected_graph(graph: Graph) -> None:
    matrix = matrix_of(graph)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-15)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-15)
    assert matrix.min() >= -1e-15
    assert matrix.diagonal().min() > 0


@given(directed, st.integers(0, 9), st.integers(0, 9))
def test_shares_of_any_directed_graph_sum_to_one(graph: Graph, step: int, seed: int) -> None:
    """These are the columns of push-sum's matrix."""
    for rank, targets in enumerate(graph):
        for shares in (uniform_shares(targets, rank), random_shares(targets, rank, step, seed)):
            assert set(shares) == {rank, *targets}
            assert min(shares.values()) > 0
            assert sum(shares.values()) == pytest.approx(1, abs=1e-15)


def test_random_shares_differ_by_rank_step_and_seed_and_repeat() -> None:
    drawn = [
        tuple(random_shares((3, 4), *which).values())
        for which in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]
    ]
    assert len(set(drawn)) == 4
    assert drawn[0] == drawn[4]


def test_an_irregular_one_way_graph_has_no_gossip_weights() -> None:
    with pytest.raises(InputError, match="take StochasticGradientPush"):
        doubly_stochastic(((1, 2), (2,), (0,)))


def test_topologies_load_without_torch() -> None:
    script = "import orchestra.topologies, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
