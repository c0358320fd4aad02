"""Prague: replicas averaged in groups that are formed of whoever is there."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, optimizers
from orchestra.settings import MOST_RANKS, MOST_SEED, MOST_STEPS, setting
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
    """Average parameters with a group of workers after each step.

    Prague (Luo et al., ASPLOS 2020), called Ripples in arXiv:1909.08029. Worker i, at its own pace:

        x_i <- x_i - gamma g_i;  then, with a group G of which it is a member, for all k in G:
        x_k <- 1/|G| sum_{j in G} x_j

    The second is a partial all-reduce, P-Reduce. Its matrix F^G is doubly stochastic, so it keeps
    the mean of the replicas. Groups that share a worker are averaged one after the other. A group
    generator beside the first worker forms them: a worker asks it after its local step, and waits
    for the other members of its group.

    smart    The answer is the group that the worker is scheduled in (Group Buffer). If there is
             none, all workers that are in no group are divided into groups at random (Global
             Division), so that no two groups are in conflict.
    random   Each request forms a group of the worker and others drawn at random. The worker
             averages with it, and before with those formed with it by others meanwhile.

    The number of its requests shows how fast a worker is: one that is `threshold` or more behind
    the worker that asks is left out of the groups formed now. It is in one when it asks itself.

    The optimizer stays with the worker; no gradient is stale. The final parameters are the exact
    mean. Groups have at most `group_size` members, and all workers if there are no more.

    Only the paper's abstract was at hand, so these are readings of ours: a worker is idle once the
    last member of its group has asked; the groups of a division differ in size by one at most, and
    a single worker that is left over stays idle; the filter serves both generators; the defaults.
    Inter-Intra synchronization and static schedules are not here.
    """

    use = "for some slow workers among many, without a server: groups average by all-reduce"
    variants = (("Prague(3)", use),)

    group_size: int = setting(3, "workers in a group, at most", low=2, high=MOST_RANKS)
    _: KW_ONLY
    generator: Literal["smart", "random"] = setting(
        "smart", "smart: divides all idle workers at once; random: a group for each request"
    )
    threshold: int | None = setting(
        8,
        "requests that a worker may be behind and still be put into a group; none: any",
        low=1,
        high=MOST_STEPS,
    )
    seed: int = setting(0, "of the choice of groups", low=0, high=MOST_SEED)

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
