"""Averages with one partner (AD-PSGD) or with a group (Prague), each worker at its own pace."""

from __future__ import annotations

import random
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, optimizers
from orchestra.errors import InputError
from orchestra.settings import MOST_RANKS, MOST_SEED, MOST_STEPS, setting
from orchestra.strategies.base import Footprint, Replicas, ReplicaState, Roles
from orchestra.topologies import Complete, Graph, Topology, connect

if TYPE_CHECKING:
    from orchestra.exchange import GroupAverage, PairwiseAverage, SharedWork
    from orchestra.worker.worker import Worker


@dataclass
class PairwiseState(ReplicaState):
    """`pair` averages with one other worker; `partners` are the choices of each step of the
    topology's period."""

    pair: PairwiseAverage = field(metadata=optimizers.TRANSIENT)
    step: int = 0
    partners: dict[int, tuple[int, ...]] = field(
        default_factory=dict, metadata=optimizers.TRANSIENT
    )


@dataclass(frozen=True, repr=False)
class PairwiseAveraging(Replicas[PairwiseState]):
    """Average parameters with one random worker at a time.

    AD-PSGD (Lian et al., ICML 2018), Algorithm 1. On worker i, at its own pace:

        g_i at x_i;  meanwhile x_i, x_j <- (x_i + x_j) / 2 with a random j;  x_i <- x_i - gamma g_i

    so the gradient is of an x_i that was averaged since. Even workers ask, odd ones answer: as
    no one who answers ever waits, there is no deadlock. The optimizer stays with the worker; it
    acts on the averaged x_i. Staleness counts the averages between a gradient's read and its
    write. The final parameters are the exact mean.
    """

    self_paced = True  # a partner averages in the background, at any step of its own

    use = "for workers of unlike speed, without a server"
    variants = (("PairwiseAveraging()", use),)

    topology: Topology = setting(
        Complete(), "whom a worker may average with; links between two even or two odd are not used"
    )
    _: KW_ONLY
    seed: int = setting(0, "of the choice of partners", low=0, high=MOST_SEED)

    def roles(self, ranks: int) -> Roles:
        """All ranks are workers; the links between even and odd ones have to connect them."""
        period = self.topology.period(ranks)
        graphs = [self.topology.graph(ranks, step) for step in range(period)]
        if not connect(
            [tuple(_partners(graph, rank) for rank in range(ranks)) for graph in graphs]
        ):
            raise InputError(
                f"{self!r}: the links between even and odd ranks do not connect {ranks} ranks"
            )
        return Roles((1.0,) * ranks)

    def footprint(self, rank: int, ranks: int) -> Footprint:
        """And what is averaged meanwhile: x, and that of the other worker."""
        return replace(super().footprint(rank, ranks), copies=2.0)

    def allocate(self, worker: Worker, work: SharedWork | None) -> PairwiseState:
        return PairwiseState(worker.local_optimizer(), exchange.PairwiseAverage(worker), work=work)

    def before_forward(self, worker: Worker, state: PairwiseState) -> None:
        """From here the parameters are averaged, while the gradient of the old ones is taken."""
        state.pair.give(self._partner(worker, state) if state.pair.active else None)

    def _partner(self, worker: Worker, state: PairwiseState) -> int | None:
        own, ranks = worker.workers.index(worker.rank), len(worker.workers)
        phase = state.step % self.topology.period(ranks)
        if phase not in state.partners:
            state.partners[phase] = _partners(self.topology.graph(ranks, phase), own)
        choices = state.partners[phase]
        return random.Random(f"{self.seed}-{own}-{state.step}").choice(choices) if choices else None

    def update(self, worker: Worker, state: PairwiseState) -> None:
        """The optimizer's step on the averaged parameters."""
        worker.clip()
        worker.step.staleness = (state.pair.take(),)
        worker.measures.staleness.extend(worker.step.staleness)
        worker.update_locally(state.optimizer)
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
        state.step += 1

    def settle(self, worker: Worker, state: PairwiseState) -> None:
        """Nobody averages."""
        state.pair.settle()

    def stop(self, worker: Worker, state: PairwiseState) -> None:
        """The exact mean of the replicas."""
        state.pair.settle()
        state.pair.close()
        if state.work is not None:
            state.work.close()
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
        worker.snapshots.renew(worker.step.consumed, worker.parameters)
        exchange.exact_mean(worker)


def _partners(graph: Graph, rank: int) -> tuple[int, ...]:
    """Those at the other ends of the links of `rank`, either way, of even and odd ranks."""
    near = set(graph[rank])
    return tuple(
        other
        for other in range((rank + 1) % 2, len(graph), 2)
        if other in near or rank in graph[other]
    )


@dataclass
class PragueState(ReplicaState):
    """`groups` is this worker's part in the averages of groups."""

    groups: GroupAverage


@dataclass(frozen=True, repr=False)
class Prague(Replicas[PragueState]):
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

    self_paced = True  # groups do not depend on the number of a worker's step

    use = "for some slow workers among many, without a server: groups average by all-reduce"
    variants = (("Prague(3)", use),)

    group_size: int = setting(3, "workers in a group, at most", low=2, high=MOST_RANKS)
    _: KW_ONLY
    generator: Literal["smart", "random"] = setting(
        "smart", "smart: divides all idle workers at once; random: a group for each request"
    )
    threshold: int | None = setting(
        8, "requests a worker in a group may be behind; none: any", low=1, high=MOST_STEPS
    )
    seed: int = setting(0, "of the choice of groups", low=0, high=MOST_SEED)

    def allocate(self, worker: Worker, work: SharedWork | None) -> PragueState:
        groups = exchange.GroupAverage(
            worker, self.group_size, self.generator, self.threshold, self.seed
        )
        return PragueState(worker.local_optimizer(), groups, work=work)

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

    def stop(self, worker: Worker, state: PragueState) -> None:
        """Average with those who wait; then the exact mean of the replicas."""
        state.groups.leave()
        if state.work is not None:
            state.work.close()
        state.groups.close()
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
        worker.snapshots.renew(worker.step.consumed, worker.parameters)
        exchange.exact_mean(worker)
