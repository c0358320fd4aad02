"""Loops of the user's own whose backward passes, batches and steps do not go one by one.

Each is run as it is by one process over the samples of all workers, in plain PyTorch, and has to
train the same on three.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tests.support.lab import some
from tests.support.own_loops import (
    BATCH,
    RANKS,
    Loop,
    Stream,
    alone,
    close,
    distributed,
    in_order,
    mean_square,
    samples,
    small_model,
)
from torch import nn
from torch.utils.data import DataLoader

from orchestra.errors import InputError

EPOCHS = 2
IN_BACKWARD = [  # averages are made in backward
    "AllReduce('ring')",
    "AllReduce('ring', shard='optimizer')",
    "ParameterServer(placement='beside', returns='gradients')",
    "Switch(AllReduce('ring'), ParameterServer(placement='beside'), when=AfterSteps(1000))",
]
IN_STEP = ["ParameterServer(placement='beside')", "ParameterServer(servers=2, placement='beside')"]


def absolute(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.l1_loss(model(batch[0]), batch[1])


Optimizer = torch.optim.Optimizer


def two_losses(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            absolute(model, batch).backward()
            optimizer.step()


def retained(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad(set_to_none=False)
            loss = mean_square(model, batch)
            loss.backward(retain_graph=True)
            (0.5 * loss).backward()
            optimizer.step()


def two_steps(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for _ in range(EPOCHS):
        for batch in batches:
            for loss in (mean_square, absolute):
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()


def taken_ahead(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for _ in range(EPOCHS):
        source = iter(batches)
        following = next(source, None)
        while following is not None:
            batch, following = following, next(source, None)
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()


def taken_in_forward(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for _ in range(EPOCHS):
        source = iter(batches)
        batch = next(source, None)
        while batch is not None:
            optimizer.zero_grad()
            loss = mean_square(model, batch)
            batch = next(source, None)
            loss.backward()
            optimizer.step()


def all_taken_first(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for _ in range(EPOCHS):
        for batch in list(batches):
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()


def passed_over(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for epoch in range(EPOCHS):
        for number, batch in enumerate(batches):
            if number == epoch:
                continue
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()


def with_closure(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for _ in range(EPOCHS):
        for batch in batches:

            def closure(batch: Any = batch) -> float:
                optimizer.zero_grad()
                loss = mean_square(model, batch)
                loss.backward()
                return float(loss.detach())

            assert optimizer.step(closure) > 0


def accumulated_by_hand(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches):
            mean_square(model, batch).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def clipped(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()


def replaced_gradients(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.clamp(-0.2, 0.2)
            optimizer.step()


def partly_without_gradient(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            if number == 1:
                model.get_parameter("bias").grad = None
            optimizer.step()


EVERYWHERE: list[Loop] = [
    two_losses, retained, two_steps, taken_ahead, taken_in_forward, all_taken_first, passed_over,
    with_closure,
]  # fmt: skip
AVERAGED: list[Loop] = [accumulated_by_hand, clipped, replaced_gradients, partly_without_gradient]
COUNT = 21  # of samples: steps of 6, 6, 6 and 3, of which the workers have 2, 1 and 0


def of_all(count: int = COUNT) -> DataLoader[Any]:
    """The samples of each step, of all workers together."""
    loader = in_order(count)
    return DataLoader(loader.dataset, batch_size=RANKS * BATCH)


@pytest.mark.parametrize("strategy", some(IN_BACKWARD + IN_STEP))
def test_it_trains_as_one_process(strategy: str) -> None:
    loops = EVERYWHERE + (AVERAGED if strategy in IN_BACKWARD else [])
    for loop in loops:
        expected = alone(loop, of_all())
        for state in distributed(loop, strategy, lambda: in_order(COUNT)):
            close(state, expected)


def test_dedicated_servers_train_as_one_process() -> None:
    for loop in EVERYWHERE:
        expected = alone(loop, of_all())
        states = distributed(loop, "ParameterServer", lambda: in_order(COUNT), ranks=RANKS + 1)
        for state in states[:RANKS]:
            close(state, expected)


def two_forwards(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    """Parameters must not change between the forward passes of a step."""
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            (mean_square(model, batch) + absolute(model, batch)).backward()
            optimizer.step()


APART = [  # each worker has a gradient of its own
    "ParameterServer(consistency='asynchronous')",
    "ParameterServer(consistency='asynchronous', placement='beside')",
    "LocalSGD(2)", "Gossip", "StochasticGradientPush(overlap=1)",
    "StochasticGradientPush(overlap=2, exchanges='one_at_a_time')", "PairwiseAveraging",
    "ElasticAveraging(1, momentum=0.5)", "ElasticAveraging(1)", "Hop(staleness=4, skip=4)",
    "Prague(2)",
]  # fmt: skip
LOCAL: list[Loop] = [
    two_losses, retained, two_steps, two_forwards, passed_over, with_closure, accumulated_by_hand,
    clipped, replaced_gradients, partly_without_gradient,
]  # fmt: skip


SUMS = {name: 3 if name.startswith("ParameterServer") else 1 for name in APART}
PARTLY = ("Elastic", "Hop")  # a replica moves to the others by a part, or leaves out batches
BATCH_BY_BATCH: list[Loop] = [  # whatever batches a worker gets
    two_losses, retained, two_steps, two_forwards, with_closure, partly_without_gradient,
]  # fmt: skip


@pytest.mark.parametrize("strategy", some(APART))
def test_workers_apart_take_each_gradient_once(strategy: str) -> None:
    """All gradients together are those that were asked for: nothing is lost, nothing explodes.

    Steps this small leave the parameters where they are, so that all orders give the same sum.
    """

    def small_steps(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-7)

    for loop in LOCAL:
        states = distributed(loop, strategy, lambda: in_order(COUNT + 3), optimizer=small_steps)
        for state in states[1:]:
            close(state, states[0])
        before = small_model().state_dict()["weight"]
        after = alone(loop, of_all(COUNT + 3), optimizer=small_steps)
        change, expected = (each["weight"] - before for each in (states[0], after))
        assert 0.2 < change.norm() / expected.norm() < 4, loop
        if loop in BATCH_BY_BATCH and not strategy.startswith(PARTLY):
            torch.testing.assert_close(change, SUMS[strategy] * expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "strategy", some([name for name in APART if not name.startswith("Elastic")])
)
def test_one_worker_trains_as_plain_pytorch(strategy: str) -> None:
    ranks = 2 if strategy == APART[0] else 1
    for loop in LOCAL:
        expected = alone(loop, in_order(6))
        close(distributed(loop, strategy, lambda: in_order(6), ranks=ranks)[0], expected)


def test_local_steps_are_weighted_by_all_their_samples() -> None:
    """One local step a round without momentum: the mean of the steps is the step of the mean."""

    def plain(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    for loop in (two_losses, two_steps, with_closure, two_forwards):
        expected = alone(loop, of_all(), optimizer=plain)
        for state in distributed(loop, "LocalSGD(1)", lambda: in_order(COUNT), optimizer=plain):
            close(state, expected)


@pytest.mark.parametrize("strategy", [IN_BACKWARD[0], IN_BACKWARD[2]])
def test_what_is_left_of_an_accumulation_is_averaged_before_it_is_clipped(strategy: str) -> None:
    """Five batches, three of which are one step; a stream does not tell that the fifth is the
    last."""

    def loop(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        for number, batch in enumerate(batches, start=1):
            mean_square(model, batch).backward()
            if number in (3, 5):
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()

    count = 5 * RANKS * BATCH
    expected = alone(loop, of_all(count))
    for state in distributed(loop, strategy, lambda: in_order(count), accumulation=3):
        close(state, expected)
    stream = DataLoader(Stream(samples(count)), batch_size=BATCH)
    with pytest.raises(InputError, match="leave out accumulation"):
        distributed(loop, strategy, lambda: stream, accumulation=3)


@pytest.mark.parametrize("strategy", [IN_BACKWARD[0], IN_BACKWARD[2], IN_STEP[0]])
def test_a_step_after_fewer_backward_passes_averages_what_there_is(strategy: str) -> None:
    """As far as a stream tells, more batches may follow; nobody has changed the gradient."""

    def loop(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        for number, batch in enumerate(batches, start=1):
            mean_square(model, batch).backward()
            if number in (3, 5):
                optimizer.step()
                optimizer.zero_grad()

    count = 5 * RANKS * BATCH
    expected = alone(loop, of_all(count))
    stream = DataLoader(Stream(samples(count)), BATCH)
    for state in distributed(loop, strategy, lambda: stream, accumulation=3):
        close(state, expected)


# What is refused


def refused(loop: Loop, strategy: str, words: str, *, ranks: int = 2) -> None:
    with pytest.raises(InputError, match=words):
        distributed(loop, strategy, lambda: in_order(8), ranks=ranks)


@pytest.mark.parametrize("strategy", ["LocalSGD(2)", APART[1], "Gossip", "PairwiseAveraging"])
def test_taking_ahead_is_refused_where_the_last_batch_would_come_too_late(strategy: str) -> None:
    for loop in (taken_ahead, taken_in_forward, all_taken_first):
        refused(loop, strategy, "num_workers loads ahead")


@pytest.mark.parametrize("strategy", IN_STEP)
def test_local_clipping_before_an_average_is_refused(strategy: str) -> None:
    for loop in (clipped, replaced_gradients):
        refused(loop, strategy, "returns='gradients'")


@pytest.mark.parametrize("strategy", ["AllReduce", APART[1], "LocalSGD"])
def test_a_gradient_of_no_batch_is_refused(strategy: str) -> None:
    """As of a generator whose own batches are never iterated."""

    def without_batches(model: nn.Module, optimizer: Optimizer, _: Iterable[Any]) -> None:
        mean_square(model, next(iter(in_order(4)))).backward()
        optimizer.step()

    def after_the_last(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        kept = []
        for batch in batches:
            kept.append(batch)
            mean_square(model, batch).backward()
            optimizer.step()
        mean_square(model, kept[0]).backward()

    for ranks in (1, 2):
        refused(without_batches, strategy, "iterate them", ranks=ranks)
        refused(after_the_last, strategy, "anew in each epoch", ranks=ranks)


def test_gradients_that_backward_did_not_bring_are_refused() -> None:
    def stepped_twice(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        for batch in batches:
            mean_square(model, batch).backward()
            optimizer.step()
            optimizer.step()

    def set_by_hand(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        parameters = list(model.parameters())
        for batch in batches:
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(mean_square(model, batch), parameters), strict=True
            ):
                parameter.grad = gradient
            optimizer.step()

    for loop in (stepped_twice, set_by_hand):
        refused(loop, "AllReduce", "one loss.backward\\(\\) at least")


def test_a_step_without_any_gradient_changes_nothing() -> None:
    def sometimes(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            if number % 2:
                mean_square(model, batch).backward()
            optimizer.step()

    for strategy in ("AllReduce", IN_STEP[0]):
        for state in distributed(sometimes, strategy, lambda: in_order(COUNT)):
            close(state, alone(sometimes, of_all()))


@pytest.mark.parametrize("strategy", [*IN_BACKWARD[:3:2], IN_STEP[0], "LocalSGD(1)"])
def test_a_loss_that_reaches_no_parameter_is_a_gradient_of_0(strategy: str) -> None:
    """That of one worker in each step, by turns; with accumulation also in one of two passes."""

    def loop(
        model: nn.Module, optimizer: Optimizer, batches: Iterable[Any], every: int = 1
    ) -> None:
        unreached = torch.zeros((), requires_grad=True)
        for step, (inputs, targets, number) in enumerate(batches, 1):
            counts = number // BATCH % RANKS != number // BATCH // RANKS % RANKS
            errors = (model(inputs) - targets).square() * counts[:, None]
            loss = errors.mean() / every if counts.any() else 1.0 * unreached
            loss.backward()
            if step % every == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 4 == 0)

    def rates(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    for every in (1, 2):
        many = functools.partial(loop, every=every)
        expected = alone(many, of_all(24), optimizer=rates)
        for state in distributed(
            many, strategy, lambda: in_order(24), optimizer=rates, accumulation=every
        ):
            close(state, expected)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("strategy", ["AllReduce", "LocalSGD(1)"])
def test_gradients_may_have_a_graph(strategy: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        for batch in batches:
            mean_square(model, batch).backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()

    expected = alone(loop, of_all(12))
    for state in distributed(loop, strategy, lambda: in_order(12), bucket_megabytes=1e-5):
        close(state, expected)


class Fails(torch.autograd.Function):
    """Raises in backward, before the gradient of what comes earlier in the model."""

    @staticmethod
    def forward(_: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient")


class FailsOnce(nn.Module):
    """Two layers, between which one backward pass ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = small_model(), nn.Linear(1, 1, dtype=torch.float64)
        self.fails = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        output: torch.Tensor = self.second(Fails.apply(hidden) if self.fails else hidden)  # type: ignore[no-untyped-call]
        return output


def test_a_backward_that_was_interrupted_is_refused() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
        assert isinstance(model, FailsOnce)
        for batch in batches:
            model.fails = True
            with pytest.raises(ValueError, match="no gradient"):
                mean_square(model, batch).backward()
            with pytest.raises(InputError, match="ended with an exception"):
                optimizer.step()
            model.fails = False
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()

    assert len(distributed(loop, "Gossip", lambda: in_order(8), model=FailsOnce)) == RANKS
