"""Hooks that a user registers on parameters, or on the model, in a loop of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gloo import join_gloo
from tests.support.own_loops import (
    State,
    alone,
    close,
    distributed,
    in_order,
    mean_square,
    member_of,
    sgd,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from orchestra.engines.processes import launch
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.own_loop import OwnLoop
from orchestra.worker.runtime import Runtime

Optimizer = torch.optim.Optimizer
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
            found.append((f"{strategy}, {kind}", member_of(model), member_of(reference)))
    return found


def test_hooks_on_parameters_act_as_in_ddp(tmp_path: Path) -> None:
    """They change this rank's gradient before it is averaged, also when registered after
    `distribute`, with a bucket for each tensor: bit for bit."""
    for found in launch(both_ways, str(tmp_path / "store"), 2).results:
        for what, state, expected in found:
            for name, tensor in expected.items():
                assert torch.equal(state[name], tensor), (what, name)


# Training that the hook of the whole model does not see


class Wrapped(nn.Module):
    """A model whose loop trains a part of it: all of its parameters are there."""

    def __init__(self) -> None:
        super().__init__()
        self.part = net()

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.part(values)
        return output


def trains(
    model: nn.Module, optimizer: Optimizer, batches: Iterable[Any], how: str, epochs: int = 3
) -> None:
    for _ in range(epochs):
        model.train(how != "in evaluation mode")
        for batch in batches:
            optimizer.zero_grad()
            part = model.get_submodule("part") if how == "a part" else model
            mean_square(part, batch).backward()
            optimizer.step()


@pytest.mark.parametrize("how", ["in evaluation mode", "a part"])
def test_training_that_no_hook_sees_is_that_of_the_whole_model(how: str) -> None:
    """One worker, so that the order of exchanges does not depend on chance."""
    for strategy in (
        "ElasticAveraging(2, placement='beside')",
        "ElasticAveraging(1, momentum=0.5, placement='beside')",
        "StochasticGradientPush(overlap=1, exchanges='one_at_a_time')",
        "PairwiseAveraging",
    ):
        (expected,), (state,) = (
            distributed(
                functools.partial(trains, how=way), strategy, lambda: in_order(6),
                ranks=1, model=Wrapped,
            )
            for way in ("", how)
        )  # fmt: skip
        close(state, expected)


@pytest.mark.parametrize("how", ["in evaluation mode", "a part"])
@pytest.mark.parametrize(
    "strategy",
    [
        "PairwiseAveraging",
        "ElasticAveraging(2, placement='beside')",
        "StochasticGradientPush(overlap=1, exchanges='one_at_a_time')",
    ],
)
def test_replicas_mix_whichever_part_is_trained(strategy: str, how: str) -> None:
    """A worker that mixes with nobody ends an epoch with what it trains on its batches alone."""
    before_the_end: list[State] = []

    def loop(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        def noted() -> Iterator[Any]:
            for batch in batches:
                yield batch
                state = member_of(model)
            before_the_end.append(state)

        trains(model, optimizer, noted(), how, epochs=1)

    distributed(loop, strategy, lambda: in_order(24), ranks=2, model=Wrapped, work="equal")
    assert len(before_the_end) == 2
    batches = list(in_order(24))
    unmixed = [
        alone(functools.partial(trains, how=how, epochs=1), batches[rank::2], Wrapped)
        for rank in range(2)
    ]
    name = "part.0.weight"
    # A fast worker may end before another one has anything to mix with: one of them has mixed.
    assert any(
        all((state[name] - other[name]).abs().max() > 1e-4 for other in unmixed)
        for state in before_the_end
    )


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_elastic_averaging_keeps_what_workers_agreed_on(momentum: float) -> None:
    """An epoch's end shows the centre, whatever passes forward there. A step that was begun in
    vain, whose batch had no backward pass, moves worker and centre by opposite amounts."""
    seen: dict[str, State] = {}

    def passes(model: nn.Module, batches: Iterable[Any]) -> State:
        for batch in batches:
            mean_square(model, batch)
            state = member_of(model)
        return state

    def loop(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        def noted() -> Iterator[Any]:
            for batch in batches:
                yield batch
                seen["own"] = member_of(model)

        trains(model, optimizer, noted(), "", epochs=1)
        seen["centre"] = member_of(model)
        close(passes(model, in_order(4)), seen["centre"])
        seen["ahead"] = passes(model, batches)
        seen["centre then"] = member_of(model)
        seen["ahead then"] = passes(model, batches)

    strategy = f"ElasticAveraging(1, momentum={momentum}, placement='beside')"
    distributed(loop, strategy, lambda: in_order(6), ranks=1, model=Wrapped)
    own, centre, ahead, centre_then, ahead_then = (each["part.0.weight"] for each in seen.values())
    lookahead = ahead - own  # momentum times the velocity
    assert bool(lookahead.any()) == (momentum > 0)
    moved = centre_then - centre
    assert moved.abs().max() > 1e-4
    torch.testing.assert_close(ahead_then - lookahead, own - moved, rtol=0, atol=1e-12)
