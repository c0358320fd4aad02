"""The batches of a loop of the user's own: dealt out to the workers, and to ranks that serve."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch

from orchestra import exchange
from orchestra.collectives import all_reduce
from orchestra.data.own_loop import Loader, Part, QueuedLoader, ShardedLoader, shard_loader
from orchestra.errors import InputError, PeerLost
from orchestra.schedules.work_queue import Kind, WorkItem
from orchestra.strategies.base import WorkSource
from orchestra.transports.tags import Tag

if TYPE_CHECKING:
    from orchestra.trainer.own_loop import OwnLoop

MID_EPOCH = -(1 << 20)
"""In place of the step of a pause: the workers' epoch goes on after it. Phases end above that."""

ENDED = (
    "this loop ended when another model was distributed; models that are trained by turns are all "
    "distributed before the first step"
)


class Batches:
    """The user's loader, dealt out to the workers; iterate it as before, once an epoch.

    When an iteration ends, every worker's model holds the agreed parameters. A rank that has become
    a server gets nothing more: its iterations serve until the workers' epoch is over, and the one
    after the workers have left ends its script, with status 0. Where workers take batches from a
    queue, which `queued` loads, they get unlike numbers of them.

    Attributes:
        item: what this worker took from the queue and has not made a step with.
        ended: all workers have left.
        begun: an epoch was begun, or served.
        accumulates: no backward pass exchanges, for now.
    """

    def __init__(
        self,
        loop: OwnLoop,
        loader: Loader,
        seed: int,
        queued: QueuedLoader | None,
        source: Batches | None = None,
    ) -> None:
        self.item: WorkItem | None = None
        self._queued = queued
        self.loss = float("nan")
        self.accumulates = False
        self.ended = self.begun = self._goes_on = self._in_epoch = False
        self.left = False
        self._loop = loop
        self.loader = loader
        self._seed = seed
        self.epoch = 0
        self._roles = loop.strategy.current_roles(loop.worker, loop.state)
        self._sharded = self._shard()
        self._source = source
        self._together = [self]  # this one and those that are iterated with it
        if source is not None:
            source.add(self)

    def __len__(self) -> int:
        sharded, workers = self._sharded, len(self._roles.workers)
        if sharded is None:  # on a server: that of a worker
            sharded = shard_loader(self.loader, workers, 0, self._seed)
        return len(sharded)

    def add(self, other: Batches) -> None:
        """From now on an iteration counts for `other`, too."""
        if self._queued is not None and self._loop.strategy.self_paced:
            raise InputError(
                "models that are trained by turns need as many batches on every worker: set "
                "work='equal' in the first distribute"
            )
        self._together.append(other)

    def __iter__(self) -> Generator[Any, None, None]:
        if self._source is not None:
            yield from self._source
            return
        if self._is_over():
            return
        for each in self._together:
            each._begin_epoch()
        try:
            if self._sharded is not None:
                yield from self._work(self._sharded)
        except GeneratorExit:
            for each in self._together:
                each.left = True
            raise
        for each in self._together:
            each._end_epoch()

    def _is_over(self) -> bool:
        """Whether there is nothing to iterate over, where that is no mistake."""
        if not self.ended:
            return False
        if self._is_worker():
            raise InputError(f"batches: {ENDED}")
        if not self._goes_on:
            raise SystemExit(0)
        return True

    def _begin_epoch(self) -> None:
        self.begun = self._in_epoch = True
        self.left = False
        self._loop.worker.reporter.phase("training")
        self._loop.begin_epoch()
        self._follow_phase()

    def _end_epoch(self) -> None:
        loop = self._loop
        loop.counts.end_epoch()
        if self._is_worker():
            loop.strategy.quiesce(loop.worker, loop.state, self.epoch)
        else:
            self._serve()
        self._take_part_in_agreement()
        if self.ended:
            self.end(goes_on=False)
        self._in_epoch = False
        self.epoch += 1

    def agree(self) -> None:
        """In mid-epoch, let every worker's model hold the agreed parameters; training can go on.

        For instance after `break`, before saving: every worker calls it, after equally many steps.
        Where an epoch has ended it changes nothing.

        Raises:
            InputError: workers take unlike numbers of batches.
        """
        for each in self._together if self._source is None else self._source._together:
            each._agree()

    def _agree(self) -> None:
        loop = self._loop
        if not self._in_epoch or self.ended or not self._is_worker():
            return
        if loop.strategy.work(loop.state) is not None:
            raise InputError(
                "batches.agree() in mid-epoch needs equally many batches on every worker: set "
                "work='equal' in distribute, or go on to the end of the epoch"
            )
        loop.strategy.quiesce(loop.worker, loop.state, MID_EPOCH)
        self._take_part_in_agreement()

    def _take_part_in_agreement(self) -> None:
        loop = self._loop
        loop.strategy.agree(loop.worker, loop.state)
        if not self.ended:  # replicas that differ have averaged them; others take the first one's
            exchange.broadcast_buffers(loop.worker, loop.worker.everyone)
        self.left = False

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """While inside, this rank may take as long as it likes; the others wait when they need it.

        For what takes longer than `patience` without a forward pass of the model. Under
        `AllReduce("native")` the collectives of the others give up after four times `patience`.
        """
        reporter = self._loop.worker.reporter
        reporter.phase("paused")
        try:
            yield
        finally:
            reporter.phase("training")

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """While inside, `backward()` exchanges nothing; the next one outside does so for all of
        them. As `no_sync` of DistributedDataParallel, where a loop knows which one is the last.
        """
        self.accumulates = True
        try:
            yield
        finally:
            self.accumulates = False

    def report(self, loss: float) -> None:
        """Tell this step's loss, before `loss.backward()`: for rules that watch it."""
        self.loss = float(loss)

    def _work(self, sharded: ShardedLoader) -> Iterator[Any]:
        loop = self._loop
        if loop.strategy.work(loop.state) is None:
            for part in sharded:
                self._count(part)
                yield part.batch
                if not self._is_worker():
                    return
                if loop.strategy.work(loop.state) is not None:
                    break
        source = loop.strategy.work(loop.state)
        if source is not None:
            yield from self._take(source)

    def _take(self, source: WorkSource) -> Iterator[Any]:
        """The batches of the queue, until all pause at the end of the epoch."""
        worker = self._loop.worker
        assert self._queued is not None
        while True:
            if self.item is not None:
                source.skip(worker.parameters)
            self.item = source.take()
            if self.item.kind is not Kind.BATCH:
                worker.step.consumed, self.item = self.item.start, None
                return
            part = self._queued.load(self.item)
            self._count(part)
            yield part.batch

    def _count(self, part: Part) -> None:
        worker = self._loop.worker
        total = part.total
        if total is None:
            total = part.samples
            loops = [each._loop for each in self._together]
            if any(loop.strategy.currently_synchronous(loop.state) for loop in loops):
                counts = torch.tensor([float(total)], dtype=torch.float64)
                all_reduce(worker.transport, counts, "ring", worker.workers, Tag.COUNT)
                total = int(counts)
        for each in self._together:
            each._loop.counts.take(part.samples, total, part.batch)

    def _alike(self, number: int) -> bool:
        """Collective over the workers: whether `number`, of 32 bits, is the same on all of them."""
        worker = self._loop.worker
        numbers = torch.zeros(len(worker.workers), dtype=torch.float64)
        numbers[worker.workers.index(worker.rank)] = number
        all_reduce(worker.transport, numbers, "ring", worker.workers, Tag.COUNT)
        return bool((numbers == number).all())

    def serve_to_the_end(self) -> None:
        """On a rank without data: serve until the workers have left this loop.

        Raises SystemExit where their scripts are over.
        """
        while not self._is_worker() and not self.ended:
            self._end_epoch()
        if self.ended and not self._goes_on:
            raise SystemExit(0)

    def end(self, *, goes_on: bool) -> None:
        """The loop is over; a worker tells those that serve whether the script `goes_on`."""
        self.begun = self.ended = True
        self._goes_on = goes_on
        worker = self._loop.worker
        workers = self._loop.strategy.current_roles(worker, self._loop.state).workers
        everyone = worker.everyone.ranks
        first = next(rank for rank in workers if rank in everyone)
        with contextlib.suppress(PeerLost):
            if worker.rank not in workers:
                self._goes_on = bool(worker.transport.receive(first, Tag.GOES_ON).wait())
            elif worker.rank == first:
                word = torch.tensor([float(goes_on)])
                for rank in everyone:
                    if rank not in workers:
                        worker.transport.send(word, rank, Tag.GOES_ON).wait()

    def _serve(self) -> None:
        loop = self._loop
        loop.worker.reporter.phase("serving")
        loop.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers
        while not self._is_worker():
            paused = loop.strategy.serve(loop.worker, loop.state)
            self.ended = paused is None
            if paused is None or paused.step >= 0:
                break
            if paused.step == MID_EPOCH:
                self._take_part_in_agreement()
        loop.worker.reporter.phase("training")

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that have data now; the others serve."""
        return self._loop.strategy.current_roles(self._loop.worker, self._loop.state).workers

    def _is_worker(self) -> bool:
        return self._loop.worker.rank in self.workers

    def _follow_phase(self) -> None:
        """Where the strategy has changed its roles, deal the coming epochs out anew."""
        roles = self._loop.strategy.current_roles(self._loop.worker, self._loop.state)
        if roles != self._roles:
            self._roles = roles
            self._sharded = self._shard()

    def _shard(self) -> ShardedLoader | None:
        workers = self._roles.workers
        rank = self._loop.worker.rank
        if rank not in workers:
            return None
        index = workers.index(rank)
        sharded = shard_loader(self.loader, len(workers), index, self._seed, self._alike)
        if hasattr(sharded, "epoch"):
            sharded.epoch = self.epoch
        return sharded
