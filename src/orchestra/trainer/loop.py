"""The loop that every rank runs, whatever the strategy and the engine."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from orchestra.coordinator.batches import Batch, BatchQueue, WorkSource
from orchestra.coordinator.events import Finish, Instruction, RestAt, Take, Wait
from orchestra.coordinator.planned import PlannedWork
from orchestra.coordinator.rest import Reason, Rest
from orchestra.data import DataPlan, Shares, apportion, plan_of
from orchestra.data.feed import Feed, Samples
from orchestra.errors import RunFailed
from orchestra.settings.base import setting
from orchestra.strategies.base import Strategy
from orchestra.strategies.member import Member
from orchestra.strategies.phases import Phases
from orchestra.strategies.traits import Pace
from orchestra.trainer.balancing import Balancer
from orchestra.trainer.recorder import Recorder
from orchestra.trainer.regrouping import Retreat
from orchestra.trainer.settings import Training
from orchestra.trainer.trace import Trace
from orchestra.worker.batches import to_device
from orchestra.worker.runtime import RankActivity
from orchestra.worker.snapshots import buffers_vector
from orchestra.worker.worker import Step, Worker


@dataclass
class Position:
    """The progress of a rank; kept in checkpoints."""

    steps: int = setting(0, "gradients that it computed", low=0)
    consumed: int = setting(0, "samples of the cluster, as far as this rank knows", low=0)
    plan_start: int = setting(0, "of the plan under way", low=0)
    plan_step: int = setting(0, "at which it stands", low=0)
    owed: tuple[Batch, ...] = setting(
        (), "batches that the coordinator of a queue had handed out, and that nobody has done"
    )
    own: int | None = setting(None, "samples read of its shard, where a queue deals out", low=0)


def plan_of_roles(
    training: Training,
    start: int,
    budget: int,
    shares: Shares,
    measured: Shares | None = None,
    *,
    begun_on: int | None = None,
) -> DataPlan:
    """Return the plan of samples `start` to `budget`, for ranks that have these `shares` of a step.
    `measured` are the ranks' speeds, where workers that step together get parts by them; `begun_on`
    is the number of ranks by which the run counts the samples of a step."""
    weights, batch = training.weighted(shares, measured), training.global_batch(shares, begun_on)
    return plan_of(min(start, budget), budget, batch, weights)


def queue_of(
    training: Training,
    budget: int,
    begun_on: int | None,
    owed: tuple[Batch, ...],
    done: int,
    shares: Shares,
) -> BatchQueue:
    """Return a queue of the samples that are left after `done` samples: the batches in `owed`, and
    what no batch has had. Batches are as large as in a step of the plan."""
    start = done + sum(end - first for first, end in owed)
    plan = plan_of_roles(training, start, budget, shares, begun_on=begun_on)
    counts = apportion(plan.global_batch, plan.shares)
    sizes = tuple((rank, count) for rank, count in enumerate(counts) if count)
    every = training.checkpoint_every
    rest_every = every and every * plan.global_batch
    return BatchQueue(plan.start, budget, sizes, rest_every, owed=owed)


class ServedWork:
    """What comes next on a rank without data: it serves as `member`, until all workers rest."""

    def __init__(self, member: Member[Any], worker: Worker) -> None:
        self._member, self._worker = member, worker

    def take(self) -> Instruction:
        """Serve; return the rest that follows. Where a checkpoint finds workers gone, go on."""
        reporter, step = self._worker.reporter, self._worker.step
        reporter.activity(RankActivity.SERVING)
        while (point := self._member.serve()) is not None:
            if point.complete or point.rest.reason not in (Reason.CHECKPOINT, Reason.STOP):
                break
        reporter.activity(RankActivity.TRAINING)
        return Finish(step.consumed) if point is None else RestAt(step.consumed, point.rest)


NONFINITE = "lower the learning rate or clip_norm, or set stop_on_nonfinite to false to go on"


class Loop(ABC):
    """Steps on a worker, serving on a rank without data, until the budget is used up."""

    worker: Worker
    strategy: Strategy
    phases: Phases  # of it, on this rank
    training: Training
    epoch_samples: int
    budget: int  # samples of the whole run
    begun_on: int  # the ranks by which the samples of a step count
    position: Position
    recorder: Recorder
    trace: Trace
    shares: Shares = ()  # measured, of the ranks' parts wherever workers step together
    balancer: Balancer | None = None  # changes these parts as the run goes on, if a rule says so
    stopped = False  # the user's stop was agreed on
    retreat: Retreat | None = None  # where a loss may void steps

    _planned: PlannedWork
    _work: WorkSource  # it, or a queue's, or a server's

    @abstractmethod
    def _samples(self, shares: Shares) -> Samples:
        """Return what this rank reads where ranks have these shares: all samples, or its shard."""

    @abstractmethod
    def _write_checkpoint(self, *, whole: bool = True) -> bool:
        """Write one at a quiet point, all ranks together; it counts where all say it is `whole`.
        Return whether it does."""

    @abstractmethod
    def _is_to_stop(self, *, complete: bool, saved: bool) -> bool:
        """Return whether the run ends at the rest for which somebody has wished. Collective if
        that is `complete`. `saved`: there is a checkpoint of it.

        Raises:
            GroupChanged: a new group goes on from the checkpoint.
        """

    def _begin_phase(self) -> None:
        """Deal out what is left of the data to those who have roles now."""
        phases, worker, position = self.phases, self.worker, self.position
        rank, position.owed = worker.rank, ()  # the queue of this phase has them
        self._base_rates = worker.optimizer.base_rates
        self._roles = roles = phases.roles
        self._traits = phases.traits
        together = self._traits.has_barriers
        # Elsewhere nobody waits for slow workers, and larger batches would weigh too little in
        # updates that are made one by one.
        measured = (self.shares or None) if together else None
        plan = plan_of_roles(
            self.training, position.plan_start, self.budget, roles.shares, measured,
            begun_on=self.begun_on,
        )  # fmt: skip
        policies: list[Callable[[], Rest | None]]
        policies = [functools.partial(phases.after_step, may_stop=True)]
        if self.balancer is not None and together:
            plan = self.balancer.begin(plan, position.steps)
            policies.append(self._balance)
        own = self.training.sharding is not None
        self._feed = Feed(self._samples(plan.shares), plan, roles.part(rank), own)
        every = self.training.checkpoint_every
        self._planned = PlannedWork(plan, position.plan_step, every, policies)
        self._work: WorkSource = worker.source or self._planned
        if rank not in roles.workers:
            self._work = ServedWork(phases.member, worker)

    def _balance(self) -> None:
        """Give the steps to come other batches, where workers have other speeds than before."""
        assert self.balancer is not None
        position = self.position
        plan = self.balancer.after_step(self._feed.plan, position.plan_step, position.steps)
        self._feed = replace(self._feed, plan=plan)
        self._planned.plan = plan

    def _train_to_end(self) -> None:
        """Train to the end of the budget, or to the step at which the user's stop is agreed."""
        self._open_window()
        while self._go_on():
            pass

    def _go_on(self) -> bool:
        """Do what comes next; return whether anything may come after it."""
        item = self._next()
        if isinstance(item, Take):
            self._step(item)
            return True
        if self._work is not self._planned:  # by steps each worker counts for itself
            self.worker.step.consumed = self.position.consumed = item.at
        if isinstance(item, Finish):
            return False
        if item.rest.reason in (Reason.PHASE, Reason.CANDIDATE):
            self._change(item.rest)
            return True
        self._rest_for_checkpoint(item.rest.reason)
        return not self.stopped

    def _next(self) -> Take | RestAt | Finish:
        """Return what this rank does next, as soon as that is known."""
        reporter = self.worker.reporter
        item = self._work.take()
        if isinstance(item, Wait):
            reporter.activity(
                RankActivity.LEAVING
            )  # a worker that is stopped is not waited for any more
            item = self._work.take()
            reporter.activity(RankActivity.TRAINING)
        assert isinstance(item, Take | RestAt | Finish)
        return item

    def _change(self, rest: Rest) -> None:
        """Change to the next phase, and share out what is left of the data.

        All ranks come here, whatever they were, with nothing in flight: a checkpoint, if there are
        any, and the point from which on all count the steps of the phase.
        """
        first = self._roles.workers[0]
        self.phases.change(rest)
        if self.worker.rank == first:
            # The switch concerns the whole run, so one rank alone puts it into the timeline.
            self.trace.happened(f"switch, after step {self.worker.measures.switched_at_step}")
        if self.balancer is not None:
            self.balancer.agree(first)
        self.position.consumed = self.position.plan_start = self.worker.step.consumed
        self.position.plan_step = 0
        # Shards are cut anew for the workers of the new phase.
        self.position.own = None
        self._begin_phase()
        self._open_window()
        if self.training.checkpoint_every is not None:
            self._take_checkpoint()

    def _open_window(self) -> None:
        """Begin to trace what this rank does in the phase under way."""
        if self.worker.rank in self._roles.workers:
            self.trace.open_for_steps(self.position.steps + 1)
        else:
            self.trace.open_for_requests(len(self._roles.workers))

    def _step(self, item: Take) -> None:
        """Do this worker's step: its part of one of all, or a batch that is its alone."""
        if self._work is self._planned:
            self._step_together(item)
        else:
            self._take(item)

    def _take(self, item: Take) -> None:
        """Do a step on a batch from the queue, which is this worker's alone."""
        part = self._part_of(item)
        batch = self.recorder.read(lambda: self._feed.samples.read(*part))
        samples = item.samples
        step = Step(samples, samples, item.stop, planned=item.stop, position=item.start)
        # The learning rate follows the place in the global order, whoever takes the batch.
        self._train(batch, step, done=item.start)

    def _part_of(self, item: Take) -> tuple[int, int]:
        """Return where the samples of `item` are: in the stream of all, or of this rank's shard."""
        position, feed = self.position, self._feed
        if not feed.own:
            return item.start, item.stop
        if position.own is None:
            position.own, _ = feed.plan.own_part(0, feed.rank)
        first = position.own
        position.own += item.samples
        return first, position.own

    def _step_together(self, item: Take) -> None:
        """Do this worker's part of a step of all."""
        position = self.position
        batch, samples = self.recorder.read(lambda: self._feed.next(position.plan_step))
        position.plan_step = self._planned.step
        # Where workers step together one without samples still takes part in the exchange.
        if not samples and self._traits.pace is Pace.FREE:
            return
        consumed = min(position.consumed + item.samples, self.budget)
        step = Step(samples, item.samples, consumed, planned=item.stop)
        self._train(batch, step, done=position.consumed)

    def _train(self, batch: Any, step: Step, *, done: int) -> None:
        """Do a step on `batch`, after `done` samples of the whole cluster."""
        worker, member = self.worker, self.phases.member
        factor = self.training.schedule.factor(done / self.budget)
        step.rates = tuple(rate * factor for rate in self._base_rates)
        step.epoch = step.consumed / self.epoch_samples
        step.fraction = step.planned / self.budget
        if self.retreat is not None:
            self.retreat.begin()
        worker.begin_step(step)
        moved = to_device(batch, worker.layout.device) if step.samples else None
        member.gradient(moved)
        self.phases.before_update()
        member.update()
        position = self.position
        position.steps += 1
        position.consumed = worker.step.consumed
        if self.retreat is not None:
            self.retreat.done()
        self._offer_buffers()
        if self._work is self._planned:
            self._planned.done()
        self.recorder.step(position.steps)
        self.trace.step_ended(position.steps)
        worker.reporter.progress(
            step=position.steps,
            samples=self.recorder.totals.samples,
            loss=worker.step.loss,
            fraction=position.consumed / self.budget,
            counters=self.recorder.series.points[-1],
        )
        self._check_loss(worker.step.loss, position.steps)
        if self.retreat is not None:
            self.retreat.ended(position.steps)

    def _check_loss(self, loss: float, step: int) -> None:
        if self.training.stop_on_nonfinite and not math.isfinite(loss):
            raise RunFailed(f"the loss became {loss} at step {step}; {NONFINITE}")

    def _rest_for_checkpoint(self, reason: Reason) -> None:
        """Come to rest, take a checkpoint unless some workers have left, and go on, unless the run
        ends here."""
        kept = self.phases.rest(reason)
        saved = kept.complete and self._take_checkpoint(whole=not kept.owes)
        if reason is Reason.STOP:
            self.stopped = self._is_to_stop(complete=kept.complete, saved=saved)
        self.phases.go_on()

    def _offer_buffers(self) -> None:
        """Offer to snapshots the first worker's in synchronous steps, else the mean of all."""
        worker, roles = self.worker, self._roles
        weight = float(self.recorder.totals.samples + worker.step.samples)
        if self._traits.lockstep:
            # The first worker's buffers are the model's, as under DistributedDataParallel.
            weight = 1.0 if roles.part(worker.rank) == roles.workers[0] else 0.0
        snapshots, consumed = worker.snapshots, worker.step.consumed
        if not weight or not snapshots.is_due(consumed, kind="buffers"):
            return
        if (vector := buffers_vector(worker.buffers)) is not None:
            snapshots.offer(consumed, vector, weight=weight, kind="buffers")

    def _take_checkpoint(self, *, whole: bool = True) -> bool:
        with self.trace.aside("checkpoint"):
            self.recorder.pause()
            saved = self._write_checkpoint(whole=whole)
            self.recorder.resume()
        return saved
