"""Averages of whole replicas, or of fragments of them, in place of gradients."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from orchestra.collectives import all_reduce
from orchestra.optimizers.state import export_moments
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker


class Counts(TypedDict):
    """The samples behind this worker's values and behind those of all workers; None: not known."""

    samples: int
    total: int | None


def average_replicas(
    worker: Worker,
    transport: Transport,
    values: Tensor,
    algorithm: str,
    *,
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
    buffer = all_reduce(transport, values, algorithm, worker.workers, Tag.REPLICAS)
    worker.measures.peak_buffer_bytes = max(worker.measures.peak_buffer_bytes, buffer)


def average_moments(
    worker: Worker,
    optimizer: torch.optim.Optimizer,
    algorithm: str,
    *,
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
    average_replicas(worker, worker.transport, flat, algorithm, samples=samples, total=total)
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
