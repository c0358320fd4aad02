"""The base class of strategies whose workers train apart, with optimizers of their own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from orchestra import exchange, optimizers
from orchestra.strategies.base import Strategy, roles_of

if TYPE_CHECKING:
    from torch import optim

    from orchestra.exchange import SharedWork
    from orchestra.schedules.work_queue import WorkSource
    from orchestra.worker.worker import Worker

R = TypeVar("R", bound="ReplicaState")


@dataclass
class ReplicaState:
    """The state of a worker that trains a replica: its optimizer, its end of the batches' queue."""

    optimizer: optim.Optimizer
    work: SharedWork | None = field(default=None, kw_only=True, metadata=optimizers.TRANSIENT)


@dataclass(frozen=True, repr=False)
class Replicas(Strategy[R]):
    """Each worker trains a replica of its own, and averages it with some or all others.

    The final parameters are the exact mean of the replicas.
    """

    synchronous = False  # replicas differ, and losses are each worker's own

    def work(self, state: R) -> WorkSource | None:
        """Return this worker's end of the queue, if workers take batches at their own pace."""
        return state.work

    def currently_lockstep(self, state: R) -> bool:
        """Return True unless batches come from a queue: if they follow the plan, all workers
        count the same steps.
        """
        return state.work is None

    def start(self, worker: Worker) -> R:
        """Give all workers the parameters of the first rank, and allocate the state."""
        exchange.agree_on_parameters(worker)
        # The final parameters are the exact mean, for which every replica is needed
        worker.reporter.expendable(False)
        shares = roles_of(self, worker.budget_ranks).shares
        # One queue for all who take batches at their own pace: whoever is free takes the next
        work = exchange.share_work(worker, shares) if self.self_paced else None
        return self.allocate(worker, work)

    @abstractmethod
    def allocate(self, worker: Worker, work: SharedWork | None) -> R:
        """Return the state at the start."""

    def settle(self, worker: Worker, state: R) -> None:
        """Wait until nothing of the workers is in flight. Collective over the workers."""

    def quiesce(self, worker: Worker, state: R, step: int) -> bool:
        """Wait until nothing is in flight; all workers are present."""
        self.settle(worker, state)
        return True

    def reduce(self, worker: Worker, state: R) -> None:
        """Keep the gradient on this worker."""
        # Left where autograd put it, not copied: optimizers read tensor by tensor (decision 122)
        exchange.keep_gradient(worker)

    def agree(self, worker: Worker, state: R) -> None:
        """Set the parameters and buffers to the exact mean of the replicas."""
        self.settle(worker, state)
        exchange.exact_mean(worker)
        exchange.exact_mean_of_buffers(worker)

    def stop(self, worker: Worker, state: R) -> None:
        """Set the parameters to the exact mean of the replicas."""
        self.settle(worker, state)
        # Closed before the last snapshot: the queue's last answer tells how much all have consumed,
        # and a due point may lie between this worker's last batch and that.
        if state.work is not None:
            state.work.close()
            worker.snapshots.offer(worker.step.consumed, worker.parameters)
        exchange.exact_mean(worker)
