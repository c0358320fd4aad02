"""Regression on the outputs of a seeded random network, and a model that has nothing but a size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from orchestra.tasks import Regression, Synthetic
from orchestra.tasks.task import Task, tensor_task
from orchestra.worker.batches import Batch

#: Units of the hidden layer, and the standard deviation of what they see before tanh: with 2, a
#: linear model explains about 0.82 of the variance.
TEACHER_HIDDEN = 32
TEACHER_GAIN = 2.0


def regression(chosen: Regression) -> Task:
    """Return the task: data in memory, and a student of these settings."""
    inputs, targets = _data(chosen)
    sizes = [chosen.train_samples, chosen.validation_samples, chosen.test_samples]
    splits = zip(torch.split(inputs, sizes), torch.split(targets, sizes), strict=True)
    model = partial(mlp, chosen.inputs, chosen.hidden, chosen.outputs)
    return tensor_task(model, *splits, loss=squared_error, metrics=regression_scores)


def _data(chosen: Regression) -> tuple[Tensor, Tensor]:
    """Make inputs (samples, inputs) and targets (samples, outputs) of all splits, in float32."""
    samples = chosen.train_samples + chosen.validation_samples + chosen.test_samples
    # RandomState: NumPy promises that its stream never changes.
    draw = numpy.random.RandomState(chosen.data_seed).standard_normal
    first = draw((chosen.inputs, TEACHER_HIDDEN)) * TEACHER_GAIN / chosen.inputs**0.5
    second = draw((TEACHER_HIDDEN, chosen.outputs))
    inputs = draw((samples, chosen.inputs))
    signal = numpy.tanh(inputs @ first) @ second
    # Unit variance for each output: otherwise the noise would weigh more on some.
    signal = (signal - signal.mean(0)) / signal.std(0)
    targets = signal + chosen.noise * draw(signal.shape)
    return torch.from_numpy(inputs).float(), torch.from_numpy(targets).float()


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Return two hidden layers with tanh: shape (n, inputs) to shape (n, outputs)."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over the batch and the outputs."""
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets)


def regression_scores(model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
    """Return `scores` of what `model` predicts for all of `batches`."""
    pairs = [(model(inputs), targets) for inputs, targets in batches]
    predictions, targets = (torch.cat(parts).cpu() for parts in zip(*pairs, strict=True))
    return scores(predictions, targets)


def scores(predictions: Tensor, targets: Tensor) -> dict[str, float]:
    """Return figures of a regression, computed in float64; both tensors are (n, outputs).

    - `mae`, `mse`: mean absolute and mean squared error over all n x outputs numbers.
    - `test_variance`: the population variance (divided by the count) of all n x outputs targets
      as one pool; the one mean of that whole pool is subtracted.
    - `r2_pooled`: 1 - (sum of squared errors) / (sum of squared deviations from that one mean);
      so it is 1 - mse / test_variance.
    - `r2_mean`: the plain mean of the R² of each output, from that output's own mean.
    """
    predictions, targets = predictions.double(), targets.double()
    errors = targets - predictions
    mse = errors.square().mean().item()
    variance = targets.var(correction=0).item()
    unexplained = errors.square().sum() / (targets - targets.mean()).square().sum()
    # Two ways to the same number; they part where a dimension is averaged that should not be.
    assert math.isnan(mse) or math.isclose(unexplained.item(), mse / variance, rel_tol=1e-9)
    deviations = (targets - targets.mean(0)).square().sum(0)
    each = 1 - errors.square().sum(0) / deviations
    return {
        "mae": errors.abs().mean().item(),
        "mse": mse,
        "test_variance": variance,
        "r2_pooled": 1 - unexplained.item(),
        "r2_mean": each.mean().item(),
    }


# A model of which only the size is told, to ask how long a training takes, without data

FLOPS_PER_PARAMETER = 6.0
"""Operations of a sample's gradient that uses each parameter once: 2 forward, 4 backward."""


def synthetic(chosen: Synthetic) -> Task:
    """Return the task, which holds no data."""
    flops = chosen.sample_flops or FLOPS_PER_PARAMETER * chosen.parameters
    edges = [chosen.parameters * k // chosen.tensors for k in range(chosen.tensors + 1)]
    sizes = [end - first for first, end in itertools.pairwise(edges)]
    train = Numbers(chosen.samples)
    return Task(model=lambda: Sized(sizes), train=train, loss=pull, sample_flops=flops)


class Numbers(Dataset[Tensor]):
    """Sample i is the number i / samples."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index / self._samples)


class Sized(nn.Module):
    """Vectors of the given sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the numbers, each times the mean of the means of the vectors."""
        means = torch.stack([vector.mean() for vector in self.vectors])
        return numbers * means.mean()


def pull(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean of the model's outputs, whose gradient is the same everywhere."""
    answers: Tensor = model(batch)
    return answers.mean()
