"""The sample-weighted average of the gradient over the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from orchestra.collectives import Group, all_reduce, broadcast, gather_objects
from orchestra.optimizers.state import Moments, export_moments
from orchestra.transports.protocol import Task
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker


class Begin(Protocol):
    """Begins the sum of a bucket over the workers."""

    def __call__(self, bucket: Bucket, *, background: bool) -> Sequence[Task[int]]:
        """The collectives that it takes, in their order; each gives the bytes of its buffer."""
        ...


class GradientAverage:
    """Replaces the gradient on every worker by its sample-weighted mean over `worker.workers`.

    The flat gradient is cut into buckets; the sum of each begins as soon as backward has filled
    it, and goes on while backward does. The loss of every worker, the wish to stop, and which
    tensors were used travel with the last bucket. `begin` begins the sum of a bucket.
    """

    def __init__(self, worker: Worker, begin: Begin) -> None:
        self._worker = worker
        self._begin = begin
        self._buckets = cut_into_buckets(worker)
        self._bucket_of = [i for i, bucket in enumerate(self._buckets) for _ in range(bucket.slots)]
        self._ready = [0] * len(self._buckets)  # slots of each that have their gradient
        self._next = 0  # the first bucket that was not begun yet
        self._under_way: list[Task[int]] = []
        self._overlaps = len(worker.workers) > 1 and len(self._buckets) > 1
        if self._overlaps:
            worker.gradients.when_ready(self._slots_are_ready)

    def finish(self) -> None:
        """After backward: begin what is left, and wait for all of it."""
        worker, gradients, step = self._worker, self._worker.gradients, self._worker.step
        gradients.collect_rest(step.weight)
        gradients.fill_tail(worker.rank, step.weight, step.loss, step.stop)
        if len(worker.workers) > 1:
            while self._next < len(self._buckets):
                self._begin_next()
            for collective in reversed(self._under_way):  # all are done when the last one is
                self._note_buffer(collective.wait())
            self._under_way.clear()
            self._ready = [0] * len(self._buckets)
            self._next = 0
        step.loss, step.losses, step.stop = gradients.publish()
        step.agreed = True

    def close(self) -> None:
        """Nothing goes on in the background any more."""
        self._worker.gradients.when_ready(None)
        self._worker.transport.end_background()

    def _slots_are_ready(self, first: int, end: int) -> None:
        """In backward: collect them, and begin the buckets that are complete, in their order."""
        gradients, weight = self._worker.gradients, self._worker.step.weight
        for slot in range(first, end):
            gradients.collect(slot, weight)
        for place in range(self._bucket_of[first], self._bucket_of[end - 1] + 1):
            bucket = self._buckets[place]
            self._ready[place] += min(end, bucket.last_slot) - max(first, bucket.first_slot)
        last = len(self._buckets) - 1  # waits for what travels with it
        while self._next < last and self._ready[self._next] == self._buckets[self._next].slots:
            self._worker.compute.reached(self._buckets[self._next].last_slot - 1)
            self._begin_next()

    def _begin_next(self) -> None:
        bucket = self._buckets[self._next]
        self._under_way += self._begin(bucket, background=self._overlaps)
        self._next += 1

    def _note_buffer(self, buffer: int) -> None:
        measures = self._worker.measures
        measures.peak_buffer_bytes = max(measures.peak_buffer_bytes, buffer)


@dataclass(frozen=True)
class Bucket:
    """A run of slots that is summed at once; `last_slot` is the end of the run.

    `values` begin at element `first` of the flat gradient.
    """

    first: int
    values: Tensor
    slots: int
    last_slot: int

    @property
    def first_slot(self) -> int:
        """The beginning of the run."""
        return self.last_slot - self.slots


def cut_into_buckets(worker: Worker) -> list[Bucket]:
    """The flat gradient in buckets of about `worker.bucket_bytes`; the tail is in the last."""
    storage, layout = worker.gradients.storage, worker.layout
    ends = []
    if worker.overlap:
        filled_to, itemsize = 0, storage.element_size()
        for index, slot in enumerate(layout.slots[1:], start=1):
            if (slot.offset - filled_to) * itemsize >= worker.bucket_bytes:
                ends.append((index, slot.offset))
                filled_to = slot.offset
    ends.append((len(layout.slots), storage.numel()))
    starts = [(0, 0), *ends]
    return [
        Bucket(start, storage[start:end], last - first, last)
        for (first, start), (last, end) in zip(starts, ends, strict=False)
    ]


def agree_on_parameters(worker: Worker) -> None:
    """Everyone takes the parameters and buffers of the first rank that is there."""
    agree_within(worker, worker.everyone)


def agree_within(worker: Worker, group: Group) -> None:
    """Everyone in `group` takes the parameters and buffers of its first rank."""
    if worker.agrees:
        return
    broadcast(worker.transport, worker.parameters, group.ranks[0], group, Tag.AGREE)
    broadcast_buffers(worker, group)


def wait_for_everyone(worker: Worker) -> None:
    """Collective over all ranks: nobody returns before everybody has called."""
    everyone = worker.everyone
    if len(everyone) > 1:
        all_reduce(worker.transport, torch.zeros(1), "butterfly", everyone, Tag.AGREE)


def agree_on_position(worker: Worker, position: int, first: int) -> int:
    """Collective over all ranks: the samples consumed, as the rank `first` knows them."""
    samples = torch.tensor([position])
    broadcast(worker.transport, samples, first, worker.everyone, Tag.AGREE)
    return int(samples)


def agree_on_data(worker: Worker, data: Any, first: int) -> Any:
    """Collective over all ranks: the plain JSON data that the rank `first` has."""
    transport, own = worker.transport, worker.rank
    if own != first:
        return gather_objects(transport, None, Group((first, own)), own)[0]
    for rank in worker.everyone.ranks:
        if rank != own:
            gather_objects(transport, data, Group((own, rank)), rank)
    return data


def start_together(worker: Worker, chief: int) -> None:
    """Collective over all ranks: how far apart they return does not depend on when each called.

    That depends on `chief` alone, which lets all go on. It tells a thousand ranks one after the
    other; after a butterfly all are at the same place again (exactly, where ranks and links are
    alike, for powers of two).
    """
    gather_objects(worker.transport, None, worker.everyone, chief)
    broadcast(worker.transport, torch.zeros(1), chief, worker.everyone, Tag.READY)
    wait_for_everyone(worker)


def broadcast_buffers(worker: Worker, group: Group) -> None:
    """Everyone in `group` takes the buffers of its first rank, as DistributedDataParallel does."""
    buffers = worker.buffers
    if not buffers or len(group) == 1 or worker.rank not in group.ranks:
        return
    for vector in pack(buffers):
        broadcast(worker.transport, vector.values, group.ranks[0], group, Tag.BUFFERS)
        vector.unpack()


class Packed:
    """Tensors of one dtype, copied end to end into `values`."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.values = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def unpack(self) -> None:
        """Copy `values` back into the tensors."""
        offset = 0
        with torch.no_grad():
            for tensor in self.tensors:
                part = self.values[offset : offset + tensor.numel()]
                tensor.copy_(part.view(tensor.shape))
                offset += tensor.numel()


def pack(named: list[tuple[str, Tensor]]) -> list[Packed]:
    """One `Packed` for each dtype, in the order of first appearance."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for _, tensor in named:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [Packed(tensors) for tensors in by_dtype.values()]


def hand_over_moments(
    worker: Worker, optimizer: torch.optim.Optimizer | None, *, averaged: bool
) -> None:
    """Let the optimizers that this rank builds next inherit the moments of `optimizer`.

    Without one here (the servers kept it, in slices) there is nothing to inherit.
    """
    worker.inherited = {}
    if optimizer is None:
        return
    moments = export_moments(optimizer, worker.named_parameters())
    worker.inherited = _averaged(worker, moments) if averaged else moments


def _averaged(worker: Worker, moments: Moments) -> Moments:
    """The moments averaged over `worker.workers`; numbers stay as they are."""
    averaged: Moments = {}
    for name in sorted(moments):
        averaged[name] = dict(moments[name])
        for key, value in moments[name].items():
            if isinstance(value, Tensor) and value.dim():
                flat = value.detach().reshape(-1) / len(worker.workers)
                if len(worker.workers) > 1:
                    all_reduce(worker.transport, flat, "ring", worker.workers, Tag.AGREE)
                averaged[name][key] = flat.view(value.shape)
    return averaged
