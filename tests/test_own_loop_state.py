"""The state of a loop of the user's own: saved, loaded, and the training that goes on from it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.own_loops import BATCH, State, samples, state_of
from tests.threads import run_ranks
from torch import nn
from torch.utils.data import DataLoader

from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.own_loop import OwnLoop
from orchestra.worker.runtime import Runtime

EPOCHS, COUNT = 3, 24
SHARDED = "AllReduce(shard='optimizer')"
BESIDE = "ParameterServer(placement='beside', servers=2)"
ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"


def a_model(seed: int) -> nn.Module:
    """With a buffer, and parameters that servers cut."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With moments, and a step count for the bias correction."""
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def shuffled() -> DataLoader[Any]:
    return DataLoader(samples(COUNT), batch_size=BATCH, shuffle=True)


class Run:
    """One rank's loop, which keeps what it has seen and saved."""

    def __init__(
        self, runtime: Runtime, strategy: str, loader: Any, seed: int = 0, **options: Any
    ) -> None:
        self.model = a_model(seed)
        self.optimizer = adam(self.model)
        self.loop = OwnLoop(
            runtime, self.model, self.optimizer, loader,
            parse(strategy, STRATEGIES, where="strategy"), **options,
        )  # fmt: skip
        self.batches = self.loop.batches
        self.seen: list[list[int]] = []
        self.saved: dict[int, bytes] = {}

    def train(self, save_after: tuple[int, ...] = (), epochs: int = EPOCHS) -> None:
        """Up to the epoch `epochs`; steps count from 1, and what is 0 or less is an epoch's end."""
        while self.batches.epoch < epochs and not self.batches.ended:
            for batch in self.batches:
                self.step(batch)
                self.seen.append(batch[2].tolist())
                if len(self.seen) in save_after:
                    self.save(len(self.seen))
            if -self.batches.epoch in save_after:
                self.save(-self.batches.epoch)

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()

    def save(self, place: int) -> None:
        file = io.BytesIO()
        torch.save(self.batches.state_dict(), file)
        self.saved[place] = file.getvalue()

    def load(self, saved: bytes) -> None:
        self.batches.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))

    def end(self) -> tuple[State, list[list[int]], dict[int, bytes]]:
        self.loop.finish(goes_on=True)
        return state_of(self.model), self.seen, self.saved


def equal(one: State, other: State) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def through_and_resumed(
    strategy: str,
    places: tuple[int, ...],
    ranks: int = 3,
    loader: Callable[[], Any] = shuffled,
    **options: Any,
) -> None:
    """Training in one piece is what it is with a new start, of another model, from each place."""

    def through(runtime: Runtime) -> Any:
        run = Run(runtime, strategy, loader(), **options)
        run.batches.serve_to_the_end() if not run.batches.is_worker() else run.train(places)
        return run.end()

    expected = run_ranks(ranks, through)
    for place in places:
        state = expected[0][2][place]

        def resumed(runtime: Runtime, state: bytes = state) -> Any:
            run = Run(runtime, strategy, loader(), seed=runtime.rank + 1, **options)
            if run.batches.is_worker():
                run.load(state)
                run.train()
            else:
                run.batches.serve_to_the_end()
            return run.end()

        for (one, seen, _), (other, later, _) in zip(
            expected, run_ranks(ranks, resumed), strict=True
        ):
            assert equal(one, other)
            assert later == (seen[place:] if place > 0 else seen[len(seen) - len(later) :])


@pytest.mark.parametrize(
    "strategy",
    [
        "AllReduce",
        SHARDED,
        "ParameterServer",
        BESIDE,
        "ParameterServer(placement='beside', returns='gradients')",
        "ParameterServer(servers=2, replicas=1)",
        "LocalSGD(3, outer=Nesterov())",
        "LocalSGD(4, outer=SlowMo(), overlap=1)",
        "LocalSGD(2, outer=Elastic())",
        "Gossip",
        "StochasticGradientPush",
        "Switch(AllReduce, LocalSGD(2), when=AfterSteps(6))",
    ],
)
def test_resumed(strategy: str) -> None:
    through_and_resumed(strategy, (1, 4, -2))
