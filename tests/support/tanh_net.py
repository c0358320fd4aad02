"""A two-layer network in float64 whose gradient NumPy knows, and which batch each worker was given.

The prediction for an input a is v . tanh(W a + b); the loss of a sample 1/2 (prediction - y)^2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from tests.support.decentralized import train_recorded
from tests.support.training import Trained, settings
from torch import Tensor, nn

from orchestra.strategies.base import Strategy
from orchestra.tasks import Task, TensorData

Vector = NDArray[np.float64]

INPUTS, HIDDEN = 2, 4
SIZE = HIDDEN * INPUTS + 2 * HIDDEN  # of float64: no padding in a flat layout
BATCHES: WeakKeyDictionary[nn.Module, list[tuple[Vector, Vector]]] = WeakKeyDictionary()
"""Of each module: the inputs and targets of the batches it has had a gradient of.

Not by its id, which another rank's module may have once a copy for warming up is gone.
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        x = torch.from_numpy(start())
        self.weight = nn.Parameter(x[: HIDDEN * INPUTS].reshape(HIDDEN, INPUTS).clone())
        self.bias = nn.Parameter(x[HIDDEN * INPUTS : -HIDDEN].clone())
        self.out = nn.Parameter(x[-HIDDEN:].clone())

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = torch.tanh(inputs @ self.weight.T + self.bias) @ self.out
        return result


def start() -> Vector:
    """x before the first step: W, b and v, one behind the other."""
    return np.random.default_rng(2).normal(size=SIZE)


def gradient_of(inputs: Vector, targets: Vector, x: Vector) -> Vector:
    """That of the batch's mean loss, by the chain rule."""
    weight = x[: HIDDEN * INPUTS].reshape(HIDDEN, INPUTS)
    bias, out = x[HIDDEN * INPUTS : -HIDDEN], x[-HIDDEN:]
    hidden = np.tanh(inputs @ weight.T + bias)
    error = (hidden @ out - targets) / len(targets)
    before = np.outer(error, out) * (1 - hidden**2)
    return np.concatenate([(before.T @ inputs).ravel(), before.sum(0), error @ hidden])


def task(samples: int) -> Task:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, INPUTS, generator=generator, dtype=torch.float64)
    targets = torch.randn(samples, generator=generator, dtype=torch.float64)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            BATCHES.setdefault(model, []).append((batch[0].numpy(), batch[1].numpy()))
        value: Tensor = 0.5 * (model(batch[0]) - batch[1]).square().mean()
        return value

    data = TensorData(inputs, targets)
    return Task(model=Net, train=data, loss=loss, collate=TensorData.collate)


def vector(state: Mapping[str, Tensor]) -> Vector:
    """x of a state of `Net`."""
    return np.concatenate([state[name].numpy().ravel() for name in ("weight", "bias", "out")])


class Run:
    """A training on threads, and the gradients of its batches."""

    def __init__(
        self, strategy: Strategy, ranks: int, samples: int, folder: Path, **training: Any
    ) -> None:
        BATCHES.clear()
        run = settings(strategy, ranks, "", **{"work": "equal", **training})
        run = replace(run, task=f"tests.support.tanh_net:task({samples})")
        self.trained: Trained = train_recorded(run, folder)
        self.batches = [BATCHES.get(module, []) for module in self.trained.modules]
        self.final = vector(self.trained.final)

    @property
    def replicas(self) -> Vector:
        """[ranks, SIZE]: as they were before the agreement at the end."""
        return np.stack([vector(replica) for replica in self.trained.replicas])

    def gradient(self, rank: int, step: int, x: Vector) -> Vector:
        """At x, of the batch that the worker was given in its step."""
        return gradient_of(*self.batches[rank][step], x)

    @property
    def samples(self) -> list[list[int]]:
        """[step][rank]; a rank may have none in the last step."""
        counts = [[len(targets) for _, targets in batches] for batches in self.batches]
        return [list(step) for step in zip_longest(*counts, fillvalue=0)]
