"""Several loops in one script. Without a launcher they are plain PyTorch, with the batch of both
workers: what the distributed script has to come to."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import orchestra

FEATURES = torch.linspace(-1, 1, 48, dtype=torch.float64).view(16, 3).sin()
TARGETS = FEATURES.sum(1, keepdim=True)
LAUNCHED = "RANK" in os.environ

Loop = tuple[nn.Module, torch.optim.Optimizer, Any]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def loader(samples: int = 16) -> Any:
    data = TensorDataset(FEATURES[:samples], TARGETS[:samples])
    return DataLoader(data, batch_size=2 if LAUNCHED else 4)


def distribute(model: nn.Module, batches: Any, strategy: str) -> Loop:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    if not LAUNCHED:
        return model, optimizer, batches
    return orchestra.distribute(model, optimizer, batches, strategy)


def step(optimizer: torch.optim.Optimizer, outputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    mse_loss(outputs, targets).backward()
    optimizer.step()


def epochs(loop: Loop, count: int = 2, leave_at: int = 10**9) -> nn.Module:
    model, optimizer, batches = loop
    for _ in range(count):
        for number, (features, targets) in enumerate(batches):
            if number == leave_at:
                break
            step(optimizer, model(features), targets)
    return model


def folds(strategy: str) -> Iterator[nn.Module]:
    """The second one is left in the middle of an epoch."""
    yield epochs(distribute(net(0), loader(8), strategy))
    yield epochs(distribute(net(1), loader(16), strategy), count=1, leave_at=2)


def cell_run_twice(strategy: str) -> Iterator[nn.Module]:
    """One model; the second time its batches are those that the first time gave."""
    model, batches = net(2), loader()
    for _ in range(2):
        loop = model, _, batches = distribute(model, batches, strategy)
        epochs(loop, count=1)
    yield model


def by_turns(strategy: str) -> Iterator[nn.Module]:
    """As in a GAN: one of two models is trained on what the other one makes."""
    torch.manual_seed(5)
    first, optimizer, batches = distribute(nn.Linear(3, 3).double(), loader(), strategy)
    second, other, batches = distribute(net(3), batches, strategy)
    for _ in range(2):
        for features, targets in batches:
            step(other, second(first(features).detach()), targets)
            step(optimizer, second(first(features)), targets)
    yield first
    yield second


def get_batch(strategy: str) -> Iterator[nn.Module]:
    """A loop of so many steps, which takes its batches with `next`."""
    model, optimizer, batches = distribute(net(4), loader(), strategy)
    following = iter(batches)
    steps = 0
    while steps < 6:
        try:
            features, targets = next(following)
        except StopIteration:
            following = iter(batches)
            features, targets = next(following)
        step(optimizer, model(features), targets)
        steps += 1
    yield model


PARTS: dict[str, Callable[[str], Iterator[nn.Module]]] = {
    part.__name__: part for part in (folds, cell_run_twice, by_turns, get_batch)
}


def trained(strategy: str, parts: list[str]) -> list[list[float]]:
    """The parameters of each model."""
    models = [model for part in parts for model in PARTS[part](strategy)]
    return [nn.utils.parameters_to_vector(model.parameters()).tolist() for model in models]


def main(strategy: str, parts: list[str]) -> None:
    torch.set_num_threads(1)
    before = (orchestra.rank(), orchestra.world_size())
    if LAUNCHED and "ring" in strategy:
        dist.init_process_group("gloo")
    vectors = trained(strategy, parts)
    assert (orchestra.rank(), orchestra.world_size()) == before
    assert orchestra.is_first() == (before[0] == 0)
    if dist.is_initialized():
        total = torch.ones(1)
        dist.all_reduce(total)
        assert int(total) == before[1]
        dist.destroy_process_group()
    Path(f"rank-{before[0]}.json").write_text(json.dumps(vectors))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
