"""The sample-weighted average of the gradient over the workers, bucket by bucket.

Or over those that are first: `PartialAverage`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from orchestra.collectives import Group, all_reduce
from orchestra.errors import GroupChanged, InputError, PeerLost
from orchestra.schedules import ALL_REDUCE, Schedule, hierarchical
from orchestra.transports.protocol import CollectiveCall, Handle, Pending, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.layout import bucket_edges
from orchestra.worker.worker import Worker


@dataclass(frozen=True)
class Bucket:
    """The slots from `first_slot` to before `end_slot`, which are summed at once.

    `values` begin at element `first` of the flat gradient.
    """

    first: int
    values: Tensor
    first_slot: int
    end_slot: int

    @property
    def slots(self) -> int:
        return self.end_slot - self.first_slot


def cut_into_buckets(worker: Worker) -> list[Bucket]:
    """The flat gradient in buckets of about `worker.bucket_bytes`; the tail is in the last."""
    storage = worker.gradients.storage
    edges = bucket_edges(worker.layout, worker.bucket_bytes if worker.overlap else None)
    # The storage is longer than the gradient by the tail.
    edges[-1] = (edges[-1][0], storage.numel())
    return [
        Bucket(start, storage[start:end], first, last)
        for (first, start), (last, end) in pairwise(edges)
    ]


Begin = Callable[[Bucket, bool], Sequence[Pending[int]]]
"""begin(bucket, background): begins the sum of a bucket over the workers; returns the collectives
that it takes, in their order. Each collective gives the bytes of its buffer."""

BeginSum = Callable[[Tensor, bool], Pending[int]]
"""begin_sum(vector, background): begins the sum of a vector over the workers, in its place."""


def each_bucket(begin_sum: BeginSum) -> Begin:
    """Sum each bucket by one collective."""
    return lambda bucket, background: [begin_sum(bucket.values, background)]


class GradientAverage:
    """Replaces the gradient on every worker by its sample-weighted mean over `worker.workers`.

    The flat gradient is cut into buckets; the sum of each begins as soon as backward has filled
    it, and goes on while backward does. The loss of every worker, the wish to stop, which tensors
    were used, and the buffers of the first worker, which all take, travel with the last bucket.
    `begin` begins the sum of a bucket; the buckets
    are those of `cut_into_buckets` unless others are given.
    """

    def __init__(
        self, worker: Worker, begin: Begin, buckets: Sequence[Bucket] | None = None
    ) -> None:
        self._worker = worker
        self._begin = begin
        self._buckets = cut_into_buckets(worker) if buckets is None else buckets
        self._bucket_of = [i for i, bucket in enumerate(self._buckets) for _ in range(bucket.slots)]
        self._ready = [0] * len(self._buckets)  # slots of each that have their gradient
        self._next = 0  # the first bucket that was not begun yet
        self._under_way: list[Pending[int]] = []
        self._overlaps = len(worker.workers) > 1 and len(self._buckets) > 1
        if self._overlaps:
            worker.gradients.on_ready = self._slots_are_ready

    def finish(self) -> None:
        """After backward: begin the buckets that are left, and wait for all sums."""
        worker, gradients, step = self._worker, self._worker.gradients, self._worker.step
        gradients.collect_rest(step.weight)
        gradients.fill_tail(worker.rank, step.weight, step.loss, step.stop)
        if len(worker.workers) > 1:
            gives = worker.rank == worker.workers.ranks[0]
            gradients.carry_buffers(gives=gives)
            while self._next < len(self._buckets):
                self._begin_next()
            # all are done when the last one is
            note_buffer(worker, max(task.wait() for task in reversed(self._under_way)))
            self._under_way.clear()
            self._ready = [0] * len(self._buckets)
            self._next = 0
            if not gives:
                gradients.take_buffers()
        step.loss, step.losses, step.stop = gradients.publish()
        step.loss_is_global = True

    def close(self) -> None:
        """Stop listening to backward, and end the background flow."""
        self._worker.gradients.on_ready = None
        self._worker.transport.end_background()

    def _slots_are_ready(self, first: int, end: int) -> None:
        """Called in backward: collect slots, and begin complete buckets, in their order."""
        gradients, weight = self._worker.gradients, self._worker.step.weight
        gradients.collect_each(first, end, weight)
        for number in range(self._bucket_of[first], self._bucket_of[end - 1] + 1):
            bucket = self._buckets[number]
            self._ready[number] += min(end, bucket.end_slot) - max(first, bucket.first_slot)
        last = len(self._buckets) - 1  # waits for what travels with it
        # In their order, whichever is filled first: all ranks have to begin the same collectives.
        while self._next < last and self._ready[self._next] == self._buckets[self._next].slots:
            self._worker.compute.advance_to(self._buckets[self._next].end_slot - 1)
            try:
                self._begin_next()
            except (PeerLost, GroupChanged):
                # `finish` comes to the same. A backward pass that an exception ends cannot be made
                # void by a loop of the user's own.
                return

    def _begin_next(self) -> None:
        self._under_way += self._begin(self._buckets[self._next], self._overlaps)
        self._next += 1


def note_buffer(worker: Worker, size: int) -> None:
    """Note that an exchange has used `size` bytes of buffer."""
    worker.measures.peak_buffer_bytes = max(worker.measures.peak_buffer_bytes, size)


@dataclass(frozen=True)
class ScheduledGroup:
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
    ) -> Pending[int]:
        """Begin this rank's part; see `Transport.collective`."""
        call = CollectiveCall(self.schedule, vector, self.group, tag, edges, background)
        return transport.collective(call)

    def sums(self, transport: Transport, tag: int = Tag.GRADIENTS) -> BeginSum:
        """Sum vectors by this collective."""
        return lambda vector, background: self.begin(transport, vector, tag, background=background)

    def of_buckets(self, worker: Worker) -> Begin:
        """Sum each bucket by this collective."""
        return each_bucket(self.sums(worker.transport))


def make_collective(
    worker: Worker,
    algorithm: str,
    order: Sequence[int] | None = None,
    ranks_per_node: int | None = None,
) -> ScheduledGroup:
    """Collective: make the all-reduce `algorithm` over the workers, in `order` if given."""
    group = worker.workers
    if order is not None:
        group = Group(tuple(rank for rank in order if rank in group.ranks))
    if algorithm == "hierarchical":
        return ScheduledGroup(hierarchical(_sizes_of_nodes(worker, group, ranks_per_node)), group)
    return ScheduledGroup(ALL_REDUCE[algorithm](len(group)), group)


def _sizes_of_nodes(worker: Worker, group: Group, ranks_per_node: int | None) -> tuple[int, ...]:
    """Return the ranks on each node: `ranks_per_node`, or as they were launched on hosts."""
    if ranks_per_node is not None:
        places = [place % ranks_per_node for place in range(len(group))]
    else:  # each rank tells its index among those of its host
        local_ranks = torch.zeros(len(group), dtype=torch.int64)
        local_ranks[group.index(worker.rank)] = worker.runtime.local_rank
        all_reduce(worker.transport, local_ranks, "butterfly", group, Tag.AGREE)
        places = local_ranks.tolist()
    # A host begins where a place is 0.
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
    """torch.distributed's own all-reduce under way on `worker`."""

    worker: Worker
    work: Pending[int]

    def wait(self) -> int:
        started = self.worker.transport.now()
        buffer = self.work.wait()
        self.worker.measures.native_seconds += self.worker.transport.now() - started
        return buffer

    def done(self) -> bool:
        return self.work.done()


def native_sum(worker: Worker) -> BeginSum:
    """Collective: sum vectors by torch.distributed's own all-reduce."""

    def all_reduce(vector: Tensor) -> Pending[int]:
        return worker.transport.collective(
            CollectiveCall(None, vector, worker.everyone, Tag.NATIVE)
        )

    def begin(vector: Tensor, background: bool) -> Pending[int]:
        ranks = len(worker.workers)
        # Those of a ring: the backend does not tell what it sends.
        worker.measures.native_bytes += 2 * (ranks - 1) * vector.nbytes // ranks
        return NativeSum(worker, all_reduce(vector))

    # The process group is made now, not inside the first step.
    all_reduce(torch.zeros(1, device=worker.parameters.device)).wait()
    return begin


LEAVE = -1
"""In place of a step: this worker's main flow has finished."""


class StepOutcome(enum.IntEnum):
    """What a step's average is to a worker."""

    TOOK_PART = 0  # its gradient is in it, and the average is in the place of the gradient
    LATE = 1  # without its gradient; the average follows
    FAILED = 2


class PartialAverage:
    """Replaces the gradient by the mean over the `needed` workers that had theirs first.

    Backup workers (Chen et al., 2016), without a server: of all workers some are one too many, so
    that the slowest of a step hold up nobody. A worker that has its gradient tells the first
    worker; as soon as enough have, that one tells everybody who they are, and all ranks carry out
    the collective. The others take part in it with zeros, from a background flow, while they
    still compute: so every worker gets every average, with the same bits. A late worker drops its
    gradient, takes the averages that it missed in their order, and computes none for steps whose
    average is there already. Until it does, they wait in its memory.

    The order in which the workers are heard of is all that depends on chance.
    """

    def __init__(self, worker: Worker, collective: ScheduledGroup, needed: int) -> None:
        self._worker = worker
        self._collective = collective
        self._needed = needed
        self._first = worker.workers.ranks[0]
        self._step = 0
        self._left = 0
        self._outcome: Handle | None = None
        self._flow = worker.transport.spawn(self._take_part)

    def is_late(self) -> bool:
        """Return whether the average of the step that begins is there already."""
        # A message of the own rank, so that the answer is in the record of the order.
        self._outcome = self._worker.transport.receive(self._worker.rank, Tag.DONE)
        return self._outcome.done()

    def finish(self) -> None:
        """Hand in the gradient; replace it by the average."""
        worker, gradients, step = self._worker, self._worker.gradients, self._worker.step
        gradients.collect_rest(step.weight)
        gradients.fill_tail(worker.rank, step.weight, step.loss, step.stop)
        gradients.carry_buffers(gives=False)  # the first worker may be late
        self._tell(self._step, step.samples)
        self.take()

    def take(self) -> None:
        """Get the average of this step, made with a gradient of this worker or without."""
        worker, gradients, step = self._worker, self._worker.gradients, self._worker.step
        handle = self._outcome or worker.transport.receive(worker.rank, Tag.DONE)
        self._outcome = None
        outcome, samples = handle.wait().tolist()
        if outcome == StepOutcome.FAILED:
            self._flow.wait()
        if outcome == StepOutcome.LATE:
            worker.transport.receive(worker.rank, Tag.AVERAGE, gradients.storage).wait()
            worker.measures.dropped += step.samples > 0
        # Gradients were weighted by samples over those of the whole step; some are missing now.
        factor = step.total_samples / samples
        if factor != 1.0:
            gradients.vector.mul_(factor)
        loss, step.losses, step.stop = gradients.publish()
        step.loss = loss * factor
        step.loss_is_global = True
        self._step += 1

    def close(self) -> None:
        """Collective: every worker has taken its last step; end the background flows."""
        self._tell(LEAVE, 0)
        self._flow.wait()

    def _tell(self, step: int, samples: int) -> None:
        self._worker.transport.send(torch.tensor([step, samples]), self._first, Tag.ARRIVED).wait()

    def _take_part(self, transport: Transport) -> None:
        """In the background, carry out one collective after another, late or not.

        The main flow may be busy with a gradient meanwhile, and finds each outcome in the order
        of the steps: messages to its own rank are the queue between the two, on every engine.
        """
        storage, own = self._worker.gradients.storage, self._worker.workers.index(transport.rank)
        stand_in, step = torch.empty_like(storage), 0
        try:
            while (chosen := self._next_choice(transport, step)).any():
                # A late worker's own gradient is still being filled: zeros go in its place.
                values = storage if chosen[own] else stand_in.zero_()
                buffer = self._collective.begin(transport, values).wait()
                note_buffer(self._worker, buffer + stand_in.nbytes)
                outcome = StepOutcome.TOOK_PART if chosen[own] else StepOutcome.LATE
                transport.send(torch.tensor([outcome, int(chosen.sum())]), transport.rank, Tag.DONE)
                if outcome is StepOutcome.LATE:
                    transport.send(values, transport.rank, Tag.AVERAGE)
                step += 1
        except BaseException:
            # Else the main flow would wait for ever; it raises the error as it joins this flow.
            transport.send(torch.tensor([StepOutcome.FAILED, 0]), transport.rank, Tag.DONE)
            raise

    def _next_choice(self, transport: Transport, step: int) -> Tensor:
        """Return each worker's samples if it takes part in `step`, else 0; all 0 at the end."""
        if transport.rank != self._first:
            return transport.receive(self._first, Tag.CHOSEN).wait()
        chosen = self._choose(transport, step)
        for other in self._worker.workers.ranks[1:]:
            transport.send(chosen, other, Tag.CHOSEN).wait()
        return chosen

    def _choose(self, transport: Transport, step: int) -> Tensor:
        """On the first worker: wait until enough have a gradient of `step`, or nobody is left."""
        workers = self._worker.workers
        chosen, heard = torch.zeros(len(workers), dtype=torch.int64), 0
        while int(chosen.count_nonzero()) < self._needed and heard < len(workers):
            handle = transport.receive(None, Tag.ARRIVED)
            arrived_for, samples = handle.wait().tolist()
            if arrived_for == step:
                heard += 1
                chosen[workers.index(handle.source)] = samples
            elif arrived_for == LEAVE:
                self._left += 1
                # All main flows have finished: `chosen` is all zeros, which ends the others, too.
                if self._left == len(workers):
                    break
        return chosen
