"""Gossip: everyone averages parameters with a few neighbours (D-PSGD, CHOCO-SGD)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

from orchestra import exchange, optimizers
from orchestra.compression.base import Compressor, Encoder
from orchestra.errors import InputError
from orchestra.parameter_server.placement import place
from orchestra.settings import setting
from orchestra.strategies.base import Roles, torch
from orchestra.strategies.stateful import ReplicaState, StatefulReplicas
from orchestra.strategies.traits import Footprint
from orchestra.topologies import Ring, Topology, connected, doubly_stochastic, sources_of

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.transports.protocol import Task, Transport
    from orchestra.worker.worker import Worker


@dataclass
class PublicCopies:
    """CHOCO-SGD: what neighbours know of each other, all of it flat: shape [layout.size].

    `own` is x^_i, what the others know of this worker's parameters; `mixed` is s_i = sum_j W_ij
    x^_j, all that has to be known of the neighbours'. `compression`: what the compressor keeps.
    """

    own: Tensor
    mixed: Tensor
    compression: exchange.CompressionState

    @staticmethod
    def of(worker: Worker, compressor: Encoder) -> PublicCopies:
        """Everyone knows the parameters that all begin with."""
        kept = exchange.CompressionState.of(worker, compressor)
        kept.residual = None  # x_i - x^_i takes its place
        return PublicCopies(worker.parameters.clone(), worker.parameters.clone(), kept)


@dataclass
class GossipState(ReplicaState):
    """`mixing` makes, in `mixed`, the parameters of the next step."""

    step: int = 0  # steps done
    copies: PublicCopies | None = None  # with compression
    mixed: Tensor | None = field(default=None, metadata=optimizers.TRANSIENT)
    mixing: Task[Tensor] | None = field(default=None, metadata=optimizers.TRANSIENT)


@dataclass(frozen=True, repr=False)
class Gossip(StatefulReplicas[GossipState]):
    """Mix parameters with those of a few neighbours in each step.

    D-PSGD (Lian et al., NeurIPS 2017), Algorithm 1, on worker i:

        x_i <- sum_j W_ij x_j - gamma g_i

    with g_i, the gradient of its own samples, taken at x_i before the mixing. So both go on at the
    same time, as in the paper: a background flow mixes while the gradient is computed (in a loop of
    your own the mixing follows it). W is doubly stochastic, so mixing keeps the mean of the
    replicas. The optimizer acts on the mixed parameters; its moments stay with the worker. The
    final parameters are the exact mean.

    With `compression` it is CHOCO-SGD (Koloskova et al., ICML 2019), Algorithm 2: after the
    optimizer's step, neighbours send each other compressed differences from the copies x^ that they
    know of each other, and

        x_i <- x_i + gamma sum_j W_ij (x^_j - x^_i)

    gamma is `consensus`: the fewer bytes, the smaller it has to be, or the replicas part. What a
    difference leaves out is in the next one, so no error feedback is needed.
    """

    use = "where no link should carry everything, and only neighbours should wait for each other"
    variants = (
        ("Gossip()", "for a few workers, or networks that are rings"),
        (
            "Gossip(Exponential(peers=1))",
            "for many workers that all reach each other: one message a step",
        ),
    )

    topology: Topology = setting(Ring(), "who mixes with whom")
    _: KW_ONLY
    compression: Compressor | None = setting(
        None, "what differences are compressed by, as TopK(0.1); none: not at all"
    )
    consensus: float = setting(
        0.2, "gamma, with compression: how far neighbours approach in a step", above=0, high=1
    )

    def check(self) -> None:
        compressor = self.compression
        if compressor and (compressor.brings_momentum or not compressor.decodable_alone):
            raise InputError(
                f"Gossip: {compressor!r} is for sums of gradients: take TopK or QSGD, or another "
                "compressor of single vectors"
            )

    def roles(self, ranks: int) -> Roles:
        graphs = self.topology.graphs(ranks)
        if self.compression is not None and len(graphs) > 1:
            raise InputError(
                f"{self!r}: the topology changes from step to step, so that copies of all would "
                "have to be kept: take one that does not, or leave out compression"
            )
        if not connected(graphs):
            raise InputError(f"{self!r}: the topology does not connect {ranks} ranks")
        for graph in graphs:
            doubly_stochastic(graph)
        return super().roles(ranks)

    def _memory(self, rank: int, ranks: int) -> Footprint:
        """Add what arrives from all neighbours in a step, and what it is mixed in."""
        arriving = max(len(sources_of(graph)[rank]) for graph in self.topology.graphs(ranks))
        copies = float(arriving + 1) if self.compression is None else 3.0  # x^, s and a difference
        return replace(super()._memory(rank, ranks), copies=copies)

    def allocate(self, worker: Worker, work: exchange.SharedWork | None) -> GossipState:
        state = GossipState(worker.local_optimizer())
        if self.compression is not None:
            state.copies = PublicCopies.of(worker, self._contraction)
        return state

    @property
    def _contraction(self) -> Encoder:
        """Return the compressor in the form that error feedback asks for: not scaled up."""
        assert isinstance(self.compression, Encoder)
        return self.compression.with_setting("error_feedback", True)

    def before_forward(self, worker: Worker, state: GossipState) -> None:
        """Begin to mix the parameters, while the gradient at them is computed."""
        if len(worker.workers) > 1 and not worker.own_loop and state.copies is None:
            state.mixing = worker.transport.in_background(self._mix(worker, state))

    def _mix(self, worker: Worker, state: GossipState) -> Callable[[Transport], Tensor]:
        if state.mixed is None:
            state.mixed = torch.empty_like(worker.parameters)
        mixed, step = state.mixed, state.step
        mix = exchange.mix_with_neighbours
        return lambda transport: mix(worker, transport, mixed, self.topology, step)

    def _take_mixed(self, worker: Worker, state: GossipState) -> None:
        """Replace the parameters by the mixed ones."""
        if state.mixing is not None:
            # The vectors change places: the old parameters are what the next step mixes into.
            state.mixed = worker.move_parameters(state.mixing.wait())
            state.mixing = None
        elif len(worker.workers) > 1:
            worker.parameters.copy_(self._mix(worker, state)(worker.transport))

    def _mix_differences(self, worker: Worker, step: int, copies: PublicCopies) -> None:
        """q_i = C(x_i - x^_i);  x^_j <- x^_j + q_j;  x_i <- x_i + gamma sum_j W_ij (x^_j - x^_i).

        Waits for the neighbours in the graph, which is the same in every step.
        """
        ranks, own = worker.workers.ranks, worker.workers.index(worker.rank)
        graph = self.topology.graph(len(ranks), step)
        weights = doubly_stochastic(graph)[own]
        x, layout = worker.parameters, worker.layout
        codec = exchange.SliceCodec(worker, self._contraction)
        spans = [(slot.offset, slot.size) for slot in layout.slots]
        (whole,) = place(spans, layout.size, 1, divisible=False)

        (payload,) = codec.encode([whole], x - copies.own, copies.compression, step)
        swap = exchange.swap_with_neighbours
        arrived = swap(worker, worker.transport, payload, graph, alike=False)
        # Its own difference as the others decode it, so that all copies of x^ stay equal.
        arrived[own] = payload
        # In a fixed order, so that the sum has the same bits in each run.
        for peer in sorted(arrived):
            q = codec.decode(whole, arrived[peer], step, ranks[peer])
            copies.mixed.add_(q, alpha=weights[peer])
            if peer == own:
                copies.own.add_(q)

        def mix() -> None:
            x.add_(copies.mixed - copies.own, alpha=self.consensus)

        exchange.charge(worker, "mix", (len(arrived) + 2) * layout.size, mix)

    def update(self, worker: Worker, state: GossipState) -> None:
        """x_i <- sum_j W_ij x_j, then the optimizer's step; with compression the step is first."""
        worker.clip()
        if state.copies is not None:
            worker.update_locally(state.optimizer)
            self._mix_differences(worker, state.step, state.copies)
        else:
            self._take_mixed(worker, state)
            worker.update_locally(state.optimizer)
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
        state.step += 1

    def settle(self, worker: Worker, state: GossipState) -> None:
        worker.transport.end_background()
