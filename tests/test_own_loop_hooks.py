"""Hooks that a user registers on parameters, or on the model, in a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tests.own_loops import State, in_order, mean_square, sgd, state_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from orchestra.bench.timing import join_gloo
from orchestra.engines.processes import launch
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.own_loop import OwnLoop
from orchestra.worker.runtime import Runtime

AVERAGES = (
    "AllReduce('ring')",
    "AllReduce('ring', shard='optimizer')",
    "ParameterServer(servers=2, placement='beside')",
    "ParameterServer(placement='beside', returns='gradients')",
)
COUNT = 24


def masked(parameter: Tensor) -> None:
    """A hook that changes a gradient in place."""
    assert parameter.grad is not None
    parameter.grad.view(-1)[::2] = 0


def noisy(generator: torch.Generator) -> Callable[[Tensor], None]:
    """A hook that puts another gradient in its place, with noise of this rank."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = parameter.grad + noise

    return hook


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def hooked(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any], kind: str, rank: int
) -> None:
    hook = masked if kind == "masked" else noisy(torch.Generator().manual_seed(rank))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for batch in batches:
        optimizer.zero_grad()
        mean_square(model, batch).backward()
        optimizer.step()


def both_ways(runtime: Runtime, store: str) -> list[tuple[str, State, State]]:
    """On one rank: what DistributedDataParallel trains, and what each strategy does."""
    join_gloo(runtime, store)
    rank, found = runtime.rank, []
    for kind in ("masked", "noisy"):
        reference = net()
        mine = list(in_order(COUNT))[rank :: runtime.ranks]
        hooked(DistributedDataParallel(reference), sgd(reference), mine, kind, rank)
        for strategy in AVERAGES:
            model = net()
            optimizer = sgd(model)
            parsed = parse(strategy, STRATEGIES, where="strategy")
            own = OwnLoop(runtime, model, optimizer, in_order(COUNT), parsed, bucket_megabytes=1e-5)
            hooked(model, optimizer, own.batches, kind, rank)
            own.finish()
            found.append((f"{strategy}, {kind}", state_of(model), state_of(reference)))
    return found


def test_hooks_on_parameters_act_as_in_ddp(tmp_path: Path) -> None:
    """They change this rank's gradient before it is averaged, also when registered after
    `distribute`, with a bucket for each tensor: bit for bit."""
    for found in launch(both_ways, str(tmp_path / "store"), 2).results:
        for what, state, expected in found:
            for name, tensor in expected.items():
                assert torch.equal(state[name], tensor), (what, name)
