"""All-reduce in shards: each worker updates one slice of the parameters (ZeRO, FSDP).

A ring sums gradients in two halves: the reduce-scatter leaves on each worker the sum of one slice,
and the all-gather gives the slices to all. In between a worker updates its slice.

    ZeRO-1  keep 1/N of the optimizer's state        (Rajbhandari et al., SC 2020)
    ZeRO-2  also 1/N of the gradients
    ZeRO-3  also 1/N of the parameters               (FSDP: Zhao et al., VLDB 2023)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestra import exchange
from orchestra.errors import InputError
from orchestra.strategies.member import Member
from orchestra.strategies.traits import Footprint

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import GradientAverage, Kept, Shards
    from orchestra.strategies.all_reduce import AllReduce
    from orchestra.worker.worker import Worker

SHARDS = ("nothing", "optimizer", "gradients", "parameters")  # the stages of ZeRO


@dataclass(eq=False)
class ShardedMember(Member["AllReduce"]):
    """A worker that owns a slice: it sums gradients, updates its slice, and gathers the others.

    `optimizer` is that of `shards`, and holds the state of the slice alone.
    """

    optimizer: Optimizer
    shards: Shards = field(init=False)
    average: GradientAverage = field(init=False)

    def open(self, *, fresh: bool) -> None:
        """Begin to listen to backward."""
        worker = self.worker
        if worker.own_loop:  # it may read the gradient, to clip it: it gets the whole of it
            ring = exchange.make_collective(worker, "ring", self.strategy.order)
            self.average = exchange.GradientAverage(worker, ring.of_buckets(worker))
        else:
            self.average = self.shards.average()

    def rest(self, rest: Rest) -> Kept:
        """Stop listening. The next phase has whole gradients again."""
        self.average.close()
        if rest.reason.ends:  # whole gradients take memory, which a checkpoint has not
            self.shards.close()
        return self.kept()

    def kept(self) -> Kept:
        return exchange.Kept(parts=[self.shards.part])

    def exchange(self) -> None:
        """g <- sum over workers of (samples / all samples) g, in this worker's slice."""
        self.average.finish()

    def update(self) -> None:
        """Step on the slice of this worker, and gather the slices of the others."""
        worker = self.worker
        self.shards.update()
        worker.offer_equal_parameters()


@dataclass(eq=False)
class ShardedParametersMember(ShardedMember):
    """A worker that keeps the parameters of its slice alone.

    Forward and backward gather each bucket when an operation uses it, and free it afterwards.
    """

    def open(self, *, fresh: bool) -> None:
        """Take the first worker's buffers; each worker has made the parameters of its slice."""
        super().open(fresh=fresh)
        if fresh:
            exchange.broadcast_buffers(self.worker, self.worker.everyone)

    def update(self) -> None:
        """Step on the slice of this worker. Each worker offers its slice to a snapshot."""
        worker = self.worker
        self.shards.update()
        worker.snapshots.offer(worker.step.consumed, worker.parameters)


def sharded_member(strategy: AllReduce, worker: Worker) -> ShardedMember:
    """Make a member in the stage of ZeRO that `strategy.shard` names."""
    several = len(worker.workers) > 1
    # ZeRO-1: gradients and parameters are whole, their sums and updates are cut into slices.
    scatter = gather = False
    kind = ShardedMember
    if strategy.shard != "optimizer":
        # ZeRO-2: a bucket of gradients has memory only until its sum is complete.
        _require_sums_in_backward(strategy, worker)
        scatter = several
    if strategy.shard == "parameters":
        # ZeRO-3: a bucket of parameters has memory only while an operation uses it.
        kind, gather = ShardedParametersMember, several
    ring = exchange.make_collective(worker, "ring", strategy.order).group
    shards = exchange.Shards(worker, ring, scatter=scatter, gather=gather)
    member = kind(strategy, worker, shards.optimizer)
    member.shards = shards
    return member


def _require_sums_in_backward(strategy: AllReduce, worker: Worker) -> None:
    """Refuse runs in which gradients are whole at the end of backward."""
    if worker.own_loop:
        raise InputError(
            f"AllReduce: shard={strategy.shard!r} needs orchestra's own loop (orchestra train): a "
            "loop of your own has whole gradients; set shard='optimizer'"
        )
    if not worker.overlap:
        raise InputError(
            f"AllReduce: shard={strategy.shard!r} sums gradients while backward goes on: set "
            "overlap to true, or shard='optimizer'"
        )


def sharded_footprint(whole: Footprint, shard: str, ranks: int) -> Footprint:
    """Return what one of `ranks` workers keeps of `whole`, with the buckets in use."""
    if ranks == 1:
        return whole
    level = SHARDS.index(shard)
    return replace(
        whole,
        optimizer=1 / ranks if level >= 1 else 1.0,
        gradients=1 / ranks if level >= 2 else 1.0,
        parameters=1 / ranks if level >= 3 else 1.0,
        buckets_in_flight=max(level - 1, 0),
    )
