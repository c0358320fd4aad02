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

from orchestra import exchange, optimizers
from orchestra.errors import InputError
from orchestra.strategies.member import Member
from orchestra.strategies.traits import Footprint

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.exchange import GradientAverage, Kept, Shards
    from orchestra.strategies.all_reduce import AllReduce
    from orchestra.transports.protocol import Group
    from orchestra.worker.worker import Worker

SHARDS = ("nothing", "optimizer", "gradients", "parameters")  # the stages of ZeRO


@dataclass(eq=False)
class ShardedMember(Member["AllReduce"]):
    """A worker that owns a slice: it sums gradients, updates its slice, and gathers the others.

    `optimizer` holds the state of the slice alone.
    """

    optimizer: Optimizer
    average: GradientAverage = field(metadata=optimizers.TRANSIENT)
    shards: Shards = field(metadata=optimizers.TRANSIENT)

    def begin(self) -> None:
        """Take the first worker's buffers."""
        exchange.broadcast_buffers(self.worker, self.worker.workers)

    def exchange(self) -> None:
        """g <- sum over workers of (samples / all samples) g, in this worker's slice."""
        self.average.finish()

    def update(self) -> None:
        """Step on the slice of this worker, and gather the slices of the others."""
        worker = self.worker
        self.shards.update()
        worker.offer_equal_parameters()

    def stop(self) -> None:
        self.average.close()
        self.shards.close()

    def kept(self) -> Kept:
        """Return the moments of this worker's slice."""
        return exchange.Kept(parts=[self.shards.part])


@dataclass(eq=False)
class ShardedParametersMember(ShardedMember):
    """A worker that keeps the parameters of its slice alone.

    Forward and backward gather each bucket when an operation uses it, and free it afterwards.
    """

    def update(self) -> None:
        """Step on the slice of this worker. Each worker offers its slice to a snapshot."""
        worker = self.worker
        self.shards.update()
        worker.snapshots.offer(worker.step.consumed, worker.parameters)


def join_sharded(strategy: AllReduce, worker: Worker) -> ShardedMember:
    """Begin with the parameters of rank 0, in the stage of ZeRO that `strategy.shard` names."""
    join = {
        "optimizer": _shard_optimizer,
        "gradients": _shard_gradients,
        "parameters": _shard_parameters,
    }[strategy.shard]
    return join(strategy, worker)


def _shard_optimizer(strategy: AllReduce, worker: Worker) -> ShardedMember:
    """ZeRO-1: gradients and parameters are whole, their sums and updates are cut into slices."""
    exchange.agree_on_parameters(worker)
    worker.reporter.expendable(False)
    ring = exchange.make_collective(worker, "ring", strategy.order)
    shards = exchange.Shards(worker, ring.group)
    if worker.own_loop:  # it may read the gradient, to clip it: it gets the whole of it
        average = exchange.GradientAverage(worker, ring.of_buckets(worker))
    else:
        average = shards.average()
    return ShardedMember(strategy, worker, shards.optimizer, average, shards)


def _shard_gradients(strategy: AllReduce, worker: Worker) -> ShardedMember:
    """ZeRO-2: a bucket of gradients has memory only until its sum is complete."""
    _require_sums_in_backward(strategy, worker)
    exchange.agree_on_parameters(worker)
    worker.reporter.expendable(False)
    ring = _ring(strategy, worker)
    shards = exchange.Shards(worker, ring, scatter=len(ring) > 1)
    return ShardedMember(strategy, worker, shards.optimizer, shards.average(), shards)


def _shard_parameters(strategy: AllReduce, worker: Worker) -> ShardedMember:
    """ZeRO-3: a bucket of parameters has memory only while an operation uses it."""
    _require_sums_in_backward(strategy, worker)
    several = len(worker.workers) > 1
    if several:  # each worker has made the parameters of its slice alone
        exchange.broadcast_buffers(worker, worker.everyone)
    else:
        exchange.agree_on_parameters(worker)
    worker.reporter.expendable(False)
    ring = _ring(strategy, worker)
    shards = exchange.Shards(worker, ring, scatter=several, gather=several)
    return ShardedParametersMember(strategy, worker, shards.optimizer, shards.average(), shards)


def _ring(strategy: AllReduce, worker: Worker) -> Group:
    return exchange.make_collective(worker, "ring", strategy.order).group


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
