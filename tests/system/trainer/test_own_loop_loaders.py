"""Every strategy over every kind of loader, in a loop of the user's own.

Where a strategy is repeatable its parameters are worked out by hand, in NumPy, from the batches
that each worker was given. Elsewhere workers have to come to the optimum of a quadratic, and to
have read each sample once an epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.support.lab import some
from tests.support.own_loops import (
    BATCH,
    MOMENTUM,
    RANKS,
    RATE,
    Stream,
    mean_square,
    samples,
    sgd,
    small_model,
)
from tests.support.threads import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.own_loop import OwnLoop
from orchestra.worker.runtime import Runtime

Vector = NDArray[np.float64]
Taken = list[list[int]]  # the numbers of the samples in each batch of a worker
COUNT, EPOCHS = 15, 2  # steps of 6, 6 and 3 samples: the last batches are of 2, 1 and 0

LOADERS: dict[str, Callable[[int], Any]] = {
    "in order": lambda count: DataLoader(samples(count), BATCH),
    "shuffled": lambda count: DataLoader(samples(count), BATCH, shuffle=True),
    "drop_last": lambda count: DataLoader(samples(count), BATCH, shuffle=True, drop_last=True),
    "own sampler": lambda count: DataLoader(samples(count), BATCH, sampler=range(count)[::-1]),
    "batch_sampler": lambda count: DataLoader(
        samples(count), batch_sampler=[[n, n - 1] if n else [n] for n in range(count)[::-2]]
    ),
    "stream": lambda count: DataLoader(Stream(samples(count)), BATCH),
    "list": lambda count: list(DataLoader(samples(count), BATCH)),
}
LOADING = {
    "worker process": lambda count: DataLoader(samples(count), BATCH, shuffle=True, num_workers=1)
}


def run(
    strategy: str,
    loader: Any,
    count: int,
    *,
    ranks: int = RANKS,
    epochs: int = EPOCHS,
    **options: Any,
) -> tuple[list[Vector], list[list[Taken]]]:
    """The final parameters of each rank, and what each worker took in each epoch."""

    def program(runtime: Runtime) -> tuple[Vector, list[Taken]]:
        model = small_model()
        optimizer = sgd(model)
        parsed = parse(strategy, STRATEGIES, where="strategy")
        loop = OwnLoop(runtime, model, optimizer, loader(count), parsed, **options)
        taken: list[Taken] = []
        for _ in range(epochs):
            taken.append([])
            for batch in loop.batches:
                taken[-1].append(batch[2].tolist())
                optimizer.zero_grad()
                mean_square(model, batch).backward()
                optimizer.step()
        loop.finish()
        return vector_of(model), taken

    results = run_ranks(ranks, program)
    workers = [taken for _, taken in results if any(taken)]
    return [vector for vector, _ in results], workers


def vector_of(model: nn.Module) -> Vector:
    tensors = [model.state_dict()[name].reshape(-1) for name in ("weight", "bias")]
    return np.array(torch.cat(tensors).tolist())


class ByHand:
    """Replicas of a linear model with squared error, and SGD with momentum on each."""

    def __init__(self, workers: int, count: int) -> None:
        features, targets, _ = (tensor.numpy() for tensor in samples(count).tensors)
        self.x = np.hstack([features, np.ones((count, 1))])
        self.y = targets[:, 0]
        self.theta = np.tile(vector_of(small_model()), (workers, 1))
        self.velocity = np.zeros_like(self.theta)
        self.moved = np.zeros(workers, dtype=bool)
        self.since = np.zeros(workers)  # samples, since the last average

    def gradient(self, worker: int, numbers: list[int]) -> Vector:
        x, y = self.x[numbers], self.y[numbers]
        gradient: Vector = 2 * x.T @ (x @ self.theta[worker] - y) / len(numbers)
        return gradient

    def step(self, worker: int, gradient: Vector) -> None:
        self.velocity[worker] = MOMENTUM * self.velocity[worker] + gradient
        self.theta[worker] -= RATE * self.velocity[worker]

    def mean(self) -> Vector:
        weights = self.since.copy() if self.since.any() else np.ones_like(self.since)
        self.since[:] = 0
        mean: Vector = weights @ self.theta / weights.sum()
        return mean


Turn = list[tuple[list[int], int]]  # of each worker: its batch, and how many samples of it count


def turns(workers: list[list[Taken]], epoch: int) -> list[Turn]:
    """What the workers took together. One that repeats the first one's batch has no samples."""
    together = zip(*(taken[epoch] for taken in workers), strict=True)
    return [
        [(b, len(b) if not w or b != batches[0] else 0) for w, b in enumerate(batches)]
        for batches in together
    ]


def averaged_gradient(replicas: ByHand, turn: Turn) -> None:
    total = sum(counted for _, counted in turn)
    gradient = sum(
        counted / total * replicas.gradient(w, batch) for w, (batch, counted) in enumerate(turn)
    )
    for worker in range(len(turn)):
        replicas.step(worker, np.asarray(gradient))


def local_steps(replicas: ByHand, turn: Turn) -> None:
    gradients = [replicas.gradient(w, batch) for w, (batch, _) in enumerate(turn)]
    for worker, (_, counted) in enumerate(turn):
        if counted:
            replicas.step(worker, gradients[worker])
        replicas.since[worker] += counted


def all_reduce(replicas: ByHand, workers: list[list[Taken]]) -> Vector:
    for epoch in range(EPOCHS):
        for turn in turns(workers, epoch):
            averaged_gradient(replicas, turn)
    result: Vector = replicas.theta[0]
    return result


def local_sgd(
    replicas: ByHand, workers: list[list[Taken]], *, nesterov: bool = False, after: int = 0
) -> Vector:
    """Rounds of two steps; those before step `after` are of averaged gradients."""
    start, velocity, steps = replicas.theta[0].copy(), np.zeros(4), 0
    for epoch in range(EPOCHS):
        for turn in turns(workers, epoch):
            steps += 1
            if steps <= after:
                averaged_gradient(replicas, turn)
                continue
            local_steps(replicas, turn)
            if (steps - after) % 2:
                continue
            average = replicas.mean()
            if nesterov:
                delta = start - average
                velocity = 0.9 * velocity + delta
                start = start - 0.7 * (delta + 0.9 * velocity)
                average = start
            replicas.theta[:] = average
        replicas.theta[:] = replicas.mean()
    result: Vector = replicas.theta[0]
    return result


def gossip(replicas: ByHand, workers: list[list[Taken]]) -> Vector:
    """A ring of three: each mixes with both others, a third of each."""
    for epoch in range(EPOCHS):
        for turn in turns(workers, epoch):
            gradients = [replicas.gradient(w, batch) for w, (batch, _) in enumerate(turn)]
            replicas.theta[:] = replicas.theta.mean(axis=0)
            for worker, (_, counted) in enumerate(turn):
                if counted:
                    replicas.step(worker, gradients[worker])
        replicas.theta[:] = replicas.theta.mean(axis=0)
    result: Vector = replicas.theta[0]
    return result


REPEATABLE: list[tuple[str, int, Callable[[ByHand, list[list[Taken]]], Vector]]] = [
    ("AllReduce('ring')", RANKS, all_reduce),
    ("AllReduce('ring', shard='optimizer')", RANKS, all_reduce),
    ("ParameterServer(placement='beside')", RANKS, all_reduce),
    ("ParameterServer(servers=2)", RANKS + 2, all_reduce),
    ("ParameterServer(placement='beside', returns='gradients')", RANKS, all_reduce),
    ("ParameterServer(consistency='bounded', staleness=0)", RANKS + 1, all_reduce),
    ("LocalSGD(2)", RANKS, local_sgd),
    ("LocalSGD(2, outer=Nesterov(0.7, 0.9))", RANKS, lambda r, w: local_sgd(r, w, nesterov=True)),
    (
        "Switch(AllReduce('ring'), LocalSGD(2), when=AfterSteps(2))",
        RANKS,
        lambda r, w: local_sgd(r, w, after=2),
    ),
    ("Gossip", RANKS, gossip),
]


@pytest.mark.parametrize(("strategy", "ranks", "by_hand"), some(REPEATABLE))
def test_parameters_are_those_worked_out_by_hand(
    strategy: str, ranks: int, by_hand: Callable[[ByHand, list[list[Taken]]], Vector]
) -> None:
    loaders = LOADERS | (LOADING if strategy in (REPEATABLE[0][0], "LocalSGD(2)") else {})
    for kind, loader in loaders.items():
        vectors, workers = run(strategy, loader, COUNT, ranks=ranks)
        assert len(workers) == RANKS
        for epoch in range(EPOCHS):
            counted = [n for turn in turns(workers, epoch) for batch, c in turn if c for n in batch]
            everything = list(range(COUNT))
            if kind == "drop_last":
                assert len(set(counted)) == len(counted) == 12
            else:
                assert sorted(counted) == everything, kind
        expected = by_hand(ByHand(RANKS, COUNT), workers)
        for vector in vectors[:RANKS]:
            np.testing.assert_allclose(vector, expected, rtol=1e-12, atol=1e-12, err_msg=kind)


SELF_PACED = [
    "ParameterServer(consistency='asynchronous')",
    "ParameterServer(consistency='asynchronous', placement='beside')",
    "ParameterServer(consistency='bounded', staleness=2)",
    "StochasticGradientPush(overlap=1)",
    "PairwiseAveraging",
    "ElasticAveraging(1)",
    "Hop(staleness=4, skip=4)",
    "Prague(2)",
    "Switch(AllReduce('ring'), PairwiseAveraging, when=AfterSteps(4), moments='averaged')",
]


def linear_samples(count: int) -> TensorDataset:
    """Targets that some linear model meets exactly, so that all gradients vanish there."""
    data = samples(count)
    features = data.tensors[0]
    targets = features @ torch.tensor([[0.75], [-0.5], [0.25]], dtype=torch.float64) + 0.125
    return TensorDataset(features, targets, data.tensors[2])


PACED: dict[str, tuple[Any, str]] = {
    "shared": (lambda n: DataLoader(linear_samples(n), BATCH, shuffle=True), "shared"),
    "equal": (lambda n: DataLoader(linear_samples(n), BATCH, shuffle=True), "equal"),
    "stream": (lambda n: DataLoader(Stream(linear_samples(n)), BATCH), "shared"),
}
PACED_LOADERS = [
    pytest.param(strategy, kind, marks=() if place % 3 == number else pytest.mark.lab)
    for place, strategy in enumerate(SELF_PACED)
    for number, kind in enumerate(PACED)
]


@pytest.mark.parametrize(("strategy", "kind"), some(PACED_LOADERS))
def test_at_their_own_pace_workers_come_to_the_optimum(strategy: str, kind: str) -> None:
    """Every sample is read once an epoch, whether work is shared or dealt out."""
    count, epochs = 30, 25
    loader, work = PACED[kind]
    vectors, workers = run(strategy, loader, count, epochs=epochs, work=work)
    for epoch in random.Random(0).sample(range(epochs), 5):
        read = [n for taken in workers for batch in taken[epoch] for n in batch]
        repeated = kind == "stream"  # where batches run out in mid-turn; it counts 0
        assert sorted(set(read) if repeated else read) == list(range(count))
    for vector in vectors:
        np.testing.assert_allclose(vector, [0.75, -0.5, 0.25, 0.125], atol=0.02)
