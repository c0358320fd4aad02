"""The sample-weighted average of the gradient over the workers, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from orchestra.collectives import Group, all_reduce
from orchestra.errors import InputError
from orchestra.schedules import ALL_REDUCE, Schedule, hierarchical
from orchestra.transports.protocol import Task, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker


@dataclass(frozen=True)
class Bucket:
    """A run of slots that is summed at once; `last_slot` is the end of the run.

    `values` begin at element `first` of the flat gradient.
    """

    first: int
    values: Tensor
    slots: int
    last_slot: int


def cut_into_buckets(worker: Worker) -> list[Bucket]:
    """The flat gradient in buckets of about `worker.bucket_bytes`; the tail is in the last."""
    storage, slots = worker.gradients.storage, worker.layout.slots
    edges = [(0, 0)]
    for index, slot in enumerate(slots[1:] if worker.overlap else (), start=1):
        if (slot.offset - edges[-1][1]) * storage.element_size() >= worker.bucket_bytes:
            edges.append((index, slot.offset))
    edges.append((len(slots), storage.numel()))
    return [
        Bucket(start, storage[start:end], last - first, last)
        for (first, start), (last, end) in pairwise(edges)
    ]


Begin = Callable[[Bucket, bool], Sequence[Task[int]]]
"""begin(bucket, background): begins the sum of a bucket over the workers.

Gives the collectives that it takes, in their order; each gives the bytes of its buffer.
"""


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
            worker.gradients.when_ready(self._slot_is_ready)

    def finish(self) -> None:
        """After backward: begin what is left, and wait for all of it."""
        worker, gradients, step = self._worker, self._worker.gradients, self._worker.step
        gradients.collect_rest(step.weight)
        gradients.fill_tail(worker.rank, step.weight, step.loss, step.stop)
        if len(worker.workers) > 1:
            while self._next < len(self._buckets):
                self._begin_next()
            for collective in reversed(self._under_way):  # all are done when the last one is
                note_buffer(worker, collective.wait())
            self._under_way.clear()
            self._ready = [0] * len(self._buckets)
            self._next = 0
        step.loss, step.losses, step.stop = gradients.publish()
        step.agreed = True

    def close(self) -> None:
        """Nothing goes on in the background any more."""
        self._worker.gradients.when_ready(None)
        self._worker.transport.end_background()

    def _slot_is_ready(self, slot: int) -> None:
        """In backward: collect it, and begin the buckets that are complete, in their order."""
        self._worker.gradients.collect(slot, self._worker.step.weight)
        self._ready[self._bucket_of[slot]] += 1
        last = len(self._buckets) - 1  # waits for what travels with it
        while self._next < last and self._ready[self._next] == self._buckets[self._next].slots:
            self._worker.compute.reached(self._buckets[self._next].last_slot - 1)
            self._begin_next()

    def _begin_next(self) -> None:
        self._under_way += self._begin(self._buckets[self._next], self._overlaps)
        self._next += 1


def note_buffer(worker: Worker, size: int) -> None:
    """An exchange has used `size` bytes of buffer."""
    worker.measures.peak_buffer_bytes = max(worker.measures.peak_buffer_bytes, size)


@dataclass(frozen=True)
class Collective:
    """A schedule, and the ranks in the order in which it numbers them."""

    schedule: Schedule
    group: Group

    def begin(
        self,
        transport: Transport,
        vector: Tensor,
        tag: int = Tag.GRADIENTS,
        edges: Sequence[int] | None = None,
        *,
        background: bool = False,
    ) -> Task[int]:
        """Begin this rank's part; see `Transport.collective`."""
        return transport.collective(
            self.schedule, vector, self.group, tag, edges, background=background
        )

    def of_buckets(self, worker: Worker) -> Begin:
        """Sum each bucket by this collective."""
        transport = worker.transport
        return lambda bucket, background: [
            self.begin(transport, bucket.values, background=background)
        ]


def make_collective(
    worker: Worker,
    algorithm: str,
    order: Sequence[int] | None = None,
    ranks_per_node: int | None = None,
) -> Collective:
    """Collective: the all-reduce `algorithm` over the workers, in their own order or in `order`."""
    group = worker.workers
    if order is not None:
        group = Group(tuple(rank for rank in order if rank in group.ranks))
    if algorithm == "hierarchical":
        return Collective(hierarchical(_sizes_of_nodes(worker, group, ranks_per_node)), group)
    return Collective(ALL_REDUCE[algorithm](len(group)), group)


def _sizes_of_nodes(worker: Worker, group: Group, ranks_per_node: int | None) -> tuple[int, ...]:
    """Runs of `ranks_per_node`, the last perhaps shorter; or the hosts, as they were launched."""
    if ranks_per_node is not None:
        places = [place % ranks_per_node for place in range(len(group))]
    else:  # each rank tells its index among those of its host
        local_ranks = torch.zeros(len(group), dtype=torch.int64)
        local_ranks[group.index(worker.rank)] = worker.runtime.local_rank
        all_reduce(worker.transport, local_ranks, "butterfly", group, Tag.AGREE)
        places = local_ranks.tolist()
    starts = [index for index, place in enumerate(places) if place == 0]
    sizes = tuple(end - start for start, end in pairwise([*starts, len(places)]))
    if places != [place for size in sizes for place in range(size)]:
        raise InputError(
            "AllReduce('hierarchical'): the ranks of a host do not follow one another (their "
            f"places on their hosts are {', '.join(map(str, places))}): launch them host by host, "
            "or set ranks_per_node and order"
        )
    return sizes


@dataclass
class NativeSum:
    """torch.distributed's own all-reduce under way on `worker`; its buffer is not known."""

    worker: Worker
    work: Task[Tensor]

    def wait(self) -> int:
        started = self.worker.transport.now()
        self.work.wait()
        self.worker.measures.native_seconds += self.worker.transport.now() - started
        return 0

    def done(self) -> bool:
        return self.work.done()


def native_sum(worker: Worker) -> Begin:
    """Sum each bucket by torch.distributed's own all-reduce."""

    def begin(bucket: Bucket, background: bool) -> Sequence[Task[int]]:
        ranks = len(worker.workers)
        worker.measures.native_bytes += 2 * (ranks - 1) * bucket.values.nbytes // ranks
        return [NativeSum(worker, worker.native.start_all_reduce(bucket.values))]

    return begin
