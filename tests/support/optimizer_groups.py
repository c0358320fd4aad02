"""Own loops whose workers differ in the options of their optimizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.own_loops import (
    BATCH,
    RATE,
    Loop,
    alone,
    close,
    distributed,
    in_order,
    samples,
    sgd,
)
from torch import nn
from torch.utils.data import DataLoader

from orchestra.errors import InputError

Optimizer = torch.optim.Optimizer
RANKS, COUNT, EPOCHS = 2, 18, 2
SHARDED = "AllReduce('ring', shard='optimizer')"
BESIDE = "ParameterServer(placement='beside')"
AVERAGED = ["AllReduce('ring')", "ParameterServer(placement='beside', returns='gradients')"]


def weight_alone(model: nn.Module) -> Optimizer:
    assert isinstance(model, nn.Linear)
    return torch.optim.SGD([model.weight], lr=RATE)


def on_all(loop: Loop, strategy: str, optimizer: Callable[[nn.Module], Optimizer]) -> None:
    """`loop` trains on two workers what it trains in one process."""
    expected = alone(loop, DataLoader(samples(COUNT), RANKS * BATCH), optimizer=optimizer)
    ranks = RANKS + 2 * ("servers=2" in strategy)
    for state in distributed(
        loop, strategy, lambda: in_order(COUNT), ranks=ranks, optimizer=optimizer
    ):
        close(state, expected)


def refused(
    words: str, loop: Loop, strategy: str, optimizer: Callable[[nn.Module], Optimizer] = sgd
) -> None:
    with pytest.raises(InputError, match=words):
        distributed(loop, strategy, lambda: in_order(COUNT), ranks=RANKS, optimizer=optimizer)
