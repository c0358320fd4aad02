"""Who talks to whom, step by step, and the weights that they mix with. Pure data."""

from orchestra.topologies.graphs import (
    Complete,
    Exponential,
    Graph,
    RandomRegular,
    Ring,
    Star,
    Topology,
    Weights,
    connect,
    connected,
    doubly_stochastic,
    random_shares,
    sources_of,
    uniform_shares,
)

__all__ = [
    "Complete",
    "Exponential",
    "Graph",
    "RandomRegular",
    "Ring",
    "Star",
    "Topology",
    "Weights",
    "connect",
    "connected",
    "doubly_stochastic",
    "random_shares",
    "sources_of",
    "uniform_shares",
]
