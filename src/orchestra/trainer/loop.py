"""The loop that every rank runs, whatever the strategy and the engine."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from orchestra.coordinator.batches import BatchQueue
from orchestra.coordinator.events import Finish, RestAt, Take, Wait
from orchestra.coordinator.planned import PlannedWork
from orchestra.coordinator.rest import Reason
from orchestra.data import DataPlan, Shares, apportion, plan_of
from orchestra.data.feed import Feed, Samples
from orchestra.errors import RunFailed
from orchestra.exchange import Fence
from orchestra.settings.base import setting
from orchestra.strategies.base import Strategy
from orchestra.strategies.phases import Phases
from orchestra.strategies.traits import Pace
from orchestra.trainer.balancing import Balancer
from orchestra.trainer.recorder import Recorder
from orchestra.trainer.settings import Training
from orchestra.trainer.trace import Trace
from orchestra.worker.batches import to_device
from orchestra.worker.snapshots import buffers_vector
from orchestra.worker.worker import Step, Worker


@dataclass
class Position:
    """The progress of a rank; kept in checkpoints."""

    steps: int = setting(0, "gradients that it computed", low=0)
    consumed: int = setting(0, "samples of the cluster, as far as this rank knows", low=0)
    plan_start: int = setting(0, "of the plan under way", low=0)
    plan_step: int = setting(0, "at which it stands", low=0)
    own: int | None = setting(None, "samples read of its shard, where a queue deals out", low=0)


def plan_of_roles(
    training: Training, start: int, budget: int, shares: Shares, measured: Shares | None = None
) -> DataPlan:
    """Return the plan of samples `start` to `budget`, for ranks that have these `shares` of a step.
    `measured` are the ranks' speeds, where workers that step together get parts by them."""
    weights = training.weighted(shares, measured)
    return plan_of(min(start, budget), budget, training.global_batch(shares), weights)


def queue_of(training: Training, budget: int, start: int, shares: Shares) -> BatchQueue:
    """Return a queue of the same samples; batches are as large as in a step of the plan."""
    plan = plan_of_roles(training, start, budget, shares)
    counts = apportion(plan.global_batch, plan.shares)
    sizes = tuple((rank, count) for rank, count in enumerate(counts) if count)
    every = training.checkpoint_every
    return BatchQueue(plan.start, budget, sizes, every and every * plan.global_batch)


class Loop(ABC):
    """Steps on a worker, serving on a rank without data, until the budget is used up."""

    worker: Worker
    strategy: Strategy
    phases: Phases  # of it, on this rank
    training: Training
    epoch_samples: int
    budget: int  # samples of the whole run
    position: Position
    recorder: Recorder
    trace: Trace
    shares: Shares = ()  # measured, of the ranks' parts wherever workers step together
    balancer: Balancer | None = None  # changes these parts as the run goes on, if a rule says so
    stopped = False  # the user's stop was agreed on
    _fence: Fence | None = None

    @abstractmethod
    def _samples(self, shares: Shares) -> Samples:
        """Return what this rank reads where ranks have these shares: all samples, or its shard."""

    @abstractmethod
    def _write_checkpoint(self) -> None:
        """Write one at a quiet point, all ranks together."""

    def _begin_phase(self) -> None:
        """Deal out what is left of the data to those who have roles now."""
        phases, rank = self.phases, self.worker.rank
        self._phase, self._base_rates = self.worker.phase, self.worker.optimizer.base_rates
        self._roles = roles = phases.roles
        self._traits = phases.traits
        together = self._traits.has_barriers
        # Elsewhere nobody waits for slow workers, and larger batches would weigh too little in
        # updates that are made one by one.
        measured = (self.shares or None) if together else None
        start, budget = self.position.plan_start, self.budget
        plan = plan_of_roles(self.training, start, budget, roles.shares, measured)
        self._balances = self.balancer if together else None
        if self._balances is not None:
            plan = self._balances.begin(plan, self.position.steps)
        own = self.training.sharding is not None
        self._feed = Feed(self._samples(plan.shares), plan, roles.part(rank), own)
        every = self.training.checkpoint_every
        self._planned = PlannedWork(plan, self.position.plan_step, every)
        self._works = rank in roles.workers

    def _train_to_end(self) -> None:
        """Train to the end of the budget, or to the step at which the user's stop is agreed."""
        self._open_window()
        while self._go_on():
            self._follow_phase()

    def _go_on(self) -> bool:
        """Do what comes next; return whether anything may come after it."""
        if not self._works:
            return self._serve()
        source, worker = self.worker.source, self.worker
        if source is None:
            item = self._planned.take()
        elif isinstance(item := source.take(), Wait):
            worker.reporter.phase("leaving")  # a worker that is stopped is not waited for any more
            item = source.take()
            worker.reporter.phase("training")
        assert isinstance(item, Take | RestAt | Finish)
        if isinstance(item, Take):
            if source is None:
                self._step(item)
            else:
                self._take(item)
            return True
        if source is not None:
            worker.step.consumed = self.position.consumed = item.at
        if isinstance(item, Finish):
            return False
        if item.rest.reason is Reason.PHASE:
            self.phases.change_by(item.rest.transition)
            return True
        self.stopped = item.rest.reason is Reason.STOP
        self._rest_for_checkpoint()
        return not self.stopped

    def _follow_phase(self) -> None:
        """If the strategy has begun another phase, share out what is left of the data.

        All ranks come here, whatever they were, with nothing in flight: a checkpoint, if there are
        any, and the point from which on all count the steps of the phase.
        """
        if self.worker.phase == self._phase:
            return
        if self.worker.rank == self._roles.workers[0]:
            # The switch concerns the whole run, so one rank alone puts it into the timeline.
            self.trace.happened(f"switch, after step {self.worker.measures.switched_at_step}")
        self._stop_looking()
        if self.balancer is not None:
            self.balancer.agree(self._roles.workers[0])
        self.position.plan_start = self.position.consumed
        self.position.plan_step = 0
        # Shards are cut anew for the workers of the new phase.
        self.position.own = None
        self._begin_phase()
        self._open_window()
        if self.training.checkpoint_every is not None:
            self._take_checkpoint()

    def _open_window(self) -> None:
        """Begin to trace what this rank does in the phase under way."""
        if self._works:
            self.trace.open_for_steps(self.position.steps + 1)
        else:
            self.trace.open_for_requests(len(self._roles.workers))

    def _serve(self) -> bool:
        self.worker.reporter.phase("serving")
        paused = self.phases.serve()
        self.position.consumed = self.worker.step.consumed
        self.worker.reporter.phase("training")
        if paused is not None and paused.rest.reason is Reason.CHECKPOINT and paused.complete:
            self._rest_for_checkpoint()
        return paused is not None

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

    def _step(self, item: Take) -> None:
        """Do this worker's part of a step of all."""
        position, planned = self.position, self._planned
        batch, samples = self.recorder.read(lambda: self._feed.next(position.plan_step))
        position.plan_step = planned.step
        # Where workers step together one without samples still takes part in the exchange.
        if not samples and self._traits.pace is Pace.FREE:
            return
        consumed = min(position.consumed + item.samples, self.budget)
        step = Step(samples, item.samples, consumed, planned=item.stop)
        self._train(batch, step, done=position.consumed)
        if self.worker.phase != self._phase:
            return  # `_follow_phase` takes a checkpoint with all ranks; some count no steps
        stop = self._all_stop()
        planned.done(stop=stop)
        if self._balances is not None and not stop:
            plan = self._balances.after_step(self._feed.plan, position.plan_step, position.steps)
            self._feed = replace(self._feed, plan=plan)
            planned.plan = plan

    def _train(self, batch: Any, step: Step, *, done: int) -> None:
        """Do a step on `batch`, after `done` samples of the whole cluster."""
        worker, phases = self.worker, self.phases
        lockstep = self._traits.lockstep
        factor = self.training.schedule.factor(done / self.budget)
        step.rates = tuple(rate * factor for rate in self._base_rates)
        step.epoch = step.consumed / self.epoch_samples
        step.fraction = step.planned / self.budget
        worker.begin_step(step)
        moved = to_device(batch, worker.layout.device) if step.samples else None
        phases.gradient(moved)
        if lockstep:  # before the update, which may end the phase
            # The first worker's buffers are the model's, as under DistributedDataParallel.
            first = self._roles.part(worker.rank) == self._roles.workers[0]
            self._offer_buffers(1.0 if first else 0.0)
        phases.update()
        if not lockstep:
            self._offer_buffers(float(self.recorder.totals.samples + step.samples))
        position = self.position
        position.steps += 1
        position.consumed = worker.step.consumed
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

    def _check_loss(self, loss: float, step: int) -> None:
        if self.training.stop_on_nonfinite and not math.isfinite(loss):
            raise RunFailed(
                f"the loss became {loss} at step {step}; lower the learning rate or clip_norm, or "
                "set stop_on_nonfinite to false to go on"
            )

    def _rest_for_checkpoint(self) -> None:
        """Come to rest, take a checkpoint unless some workers have left, and go on."""
        if self.phases.rest(Reason.CHECKPOINT).complete:
            self._take_checkpoint()
        self.phases.go_on()

    def _all_stop(self) -> bool:
        """Return whether this step is the last: agreed with its loss, or a fence."""
        step = self.worker.step
        if step.loss_is_global or self._traits.pace is Pace.FREE:
            return step.stop
        plan_step = self.position.plan_step
        if self._fence is None:
            # Made for the first step that needs it: strategies that agree with the loss never do.
            self._fence = Fence(self.worker, steps=plan_step - 1)
        return self._fence.reached(plan_step, wish=step.stop)

    def _stop_looking(self) -> None:
        """Collective, after the strategy has stopped: end the search for a fence."""
        if self._fence is not None:
            self._fence.close()
            self._fence = None

    def _offer_buffers(self, weight: float) -> None:
        """Offer to snapshots the first worker's in synchronous steps, else the mean of all."""
        snapshots, consumed = self.worker.snapshots, self.worker.step.consumed
        if not weight or not snapshots.is_due(consumed, kind="buffers"):
            return
        if (vector := buffers_vector(self.worker.buffers)) is not None:
            snapshots.offer(consumed, vector, weight=weight, kind="buffers")

    def _take_checkpoint(self) -> None:
        with self.trace.aside("checkpoint"):
            self.recorder.pause()
            self._write_checkpoint()
            self.recorder.resume()
