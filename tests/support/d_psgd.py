"""D-PSGD on a quadratic, in NumPy."""

from __future__ import annotations

import numpy as np
from tests.support.decentralized import Matrix, gradients, momentum_sgd
from tests.support.mixing import matrix_of

from orchestra.topologies import Topology

STEPS = 7


def d_psgd(topology: Topology, ranks: int, momentum: float = 0.0) -> Matrix:
    """Lian et al. 2017, Algorithm 1: X <- W X - gamma G(X), row i being worker i."""
    gradient, x = gradients(ranks, STEPS), np.zeros((ranks, 5))
    step = momentum_sgd(0.1, momentum, ranks)
    for k in range(STEPS):
        descent = np.stack([step(i, gradient(i, k, x[i])) for i in range(ranks)])
        x = matrix_of(topology.graph(ranks, k)) @ x - descent
    return x
