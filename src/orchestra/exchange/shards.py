"""The optimizer's state in slices, one a worker, instead of whole on each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchestra.collectives import Group, all_reduce
from orchestra.exchange.average import Bucket, Collective, cut_into_buckets
from orchestra.optimizers.spec import set_rates
from orchestra.optimizers.state import OptimizerPart, install_moments
from orchestra.parameter_server.placement import place
from orchestra.schedules import ALL_REDUCE, ring_all_gather, ring_reduce_scatter
from orchestra.transports.protocol import Task
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker


@dataclass(frozen=True)
class Part:
    """A tensor of which this worker updates the elements from `first` on: it, or a cut of it.

    `values` and `gradient` share memory with the flat vectors.
    """

    slot: int
    first: int
    values: Tensor
    gradient: Tensor


class Shards:
    """ZeRO, stage 1 (Rajbhandari et al., SC 2020): the ring's first half, an update, its second.

    Every bucket is cut into one slice a worker, each of which owns the slice of which the
    reduce-scatter leaves it the sum. Tensors are cut only where the optimizer treats each element
    alone. `optimizer` holds the state of this worker's parts, and nothing else.
    """

    def __init__(self, worker: Worker, ring: Group) -> None:
        self._worker = worker
        self._reduce_scatter = Collective(ring_reduce_scatter(len(ring)), ring)
        self._all_gather = Collective(ring_all_gather(len(ring)), ring)
        self._tail = Collective(ALL_REDUCE["butterfly"](len(ring)), ring)
        self._buckets = cut_into_buckets(worker)
        self._edges: dict[int, tuple[int, ...]] = {}  # of the slices of a bucket, by its beginning
        self._parts: list[Part] = []
        for bucket in self._buckets:
            self._cut(bucket, len(ring), own=(ring.index(worker.rank) + 1) % len(ring))
        names = [worker.layout.slots[part.slot].name for part in self._parts]
        tensors = {
            name: (part.values, part.first) for name, part in zip(names, self._parts, strict=True)
        }
        self.optimizer = worker.optimizer.build({name: t for name, (t, _) in tensors.items()})
        install_moments(self.optimizer, tensors, worker.inherited)
        self.part = OptimizerPart(self.optimizer, tensors)

    def _cut(self, bucket: Bucket, workers: int, own: int) -> None:
        layout = self._worker.layout
        first_slot = bucket.last_slot - bucket.slots
        slots = layout.slots[first_slot : bucket.last_slot]
        spans = [(slot.offset - bucket.first, slot.size) for slot in slots]
        size = min(bucket.values.numel(), layout.size - bucket.first)
        divisible = self._worker.optimizer.elementwise
        slices = place(spans, size, workers, divisible=divisible)
        self._edges[bucket.first] = (*(part.first for part in slices), size)
        for piece in slices[own].pieces:
            start, end = bucket.first + piece.first, bucket.first + piece.end
            self._parts.append(self._part(first_slot + piece.tensor, start, end))

    def _part(self, index: int, start: int, end: int) -> Part:
        """Elements [start, end) of the flat vectors; a tensor that is there whole has its shape."""
        slot, worker = self._worker.layout.slots[index], self._worker
        shape = slot.shape if end - start == slot.size else (end - start,)
        values = worker.parameters[start:end].view(shape)
        gradient = worker.gradients.vector[start:end].view(shape)
        return Part(index, start - slot.offset, values, gradient)

    def sum(self, bucket: Bucket, background: bool) -> list[Task[int]]:
        """Begin the sum of this worker's slice of `bucket`; of the tail behind it everybody's."""
        transport = self._worker.transport
        edges = self._edges[bucket.first]
        gradient, tail = bucket.values[: edges[-1]], bucket.values[edges[-1] :]
        begun = [
            self._reduce_scatter.begin(transport, gradient, edges=edges, background=background)
        ]
        if tail.numel():
            begun.append(self._tail.begin(transport, tail, background=background))
        return begun

    def update(self) -> None:
        """Clip and step on the own slices; then everybody's parameters are collected."""
        worker = self._worker
        for part in self._parts:
            part.values.grad = part.gradient if worker.gradients.used[part.slot] else None
        self._clip()
        set_rates(self.optimizer, worker.step.rates)
        elements = sum(part.values.numel() for part in self._parts)
        worker.compute.run(Work("update", elements), self.optimizer.step)
        for bucket in self._buckets:
            edges = self._edges[bucket.first]
            values = worker.parameters[bucket.first : bucket.first + edges[-1]]
            self._all_gather.begin(worker.transport, values, Tag.SHARDS, edges).wait()

    def _clip(self) -> None:
        """By the norm of the whole gradient: each worker knows the square of its part."""
        worker, group = self._worker, self._reduce_scatter.group
        if worker.clip_norm is None or len(group) == 1:
            worker.clip()
            return
        gradients = [part.gradient for part in self._parts if part.values.grad is not None]
        square = torch.zeros(1, dtype=torch.float64, device=worker.layout.device)
        for gradient in gradients:
            square += gradient.double().square().sum()
        all_reduce(worker.transport, square, "butterfly", group, Tag.NORM)
        factor = worker.clip_norm / (float(square.sqrt()) + 1e-6)
        if factor < 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
