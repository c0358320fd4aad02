"""The epochs of a loop of the user's own: its loader is dealt out, and workers agree at the end."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from orchestra import exchange
from orchestra.coordinator.batches import WorkSource
from orchestra.coordinator.events import Finish, RestAt, Take
from orchestra.coordinator.rest import Reason
from orchestra.data import loaders
from orchestra.errors import InputError
from orchestra.optimizers.state import random_state, restore_random_state, undisturbed
from orchestra.strategies.base import Strategy
from orchestra.strategies.traits import Dealing, Pace
from orchestra.trainer.own_loop.model import BackwardPasses, Count
from orchestra.trainer.own_loop.rank import Command, OwnRank
from orchestra.worker.runtime import Runtime

ENDED = (
    "this loop ended when another model was distributed; models that are trained by turns are all "
    "distributed before the first step"
)


class Epochs(OwnRank):
    """The user's loader, iterated once an epoch; `Batches` saves and resumes it, too."""

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        loader: loaders.Loader | Epochs,
        *,
        accumulation: int,
        seed: int,
        work: str,
        **options: Any,
    ) -> None:
        before = loader if isinstance(loader, Epochs) else None
        self.loader: loaders.Loader = loader.loader if isinstance(loader, Epochs) else loader
        # The batches of another loop, which see to the order.
        self._source = source = None if before is None or before.ended else before
        self._queued: loaders.QueuedLoader | None = None
        # Accumulation finds a short last step by `len(batches)`, unknown to a queue.
        if work == "shared" and accumulation == 1 and source is None:
            self._queued = loaders.QueuedLoader.of(self.loader, seed)
        queue_of = None if self._queued is None else self._queued.queue
        super().__init__(runtime, model, optimizer, strategy, queue_of, **options)
        self.passes = BackwardPasses(accumulation, copied=self.worker.layout.device.type != "cpu")
        self.epoch = 0  # how many have ended
        self.begun = False  # an epoch was begun, or served
        self.left = False  # an iteration, before its epoch's end, and nobody has agreed since
        self.item: Take | None = None  # taken from the queue; no step was made with it yet
        self.loss = float("nan")  # what was reported last
        # This worker's of the samples behind the gradient of the batch, or group, that was handed
        # out last; 1 where its gradient is not averaged.
        self.share = 1.0
        self._samples: int | None = 0  # of it, if they are known
        self._turns = 0  # the sum of all digests of turns
        self._seed = seed
        self.steps_begin_with_batches = False  # in place of a forward pass of the model
        self.ends_process = True  # of a rank that serves, once the workers' scripts are over
        self._goes_on = self._in_epoch = False
        self._resumed_at = self._passes_before = 0
        self._order: dict[str, Any] = {}
        self._together = [self]  # this one and those that are iterated with it
        if source is not None:
            if source._uses_queue:
                raise InputError(
                    "models that are trained by turns need as many batches on every worker: set "
                    "work='equal' in the first distribute"
                )
            source._together.append(self)
        self._deal_out()

    def __len__(self) -> int:
        if self._sharded is None:  # on a server: that of a worker
            return len(loaders.shard_loader(self.loader, len(self._roles.workers), 0, self._seed))
        return len(self._sharded)

    @property
    def length(self) -> int | None:
        """The batches of an epoch; None if the loader does not know."""
        try:
            return len(self)
        except TypeError:
            return None

    @property
    def averages_gradients(self) -> bool:
        """True if the workers step together now, on the average of their gradients."""
        return any(each.synchronous for each in self._together)

    # Iterating

    def __iter__(self) -> Generator[Any, None, None]:
        return self._iterate(None)

    def groups(self, size: int) -> Generator[Any, None, None]:
        """Iterate an epoch, `size` batches at a time; the gradient of a group is exchanged once.

        For loops that take the batches of a step before its first `backward()`. They call
        `backward()` once for each batch, and `step()` once for each group. Only the last
        `backward()` of a group exchanges, whatever `accumulation` says; the last group of an epoch
        may be smaller. InputError if batches lie in a queue, from which workers take one at a time.
        """
        if self._uses_queue:
            raise InputError("batches.groups() needs as many on every worker: set work='equal'")
        return self._iterate(size)

    @property
    def _uses_queue(self) -> bool:
        """True if workers take the batches of some phase from a queue."""
        return self._queued is not None and self.strategy.traits().dealing is Dealing.QUEUE

    def _iterate(self, group: int | None) -> Generator[Any, None, None]:
        if self._source is not None:
            yield from self._source._iterate(group)
            return
        if self._is_over():
            return
        for each in self._together:
            each.take_over()
        left = self.left
        for each in self._together:
            each._begin_epoch()
        try:
            if self._sharded is not None:
                # All workers are here, unless one left the epoch, or its process, by itself.
                if not left and not self.worker.transport.lost():
                    self._sharded.compare()
                yield from self._work(self._sharded, group)
        # The script left the loop over the batches, by `break` or an exception.
        except GeneratorExit:
            for each in self._together:
                each.left = True
            raise
        for each in self._together:
            each._end_epoch()

    def _work(self, sharded: loaders.ShardedLoader, group: int | None) -> Iterator[Any]:
        if self.source() is None:
            if not self.taken:
                self._order = self._draws()
                parts = sharded.begin(0)
            else:
                # The sampler draws what it drew when the epoch began, so that the rest is the same.
                with undisturbed():
                    restore_random_state(self._order["random"])
                    parts = sharded.begin(self.taken)
            while some := list(islice(parts, group or 1)):
                self._count(*some)
                if group is not None:
                    for each in self._together:
                        each.passes.begin_group(len(some))
                batches = [part.batch for part in some]
                yield batches[0] if group is None else batches
                # A step with this batch may have ended a phase of `Switch`: this rank serves now,
                # or workers take batches from a queue.
                if not self.is_worker():
                    return
                if self.source() is not None:
                    break
            else:
                if self.averages_gradients and not sharded.knows_totals:
                    self._sum_counts(0, 0)
        if (source := self.source()) is not None:
            assert self._queued is not None
            self._queued.check_length()
            yield from self._take(source)

    def _take(self, source: WorkSource) -> Iterator[Any]:
        """Give the batches of the queue, until all pause at the end of the epoch."""
        worker = self.worker
        assert self._queued is not None
        while True:
            if self.item is not None:
                # The loop made no step with the batch before: the queue has to be told.
                source.skip(worker.parameters)
            item, self.item = source.take(), None
            if isinstance(item, RestAt | Finish):
                worker.step.consumed = item.at
                return
            assert isinstance(item, Take)
            self.item = item
            part = self._queued.load(self.item)
            self._count(part)
            yield part.batch

    def _count(self, *parts: loaders.WorkerBatch) -> None:
        """Note which samples are behind the next gradient, here and on all workers."""
        known = all(part.samples is not None for part in parts)
        samples = sum(part.samples or 0 for part in parts)
        totals = [part.total for part in parts if part.total is not None]
        averaged = self.averages_gradients
        if len(totals) == len(parts):
            total = sum(totals)
        else:
            turn = sum(part.turn_digest for part in parts)
            self._turns += turn
            total = self._sum_counts(samples, turn) if averaged else samples
        self._samples = samples if known else None
        self.share = samples / max(total, 1) if averaged else 1.0
        for each in self._together:
            each.taken += len(parts)
            count = Count(samples, total, total) if known else None
            each.passes.take(count, [part.batch for part in parts])
            if each.steps_begin_with_batches and torch.is_grad_enabled():
                each.enter()

    def _sum_counts(self, samples: int, turn: int) -> int:
        """Return the samples of all workers in this step, if all have this digest of its `turn`.

        At the end of an epoch both are 0: the batches of another worker may not be over.
        """
        total, turns = self.sum_over_workers(torch.tensor([samples, turn])).tolist()
        if turns != turn * len(self.worker.workers):
            raise InputError(loaders.UNLIKE)
        return int(total)

    def weight(self, count: int) -> int:
        """Let the gradient of the batch, or group, that was taken last weigh `count`; return the
        sum over the workers.

        Every worker calls it before `backward()`, where the loss is a mean over something else than
        samples, such as the tokens that are not masked: `count` is their number. A gradient that is
        not averaged has no other to be weighed against, so the sum is `count` there. In averages of
        models the count takes the place of the samples. InputError outside of that place.
        """
        if self._source is not None:
            return self._source.weight(count)
        if isinstance(count, bool) or int(count) != count or count < 0:
            raise InputError(f"batches.weight(): expected a whole number from 0, got {count!r}")
        if self.item is not None:  # of a queue, which counts samples
            return int(count)
        # A repeated batch has no samples, and must not count
        own = 0 if self._samples == 0 else int(count)
        averaged = self.averages_gradients
        total = int(self.sum_over_workers(torch.tensor([own]))) if averaged else own
        for each in self._together:
            each.passes.weigh(own, total)
        self.share = own / total if averaged and total else float(not averaged)
        return total

    def enter(self) -> None:
        """Collective over the workers: begin a step, unless it has begun. Parameters may change."""
        if self.take_over() or not self.passes.entered:
            self.passes.entered = True
            self.phases.member.begin()

    # Epochs

    def _is_over(self) -> bool:
        """Return whether this loop has ended, on a rank that serves; refuse to go on elsewhere."""
        if not self.ended:
            return False
        if self.is_worker():
            raise InputError(f"batches: {ENDED}")
        if not self._goes_on and self.ends_process:
            # A rank that a `Switch` made a server ends its script here, once all workers have left.
            raise SystemExit(0)
        return True

    def _begin_epoch(self) -> None:
        self.begun = self._in_epoch = True
        self.left = False
        self.worker.reporter.phase("training")
        self.taken, self._resumed_at = self._resumed_at, 0
        self.passes.begin_epoch(self._passes_before)
        self._passes_before = 0
        if self.roles != self._roles:
            self._deal_out()

    def _deal_out(self) -> None:
        """Deal the coming epochs out to those who have roles now."""
        self._roles = self.roles
        self._sharded: loaders.ShardedLoader | None = None
        workers, rank = self._roles.workers, self.worker.rank
        if rank in workers:
            own, alike = workers.index(rank), self.alike
            self._sharded = loaders.shard_loader(self.loader, len(workers), own, self._seed, alike)
            self._sharded.epoch = self.epoch

    def _end_epoch(self) -> None:
        command = None
        self.passes.end_epoch()
        if self.is_worker():
            self.rest(Reason.EPOCH)
        else:
            command = self._serve()
        self._take_part_in_agreement()
        if command is not None:
            self.end(command)
        self._in_epoch = False
        self.taken = 0
        self.epoch += 1

    def rest(self, reason: Reason) -> None:
        """Wait until nothing is in flight anywhere; servers learn the `reason`."""
        self.kept = self.phases.rest(reason)
        self.passes.rest()

    def _take_part_in_agreement(self) -> None:
        # Once nothing is in flight: a worker that waits here answers nobody who averages with it.
        if self.is_worker() and self.source() is None and not self.worker.transport.lost():
            if not self.alike(self._turns & 0xFFFFFFFF):
                raise InputError(loaders.UNLIKE)
            pace = self.phases.traits.pace
            if pace is not Pace.FREE and not self.alike(self.ledger.digest(self.worker.phase)):
                raise self.ledger.refusal(self.steps)
        self.phases.agree(self.kept)
        if not self.ended:  # replicas that differ have averaged them; others take the first one's
            exchange.broadcast_buffers(self.worker, self.worker.everyone)
        self.left = False

    def agree(self) -> None:
        """Let every worker's model hold the agreed parameters in mid-epoch; training can go on.

        Every worker calls it, after equally many steps; for instance after `break`, before saving.
        Where an epoch has ended it changes nothing. InputError if workers take unlike numbers of
        batches.
        """
        for each in self._in_mid_epoch("agree"):
            each.rest(Reason.AGREEMENT)
            each._take_part_in_agreement()

    def end_epoch(self) -> None:
        """End the epoch after `break`, as if there were no more batches.

        Every worker's model then holds the agreed parameters, and the next iteration begins another
        epoch. Every worker calls it, after equally many steps. Where an epoch has ended it changes
        nothing. InputError if workers take unlike numbers of batches.
        """
        for each in self._in_mid_epoch("end_epoch"):
            each._end_epoch()

    def _in_mid_epoch(self, method: str) -> Iterator[Epochs]:
        """Give those that are iterated together, where this worker is within an epoch."""
        for each in (self._source or self)._together:
            if each._in_epoch and not each.ended and each.is_worker():
                if method == "agree":
                    each.take_over()
                if each.source() is not None:
                    raise InputError(
                        f"batches.{method}() in mid-epoch needs equally many batches on every "
                        "worker: set work='equal' in distribute, or go on to the end of the epoch"
                    )
                yield each

    # Ranks that serve

    def serve_to_the_end(self) -> None:
        """Serve until the workers have left this loop. Called on a rank without data.

        Raises SystemExit where their scripts are over, if it `ends_process`.
        """
        while not self.is_worker() and not self.ended:
            self._end_epoch()
        self._is_over()

    def _serve(self, *, until_saved: bool = False) -> Command | None:
        """Serve to the end of the workers' epoch; return a command that ended the loop, if any."""
        self.worker.reporter.phase("serving")
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers
        last = None
        while not self.is_worker():
            paused = self.phases.serve()
            if paused is None:
                command = self.hear()
                if command not in (Command.RESTART, Command.RESUME):
                    self.ended, last = True, command
                    break
            elif paused.rest.reason is not Reason.PHASE:
                self.kept = self.phases.rest(paused.rest.reason)
                if paused.rest.reason is Reason.SAVE:
                    self.collect(self._order_state())
                    self.phases.go_on()
                    if until_saved:
                        break
                elif paused.rest.reason is Reason.AGREEMENT:
                    self._take_part_in_agreement()
                elif paused.rest.reason is Reason.EPOCH:
                    break
        self.worker.reporter.phase("training")
        return last

    def end(self, command: Command) -> None:
        """End the loop; `command` tells whether the script goes on with another one."""
        self.begun = self.ended = True
        self.left = False
        self._goes_on = command is not Command.OVER
        if command is Command.HANDS_OVER:
            self.hand_over()

    @property
    def _order_number(self) -> int:
        """The number from which the order of the epoch under way, or of the next one, follows."""
        begun = self.taken > 0 and not self._resumed_at
        return 0 if self._sharded is None else self._sharded.epoch - begun

    def _order_state(self) -> dict[str, Any]:
        """Return the states of the generators at the beginning of the epoch under way, or now.

        The order of the epoch follows from them: what was drawn since is drawn again.
        """
        return self._order if self.taken and self._source is None else self._draws()

    def _draws(self) -> dict[str, Any]:
        own = [generator.get_state() for generator in self._generators()]
        return {"random": random_state(), "generators": own}

    def _generators(self) -> list[torch.Generator]:
        """Return the loader's own, unless another loop's batches see to them."""
        return loaders.generators_of(self.loader) if self._source is None else []
