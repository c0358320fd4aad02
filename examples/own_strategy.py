"""Dynamic averaging: replicas are averaged once one of them has moved far, and only then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestra import Strategy, exchange
from orchestra.settings import setting
from orchestra.strategies.life_cycle import agree
from orchestra.strategies.traits import Pace, Traits, WorkMode

if TYPE_CHECKING:  # so that `orchestra list` need not import torch
    import torch

    from orchestra.worker.worker import Worker


@dataclass
class State:
    """`reference` is what the last average gave."""

    optimizer: torch.optim.Optimizer
    reference: torch.Tensor
    steps: int = 0


@dataclass(frozen=True, repr=False)
class DynamicAveraging(Strategy[State]):
    """Average once a replica has moved far since the last time (Kamp et al., ECML PKDD 2018)."""

    drift: float = setting(0.5, "Delta: the squared distance that is far", above=0.0)
    every: int = setting(4, "b: steps between two looks at the distance", low=1)

    def traits(self, work: WorkMode = "shared") -> Traits:
        return replace(super().traits(work), pace=Pace.ROUNDS)  # replicas differ

    def start(self, worker: Worker) -> State:
        exchange.agree_on_parameters(worker)
        worker.reporter.expendable(False)
        return State(worker.local_optimizer(), worker.parameters.clone())

    def reduce(self, worker: Worker, state: State) -> None:
        exchange.keep_gradient(worker)

    def update(self, worker: Worker, state: State) -> None:
        worker.clip()
        worker.update_locally(state.optimizer)
        state.steps += 1
        if state.steps % self.every == 0:
            far = ((worker.parameters - state.reference).square().sum() > self.drift).float()[None]
            exchange.all_reduce(worker.transport, far, "ring", worker.workers, tag=1024)
            if far.item():
                agree(self, worker, state)
        worker.snapshots.offer(worker.step.consumed, worker.parameters)

    def rebase(self, worker: Worker, state: State) -> None:
        state.reference.copy_(worker.parameters)
