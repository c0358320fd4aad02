"""Synchronous data parallelism: every step uses the average gradient over all workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, optimizers
from orchestra.settings import setting
from orchestra.strategies.base import Strategy

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.exchange import GradientAverage
    from orchestra.worker.worker import Worker


@dataclass
class AllReduceState:
    """Each worker keeps a whole optimizer; they stay equal, since their gradients are."""

    optimizer: Optimizer
    average: GradientAverage = field(metadata=optimizers.TRANSIENT)


@dataclass(frozen=True, repr=False)
class AllReduce(Strategy[AllReduceState]):
    """Average the gradient over the workers, then step the same optimizer everywhere."""

    algorithm: Literal["ring", "ring_gather", "parallel", "reduce_to_one", "native"] = setting(
        "ring", "how the average is made; native: torch.distributed's own (gloo or NCCL)"
    )

    def start(self, worker: Worker) -> AllReduceState:
        """Everyone begins with the parameters of rank 0."""
        exchange.agree_on_parameters(worker)
        if self.algorithm == "native":
            worker.native.barrier()  # the group is made now, not inside the first step
        worker.reporter.expendable(False)
        return AllReduceState(
            worker.local_optimizer(), exchange.GradientAverage(worker, self.algorithm)
        )

    def before_forward(self, worker: Worker, state: AllReduceState) -> None:
        """Everyone takes the first worker's buffers."""
        exchange.broadcast_buffers(worker, worker.workers)

    def reduce(self, worker: Worker, state: AllReduceState) -> None:
        """g <- sum over workers of (samples / all samples) g."""
        state.average.finish()

    def update(self, worker: Worker, state: AllReduceState) -> None:
        """The same step of the same optimizer on every worker."""
        worker.clip()
        worker.update_locally(state.optimizer)
        if worker.rank == worker.workers.ranks[0]:
            worker.snapshots.offer(worker.step.consumed, worker.parameters)

    def stop(self, worker: Worker, state: AllReduceState) -> None:
        """All parameters are equal already."""
        state.average.close()

    def optimizer_of(self, state: AllReduceState) -> Optimizer:
        """The optimizer, which is the same on every worker."""
        return state.optimizer
