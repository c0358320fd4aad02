"""CHOCO-SGD (Koloskova, Stich and Jaggi, ICML 2019): gossip of compressed differences."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from orchestra.compression.base import Encoder
from orchestra.exchange.agreement import charge
from orchestra.exchange.compression import CompressionState, SliceCodec
from orchestra.parameter_server.placement import Piece, Slice
from orchestra.topologies import Topology, doubly_stochastic
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker


@dataclass
class PublicCopies:
    """What neighbours know of each other, all of it flat: shape [layout.size].

    Attributes:
        own: x^_i, what the others know of this worker's parameters.
        mixed: s_i = sum_j W_ij x^_j, which is all that has to be known of the neighbours'.
        compression: what the compressor keeps.
    """

    own: Tensor
    mixed: Tensor
    compression: CompressionState

    @staticmethod
    def of(worker: Worker, compressor: Encoder) -> PublicCopies:
        """Everyone knows the parameters that all begin with."""
        kept = CompressionState.of(worker, compressor)
        kept.residual = None  # x_i - x^_i takes its place
        return PublicCopies(worker.parameters.clone(), worker.parameters.clone(), kept)


def mix_differences(
    worker: Worker,
    topology: Topology,
    step: int,
    compressor: Encoder,
    copies: PublicCopies,
    rate: float,
) -> None:
    """q_i = C(x_i - x^_i);  x^_j <- x^_j + q_j;  x_i <- x_i + gamma sum_j W_ij (x^_j - x^_i).

    `rate` is gamma. Waits for the neighbours in the graph, which is the same in every step.
    """
    ranks, own = worker.workers.ranks, worker.workers.index(worker.rank)
    graph = topology.graph(len(ranks), step)
    weights = doubly_stochastic(graph)[own]
    transport, x, layout = worker.transport, worker.parameters, worker.layout
    pieces = [
        Piece(number, slot.offset, slot.offset + slot.size)
        for number, slot in enumerate(layout.slots)
    ]
    whole, codec = Slice(0, layout.size, tuple(pieces), worker.rank), SliceCodec(worker, compressor)

    (payload,) = codec.encode([whole], x - copies.own, copies.compression, step)
    arriving = {
        peer: transport.receive(ranks[peer], Tag.MIX) for peer in sorted(weights) if peer != own
    }
    leaving = [transport.send(payload, ranks[peer], Tag.MIX) for peer in graph[own]]
    arrived = {peer: handle.wait() for peer, handle in arriving.items()}
    for handle in leaving:
        handle.wait()

    arrived[own] = payload
    for peer in sorted(arrived):
        q = codec.decode(whole, arrived[peer], step, ranks[peer])
        copies.mixed.add_(q, alpha=weights[peer])
        if peer == own:
            copies.own.add_(q)

    def mix() -> None:
        x.add_(copies.mixed - copies.own, alpha=rate)

    charge(worker, "mix", (len(arrived) + 2) * layout.size, mix)
