"""Replicas that differ: mixing them, averaging them, and the pull of a common centre."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from orchestra.collectives import Group, all_reduce
from orchestra.exchange.average import note_buffer
from orchestra.optimizers.state import export_moments
from orchestra.topologies import Topology, doubly_stochastic
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker

T = TypeVar("T")


def keep_gradient(worker: Worker) -> None:
    """The gradient stays this worker's own; one of no samples counts for nothing."""
    worker.gradients.collect_rest()
    if not worker.step.samples:
        worker.gradients.used = [False] * len(worker.gradients.used)
    worker.gradients.forget_unused()


def mix_with_neighbours(worker: Worker, topology: Topology, step: int) -> None:
    """x_i <- sum_j W_ij x_j over the neighbours in the graph of `step`; waits for them."""
    ranks, own = worker.workers.ranks, worker.workers.index(worker.rank)
    graph = topology.graph(len(ranks), step)
    weights = doubly_stochastic(graph)[own]
    transport, x = worker.transport, worker.parameters
    arriving = {
        peer: transport.receive(ranks[peer], Tag.MIX, torch.empty_like(x))
        for peer in sorted(weights)
        if peer != own
    }
    leaving = [transport.send(x, ranks[peer], Tag.MIX) for peer in graph[own]]
    arrived = {peer: handle.wait() for peer, handle in arriving.items()}
    for handle in leaving:
        handle.wait()

    def mix() -> None:
        if arrived:
            x.mul_(weights[own])
        for peer, values in arrived.items():
            x.add_(values, alpha=weights[peer])

    charge(worker, "mix", len(arrived) * worker.layout.size, mix)


def average_replicas(
    worker: Worker,
    transport: Transport,
    values: Tensor,
    algorithm: str,
    samples: int,
    total: int | None,
) -> None:
    """values <- their mean over the workers, weighted by the samples behind them.

    `transport` is that of the flow which does it. Workers that do not know the `total` add up.
    """
    if len(worker.workers) == 1:
        return
    if total is None:
        counts = torch.tensor([samples], dtype=torch.float64)
        all_reduce(transport, counts, algorithm, worker.workers, Tag.REPLICAS)
        total = int(counts)
    values.mul_(samples / total)
    note_buffer(worker, all_reduce(transport, values, algorithm, worker.workers, Tag.REPLICAS))


def average_moments(
    worker: Worker,
    optimizer: torch.optim.Optimizer,
    algorithm: str,
    samples: int,
    total: int | None,
) -> None:
    """The moments in `optimizer` become their mean over the workers, as `average_replicas`.

    Those of a parameter that some worker has not updated yet stay as they are.
    """
    if len(worker.workers) == 1:
        return
    moments = export_moments(optimizer, worker.named_parameters())
    names = list(worker.named_parameters())
    there = torch.tensor([float(name in moments) for name in names])
    all_reduce(worker.transport, there, algorithm, worker.workers, Tag.AGREE)
    tensors = [
        value
        for name, workers in zip(names, there.tolist(), strict=True)
        if workers == len(worker.workers)
        for _, value in sorted(moments[name].items())
        if isinstance(value, Tensor) and value.dim()
    ]
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    average_replicas(worker, worker.transport, flat, algorithm, samples, total)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def charge(worker: Worker, kind: str, elements: int, function: Callable[[], T]) -> T:
    """Do `function`, and count it as computing on so many elements."""
    return worker.compute.run(Work(kind, elements), function)


def copy_of(worker: Worker, values: Tensor) -> Tensor:
    """A copy of `values` to be averaged, while the replica goes on; charged as work."""
    return charge(worker, "encode", values.numel(), values.clone)


def ring_sum(worker: Worker, vector: Tensor, tag: int, ranks: tuple[int, ...] | None = None) -> int:
    """Replace `vector` by its sum over `ranks`, or over the workers; the bytes of buffer used."""
    group = worker.workers if ranks is None else Group(ranks)
    return all_reduce(worker.transport, vector, "ring", group, tag) if len(group) > 1 else 0


def fragments_of(worker: Worker, count: int) -> list[tuple[int, int]]:
    """The flat parameters in `count` runs (first, end) of whole tensors, about equally large.

    There are fewer where there are not as many tensors.
    """
    slots, size = worker.layout.slots, worker.layout.size
    ends = [slot.offset for slot in slots[1:]] + [size]
    cuts = {min(ends, key=lambda end: abs(end - size * k / count)) for k in range(1, count + 1)}
    distinct = sorted(cuts)
    return list(zip([0, *distinct[:-1]], distinct, strict=True))
