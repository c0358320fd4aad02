"""Averages of whole replicas, or of fragments of them, in place of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestra.collectives import all_reduce
from orchestra.optimizers.moments import export_moments
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker


def average_replicas(
    worker: Worker, transport: Transport, values: Tensor, weight: float, algorithm: str
) -> None:
    """values <- sum over the workers of weight x values; the weights have to sum to 1.

    `transport` is that of the flow which does it.
    """
    if len(worker.workers) == 1:
        return
    values.mul_(weight)
    buffer = all_reduce(transport, values, algorithm, worker.workers, Tag.REPLICAS)
    worker.measures.peak_buffer_bytes = max(worker.measures.peak_buffer_bytes, buffer)


def average_moments(
    worker: Worker, optimizer: torch.optim.Optimizer, weight: float, algorithm: str
) -> None:
    """The moments in `optimizer` become their sum over the workers, `weight` times each one's.

    The weights have to sum to 1. A parameter that some worker has not updated yet keeps its own.
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
    average_replicas(worker, worker.transport, flat, weight, algorithm)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def scaled_copy(worker: Worker, values: Tensor) -> Tensor:
    """A copy of `values` to be averaged, while the replica goes on; charged as work."""
    return worker.compute.run(Work("encode", values.numel()), values.clone)


def fragments_of(worker: Worker, count: int) -> list[tuple[int, int]]:
    """The flat parameters in `count` runs (first, end) of whole tensors, about equally large.

    There are fewer where there are not as many tensors.
    """
    slots, size = worker.layout.slots, worker.layout.size
    ends = [slot.offset for slot in slots[1:]] + [size]
    cuts = [min(ends, key=lambda end: abs(end - size * k / count)) for k in range(1, count + 1)]
    distinct = sorted(set(cuts))
    return list(zip([0, *distinct[:-1]], distinct, strict=True))
