"""Compression in loops of the user's own: what waits for later steps stays bounded and exact."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.own_loops import distributed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from orchestra.compression.base import Context, Encoder
from orchestra.errors import InputError

RANKS = 2


def noisy(batches: int) -> TensorDataset:
    """64 features and 8 targets, which depend on them but for some noise."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * batches, 64, generator=generator, dtype=torch.float64)
    weight = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(inputs), 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs @ weight + 0.5 * noise)


def regression(batches: int) -> DataLoader[Any]:
    return DataLoader(noisy(batches), batch_size=8)


def matrix() -> nn.Module:
    """A linear model of 520 parameters, which begin at 0."""
    model = nn.Linear(64, 8, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def half_square(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    loss: Tensor = 0.5 * (model(inputs) - targets).square().sum(1).mean()
    return loss


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        half_square(model, batch).backward()
        optimizer.step()


def slow_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


# A compressor whose errors are kept has to be a contraction


@pytest.mark.parametrize(
    "strategy",
    [
        "Gossip(compression=QSGD(7))",
        "AllReduce(compression=QSGD(7, error_feedback=True))",
        pytest.param(
            "ParameterServer(placement='beside', compression=QSGD(1, error_feedback=True))",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_what_a_quantizer_leaves_out_does_not_grow(strategy: str) -> None:
    """The noise alone has a loss of 1, and the model at the beginning one of 257.

    QSGD's error is larger than what it quantizes, in runs of 512 elements: kept for the next step
    without a divisor, it leads to a loss of 2e8 after 60 steps.
    """
    (state, *_) = distributed(
        plain, strategy, lambda: regression(4 * 60), ranks=4, model=matrix, optimizer=slow_sgd
    )
    inputs, targets = noisy(4 * 60).tensors
    predicted = inputs @ state["weight"].T + state["bias"]
    assert 0.5 * float((predicted - targets).square().sum(1).mean()) < 20


@dataclass(frozen=True, repr=False)
class Loud(Encoder):
    """Each element with a chance of 1/8, times 8: unbiased, and no contraction."""

    adds = True

    def size(self, elements: int, itemsize: int, step: int) -> int:
        return elements * itemsize

    def encode(self, values: Tensor, context: Context) -> Tensor:
        drawn = torch.from_numpy(context.random(shared=True).random(len(values)))
        return 8 * values * (drawn < 1 / 8)

    def add(self, payload: Tensor, out: Tensor, context: Context, alpha: float = 1.0) -> None:
        out.add_(payload, alpha=alpha)


@pytest.mark.parametrize(
    "strategy", ["AllReduce(compression={}(error_feedback=True))", "Gossip(compression={}())"]
)
def test_a_compressor_that_is_no_contraction_is_refused(strategy: str) -> None:
    with pytest.raises(InputError, match=r"Loud.* leaves out more than there was"):
        distributed(
            plain,
            strategy.format(f"{__name__}:Loud"),
            lambda: regression(4),
            ranks=RANKS,
            model=matrix,
        )
