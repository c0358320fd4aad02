"""Replicas that differ: mixing them with the neighbours', and bringing them together."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestra.collectives import all_reduce, broadcast
from orchestra.exchange.average import pack
from orchestra.topologies import Topology, doubly_stochastic
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker

WHOLE = slice(None)


def keep_gradient(worker: Worker) -> None:
    """The gradient stays this worker's own; one of no samples counts for nothing."""
    worker.gradients.collect_rest()
    if not worker.step.samples:
        worker.gradients.used = [False] * len(worker.gradients.used)
    worker.gradients.forget_unused()


def mix_with_neighbours(worker: Worker, topology: Topology, step: int) -> None:
    """x_i <- sum_j W_ij x_j over the neighbours in the graph of `step`; waits for them."""
    ranks, own = len(worker.workers), worker.workers.index(worker.rank)
    graph = topology.graph(ranks, step)
    weights = doubly_stochastic(graph)[own]
    transport, x = worker.transport, worker.parameters
    arriving = {
        peer: transport.receive(worker.workers.ranks[peer], Tag.MIX, torch.empty_like(x))
        for peer in sorted(weights)
        if peer != own
    }
    leaving = [transport.send(x, worker.workers.ranks[peer], Tag.MIX) for peer in graph[own]]
    arrived = {peer: handle.wait() for peer, handle in arriving.items()}
    for handle in leaving:
        handle.wait()

    def mix() -> None:
        if arrived:
            x.mul_(weights[own])
        for peer, values in arrived.items():
            x.add_(values, alpha=weights[peer])

    worker.compute.run(Work("mix", len(arrived) * worker.layout.size), mix)


def exact_mean(worker: Worker, weight: float = 1.0, part: slice = WHOLE) -> None:
    """Everyone's parameters in `part` become the mean over the workers, weighted by `weight`.

    Summed in float64, where a sum of float32 numbers is exact in practice.
    """
    values = worker.parameters[part]
    values.copy_(_mean(worker, values, weight))


def exact_mean_of_buffers(worker: Worker, weight: float = 1.0) -> None:
    """Floating buffers become their mean, weighted by `weight`, others the first worker's."""
    for packed in pack(worker.buffers):
        if packed.values.is_floating_point():
            packed.values.copy_(_mean(worker, packed.values, weight))
        else:
            broadcast(
                worker.transport,
                packed.values,
                worker.workers.ranks[0],
                worker.workers,
                Tag.BUFFERS,
            )
        packed.unpack()


def _mean(worker: Worker, values: Tensor, weight: float) -> Tensor:
    if len(worker.workers) == 1:
        return values
    total = torch.cat([weight * values.double(), values.new_tensor([weight]).double()])
    all_reduce(worker.transport, total, "ring", worker.workers, Tag.AGREE)
    return total[:-1] / total[-1]
