"""A loop of the user's own: `loss.backward()` runs the first half of a step, `optimizer.step()`
the second; `batches` deals out the data, and serves on a rank without any.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from orchestra.collectives import all_reduce
from orchestra.data.own_loop import Part, QueuedLoader, ShardedLoader, shard_loader
from orchestra.errors import InputError
from orchestra.optimizers.spec import OptimizerSpec, get_rates, set_rates
from orchestra.schedules.work_queue import Kind, WorkItem
from orchestra.strategies.base import CHANGED, Strategy, WorkSource
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Step, Worker


class OwnLoop:
    """Ties a strategy to a model, an optimizer and a loader that a user drives.

    `accumulation` is how many times the user calls `backward` for one `step`: only the last one
    exchanges. Where an epoch ends with fewer, `step` does.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        strategy: Strategy[Any],
        *,
        accumulation: int = 1,
        seed: int = 0,
        work: str = "shared",
        bucket_megabytes: float = 25.0,
        overlap: bool = True,
    ) -> None:
        self.strategy = strategy
        roles = strategy.roles(runtime.ranks)
        if len(roles.shares) != runtime.ranks:
            raise InputError(
                f"{strategy!r} runs on {len(roles.shares)} process(es), but {runtime.ranks} were "
                "started: start as many, or name another strategy"
            )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        spec = OptimizerSpec.from_instance(optimizer, names)
        self.worker = Worker(
            runtime,
            model,
            spec,
            own_optimizer=optimizer,
            bucket_bytes=int(bucket_megabytes * 1e6),
            overlap=overlap,
        )
        self.worker.set_workers(roles.workers)
        self.optimizer = optimizer
        self.accumulation = accumulation
        queued = None
        if work == "shared" and accumulation == 1 and QueuedLoader.fits(loader):
            queued = QueuedLoader(loader, seed)
            self.worker.queue_of = queued.queue
        self.state = strategy.start(self.worker)
        self.batches = Batches(self, loader, seed, queued)
        self._backwards = 0  # in this epoch
        self._pending = False  # a gradient that was not exchanged yet
        self._stepping = False
        self._steps = 0
        self._take_over_forward(model)
        self._take_over_backward(model)
        self._take_over_step()

    def _take_over_forward(self, model: nn.Module) -> None:
        def before(module: nn.Module, _: Any) -> None:
            first = self._backwards % self.accumulation == 0
            if module.training and torch.is_grad_enabled() and first:
                self.strategy.before_forward(self.worker, self.state)

        model.register_forward_pre_hook(before)

    def begin_epoch(self) -> None:
        """Count the backward passes from here."""
        self._backwards = 0

    # The first half: at the end of the last backward of a step

    def _take_over_backward(self, model: nn.Module) -> None:
        """Begin the exchange in the last backward of a step; finish it when that one ends."""
        under_way = False

        def finished() -> None:
            nonlocal under_way
            under_way = False
            self._backwards += 1
            if self.worker.gradients.last_backward:
                self.strategy.reduce(self.worker, self.state)
            else:
                self._pending = True

        def in_backward() -> None:
            nonlocal under_way
            if under_way:
                return
            under_way = True
            torch.autograd.Variable._execution_engine.queue_callback(finished)
            last = (self._backwards + 1) % self.accumulation == 0
            self.worker.gradients.last_backward = last
            if last:
                self._begin_exchange()

        self.worker.gradients.when_in_backward(in_backward)

    def _begin_exchange(self) -> None:
        worker = self.worker
        self._pending = False
        samples, total = self.batches.take_counts()
        item = self.batches.item
        worker.gradients.await_collection()
        worker.begin_step(
            Step(
                samples=samples,
                total_samples=total,
                consumed=worker.step.consumed + total if item is None else item.stop,
                position=None if item is None else item.start,
                epoch=self.batches.epoch,
                rates=get_rates(self.optimizer),
                loss=self.batches.loss,
            )
        )

    # The second half: in optimizer.step()

    def _take_over_step(self) -> None:
        original = self.optimizer.step
        loop = self

        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if loop._stepping:
                return original()
            if closure is not None:
                raise InputError("optimizer.step(closure) cannot be distributed: call step() alone")
            return loop._update()

        self.optimizer.step = types.MethodType(step, self.optimizer)  # type: ignore[method-assign]

    def _update(self) -> None:
        if self._pending:  # a step after fewer backward passes: the last ones of an epoch
            self._begin_exchange()
            self.strategy.reduce(self.worker, self.state)
        if self.strategy.reads_loss and math.isnan(self.batches.loss):
            raise InputError(
                f"{self.strategy!r} watches the training loss, which this loop keeps to itself: "
                "call batches.report(loss.item()) before loss.backward()"
            )
        self._stepping = True
        rates = get_rates(self.optimizer)
        self.worker.set_rates(rates)
        try:
            self.strategy.update(self.worker, self.state)
        finally:
            set_rates(self.optimizer, rates)
            self._stepping = False
        self.batches.item = None
        self.worker.gradients.forget()
        self._steps += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers
        self.worker.reporter.progress(step=self._steps, samples=self.worker.step.consumed)

    def finish(self) -> None:
        """The script is over: leave in order, whatever the others still do."""
        self.worker.reporter.phase("leaving")
        if not self.batches.ended:
            self.strategy.stop(self.worker, self.state)


class Batches:
    """The user's loader, dealt out to the workers; iterate it as before, once an epoch.

    When an iteration ends, every rank's model holds the agreed parameters. On a rank without
    data an iteration yields nothing: it serves until the workers' epoch is over. Where workers take
    batches from a queue, which `queued` loads, they get unlike numbers of them.

    Attributes:
        item: what this worker took from the queue and has not made a step with.
    """

    def __init__(
        self, loop: OwnLoop, loader: DataLoader[Any], seed: int, queued: QueuedLoader | None
    ) -> None:
        self.item: WorkItem | None = None
        self._queued = queued
        self.loss = float("nan")
        self.ended = False  # all workers have left: nothing is to be served any more
        self._loop = loop
        self._loader = loader
        self._seed = seed
        self._samples = 0
        self._total = 0
        self.epoch = 0
        self._roles = loop.strategy.current_roles(loop.worker, loop.state)
        self._sharded = self._shard()

    def __len__(self) -> int:
        return len(self._sharded) if self._sharded is not None else 0

    def __iter__(self) -> Iterator[Any]:
        loop = self._loop
        if self.ended:
            return
        loop.worker.reporter.phase("training")
        loop.begin_epoch()
        self._follow_phase()
        if self._sharded is not None:
            yield from self._work(self._sharded)
        if self._is_worker():
            loop.strategy.quiesce(loop.worker, loop.state, self.epoch)
        else:
            self._serve()
        loop.strategy.agree(loop.worker, loop.state)
        self.epoch += 1

    def report(self, loss: float) -> None:
        """Tell this step's loss, before `loss.backward()`: for rules that watch it."""
        self.loss = float(loss)

    def take_counts(self) -> tuple[int, int]:
        """The samples since the last step: this worker's, and those of all workers."""
        samples, total = self._samples, self._total
        self._samples = self._total = 0
        return samples, total

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
                self.take_counts()
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
            if self._loop.strategy.currently_synchronous(self._loop.state):
                counts = torch.tensor([float(total)], dtype=torch.float64)
                all_reduce(worker.transport, counts, "ring", worker.workers, Tag.COUNT)
                total = int(counts)
        self._samples += part.samples
        self._total += total

    def _serve(self) -> None:
        loop = self._loop
        loop.worker.reporter.phase("serving")
        loop.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers
        while not self._is_worker():
            paused = loop.strategy.serve(loop.worker, loop.state)
            self.ended = paused is None
            if paused is None or paused.step != CHANGED:
                break
        loop.worker.reporter.phase("training")

    def _is_worker(self) -> bool:
        loop = self._loop
        return loop.worker.rank in loop.strategy.current_roles(loop.worker, loop.state).workers

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
        sharded = shard_loader(self._loader, len(workers), workers.index(rank), self._seed)
        if hasattr(sharded, "epoch"):
            sharded.epoch = self.epoch
        return sharded
