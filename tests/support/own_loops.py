"""Loops of the user's own on threads, the same ones in one process, and what both are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tests.support.threads import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.own_loop import OwnLoop
from orchestra.worker.runtime import Runtime

BATCH, RANKS = 2, 3
RATE, MOMENTUM = 0.05, 0.5

State = dict[str, Tensor]
Loop = Callable[[nn.Module, torch.optim.Optimizer, Iterable[Any]], None]


def samples(count: int) -> TensorDataset:
    """Features, targets, and the number of each sample."""
    generator = torch.Generator().manual_seed(count)
    features = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(features, features.sum(1, keepdim=True).sin(), torch.arange(count))


def in_order(count: int) -> DataLoader[Any]:
    """The loader of a single machine."""
    return DataLoader(samples(count), batch_size=BATCH)


class Stream(IterableDataset[Any]):
    """A stream that does not know its length."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return (self._data[index] for index in range(len(self._data)))


def small_model() -> nn.Module:
    """A linear one, always the same."""
    model = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.25, 0.125]]))
        model.bias.zero_()
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With momentum, so that a step that is made twice is seen."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def member_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def distributed(
    loop: Loop,
    strategy: str,
    loader: Callable[[], Any],
    *,
    ranks: int = RANKS,
    model: Callable[[], nn.Module] = small_model,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> list[State]:
    """What `loop` trains on each rank."""

    def program(runtime: Runtime) -> State:
        mine = model()
        mine_optimizer = optimizer(mine)
        parsed = parse(strategy, STRATEGIES, where="strategy")
        own = OwnLoop(runtime, mine, mine_optimizer, loader(), parsed, **options)
        loop(mine, mine_optimizer, own.batches)
        own.finish()
        return member_of(mine)

    return run_ranks(ranks, program)


def alone(
    loop: Loop,
    batches: Iterable[Any],
    model: Callable[[], nn.Module] = small_model,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> State:
    """What `loop` trains in plain PyTorch on `batches`."""
    mine = model()
    loop(mine, optimizer(mine), batches)
    return member_of(mine)


def close(one: State, other: State) -> None:
    """Equal but for the order of summation."""
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor, rtol=1e-12, atol=1e-12)
