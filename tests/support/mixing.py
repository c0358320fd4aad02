"""Graphs that a test gives, and the matrices of their weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestra.topologies import Graph, Topology, doubly_stochastic


@dataclass(frozen=True, repr=False)
class Given(Topology):
    """The graph of a test."""

    given: tuple[tuple[int, ...], ...] = ()

    def links(self, ranks: int, step: int) -> Graph:
        return self.given


def matrix_of(graph: Graph) -> NDArray[np.float64]:
    """W of gossip, as a matrix."""
    matrix = np.zeros((len(graph), len(graph)))
    for rank, row in enumerate(doubly_stochastic(graph)):
        for source, weight in row.items():
            matrix[rank, source] = weight
    return matrix
