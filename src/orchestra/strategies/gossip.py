"""Gossip: everyone averages parameters with a few neighbours, each step (D-PSGD, Hop)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

from orchestra import exchange, optimizers
from orchestra.errors import InputError
from orchestra.settings import MOST_RANKS, MOST_STEPS, setting
from orchestra.strategies.base import Footprint, Replicas, ReplicaState, Roles
from orchestra.topologies import Ring, Topology, connected, doubly_stochastic, sources_of

if TYPE_CHECKING:
    from orchestra.exchange import IterationQueues, SharedWork
    from orchestra.worker.worker import Worker


@dataclass
class GossipState(ReplicaState):
    """`step` counts the steps done."""

    step: int = 0


@dataclass(frozen=True, repr=False)
class Gossip(Replicas[GossipState]):
    """Mix parameters with those of a few neighbours in each step.

    D-PSGD (Lian et al., NeurIPS 2017), Algorithm 1, on worker i:

        x_i <- sum_j W_ij x_j - gamma g_i

    with g_i, the gradient of its own samples, taken at x_i before the mixing. W is doubly
    stochastic, so mixing keeps the mean of the replicas. The optimizer acts on the mixed
    parameters; its moments stay with the worker. The final parameters are the exact mean.
    """

    depends_on_speed = False  # everyone waits for the same neighbours at the same step

    use = "where no link should carry everything, and only neighbours should wait for each other"
    variants = (
        ("Gossip()", "for a few workers, or networks that are rings"),
        (
            "Gossip(Exponential(peers=1))",
            "for many workers that all reach each other: one message a step",
        ),
    )

    topology: Topology = setting(Ring(), "who mixes with whom")

    def roles(self, ranks: int) -> Roles:
        """All ranks are workers; the graph has to connect them and to have weights."""
        if not connected(self.topology, ranks):
            raise InputError(f"{self!r}: the topology does not connect {ranks} ranks")
        for step in range(self.topology.period(ranks)):
            doubly_stochastic(self.topology.graph(ranks, step))
        return Roles((1.0,) * ranks)

    def footprint(self, rank: int, ranks: int) -> Footprint:
        """And what arrives from all neighbours of a step."""
        steps = range(self.topology.period(ranks))
        arriving = max(len(sources_of(self.topology.graph(ranks, step))[rank]) for step in steps)
        return replace(super().footprint(rank, ranks), copies=float(arriving))

    def allocate(self, worker: Worker, work: SharedWork | None) -> GossipState:
        return GossipState(worker.local_optimizer())

    def update(self, worker: Worker, state: GossipState) -> None:
        """x_i <- sum_j W_ij x_j, then the optimizer's step."""
        worker.clip()
        exchange.mix_with_neighbours(worker, self.topology, state.step)
        worker.update_locally(state.optimizer)
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
        state.step += 1


@dataclass
class HopState(ReplicaState):
    """`queues` hold the updates of neighbours; they are empty at a quiet point."""

    queues: IterationQueues = field(metadata=optimizers.TRANSIENT)


@dataclass(frozen=True, repr=False)
class Hop(Replicas[HopState]):
    """Mix parameters with neighbours that may be some iterations ahead or behind.

    Hop (Luo et al., ASPLOS 2019). Worker i in its iteration k:

        send x_i and k;  g_i at x_i;  x_i <- sum_u w_u u / sum_u w_u - gamma g_i

    over its own parameters and the updates u of its neighbours. Without the settings below these
    are the updates of iteration k, w_u = W_ij, and Hop is D-PSGD, as `Gossip` is, except that
    parameters travel while gradients are taken.

    max_gap (max_ig)  a worker enters an iteration with a token of each worker that it sends to,
                      which hands one out in each iteration that it enters itself: nobody is more
                      than `max_gap` iterations ahead of such a neighbour
    backup            the updates of all neighbours but `backup` are enough, and what else is here
                      is mixed, too; updates of former iterations are dropped
    staleness (s)     from each neighbour the newest update is enough if it is not of an iteration
                      before k - s; w_u = W_ij (Iter(u) - (k - s) + 1)
    skip              a worker that finds one that it sends to more than `behind` iterations ahead
                      leaves up to `skip` iterations out, after the average of the last of them

    With `skip` the workers take batches from a queue: who skips has time for fewer, and the others
    take them. With `work: equal` it takes all of its own, the last ones after the others have left.
    Without `skip` all have equal parts, since tokens tie everyone to the pace of the slowest.

    Only the abstract of the paper was at hand when this was written. These details are our reading,
    and may differ from the authors':

    - Where updates are missing, their weights are divided among the others in proportion.
    - With `staleness` an update is mixed again until a newer one comes or it is too old, and may be
      of an iteration after k. Each neighbour but `backup` has to be heard of once before.
    - Neighbours are told which iterations were skipped, and wait for no update of them.
    - A jump goes as far as tokens are there, and not beyond the furthest neighbour. It is made only
      if the updates are there already; the worker's own parameters have their part in the average.

    The final parameters are the exact mean.
    """

    use = "for gossip among workers of which some are slow, by turns or always"
    variants = (
        ("Hop(backup=1)", "for workers that are slow by turns"),
        ("Hop(staleness=4, skip=4)", "for some workers that are always slower"),
    )

    topology: Topology = setting(Ring(), "who mixes with whom; the same in every step")
    _: KW_ONLY
    max_gap: int = setting(
        5, "max_ig: iterations a worker may be ahead of those it sends to", low=1, high=MOST_STEPS
    )
    backup: int = setting(
        0, "neighbours whose updates a worker does not wait for", low=0, high=MOST_RANKS
    )
    staleness: int = setting(0, "s: iterations that an update may be old", low=0, high=MOST_STEPS)
    skip: int = setting(
        0, "iterations that a worker leaves out at most when it is behind", low=0, high=MOST_STEPS
    )
    behind: int = setting(
        2, "with skip: behind when a neighbour is more iterations ahead", low=1, high=MOST_STEPS
    )

    def check(self) -> None:
        """With `skip` somebody has to get that far behind."""
        reach = self.max_gap if self.backup else min(self.max_gap, self.staleness + 1)
        if self.skip and self.behind >= reach:
            raise InputError(
                f"Hop: skip={self.skip} has no effect: neighbours get at most {reach} ahead, and "
                f"behind is {self.behind}; lower behind, or raise staleness, backup or max_gap"
            )

    @property
    def depends_on_speed(self) -> bool:
        """The gap alone changes no values, only when they are there."""
        return bool(self.backup or self.staleness)

    @property
    def self_paced(self) -> bool:
        """Only who skips is not tied to the number of iterations of the others."""
        return self.skip > 0

    def roles(self, ranks: int) -> Roles:
        """All ranks are workers; the graph has to connect them, and to stay the same."""
        if not connected(self.topology, ranks):
            raise InputError(f"{self!r}: the topology does not connect {ranks} ranks")
        if self.topology.period(ranks) > 1:
            raise InputError(
                f"{self!r}: the topology changes from step to step, and neighbours that are not in "
                "the same iteration would disagree on it; take one that does not, or Gossip"
            )
        graph = self.topology.graph(ranks, 0)
        doubly_stochastic(graph)
        fewest = min(map(len, sources_of(graph)))
        if ranks > 1 and self.backup >= fewest:
            raise InputError(
                f"{self!r}: of {ranks} ranks one hears of {fewest} only; set backup below that, or "
                "take a topology with more links"
            )
        return Roles((1.0,) * ranks)

    def footprint(self, rank: int, ranks: int) -> Footprint:
        """And the updates of iterations that neighbours are ahead, and those on their way out."""
        graph = self.topology.graph(ranks, 0)
        sources = sources_of(graph)
        ahead = self.max_gap if self.depends_on_speed or sources != graph else 1
        moving = len(sources[rank]) + min(len(graph[rank]), 1)
        return replace(super().footprint(rank, ranks), copies=float(moving * (1 + ahead)))

    def allocate(self, worker: Worker, work: SharedWork | None) -> HopState:
        queues = exchange.IterationQueues(
            worker,
            self.topology.graph(len(worker.workers), 0),
            self.max_gap,
            self.backup,
            self.staleness,
            self.skip,
            self.behind,
        )
        return HopState(worker.local_optimizer(), queues, work=work)

    def before_forward(self, worker: Worker, state: HopState) -> None:
        """Parameters leave here, and travel while the gradient of them is taken."""
        state.queues.enter()

    def update(self, worker: Worker, state: HopState) -> None:
        """The average, then the optimizer's step."""
        worker.clip()
        state.queues.mix()
        worker.update_locally(state.optimizer)
        worker.snapshots.offer(worker.step.consumed, worker.parameters)

    def settle(self, worker: Worker, state: HopState) -> None:
        """Nobody is in an iteration."""
        state.queues.drain()
