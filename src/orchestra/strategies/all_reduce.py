"""Synchronous data parallelism: every step uses the average gradient over all workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from orchestra import exchange
from orchestra.compression.base import Compressor
from orchestra.errors import InputError
from orchestra.settings import MAX_RANKS, setting
from orchestra.strategies.base import Roles, Strategy, replica_memory
from orchestra.strategies.member import Member
from orchestra.strategies.sharded_all_reduce import sharded_footprint, sharded_member
from orchestra.strategies.traits import AfterLoss, Footprint, Partition, Rehearsal, Traits, WorkMode

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import CompressionState, GradientAverage, Kept, PartialAverage
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


@dataclass(frozen=True, repr=False)
class AllReduce(Strategy):
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
        # Nothing is known of the ranks beyond their number, and Orchestra makes the connections.
        in_groups = plain and self.order is None and self.algorithm != "native"
        # It matters which gradients arrive first, or which ranks share a node.
        by_node = self.algorithm == "hierarchical" and self.ranks_per_node is None
        return Traits(
            self._memory,
            partition=Partition.SHARDED if self.shard == "parameters" else Partition.REPLICATED,
            depends_on_speed=self.backup > 0 or by_node,
            native=self.algorithm == "native",
            optimizer=Partition.REPLICATED if self.shard == "nothing" else Partition.SHARDED,
            exchange=Rehearsal(repr(self), self._rehearse) if plain else None,
            after_loss=AfterLoss.TOGETHER if in_groups else AfterLoss.CHECKPOINT,
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
        """Return a part of what is sharded, and add what compression keeps."""
        kept = 0.0 if self.compression is None else self.compression.footprint
        whole = replace(replica_memory(self, rank, ranks), copies=kept)
        return sharded_footprint(whole, self.shard, ranks)

    def _rehearse(self, worker: Worker, values: Tensor) -> None:
        if self.compression is None:
            begin_sum, _ = self.sums(worker)
            begin_sum(values, False).wait()
        else:
            kept = exchange.CompressionState.of(worker, self.compression)
            exchange.average_compressed(
                worker, worker.transport, values, 0, self.compression, kept, self.algorithm, 0
            )

    def sums(self, worker: Worker) -> tuple[exchange.BeginSum, Group]:
        """Return how the algorithm sums a vector, and the workers in the order of its ring."""
        if self.algorithm == "native":
            return exchange.native_sum(worker), worker.workers
        collective = self.collective(worker)
        return collective.sums(worker.transport), collective.group

    def collective(self, worker: Worker) -> exchange.ScheduledGroup:
        return exchange.make_collective(worker, self.algorithm, self.order, self.ranks_per_node)

    def member(self, worker: Worker) -> Member[Any]:
        if self.backup and worker.own_loop:
            raise InputError(
                "AllReduce: backup needs orchestra's own loop (orchestra train): a late worker "
                "leaves out forward and backward passes, which a loop of your own cannot"
            )
        if self.shard != "nothing":
            return sharded_member(self, worker)
        optimizer = worker.local_optimizer()
        if self.backup:
            return BackupMember(self, worker, optimizer)
        if self.compression is None:
            return AllReduceMember(self, worker, optimizer)
        kept = exchange.CompressionState.of(worker, self.compression)
        return CompressedMember(self, worker, optimizer, kept)


@dataclass(eq=False)
class AveragingMember(Member[AllReduce]):
    """A worker with a whole optimizer, which equals all others because their gradients do."""

    optimizer: Optimizer
    average: GradientAverage | PartialAverage = field(init=False)

    def rest(self, rest: Rest) -> Kept:
        """End the background flows."""
        self.average.close()
        return super().rest(rest)

    def exchange(self) -> None:
        """g <- sum over workers of (samples / all samples) g."""
        self.average.finish()

    def update(self) -> None:
        """Take the same step of the same optimizer on every worker."""
        worker = self.worker
        worker.clip()
        worker.update_locally(self.optimizer)
        worker.offer_equal_parameters()


@dataclass(eq=False)
class AllReduceMember(AveragingMember):
    """Average the gradients of all workers, each bucket as soon as backward has filled it."""

    average: GradientAverage = field(init=False)

    def open(self, *, fresh: bool) -> None:
        """Begin to listen to backward."""
        begin_sum, _ = self.strategy.sums(self.worker)
        self.average = exchange.GradientAverage(self.worker, exchange.each_bucket(begin_sum))


@dataclass(eq=False)
class CompressedMember(AllReduceMember):
    """Average compressed gradients; `compression` keeps what is left out for later steps."""

    compression: CompressionState

    def open(self, *, fresh: bool) -> None:
        """Begin to listen to backward."""
        worker, compressor = self.worker, self.strategy.compression
        assert compressor is not None
        begin_sum, ring = self.strategy.sums(worker)
        total = exchange.CompressedSum(worker, compressor, self.compression, begin_sum, ring)
        self.average = exchange.GradientAverage(worker, total.begin)


@dataclass(eq=False)
class BackupMember(AveragingMember):
    """Average the N - b gradients that are complete first, and drop the others.

    Backup workers (Chen et al., 2016), without a server. No worker waits for the buffers of the
    first worker, which may be late.
    """

    average: PartialAverage = field(init=False)

    def open(self, *, fresh: bool) -> None:
        """Begin to take part in the averages of the others."""
        worker, strategy = self.worker, self.strategy
        needed = len(worker.workers) - strategy.backup
        self.average = exchange.PartialAverage(worker, strategy.collective(worker), needed)

    def rest(self, rest: Rest) -> Kept:
        """End the background flows; at the end, take the first worker's buffers."""
        kept = super().rest(rest)
        if rest.reason.ends:
            exchange.broadcast_buffers(self.worker, self.worker.everyone)
        return kept

    def gradient(self, batch: Batch | None) -> None:
        """Compute the gradient of `batch`; pass over the batch if the step's average is there."""
        if not self.average.is_late():
            super().gradient(batch)
            return
        self.worker.step.samples = 0
        self.worker.gradients.clear()
        self.average.take()
