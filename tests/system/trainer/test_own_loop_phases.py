"""What an own loop's optimizer goes on with where a `Switch` changes its phase."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.own_loops import (
    BATCH,
    RANKS,
    State,
    alone,
    close,
    distributed,
    in_order,
    mean_square,
    member_of,
    samples,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from orchestra.errors import InputError

STEPS = 4  # of a phase
COUNT = 2 * STEPS * BATCH * RANKS


class Branches(nn.Module):
    """`often` is used for most batches, `once` for one in six, so by some workers only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.often, self.once = (nn.Linear(3, 1) for _ in range(3))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.double().parameters():
                parameter.uniform_(-0.6, 0.6, generator=generator)
        self.seen: list[list[Tensor]] = []

    def forward(self, features: Tensor, number: int) -> Tensor:
        values: Tensor = self.always(features)
        values = values + self.often(features) if number % 4 < 3 else values
        return values + self.once(features) if number % 6 == 0 else values


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    features, targets, numbers = batch
    return nn.functional.mse_loss(model(features, int(numbers[0]) // BATCH), targets)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for batch in batches:
        assert isinstance(model, Branches)
        model.seen.append(batch)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        mean_square(model, batch).backward()
        optimizer.step()


def mean(values: list[Any]) -> Any:
    return sum(values[1:], start=values[0]) / len(values)


def replayed(models: list[Branches], optimizer_of: Callable[..., Any]) -> State:
    """Each worker's steps alone, then the mean of all, with the mean of the moments, goes on."""
    apart = [Branches() for _ in models]
    optimizers = [optimizer_of(each.parameters()) for each in apart]
    for model, optimizer, run in zip(apart, optimizers, models, strict=True):
        loop(model, optimizer, run.seen[:STEPS])
    together = Branches()
    unlike: set[int] = set()
    optimizer = optimizer_of(together.parameters())
    for parameter, *own in zip(*(each.parameters() for each in [together, *apart]), strict=True):
        parameter.data.copy_(mean([each.data for each in own]))
        states = [each.state.get(p) for each, p in zip(optimizers, own, strict=True)]
        unlike.add(sum(map(bool, states)))
        if all(states):
            optimizer.state[parameter] = {key: mean([s[key] for s in states]) for key in states[0]}
    assert len(unlike) == 2, "some parameters were used by all workers, and others by some"
    for step in range(STEPS, 2 * STEPS):
        optimizer.zero_grad()
        mean([loss_of(together, run.seen[step]) for run in models]).backward()
        optimizer.step()
    return member_of(together)


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam"])
@pytest.mark.parametrize("then", ["AllReduce", "ParameterServer(placement='beside')"])
def test_averaged_moments_of_unlike_workers_are_their_mean(name: str, then: str) -> None:
    """Also counts of steps, which differ; those of a parameter that some never used begin anew."""
    arguments = {"momentum": 0.9} if name == "SGD" else {}
    optimizer_of = partial(getattr(torch.optim, name), lr=0.05, **arguments)
    models: list[Branches] = []

    def model() -> Branches:
        models.append(Branches())
        return models[-1]

    final = distributed(
        loop,
        f"Switch(LocalSGD(100), {then}, when=AfterSteps({STEPS}), moments='averaged')",
        partial(in_order, COUNT),
        model=model,
        optimizer=lambda each: optimizer_of(each.parameters()),
    )
    expected = replayed(models, optimizer_of)
    for state in final:
        for key, tensor in expected.items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-10, atol=1e-10)
            assert torch.equal(state[key], final[0][key])


class Counting(torch.optim.SGD):
    """Counts steps in a plain number, keeps a remark, and steps by less and less."""

    remark: Any = None

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            if self.remark is not None:
                state["remark"] = self.remark
            parameter.data.sub_(parameter.grad / state["count"], alpha=0.1)


def test_plain_numbers_have_a_mean_and_other_state_is_refused() -> None:
    strategy = f"Switch(LocalSGD(100), AllReduce, when=AfterSteps({STEPS}), moments='averaged')"

    def train(remark: Any) -> list[State]:
        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            counting = Counting(model.parameters(), lr=0.1)
            counting.remark = remark
            return counting

        return distributed(
            loop, strategy, partial(in_order, COUNT), model=Branches, optimizer=optimizer
        )

    one, *others = train(None)
    for other in others:
        assert all(torch.equal(one[name], other[name]) for name in one)
    for remark in ("good", torch.tensor([3], dtype=torch.uint8)):
        with pytest.raises(InputError, match="'remark' in the optimizer's state has no mean: set"):
            train(remark)


SERVER = "ParameterServer(placement='beside')"


@pytest.mark.parametrize(
    "strategy",
    [
        f"Switch(Switch(AllReduce, AllReduce('tree'), when=AfterSteps(2)), AllReduce, "
        f"when=AfterSteps({STEPS}), moments='reset')",
        f"Switch(Switch(AllReduce, {SERVER}, when=AfterSteps(2)), AllReduce, "
        f"when=AfterSteps({STEPS}), moments='reset')",
    ],
)
def test_reset_moments_are_not_those_of_an_earlier_change(strategy: str) -> None:
    """Three workers equal one process that clears its optimizer's state after as many steps."""

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.05)

    def resetting(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        for step, batch in enumerate(batches):
            if step == STEPS:
                optimizer.state.clear()
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()

    final = distributed(plain, strategy, partial(in_order, COUNT), optimizer=adam)
    whole = DataLoader(samples(COUNT), batch_size=BATCH * RANKS)
    for state in final:
        close(state, alone(resetting, whole, optimizer=adam))
