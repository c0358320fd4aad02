"""The collective that a strategy asked for by name, made for the workers that there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from orchestra.collectives import Group, all_reduce
from orchestra.errors import InputError
from orchestra.exchange.average import Begin, Bucket
from orchestra.schedules import ALL_REDUCE, Schedule, hierarchical
from orchestra.transports.protocol import CollectiveCall, Task, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker


@dataclass(frozen=True)
class Collective:
    """A schedule, and the ranks in the order in which it numbers them."""

    schedule: Schedule
    group: Group

    def begin(
        self,
        transport: Transport,
        vector: Tensor,
        tag: int,
        edges: Sequence[int] | None = None,
        *,
        background: bool = False,
    ) -> Task[int]:
        """Begin this rank's part; see `Transport.collective`."""
        call = CollectiveCall(self.schedule, vector, self.group, tag, edges, background)
        return transport.collective(call)

    def sum_on(self, transport: Transport) -> Begin:
        """What begins the sum of a bucket, over `transport`."""

        def begin(bucket: Bucket, *, background: bool) -> Sequence[Task[int]]:
            return [self.begin(transport, bucket.values, Tag.GRADIENTS, background=background)]

        return begin


@dataclass
class NativeSum:
    """torch.distributed's own all-reduce under way on `worker`."""

    worker: Worker
    work: Task[int]

    def wait(self) -> int:
        """Block until it is done: the bytes of buffer used, as far as they are known."""
        started = self.worker.transport.now()
        buffer = self.work.wait()
        self.worker.measures.native_seconds += self.worker.transport.now() - started
        return buffer

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.work.done()


def native_sum(worker: Worker) -> Begin:
    """Collective: what begins the sum of a bucket by torch.distributed's own all-reduce."""

    def all_reduce(vector: Tensor) -> Task[int]:
        call = CollectiveCall(None, vector, worker.everyone, Tag.NATIVE)
        return worker.transport.collective(call)

    def begin(bucket: Bucket, *, background: bool) -> Sequence[Task[int]]:
        ranks = len(worker.workers)
        worker.measures.native_bytes += 2 * (ranks - 1) * bucket.values.nbytes // ranks
        return [NativeSum(worker, all_reduce(bucket.values))]

    # The process group is made now, not inside the first step.
    all_reduce(torch.zeros(1, device=worker.parameters.device)).wait()
    return begin


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
    places = list(range(len(group)))
    if ranks_per_node is not None:
        places = [place % ranks_per_node for place in places]
    else:
        places = _local_ranks(worker, group)
    starts = [index for index, place in enumerate(places) if place == 0]
    sizes = tuple(end - start for start, end in pairwise([*starts, len(places)]))
    if places != [place for size in sizes for place in range(size)]:
        raise InputError(
            "AllReduce('hierarchical'): the ranks of a host do not follow one another (their "
            f"places on their hosts are {', '.join(map(str, places))}): launch them host by host, "
            "or set ranks_per_node and order"
        )
    return sizes


def _local_ranks(worker: Worker, group: Group) -> list[int]:
    """Collective: of each rank its index among those of its host."""
    places = torch.zeros(len(group), dtype=torch.int64)
    places[group.index(worker.rank)] = worker.runtime.local_rank
    all_reduce(worker.transport, places, "butterfly", group, Tag.AGREE)
    return [int(place) for place in places]
