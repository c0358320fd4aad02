"""Averages of whole replicas, or of fragments of them, in place of gradients."""

from __future__ import annotations

from torch import Tensor

from orchestra.collectives import all_reduce
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
