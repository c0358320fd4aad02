"""Gossip: everyone averages parameters with a few neighbours (D-PSGD, CHOCO-SGD)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

from orchestra import exchange
from orchestra.compression.base import Compressor, Encoder
from orchestra.errors import InputError
from orchestra.parameter_server.placement import place
from orchestra.settings import setting
from orchestra.settings.base import COMMON
from orchestra.strategies.base import Replicas, Roles, torch
from orchestra.strategies.member import ReplicaMember
from orchestra.strategies.traits import AfterLoss, Footprint, Traits, WorkMode
from orchestra.topologies import Ring, Topology, connected, doubly_stochastic, sources_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import CompressionState, SliceCodec
    from orchestra.transports.protocol import Pending, Transport
    from orchestra.worker.worker import Worker


@dataclass(frozen=True, repr=False)
class Gossip(Replicas):
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

    def traits(self, work: WorkMode = "shared") -> Traits:
        """Return the traits of replicas that have no message in flight between two steps."""
        return replace(super().traits(work), after_loss=AfterLoss.KEPT)

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

    @property
    def contraction(self) -> Encoder:
        """The compressor in the form that error feedback asks for: not scaled up."""
        assert isinstance(self.compression, Encoder)
        return self.compression.with_setting("error_feedback", True)

    def member(self, worker: Worker) -> DPSGDMember | ChocoMember:
        """Return the member of D-PSGD, or with `compression` that of CHOCO-SGD."""
        optimizer = worker.local_optimizer()
        if self.compression is None:
            return DPSGDMember(self, worker, optimizer)
        return ChocoMember(self, worker, optimizer, PublicCopies.of(worker, self.contraction))


@dataclass(eq=False)
class DPSGDMember(ReplicaMember[Gossip]):
    """D-PSGD: a background flow mixes the parameters while the gradient is computed."""

    step: int = field(default=0, metadata=COMMON)  # steps done
    mixed: Tensor = field(init=False)  # sum_j W_ij x_j, once `mixing` is done
    mixing: Pending[Tensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.mixed = torch.empty_like(self.worker.parameters)

    def begin(self) -> None:
        """Begin to mix the parameters, while the gradient at them is computed."""
        if len(self.worker.workers) > 1 and not self.worker.own_loop:
            self.mixing = self.worker.transport.in_background(self._mix())

    def update(self) -> None:
        """x_i <- sum_j W_ij x_j - gamma g_i."""
        worker = self.worker
        worker.clip()
        self._take_mixed()
        worker.update_locally(self.optimizer)
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
        self.step += 1

    def _take_mixed(self) -> None:
        """Replace the parameters by the mixed ones."""
        if self.mixing is not None:
            # The vectors change places: the old parameters are what the next step mixes into.
            self.mixed = self.worker.move_parameters(self.mixing.wait())
            self.mixing = None
        elif len(self.worker.workers) > 1:
            self.worker.parameters.copy_(self._mix()(self.worker.transport))

    def _mix(self) -> Callable[[Transport], Tensor]:
        """Return the function that a flow calls to mix the parameters of this step."""
        worker, topology, mixed, step = self.worker, self.strategy.topology, self.mixed, self.step
        mix = exchange.mix_with_neighbours
        return lambda transport: mix(worker, transport, mixed, topology, step)

    def settle(self, rest: Rest) -> None:
        self.worker.transport.end_background()


@dataclass
class PublicCopies:
    """CHOCO-SGD: what neighbours know of each other, all of it flat: shape [layout.size].

    `own` is x^_i, what the others know of this worker's parameters; `mixed` is s_i = sum_j W_ij
    x^_j, all that has to be known of the neighbours'. `compression`: what the compressor keeps.
    """

    own: Tensor
    mixed: Tensor
    compression: CompressionState

    @staticmethod
    def of(worker: Worker, compressor: Encoder) -> PublicCopies:
        """Everyone knows the parameters that all begin with."""
        kept = exchange.CompressionState.of(worker, compressor)
        kept.residual = None  # x_i - x^_i takes its place
        return PublicCopies(worker.parameters.clone(), worker.parameters.clone(), kept)


@dataclass(eq=False)
class ChocoMember(ReplicaMember[Gossip]):
    """CHOCO-SGD: neighbours send each other compressed differences after the optimizer's step."""

    copies: PublicCopies
    step: int = field(default=0, metadata=COMMON)  # steps done
    codec: SliceCodec = field(init=False)

    def __post_init__(self) -> None:
        self.codec = exchange.SliceCodec(self.worker, self.strategy.contraction)

    def update(self) -> None:
        """x_i <- x_i - eta g_i;  then x_i <- x_i + gamma sum_j W_ij (x^_j - x^_i)."""
        worker = self.worker
        worker.clip()
        worker.update_locally(self.optimizer)
        self._mix_differences()
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
        self.step += 1

    def _mix_differences(self) -> None:
        """q_i = C(x_i - x^_i);  x^_j <- x^_j + q_j;  x_i <- x_i + gamma sum_j W_ij (x^_j - x^_i).

        Waits for the neighbours in the graph, which is the same in every step.
        """
        worker, copies = self.worker, self.copies
        ranks, own = worker.workers.ranks, worker.workers.index(worker.rank)
        graph = self.strategy.topology.graph(len(ranks), self.step)
        weights = doubly_stochastic(graph)[own]
        x, layout = worker.parameters, worker.layout
        spans = [(slot.offset, slot.size) for slot in layout.slots]
        (whole,) = place(spans, layout.size, 1, divisible=False)

        (payload,) = self.codec.encode([whole], x - copies.own, copies.compression, self.step)
        swap = exchange.swap_with_neighbours
        arrived = swap(worker, worker.transport, payload, graph, alike=False)
        # Its own difference as the others decode it, so that all copies of x^ stay equal.
        arrived[own] = payload
        # In a fixed order, so that the sum has the same bits in each run.
        for peer in sorted(arrived):
            q = self.codec.decode(whole, arrived[peer], self.step, ranks[peer])
            copies.mixed.add_(q, alpha=weights[peer])
            if peer == own:
                copies.own.add_(q)

        def mix() -> None:
            x.add_(copies.mixed - copies.own, alpha=self.strategy.consensus)

        exchange.charge(worker, "mix", (len(arrived) + 2) * layout.size, mix)

    def settle(self, rest: Rest) -> None:
        self.worker.transport.end_background()
