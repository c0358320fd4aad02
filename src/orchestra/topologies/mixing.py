"""How much of whom: the weights of a mixing step."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache

from orchestra.errors import InputError
from orchestra.topologies.graphs import Graph, sources_of

Weights = tuple[Mapping[int, float], ...]
"""For each rank, the weight that it gives to what it has from each rank, itself included: W_ij."""


@lru_cache(maxsize=1024)
def doubly_stochastic(graph: Graph) -> Weights:
    """Weights whose rows and columns all sum to 1, so that mixing keeps the mean.

    Uniform, 1 / (d + 1), where everyone sends to and hears from d ranks. Else those of
    Metropolis and Hastings, W_ij = 1 / (1 + max(d_i, d_j)), which need links both ways.

    Raises:
        InputError: `graph` is neither regular nor undirected.
    """
    sources = sources_of(graph)
    degrees = {len(peers) for peers in (*graph, *sources)}
    if len(degrees) == 1:
        share = 1.0 / (degrees.pop() + 1)
        return tuple({rank: share, **dict.fromkeys(own, share)} for rank, own in enumerate(sources))
    if sources != graph:
        raise InputError(
            "this graph has one-way links, and not as many for everyone: no simple weights keep "
            "its mean; take StochasticGradientPush, or a regular or undirected topology"
        )
    rows = []
    for rank, peers in enumerate(graph):
        row = {peer: 1.0 / (1 + max(len(peers), len(graph[peer]))) for peer in peers}
        rows.append({rank: 1.0 - sum(row.values()), **row})
    return tuple(rows)


def uniform_shares(targets: tuple[int, ...], rank: int, step: int = 0) -> dict[int, float]:
    """What `rank` sends to each target, and keeps: equal parts of 1, in every step."""
    share = 1.0 / (len(targets) + 1)
    return {rank: share, **dict.fromkeys(targets, share)}


def random_shares(targets: tuple[int, ...], rank: int, step: int, seed: int) -> dict[int, float]:
    """What `rank` sends to each target, and keeps: random parts of 1, its own in every step."""
    stream = random.Random(f"{seed}-{rank}-{step}")
    drawn = {to: stream.uniform(0.1, 1.0) for to in (rank, *targets)}
    total = sum(drawn.values())
    return {to: part / total for to, part in drawn.items()}
