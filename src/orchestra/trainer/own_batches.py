"""The batches of a loop of the user's own, as its script iterates, saves and resumes them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from orchestra.data.own_loop import Loader, Part, QueuedLoader, ShardedLoader, shard_loader
from orchestra.errors import InputError
from orchestra.schedules.work_queue import Kind, WorkItem
from orchestra.strategies.base import WorkSource
from orchestra.trainer.own_epochs import MID_EPOCH, SAVING, Epochs
from orchestra.trainer.own_model import check_place

if TYPE_CHECKING:
    from orchestra.trainer.own_loop import OwnLoop


class Batches(Epochs):
    """The user's loader, dealt out to the workers; iterate it as before, once an epoch.

    When an iteration ends, every worker's model holds the agreed parameters. A rank that has become
    a server gets nothing more: its iterations serve until the workers' epoch is over, and the one
    after the workers have left ends its script, with status 0. Where workers take batches from a
    queue, which `queued` loads, they get unlike numbers of them.

    Attributes:
        epoch: how many have ended; as `taken`, `ended`, `begun` and `left` in `Epochs`.
        item: what this worker took from the queue and has not made a step with.
        loss: what was reported last.
        share: of the samples behind the gradient of the batch, or group, that was handed out last,
            this worker's; 1 where its gradient is not averaged.
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
        super().__init__(loop, loader, seed, follows=source is not None)
        self.item: WorkItem | None = None
        self.loss = float("nan")
        self.share = 1.0
        self.accumulates = False
        self._queued = queued
        self._source = source
        self._together = [self]  # this one and those that are iterated with it
        if source is not None:
            source.add(self)

    def __len__(self) -> int:
        sharded, workers = self._sharded, len(self._roles.workers)
        if sharded is None:  # on a server: that of a worker
            sharded = shard_loader(self.loader, workers, 0, self.seed)
        return len(sharded)

    @property
    def length(self) -> int | None:
        """Of an epoch, in batches; None where the loader does not know."""
        try:
            return len(self)
        except TypeError:
            return None

    def add(self, other: Batches) -> None:
        """From now on an iteration counts for `other`, too."""
        if self._queued is not None and self._loop.strategy.self_paced:
            raise InputError(
                "models that are trained by turns need as many batches on every worker: set "
                "work='equal' in the first distribute"
            )
        self._together.append(other)

    # Iterating

    def __iter__(self) -> Generator[Any, None, None]:
        return self._iterate(None)

    def groups(self, size: int) -> Generator[Any, None, None]:
        """Iterate an epoch, `size` batches at a time; those of a group are behind one gradient.

        For loops that take the batches of a step before its first `backward()`, of which there has
        to be one for each batch, and one `step()` for each group. Only the last `backward()`
        exchanges, whatever `accumulation` says; also that of the last group, which may be smaller.

        Raises:
            InputError: batches lie in a queue, from which workers take one at a time.
        """
        if self._queued is not None and self._loop.strategy.self_paced:
            raise InputError("batches.groups() needs as many on every worker: set work='equal'")
        return self._iterate(size)

    def _iterate(self, group: int | None) -> Generator[Any, None, None]:
        if self._source is not None:
            yield from self._source._iterate(group)
            return
        if self._is_over():
            return
        for each in self._together:
            each._loop.kept.take_over()
        for each in self._together:
            each._begin_epoch()
        try:
            if self._sharded is not None:
                yield from self._work(self._sharded, group)
        except GeneratorExit:
            for each in self._together:
                each.left = True
            raise
        for each in self._together:
            each._end_epoch()

    def _work(self, sharded: ShardedLoader, group: int | None) -> Iterator[Any]:
        loop = self._loop
        if loop.strategy.work(loop.state) is None:
            parts = self._begin_order(sharded)
            while some := list(islice(parts, group or 1)):
                self._count(*some)
                if group is not None:
                    for each in self._together:
                        each._loop.begin_group(len(some))
                batches = [part.batch for part in some]
                yield batches[0] if group is None else batches
                if not self.is_worker():
                    return
                if loop.strategy.work(loop.state) is not None:
                    break
        source = loop.strategy.work(loop.state)
        if source is not None:
            yield from self._take(source)

    def _take(self, source: WorkSource) -> Iterator[Any]:
        """Give the batches of the queue, until all pause at the end of the epoch."""
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

    def _count(self, *parts: Part) -> None:
        """Note which samples are behind the next gradient, here and on all workers."""
        samples = sum(part.samples for part in parts)
        totals = [part.total for part in parts if part.total is not None]
        if len(totals) == len(parts):
            total = sum(totals)
        elif self.averages_gradients:
            total = int(self.sum_over_workers(torch.tensor([samples])))
        else:
            total = samples
        self.share = samples / total if self.averages_gradients else 1.0
        for each in self._together:
            each.taken += len(parts)
            each._loop.counts.take(samples, total, [part.batch for part in parts])

    # Epochs

    def agree(self) -> None:
        """In mid-epoch, let every worker's model hold the agreed parameters; training can go on.

        For instance after `break`, before saving: every worker calls it, after equally many steps.
        Where an epoch has ended it changes nothing.

        Raises:
            InputError: workers take unlike numbers of batches.
        """
        for each in self._in_mid_epoch():
            each._loop.kept.take_over()
            each._refuse_queue("agree")
            each._loop.strategy.quiesce(each._loop.worker, each._loop.state, MID_EPOCH)
            each._take_part_in_agreement()

    def end_epoch(self) -> None:
        """After `break`, end the epoch as if there were no more batches.

        Every worker's model then holds the agreed parameters, and the next iteration begins another
        epoch. Every worker calls it, after equally many steps. Where an epoch has ended it changes
        nothing.

        Raises:
            InputError: workers take unlike numbers of batches.
        """
        for each in self._in_mid_epoch():
            each._refuse_queue("end_epoch")
            each._end_epoch()

    def _in_mid_epoch(self) -> list[Batches]:
        """Return those that are iterated together, where this worker is within an epoch."""
        together = (self._source or self)._together
        return [each for each in together if each._in_epoch and not each.ended and each.is_worker()]

    def _refuse_queue(self, method: str) -> None:
        if self._loop.strategy.work(self._loop.state) is not None:
            raise InputError(
                f"batches.{method}() in mid-epoch needs equally many batches on every worker: set "
                "work='equal' in distribute, or go on to the end of the epoch"
            )

    # Saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """All that the training goes on from: every worker calls it, between two steps.

        Parameters, buffers and moments as each rank has them, slices on servers included; epoch,
        and place in it; random generators. Plain data and tensors, for torch.save. Save what the
        first worker gets: it has all of it, the others only know what it is of.

        Raises:
            InputError: there is no such place here; the message says where one is.
        """
        loop = self._loop
        if self._is_over():
            return loop.kept.saved({})
        if not self.is_worker():
            self._serve(until_saved=True)
            return loop.kept.saved({})
        check_place(loop)
        loop.kept.take_over()
        loop.strategy.quiesce(loop.worker, loop.state, SAVING)
        return loop.kept.saved(loop.kept.collect())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`: every worker calls it with what the first one's `state_dict()` was.

        It belongs behind `distribute` and before the loop over these batches, whose first
        iteration goes on where the epoch was left.

        Raises:
            InputError: `state` is of other settings, or training has come too far to go back.
        """
        if self._is_over():
            return
        if self._in_epoch and not self.left:
            raise InputError(
                "batches.load_state_dict(): an iteration over the batches is under way: call it "
                "before the loop over them, or leave that with break"
            )
        self._loop.kept.load(state)

    def start_at(self, batch: int) -> None:
        """Begin the next epoch at its batch number `batch`, from 0."""
        position = {"epoch": self.epoch, "taken": batch, "backwards": 0, "order": self.order}
        self.go_on_from(position, self.order_state())

    # What else a loop tells, or asks

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

    @property
    def averages_gradients(self) -> bool:
        """Whether the workers step together now, on the average of their gradients."""
        loops = [each._loop for each in self._together]
        return any(loop.strategy.under_way(loop.state).synchronous for loop in loops)
