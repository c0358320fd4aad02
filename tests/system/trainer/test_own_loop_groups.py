"""Own loops that change options of their optimizer, and workers whose optimizers part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.support.optimizer_groups import (
    AVERAGED,
    BESIDE,
    EPOCHS,
    SHARDED,
    Optimizer,
    on_all,
    refused,
    weight_alone,
)
from tests.support.own_loops import RATE, Loop, distributed, in_order, mean_square, sgd
from torch import nn

ELSEWHERE = [SHARDED, BESIDE, "ParameterServer(servers=2, replicas=1)"]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def each_step(
    model: nn.Module, optimizer: Optimizer, batches: Iterable[Any], after: Callable[[], None]
) -> None:
    for batch in batches:
        optimizer.zero_grad()
        mean_square(model, batch).backward()
        optimizer.step()
        after()


def one_cycle(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    """The schedule changes momentum or betas in each step, the loop weight decay."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)

    def after() -> None:
        schedule.step()
        optimizer.param_groups[0]["weight_decay"] += 0.03

    for _ in range(EPOCHS):
        each_step(model, optimizer, batches, after)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize(
    "strategy", [*ELSEWHERE, f"Switch(AllReduce('ring'), {BESIDE}, when=AfterSteps(4))"]
)
def test_options_that_the_loop_changes_travel_to_where_the_update_is(
    strategy: str, optimizer: Callable[[nn.Module], Optimizer]
) -> None:
    if "Switch" in strategy and optimizer is sgd:
        pytest.skip("the same as with AdamW")
    on_all(one_cycle, strategy, optimizer)


def test_an_option_that_cannot_be_sent_is_refused() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        optimizer.param_groups[0]["nesterov"] = object()
        each_step(model, optimizer, batches, lambda: None)

    refused("cannot be sent to servers: make it a number", loop, BESIDE)


def group_added_later(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    assert isinstance(model, nn.Linear)
    each_step(model, optimizer, batches, lambda: None)
    optimizer.add_param_group({"params": [model.bias], "lr": 0.1})
    each_step(model, optimizer, batches, lambda: None)


@pytest.mark.parametrize("strategy", [*AVERAGED, "LocalSGD(1)"])
def test_a_group_may_be_added_where_the_users_optimizer_steps(strategy: str) -> None:
    on_all(group_added_later, strategy, weight_alone)


@pytest.mark.parametrize(
    "strategy", [SHARDED, BESIDE, "Switch(AllReduce, Gossip, when=AfterSteps(99))"]
)
def test_a_group_that_others_do_not_know_of_is_refused(strategy: str) -> None:
    refused("make all groups before, with lr=0", group_added_later, strategy, weight_alone)


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio et al., 2024), which keeps its weights in its groups."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": RATE, "beta": 0.9, "weight_sum": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                lr, beta = group["lr"], group["beta"]
                group["weight_sum"] += lr**2
                part = lr**2 / group["weight_sum"]
                for y in group["params"]:
                    z = self.state[y].setdefault("z", y.clone())
                    y.lerp_(z, part).add_(y.grad, alpha=lr * (beta * (1 - part) - 1))
                    z.sub_(y.grad, alpha=lr)

    def _move(self, share: float) -> None:
        with torch.no_grad():
            for y, state in self.state.items():
                y.lerp_(state["z"], share)

    def train(self) -> None:
        """Go from the averaged weights to those at which gradients are computed."""
        self._move(1 - self.param_groups[0]["beta"])

    def eval(self) -> None:
        """Go to the averaged weights."""
        self._move(1 - 1 / self.param_groups[0]["beta"])


def schedule_free(model: nn.Module) -> Optimizer:
    return ScheduleFree(model.parameters())


def evaluated(model: nn.Module, optimizer: Any, batches: Iterable[Any]) -> None:
    for epoch in range(EPOCHS):
        if epoch:
            optimizer.train()
        each_step(model, optimizer, batches, lambda: None)
        optimizer.eval()


@pytest.mark.parametrize("strategy", AVERAGED)
def test_an_optimizer_with_state_in_its_groups_steps_where_the_user_sees_it(strategy: str) -> None:
    on_all(evaluated, strategy, schedule_free)


@pytest.mark.parametrize("strategy", [SHARDED, BESIDE, "LocalSGD(1)"])
def test_an_optimizer_with_state_in_its_groups_is_refused_elsewhere(strategy: str) -> None:
    refused("ScheduleFree writes weight_sum into its groups", evaluated, strategy, schedule_free)


def first(batches: Any) -> bool:
    """Whether this is the first worker, or the only one."""
    return not hasattr(batches, "worker") or batches.worker.rank == 0


def rate_by_own_loss(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss = mean_square(model, batch)
        loss.backward()
        optimizer.step()
        if loss.item() > 0.3:
            optimizer.param_groups[0]["lr"] /= 2


def steps_at(*own: int) -> Loop:
    """Step at all batches but one: its number is another one on each rank, none if below 0."""

    def loop(model: nn.Module, optimizer: Optimizer, batches: Any) -> None:
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            if number != own[not first(batches)]:
                optimizer.step()

    return loop


SERVERS = [BESIDE, "ParameterServer(placement='beside', returns='gradients')"]


@pytest.mark.parametrize("strategy", ["AllReduce('ring')", SHARDED, *SERVERS, "LocalSGD(2)"])
def test_rates_that_follow_a_workers_own_loss_are_refused(strategy: str) -> None:
    refused("optimizers differ: .*orchestra.mean", rate_by_own_loss, strategy)


def test_rates_may_follow_a_workers_own_loss_where_each_push_is_a_step() -> None:
    asynchronous = "ParameterServer(consistency='asynchronous', placement='beside')"
    distributed(rate_by_own_loss, asynchronous, lambda: in_order(8), ranks=2)


@pytest.mark.parametrize("strategy", ["AllReduce('ring')", *SERVERS])
@pytest.mark.parametrize("skipped", [(-1, 2), (-1, 4), (1, 2)], ids=["once", "last", "unlike"])
def test_steps_at_unlike_batches_are_refused(strategy: str, skipped: tuple[int, int]) -> None:
    refused("optimizers differ: in the batches", steps_at(*skipped), strategy)


def test_replicas_that_step_at_unlike_batches_are_refused() -> None:
    refused("optimizers differ: in the batches", steps_at(1, 2), "LocalSGD(2)")


@pytest.mark.parametrize("strategy", [*AVERAGED, SHARDED, BESIDE, "LocalSGD(1)"])
def test_a_batch_at_which_no_worker_steps_counts_for_nothing(strategy: str) -> None:
    on_all(steps_at(1, 1), strategy, sgd)
