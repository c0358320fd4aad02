"""Dynamic averaging: replicas are averaged once one of them has moved far, and only then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestra import Strategy, exchange
from orchestra.settings import setting
from orchestra.strategies.member import Member
from orchestra.strategies.traits import Pace, Traits, WorkMode

if TYPE_CHECKING:  # so that `orchestra list` need not import torch
    import torch

    from orchestra.worker.worker import Worker


@dataclass(frozen=True, repr=False)
class DynamicAveraging(Strategy):
    """Average once a replica has moved far since the last time (Kamp et al., ECML PKDD 2018)."""

    drift: float = setting(0.5, "Delta: the squared distance that is far", above=0.0)
    every: int = setting(4, "b: steps between two looks at the distance", low=1)

    def traits(self, work: WorkMode = "shared") -> Traits:
        return replace(super().traits(work), pace=Pace.ROUNDS, reads_values=True)  # replicas differ

    def member(self, worker: Worker) -> DynamicMember:
        return DynamicMember(self, worker, worker.local_optimizer(), worker.parameters.clone())


@dataclass(eq=False)
class DynamicMember(Member[DynamicAveraging]):
    """One worker's replica; `reference` is what the last average gave."""

    optimizer: torch.optim.Optimizer
    reference: torch.Tensor
    steps: int = 0

    def exchange(self) -> None:
        exchange.keep_gradient(self.worker)

    def update(self) -> None:
        worker, settings = self.worker, self.strategy
        worker.clip()
        worker.update_locally(self.optimizer)
        self.steps += 1
        if self.steps % settings.every == 0:
            distance = (worker.parameters - self.reference).square().sum()
            far = (distance > settings.drift).float()[None]
            exchange.all_reduce(worker.transport, far, "ring", worker.workers, tag=1024)
            if far.item():
                exchange.exact_mean(worker)
                self.reference.copy_(worker.parameters)
        worker.snapshots.offer(worker.step.consumed, worker.parameters)

    def open(self, *, fresh: bool) -> None:
        if fresh:  # in a loop of the user's own, also after each epoch
            self.reference.copy_(self.worker.parameters)
