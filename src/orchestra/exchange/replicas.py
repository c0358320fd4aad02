"""Replicas that differ: mixing them, averaging them, and the pull of a common centre."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from orchestra.collectives import all_reduce
from orchestra.exchange.average import note_buffer
from orchestra.optimizers.state import export_moments
from orchestra.parameter_server.client import Client
from orchestra.parameter_server.state import Answer, Push
from orchestra.topologies import Topology, doubly_stochastic
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker


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

    worker.compute.run(Work("mix", len(arrived) * worker.layout.size), mix)


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


def copy_of(worker: Worker, values: Tensor) -> Tensor:
    """A copy of `values` to be averaged, while the replica goes on; charged as work."""
    return worker.compute.run(Work("encode", values.numel()), values.clone)


def fragments_of(worker: Worker, count: int) -> list[tuple[int, int]]:
    """The flat parameters in `count` runs (first, end) of whole tensors, about equally large.

    There are fewer where there are not as many tensors.
    """
    slots, size = worker.layout.slots, worker.layout.size
    ends = [slot.offset for slot in slots[1:]] + [size]
    cuts = {min(ends, key=lambda end: abs(end - size * k / count)) for k in range(1, count + 1)}
    distinct = sorted(cuts)
    return list(zip([0, *distinct[:-1]], distinct, strict=True))


def pull_on_centre(
    worker: Worker, client: Client, into: Tensor, alpha: float, samples: int
) -> list[Answer]:
    """c <- c + alpha (x - c) on the servers, and alpha (x - c) into flat `into`.

    `samples` are those behind x since this worker's last exchange.
    """
    step, used = worker.step, (True,) * len(worker.layout.slots)
    push = Push(
        worker.rank, client.clock + 1, samples, samples, step.loss, step.stop, (alpha,), used
    )
    return client.push(push, worker.parameters, into)


def look_ahead(worker: Worker, velocity: Tensor, momentum: float) -> None:
    """x <- x + delta v."""
    _charged(worker, lambda: worker.parameters.add_(velocity, alpha=momentum))


def step_elastically(
    worker: Worker,
    optimizer: torch.optim.Optimizer,
    force: Tensor | None,
    velocity: Tensor | None,
    momentum: float,
) -> None:
    """The optimizer's step and minus `force`.

    With a `velocity` v the parameters have to be x + delta v, and it becomes what x moves by
    without the force.
    """
    x = worker.parameters
    if velocity is not None:
        _charged(worker, lambda: velocity.mul_(momentum).sub_(x))
    worker.update_locally(optimizer)
    if velocity is not None:
        _charged(worker, lambda: velocity.add_(x))
    if force is not None:
        _charged(worker, lambda: x.sub_(force))


def _charged(worker: Worker, function: Callable[[], Tensor]) -> None:
    worker.compute.run(Work("mix", worker.layout.size), function)
