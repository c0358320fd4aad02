"""A quadratic on which decentralized strategies are followed by hand, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.support.training import Trained, member_of, settings
from torch import Tensor, nn

from orchestra.coordinator.rest import Reason
from orchestra.data import DataPlan
from orchestra.data.feed import Feed, open_samples
from orchestra.records.report import RankReport
from orchestra.strategies.base import Strategy
from orchestra.tasks import Task, TensorData
from orchestra.trainer.session import Session
from orchestra.worker.runtime import Runtime

SIZE = 5
BATCH = 2
CURVATURE = torch.linspace(0.5, 2.0, SIZE, dtype=torch.float64)
Matrix = NDArray[np.float64]


class Place(nn.Module):
    """One vector, which begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))


def quadratic(samples: int) -> Task:
    """Sample k pulls x towards a point of its own: 1/2 sum_d c_d (x_d - b_kd)^2."""
    generator = torch.Generator().manual_seed(samples)
    points = torch.randn(samples, SIZE, generator=generator, dtype=torch.float64)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(model, Place)
        return 0.5 * ((model.x - batch[1]).square() * CURVATURE).sum(1).mean()

    data = TensorData(torch.arange(samples), points)
    return Task(model=Place, train=data, test=data, loss=loss, collate=TensorData.collate)


Gradient = Callable[[int, int, Matrix], Matrix]


def gradients(ranks: int, steps: int) -> Gradient:
    """gradient(rank, step, x) of the task `quadratic` with as many samples as there are steps."""
    task = quadratic(ranks * steps * BATCH)
    plan = DataPlan(0, ranks * steps * BATCH, ranks * BATCH, (1.0,) * ranks)
    samples = open_samples(task.train, 0, task.collate)
    curvature = CURVATURE.numpy()

    def gradient(rank: int, step: int, x: Matrix) -> Matrix:
        (_, points), _ = Feed(samples, plan, rank).next(step)
        result: Matrix = curvature * (x - points.double().numpy().mean(0))
        return result

    return gradient


def gradients_taken(result: Trained, ranks: int, steps: int) -> Gradient:
    """The same of what each rank took from the queue in its own step, as its records say."""
    task = quadratic(ranks * steps * BATCH)
    samples = open_samples(task.train, 0, task.collate)
    curvature = CURVATURE.numpy()
    positions = [[line["position"] for line in result.lines(rank)] for rank in range(ranks)]

    def gradient(rank: int, step: int, x: Matrix) -> Matrix:
        first = positions[rank][step]
        _, points = samples.read(first, first + BATCH)
        value: Matrix = curvature * (x - points.double().numpy().mean(0))
        return value

    return gradient


def each_batch_once(result: Trained, ranks: int, steps: int) -> bool:
    """Whether the ranks together took each batch of the run, and none twice."""
    positions = sorted(line["position"] for rank in range(ranks) for line in result.lines(rank))
    return positions == list(range(0, ranks * steps * BATCH, BATCH))


def train_quadratic(
    strategy: Strategy, ranks: int, steps: int, folder: Path, **training: Any
) -> Trained:
    """Train on threads; `replicas` are those before the agreement at the end."""
    training = {"batch_size": BATCH, "optimizer": "SGD(lr=0.1)", **training}
    run = settings(strategy, ranks, "", **training)
    run = replace(run, task=f"tests.support.decentralized:quadratic({ranks * steps * BATCH})")
    return train_recorded(run, folder)


def train_recorded(run: Any, folder: Path) -> Trained:
    """Train on threads; `replicas` are the parameters before the strategy's `stop`."""
    from safetensors.torch import load_file
    from tests.support.threads import run_ranks

    folder.mkdir(parents=True, exist_ok=True)

    def program(runtime: Runtime) -> tuple[dict[str, Tensor], RankReport, Any, nn.Module]:
        session = Session(runtime, run, run.strategy, folder)
        last: list[dict[str, Tensor]] = []
        finish = session.phases.finish

        def noting(reason: Reason = Reason.END) -> Any:
            state = session.worker.module.state_dict()
            last.append({k: v.detach().clone() for k, v in state.items()})
            return finish(reason)

        session.phases.finish = noting  # type: ignore[method-assign]
        session.begin()
        session.train()
        return last[-1], session.finish(), member_of(session), session.worker.module

    results = run_ranks(len(run.strategy.roles(run.training.ranks).shares), program)
    final = load_file(folder / "parameters.safetensors")
    return Trained(folder, final, *zip(*results, strict=True))


def replicas_of(result: Trained) -> Matrix:
    """[ranks, SIZE]"""
    return np.stack([replica["x"].numpy() for replica in result.replicas])


def momentum_sgd(rate: float, momentum: float, ranks: int) -> Callable[[int, Matrix], Matrix]:
    """What torch.optim.SGD subtracts at a rank, given its gradient."""
    buffers: list[Matrix | None] = [None] * ranks

    def step(rank: int, gradient: Matrix) -> Matrix:
        before = buffers[rank]
        new = gradient if before is None else momentum * before + gradient
        buffers[rank] = new
        return rate * new

    return step


def distance_between(one: Matrix, other: Matrix | Sequence[float]) -> float:
    """The largest difference."""
    return float(np.abs(one - np.asarray(other)).max())
