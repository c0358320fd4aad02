"""Synchronous data parallelism: every step uses the average gradient over all workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, optimizers
from orchestra.compression.base import Compressor
from orchestra.errors import InputError
from orchestra.settings import MAX_RANKS, setting
from orchestra.strategies.base import Roles, replica_memory
from orchestra.strategies.stateful import Stateful
from orchestra.strategies.traits import Footprint, Partition, Rehearsal, Traits, WorkMode

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from orchestra.exchange import Kept
    from orchestra.transports.protocol import Group
    from orchestra.worker.batches import Batch
    from orchestra.worker.layout import Share
    from orchestra.worker.worker import Worker


def require_ring(strategy: str, compressor: Compressor, algorithm: str) -> None:
    """Refuse payloads that do not add, and so are gathered around a ring, by other algorithms."""
    if not compressor.adds and algorithm != "ring":
        raise InputError(
            f"{strategy}: payloads of {compressor!r} do not add, so that they can only be "
            f"gathered: set algorithm='ring' in place of {algorithm!r}"
        )


SHARDS = ("nothing", "optimizer", "gradients", "parameters")  # the stages of ZeRO


@dataclass
class AllReduceState:
    """Workers keep whole optimizers, equal since their gradients are; or the one of their slice."""

    optimizer: Optimizer
    average: exchange.GradientAverage | exchange.PartialAverage = field(
        metadata=optimizers.TRANSIENT
    )
    shards: exchange.Shards | None = field(default=None, metadata=optimizers.TRANSIENT)
    compression: exchange.CompressionState | None = None


@dataclass(frozen=True, repr=False)
class AllReduce(Stateful[AllReduceState]):
    """Average the gradient over the workers, then step the same optimizer everywhere.

    For N workers and n bytes of gradient a rank sends in a step

    ring              2n (N-1)/N, in 2(N-1) rounds
    halving_doubling  as much, in 2 log2(N) rounds, where N is a power of two
    butterfly         n log2(N), in log2(N) rounds
    tree              up to 3n, in 2 log2(N) rounds
    hierarchical      as the ring, most of it inside a node
    reduce_to_one     n, rank 0 (N-1)n, in 2 rounds
    parallel          (N-1)n, in one round
    ring_gather       (N-1)n, in N-1 rounds
    native            what torch.distributed sends (gloo or NCCL)

    Where links are unlike, `order` keeps a ring off the slow ones: ring_order(costs) in
    orchestra.schedules finds the best one. `shard` is for models that are too large for each worker
    to hold with gradients and the optimizer's state (Adam's is twice the model): ZeRO (Rajbhandari
    et al., SC 2020) and FSDP (Zhao et al., VLDB 2023). It works bucket by bucket: gradients have
    memory until their bucket is summed, parameters while operations need some of their bucket.
    "optimizer" and "gradients" send no more bytes than the ring, "parameters" up to 3n (N-1)/N: in
    forward, in backward, and the sums. `backup` is for workers of
    which now this one and now that one is slow: its gradient is dropped, and nobody waits for it.
    `compression` is for slow networks. What adds (FP16, BF16, PowerSGD, RandomK) is summed by any
    algorithm; other payloads are gathered around the ring, (N-1) of them sent by each rank.
    """

    use = "for workers of equal speed, and what one process would have learnt"
    variants = (
        ('AllReduce("ring")', "for large models: the fewest bytes"),
        (
            'AllReduce("halving_doubling")',
            "for many workers, a power of two: as few bytes, few rounds",
        ),
        ('AllReduce("butterfly")', "for small models, where rounds cost the most"),
        ('AllReduce("tree")', "for small models and any number of workers"),
        (
            'AllReduce("hierarchical", ranks_per_node=2)',
            "for nodes of several ranks on slow networks",
        ),
        ('AllReduce("ring_gather")', "to see whole gradients travel; ring sends fewer bytes"),
        ('AllReduce("parallel")', "for tiny models: all in one round"),
        ('AllReduce("reduce_to_one")', "for a few ranks on one host"),
        ('AllReduce("native")', "for GPUs: torch.distributed's own (NCCL, gloo)"),
        (
            'AllReduce("ring", shard="optimizer")',
            "for an optimizer whose state is too large for each",
        ),
        ('AllReduce("ring", shard="gradients")', "for gradients, too, that are too large for each"),
        (
            'AllReduce("ring", shard="parameters")',
            "for models that fit no worker; half as many bytes again",
        ),
        ('AllReduce("ring", backup=1)', "for workers that are slow by turns"),
        ('AllReduce("ring", compression=BF16())', "for slow networks: half the bytes"),
        (
            'AllReduce("ring", compression=PowerSGD(4))',
            "for very slow networks, and models of large matrices",
        ),
    )

    algorithm: Literal[
        "ring", "halving_doubling", "butterfly", "tree", "hierarchical", "ring_gather", "parallel",
        "reduce_to_one", "native",
    ] = setting("ring", "how the average is made; see above")  # fmt: skip
    _: KW_ONLY
    order: tuple[int, ...] | None = setting(
        None, "the ranks in their order in the ring; None: by number", low=0, high=MAX_RANKS
    )
    ranks_per_node: int | None = setting(
        None, "hierarchical: ranks close to each other; None: those of a host", low=1,
        high=MAX_RANKS,
    )  # fmt: skip
    shard: Literal["nothing", "optimizer", "gradients", "parameters"] = setting(
        "nothing",
        "of what each worker keeps 1/N: the optimizer's state (ZeRO-1), also gradients (ZeRO-2), "
        "also parameters (ZeRO-3, FSDP)",
    )
    backup: int = setting(
        0, "workers not waited for: the first N - backup make the average", low=0, high=MAX_RANKS
    )
    compression: Compressor | None = setting(
        None, "what gradients are compressed by, as PowerSGD(4); none: not at all"
    )

    def check(self) -> None:
        if self.compression is not None:
            require_ring("AllReduce", self.compression, self.algorithm)
            if self.shard != "nothing" or self.backup:
                raise InputError(
                    "AllReduce: compression does not go with shard or backup: leave these out"
                )
        if self.order is not None and sorted(self.order) != list(range(len(self.order))):
            raise InputError(
                f"AllReduce.order: {self.order!r} does not hold each of the ranks 0 to "
                f"{len(self.order) - 1} once"
            )
        if self.ranks_per_node is not None and self.algorithm != "hierarchical":
            raise InputError("AllReduce: ranks_per_node needs algorithm='hierarchical'")
        if self.shard != "nothing" and self.algorithm != "ring":
            raise InputError(f"AllReduce: shard={self.shard!r} needs algorithm='ring'")
        if self.shard != "nothing" and self.backup:
            raise InputError(f"AllReduce: backup does not go with shard={self.shard!r}")
        if self.algorithm == "native" and (self.order is not None or self.backup):
            raise InputError(
                "AllReduce: order and backup do not go with algorithm='native': name a schedule"
            )

    def traits(self, work: WorkMode = "shared") -> Traits:
        plain = self.shard == "nothing" and not self.backup
        # It matters which gradients arrive first, or which ranks share a node.
        by_node = self.algorithm == "hierarchical" and self.ranks_per_node is None
        return Traits(
            self._memory,
            partition=Partition.SHARDED if self.shard == "parameters" else Partition.REPLICATED,
            depends_on_speed=self.backup > 0 or by_node,
            native=self.algorithm == "native",
            optimizer=Partition.REPLICATED if self.shard == "nothing" else Partition.SHARDED,
            exchange=Rehearsal(repr(self), self._rehearse) if plain else None,
        )

    def place(
        self, module: nn.Module, loss_of: Callable[[nn.Module], Tensor], rank: int, ranks: int
    ) -> Share | None:
        """Return the shard of `rank` under shard="parameters"."""
        if self.shard != "parameters" or ranks == 1:
            return None
        return exchange.share_of(self.order or tuple(range(ranks)), rank)

    def roles(self, ranks: int) -> Roles:
        if self.order is not None and len(self.order) != ranks:
            raise InputError(
                f"AllReduce.order: {self.order!r} is an order of {len(self.order)} ranks, but "
                f"there are {ranks}"
            )
        if self.backup >= ranks:
            raise InputError(
                f"AllReduce: backup={self.backup} of {ranks} ranks leaves no gradient to wait "
                "for: lower backup or raise ranks"
            )
        return super().roles(ranks)

    def _memory(self, rank: int, ranks: int) -> Footprint:
        """Return a part of what is sharded, with the buckets in use and what compression keeps."""
        level = SHARDS.index(self.shard) if ranks > 1 else 0
        kept = 0.0 if self.compression is None else self.compression.footprint
        return replace(
            replica_memory(self, rank, ranks), optimizer=1 / ranks if level >= 1 else 1.0,
            gradients=1 / ranks if level >= 2 else 1.0,
            parameters=1 / ranks if level >= 3 else 1.0, copies=kept, windows=max(level - 1, 0),
        )  # fmt: skip

    def _rehearse(self, worker: Worker, values: Tensor) -> None:
        if self.compression is not None:
            kept = exchange.CompressionState.of(worker, self.compression)
            exchange.average_compressed(
                worker, worker.transport, values, 0, self.compression, kept, self.algorithm, 0
            )
        elif self.algorithm == "native":
            exchange.native_sum(worker)(values, False).wait()
        else:
            self._collective(worker).begin(worker.transport, values).wait()

    def _collective(self, worker: Worker) -> exchange.ScheduledGroup:
        return exchange.make_collective(worker, self.algorithm, self.order, self.ranks_per_node)

    def start(self, worker: Worker) -> AllReduceState:
        """Begin with the parameters of rank 0."""
        if self.backup and worker.own_loop:
            raise InputError(
                "AllReduce: backup needs orchestra's own loop (orchestra train): a late worker "
                "leaves out forward and backward passes, which a loop of your own cannot"
            )
        self._check_sharded(worker)
        if self.shard == "parameters" and len(worker.workers) > 1:
            exchange.broadcast_buffers(worker, worker.everyone)
        else:
            exchange.agree_on_parameters(worker)
        worker.reporter.expendable(False)
        if self.algorithm == "native":
            return self._averaging(worker, exchange.native_sum(worker), worker.workers)
        collective = self._collective(worker)
        if self.backup:
            # (N - b) of the first to come make the average (Chen et al., 2016).
            needed = len(worker.workers) - self.backup
            partial = exchange.PartialAverage(worker, collective, needed)
            return AllReduceState(worker.local_optimizer(), partial)
        begin_sum = collective.sums(worker.transport)
        if self.shard == "nothing":
            return self._averaging(worker, begin_sum, collective.group)
        several = len(collective.group) > 1
        shards = exchange.Shards(
            worker, collective.group, scatter=several and self.shard != "optimizer",
            gather=several and self.shard == "parameters",
        )  # fmt: skip
        if worker.own_loop:  # it may read the gradient, to clip it: it gets the whole of it
            average = exchange.GradientAverage(worker, collective.of_buckets(worker))
        else:
            average = shards.average()
        return AllReduceState(shards.optimizer, average, shards)

    def _check_sharded(self, worker: Worker) -> None:
        if self.shard not in ("gradients", "parameters"):
            return
        if worker.own_loop:
            raise InputError(
                f"AllReduce: shard={self.shard!r} needs orchestra's own loop (orchestra train): a "
                "loop of your own has whole gradients; set shard='optimizer'"
            )
        if not worker.overlap:
            raise InputError(
                f"AllReduce: shard={self.shard!r} sums gradients while backward goes on: set "
                "overlap to true, or shard='optimizer'"
            )

    def _averaging(
        self, worker: Worker, begin_sum: exchange.BeginSum, ring: Group
    ) -> AllReduceState:
        """Make the state with a whole optimizer, and averages by `begin_sum`."""
        kept, begin = None, exchange.each_bucket(begin_sum)
        if self.compression is not None:
            kept = exchange.CompressionState.of(worker, self.compression)
            begin = exchange.CompressedSum(worker, self.compression, kept, begin_sum, ring).begin
        average = exchange.GradientAverage(worker, begin)
        return AllReduceState(worker.local_optimizer(), average, compression=kept)

    def before_forward(self, worker: Worker, state: AllReduceState) -> None:
        """Take the first worker's buffers; but nobody waits for it under `backup`."""
        if not self.backup:
            exchange.broadcast_buffers(worker, worker.workers)

    def gradient(self, worker: Worker, state: AllReduceState, batch: Batch | None) -> None:
        """Compute the gradient; under `backup`, pass over the batch if its average is there."""
        if not isinstance(state.average, exchange.PartialAverage) or not state.average.is_late():
            super().gradient(worker, state, batch)
            return
        worker.step.samples = 0
        worker.gradients.clear()
        state.average.take()

    def reduce(self, worker: Worker, state: AllReduceState) -> None:
        """g <- sum over workers of (samples / all samples) g."""
        state.average.finish()

    def update(self, worker: Worker, state: AllReduceState) -> None:
        """Take the same step of the same optimizer on every worker; or each on its slice."""
        if state.shards is not None:
            state.shards.update()
        else:
            worker.clip()
            worker.update_locally(state.optimizer)
        # Shards differ; whole parameters are equal, and one worker's copy is enough.
        if self.shard == "parameters" or worker.rank == worker.workers.ranks[0]:
            worker.snapshots.offer(worker.step.consumed, worker.parameters)

    def stop(self, worker: Worker, state: AllReduceState) -> None:
        state.average.close()
        if state.shards is not None:
            state.shards.close()
        if self.backup:
            exchange.broadcast_buffers(worker, worker.everyone)

    def kept(self, worker: Worker, state: AllReduceState) -> Kept:
        if state.shards is None:
            return super().kept(worker, state)
        return exchange.Kept(parts=[state.shards.part])
