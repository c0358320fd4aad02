"""Own loops whose optimizer steps in an unusual way, or is not the only one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.support.optimizer_groups import (
    AVERAGED,
    BESIDE,
    COUNT,
    RANKS,
    SHARDED,
    on_all,
    refused,
    weight_alone,
)
from tests.support.own_loops import MOMENTUM, RATE, distributed, in_order, mean_square, sgd
from torch import Tensor, nn

Optimizer = torch.optim.Optimizer
RADIUS = 0.05
APART = [BESIDE, "LocalSGD(2)", "Gossip"]
SWITCH = "Switch(AllReduce('ring'), Gossip, when=AfterSteps(4))"


class SharpnessAware(torch.optim.Optimizer):
    """SAM (Foret et al., 2021) over SGD, with the interface of its usual implementation."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": RATE})
        self.base = torch.optim.SGD(self.param_groups, lr=RATE, momentum=MOMENTUM)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb."""
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        for each in parameters:
            self.state[each]["before"] = each.clone()
            each.add_(each.grad, alpha=float(RADIUS / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Go back, and step."""
        for each in self.param_groups[0]["params"]:
            each.copy_(self.state[each].pop("before"))
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        self.first_step()
        closure()
        self.second_step()


class Twice(torch.optim.Optimizer):
    """Two steps, each with a gradient of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": RATE})

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            loss = closure()
            with torch.no_grad():
                for each in self.param_groups[0]["params"]:
                    each.sub_(each.grad, alpha=self.param_groups[0]["lr"])
        return loss


def sharpness_aware(model: nn.Module) -> Optimizer:
    return SharpnessAware(model.parameters())


def twice(model: nn.Module) -> Optimizer:
    return Twice(model.parameters())


def in_halves(model: nn.Module, optimizer: Any, batches: Iterable[Any]) -> None:
    for batch in batches:
        mean_square(model, batch).backward()
        optimizer.first_step()
        mean_square(model, batch).backward()
        optimizer.second_step()


def by_hand(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    """Climb, and go back, without an optimizer's help."""
    for batch in batches:
        optimizer.zero_grad()
        mean_square(model, batch).backward()
        with torch.no_grad():
            climbed = [
                (each, RADIUS * each.grad) for each in model.parameters() if each.grad is not None
            ]
            for each, way in climbed:
                each.add_(way)
            optimizer.zero_grad()
        mean_square(model, batch).backward()
        with torch.no_grad():
            for each, way in climbed:
                each.sub_(way)
        optimizer.step()


def closure_after_backward(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for batch in batches:

        def closure(batch: Any = batch) -> Tensor:
            loss = mean_square(model, batch)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)  # type: ignore[arg-type]


def closure_alone(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for batch in batches:

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss = mean_square(model, batch)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None  # type: ignore[arg-type]


def two_optimizers(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    assert isinstance(model, nn.Linear)
    assert model.bias is not None
    other = torch.optim.SGD([model.bias], lr=RATE)
    for batch in batches:
        model.zero_grad()
        mean_square(model, batch).backward()
        optimizer.step()
        other.step()


HALVES: list[tuple[Any, Callable[[nn.Module], Optimizer]]] = [
    (in_halves, sharpness_aware),
    (by_hand, sgd),
    (two_optimizers, weight_alone),
]
CLOSURES: list[tuple[Any, Callable[[nn.Module], Optimizer]]] = [
    (closure_after_backward, sharpness_aware),
    (closure_alone, twice),
]


@pytest.mark.parametrize("strategy", [*AVERAGED, SHARDED])
@pytest.mark.parametrize(("loop", "optimizer"), HALVES)
def test_changes_beside_the_step_are_exact_where_all_have_the_gradient(
    loop: Any, optimizer: Callable[[nn.Module], Optimizer], strategy: str
) -> None:
    on_all(loop, strategy, optimizer)


@pytest.mark.parametrize("strategy", [*APART, SWITCH])
@pytest.mark.parametrize(("loop", "optimizer"), HALVES)
def test_changes_beside_the_step_are_refused_elsewhere(
    loop: Any, optimizer: Callable[[nn.Module], Optimizer], strategy: str
) -> None:
    refused(
        "learns only of steps of the optimizer that distribute was given", loop, strategy, optimizer
    )


@pytest.mark.parametrize("strategy", AVERAGED)
@pytest.mark.parametrize(("loop", "optimizer"), CLOSURES)
def test_an_optimizer_calls_its_closure_as_often_as_it_likes(
    loop: Any, optimizer: Callable[[nn.Module], Optimizer], strategy: str
) -> None:
    on_all(loop, strategy, optimizer)


@pytest.mark.parametrize(("loop", "optimizer"), CLOSURES)
def test_replicas_step_by_closures_of_their_own(
    loop: Any, optimizer: Callable[[nn.Module], Optimizer]
) -> None:
    first, second = distributed(
        loop, "LocalSGD(2)", lambda: in_order(COUNT), ranks=RANKS, optimizer=optimizer
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("strategy", [SHARDED, BESIDE])
@pytest.mark.parametrize(("loop", "optimizer"), CLOSURES)
def test_closures_that_other_optimizers_would_have_to_call_are_refused(
    loop: Any, optimizer: Callable[[nn.Module], Optimizer], strategy: str
) -> None:
    refused("may call the closure again", loop, strategy, optimizer)


def test_a_closure_that_accumulates_is_refused() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        for batch in batches:
            mean_square(model, batch).backward()
            with batches.accumulate():

                def closure(batch: Any = batch) -> Tensor:
                    loss = mean_square(model, batch)
                    loss.backward()
                    return loss

                optimizer.step(closure)  # type: ignore[arg-type]

    refused("leave them out", loop, "AllReduce('ring')", twice)
