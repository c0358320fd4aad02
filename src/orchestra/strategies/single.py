"""No distribution: one process, all cores. The baseline of every other strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestra.strategies.base import Roles, Strategy
from orchestra.strategies.member import Member
from orchestra.strategies.traits import Traits, WorkMode

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.worker.worker import Worker


@dataclass(frozen=True, repr=False)
class Single(Strategy):
    """One process with the batch of all ranks: per-worker batch x ranks.

    `ranks` is its budget in a comparison, not a number of processes.
    """

    use = "first of all: on one host it mostly is faster than any distribution"

    def traits(self, work: WorkMode = "shared") -> Traits:
        return replace(super().traits(work), distributed=False)

    def roles(self, ranks: int) -> Roles:
        return Roles((float(ranks),))

    def member(self, worker: Worker) -> SingleMember:
        return SingleMember(self, worker, worker.local_optimizer())


@dataclass(eq=False)
class SingleMember(Member[Single]):
    """The one process, with the one optimizer."""

    optimizer: Optimizer

    def exchange(self) -> None:
        """Nothing is exchanged."""
        self.worker.gradients.leave_in_place()

    def update(self) -> None:
        worker = self.worker
        worker.clip()
        worker.update_locally(self.optimizer)
        worker.step.loss_is_global = True
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
