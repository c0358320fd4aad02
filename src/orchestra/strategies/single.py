"""No distribution: one process, all cores. The baseline of every other strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestra.strategies.base import Roles, Strategy
from orchestra.strategies.traits import Traits, WorkMode

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.worker.worker import Worker


@dataclass
class SingleState:
    """The one optimizer."""

    optimizer: Optimizer


@dataclass(frozen=True, repr=False)
class Single(Strategy[SingleState]):
    """One process with the batch of all ranks: per-worker batch x ranks.

    `ranks` is its budget in a comparison, not a number of processes.
    """

    use = "first of all: on one host it mostly is faster than any distribution"

    def traits(self, work: WorkMode = "shared") -> Traits:
        return replace(super().traits(work), distributed=False)

    def roles(self, ranks: int) -> Roles:
        return Roles((float(ranks),))

    def start(self, worker: Worker) -> SingleState:
        return SingleState(worker.local_optimizer())

    def reduce(self, worker: Worker, state: SingleState) -> None:
        """Nothing is exchanged."""
        worker.gradients.leave_in_place()

    def update(self, worker: Worker, state: SingleState) -> None:
        worker.clip()
        worker.update_locally(state.optimizer)
        worker.step.agreed = True
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
