"""Prague: replicas averaged in groups that are formed of whoever is there."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, optimizers
from orchestra.settings import setting
from orchestra.strategies.base import Strategy, roles_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.exchange import GroupAverage, SharedWork
    from orchestra.worker.worker import Worker


@dataclass
class PragueState:
    """A worker's own optimizer, and its part in the averages of groups."""

    optimizer: Optimizer
    groups: GroupAverage
    work: SharedWork | None = field(default=None, metadata=optimizers.TRANSIENT)


@dataclass(frozen=True, repr=False)
class Prague(Strategy[PragueState]):
    """Average parameters with a group of workers after each step."""

    use = "for workers of unlike speed, without a server"
    variants = (("Prague(3)", use),)

    group_size: int = setting(3, "workers of a group, at most", low=2)
    _: KW_ONLY
    generator: Literal["smart", "random"] = setting("smart", "who forms groups")
    threshold: int | None = setting(4, "filter", low=1)
    seed: int = setting(0, "of the choice of groups", low=0)

    @property
    def synchronous(self) -> bool:
        """Workers wait for their group only, and share no loss."""
        return False

    @property
    def self_paced(self) -> bool:
        """Groups do not depend on the number of a worker's step."""
        return True

    def work(self, state: PragueState) -> SharedWork | None:
        """From the first worker."""
        return state.work

    def currently_lockstep(self, state: PragueState) -> bool:
        """Where work is dealt out, all count the steps alike."""
        return state.work is None

    def start(self, worker: Worker) -> PragueState:
        """Everyone begins with the parameters of the first rank."""
        exchange.agree_on_parameters(worker)
        worker.reporter.expendable(False)
        work = exchange.share_work(worker, roles_of(self, worker.budget_ranks).shares)
        groups = exchange.GroupAverage(
            worker, self.group_size, self.generator, self.threshold, self.seed
        )
        return PragueState(worker.local_optimizer(), groups, work)

    def reduce(self, worker: Worker, state: PragueState) -> None:
        """The gradient stays here."""
        exchange.keep_gradient(worker)

    def update(self, worker: Worker, state: PragueState) -> None:
        """The optimizer's step, then the averages."""
        worker.clip()
        worker.update_locally(state.optimizer)
        state.groups.average()
        worker.snapshots.offer(worker.step.consumed, worker.parameters)

    def quiesce(self, worker: Worker, state: PragueState, step: int) -> bool:
        """All groups have been averaged."""
        state.groups.settle()
        return True

    def agree(self, worker: Worker, state: PragueState) -> None:
        """The exact mean of the replicas, and of their buffers."""
        exchange.exact_mean(worker)
        exchange.exact_mean_of_buffers(worker)

    def stop(self, worker: Worker, state: PragueState) -> None:
        """Average with those who wait; then the exact mean of the replicas."""
        state.groups.leave()
        if state.work is not None:
            state.work.close()
        state.groups.close()
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
        worker.snapshots.renew(worker.step.consumed, worker.parameters)
        exchange.exact_mean(worker)

    def optimizer_of(self, state: PragueState) -> Optimizer:
        """This worker's own."""
        return state.optimizer
