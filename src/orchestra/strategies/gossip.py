"""Gossip: everyone averages parameters with a few neighbours, each step (D-PSGD)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestra import exchange
from orchestra.errors import InputError
from orchestra.settings import setting
from orchestra.strategies.base import Footprint, Replicas, ReplicaState, Roles
from orchestra.topologies import Ring, Topology, connected, doubly_stochastic, sources_of

if TYPE_CHECKING:
    from orchestra.exchange import SharedWork
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
