"""The loop that every rank runs, whatever the strategy and the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestra.data.feed import Feed, Samples
from orchestra.data.plan import Plan, apportion, plan_of
from orchestra.errors import RunFailed
from orchestra.exchange import CommonStep
from orchestra.schedules.work_queue import Kind, WorkItem, WorkQueue
from orchestra.strategies.base import CHANGED, Roles, Strategy, WorkSource
from orchestra.trainer.evaluation import buffers_vector
from orchestra.trainer.recorder import Recorder
from orchestra.trainer.settings import Training
from orchestra.trainer.trace import Trace
from orchestra.worker.batches import mover
from orchestra.worker.worker import Step, Worker


@dataclass
class Position:
    """How far a rank has come; kept in checkpoints.

    `steps` are the gradients that it computed. `consumed` are the samples of the cluster, as far
    as this rank knows; the plan under way began at `plan_start` and stands at `plan_step`. `own`
    counts the samples that the rank has read of its own shard, where it takes them from a queue.
    """

    steps: int = 0
    consumed: int = 0
    plan_start: int = 0
    plan_step: int = 0
    own: int | None = None


def plan_of_roles(
    training: Training,
    start: int,
    budget: int,
    shares: tuple[float, ...],
    measured: tuple[float, ...] | None = None,
) -> Plan:
    """The plan of samples `start` to `budget`, for ranks that have these `shares` of a step.

    `measured`: the ranks' speeds, where workers that step together get parts by them.
    """
    return plan_of(
        min(start, budget),
        budget,
        training.global_batch(shares),
        training.weighted(shares, measured),
    )


def queue_of(training: Training, budget: int, start: int, shares: tuple[float, ...]) -> WorkQueue:
    """The same samples in a queue; a batch of each worker is as large as in a step of the plan."""
    plan = plan_of_roles(training, start, budget, shares)
    counts = apportion(plan.global_batch, plan.shares)
    sizes = tuple((rank, count) for rank, count in enumerate(counts) if count)
    every = training.checkpoint_every
    return WorkQueue(plan.start, budget, sizes, every and every * plan.global_batch)


class Loop:
    """Steps on a worker, serving on a rank without data, until the budget is used up.

    `measured` are the weights of the ranks' parts wherever workers step together.
    """

    def __init__(
        self,
        worker: Worker,
        strategy: Strategy[Any],
        state: Any,
        training: Training,
        samples: Callable[[tuple[float, ...]], Samples],
        *,
        epoch_samples: int,
        budget: int,
        position: Position,
        recorder: Recorder,
        trace: Trace,
        checkpoint: Callable[[], None],
        measured: tuple[float, ...] | None = None,
    ) -> None:
        self.position = position
        self.stopped = False
        self._worker = worker
        self._strategy = strategy
        self._state = state
        self._training = training
        self._samples = samples
        self._epoch_samples = epoch_samples
        self._budget = budget
        self._recorder = recorder
        self._trace = trace
        self._checkpoint = checkpoint
        self._measured = measured
        self._base_rates = worker.optimizer.base_rates
        self._roles = strategy.current_roles(worker, state)
        self._phase = worker.phase
        self._feed = self._feed_for(self._roles)
        self._leaving: CommonStep | None = None
        self._moved = mover(worker.layout.device)
        # Before anything of it is sent, so that the rank is named whose own loss it is.
        worker.check_loss = lambda loss: self._check_loss(loss, self.position.steps + 1)

    def _feed_for(self, roles: Roles) -> Feed:
        together = self._strategy.currently_together(self._state)
        plan = plan_of_roles(
            self._training,
            self.position.plan_start,
            self._budget,
            roles.shares,
            self._measured if together else None,
        )
        own = self._training.sharding is not None
        self._works = self._worker.rank in roles.workers
        self._queue = self._strategy.work(self._state)
        return Feed(self._samples(plan.shares), plan, roles.part(self._worker.rank), own)

    def run(self) -> None:
        """Train to the end of the budget, or to the step at which the user's stop is agreed."""
        self._open_window()
        while True:
            self._follow_phase()
            if not self._works:
                if not self._serve():
                    return
            elif self.stopped:
                return
            elif self._queue is not None:
                if not self._take(self._queue):
                    return
            elif self.position.plan_step >= self._feed.plan.steps:
                return
            else:
                self._step()

    def _follow_phase(self) -> None:
        """Where the strategy has begun another phase, share out what is left of the data.

        All ranks come here, whatever they were, with nothing in flight: a checkpoint, if there are
        any, and the point from which on all count the steps of the phase.
        """
        if self._worker.phase == self._phase:
            return
        if self._worker.rank == self._roles.workers[0]:
            step = self._worker.measures.switched_at_step
            self._trace.happened(f"switch, after step {step}")
        self.close()
        self._phase = self._worker.phase
        self.position.plan_start = self.position.consumed
        self.position.plan_step = 0
        self.position.own = None
        self._roles = self._strategy.current_roles(self._worker, self._state)
        self._feed = self._feed_for(self._roles)
        self._open_window()
        if self._training.checkpoint_every is not None:
            self._take_checkpoint()

    def _open_window(self) -> None:
        """Write down the beginning of what this rank does in the phase under way."""
        if self._works:
            self._trace.open_for_steps(self.position.steps + 1)
        else:
            self._trace.open_for_requests(len(self._roles.workers))

    def _serve(self) -> bool:
        self._worker.reporter.phase("serving")
        paused = self._strategy.serve(self._worker, self._state)
        self.position.consumed = self._worker.step.consumed
        self._worker.reporter.phase("training")
        if paused is not None and paused.step > CHANGED and paused.complete:
            self._take_checkpoint()
        return paused is not None

    def _take(self, queue: WorkSource) -> bool:
        """Do what comes next out of the queue; whether anything may come after it."""
        item, worker, position = queue.take(), self._worker, self.position
        if item.kind is Kind.WAIT:
            worker.reporter.phase("leaving")  # a worker that is stopped is not waited for any more
            item = queue.take()
            worker.reporter.phase("training")
        if item.kind is Kind.BATCH:
            part = self._part_of(item)
            self._train(
                self._feed.samples.read(*part),
                Step(
                    samples=item.samples,
                    total_samples=item.samples,
                    consumed=item.stop,
                    planned=item.stop,
                    position=item.start,
                ),
                done=item.start,
            )
            self._finish_step()
            return True
        worker.step.consumed = position.consumed = item.start
        if item.kind is Kind.END:
            if item.start < self._budget:
                self._strategy.end_phase(worker, self._state, item.level)
            return item.start < self._budget
        self.stopped = item.kind is Kind.STOP
        self._checkpoint_together()
        return True

    def _part_of(self, item: WorkItem) -> tuple[int, int]:
        """Where the samples of `item` are: in the stream of all, or of this rank's shard."""
        position, feed = self.position, self._feed
        if not feed.own:
            return item.start, item.stop
        if position.own is None:
            position.own, _ = feed.plan.own_part(0, feed.rank)
        first = position.own
        position.own += item.samples
        return first, position.own

    def _step(self) -> None:
        position = self.position
        batch, samples = self._feed.next(position.plan_step)
        deal = self._feed.plan.deal(position.plan_step)
        position.plan_step += 1
        if not samples and not self._strategy.currently_lockstep(self._state):
            return
        self._train(
            batch,
            Step(
                samples=samples,
                total_samples=deal.samples,
                consumed=min(position.consumed + deal.samples, self._budget),
                planned=deal.stop,
            ),
            done=position.consumed,
        )
        self._finish_step()
        if self._worker.phase != self._phase:
            return  # what is due now is due for all ranks, also for those that do not count steps
        self.stopped = self._all_stop()
        every = self._training.checkpoint_every
        if self.stopped or (every is not None and position.plan_step % every == 0):
            self._checkpoint_together()

    def _train(self, batch: Any, step: Step, *, done: int) -> None:
        """A step on `batch`, after `done` samples of the whole cluster."""
        worker, strategy, state = self._worker, self._strategy, self._state
        synchronous = strategy.currently_synchronous(state)
        factor = self._training.schedule.factor(done / self._budget)
        step.rates = tuple(rate * factor for rate in self._base_rates)
        step.epoch = step.consumed / self._epoch_samples
        step.fraction = step.planned / self._budget
        worker.begin_step(step)
        moved = self._moved(batch) if step.samples else None
        strategy.gradient(worker, state, moved)
        if synchronous:  # before the update, which may end the phase
            first = self._roles.part(worker.rank) == self._roles.workers[0]
            self._offer_buffers(1.0 if first else 0.0)
        strategy.update(worker, state)
        if not synchronous:
            self._offer_buffers(float(self._recorder.totals.samples + step.samples))

    def _finish_step(self) -> None:
        worker, position = self._worker, self.position
        position.steps += 1
        position.consumed = worker.step.consumed
        self._recorder.step(position.steps)
        self._trace.step_ended(position.steps)
        worker.reporter.progress(
            step=position.steps,
            samples=self._recorder.totals.samples,
            loss=worker.step.loss,
            fraction=position.consumed / self._budget,
        )
        self._check_loss(worker.step.loss, position.steps)

    def _check_loss(self, loss: float, step: int) -> None:
        if self._training.stop_on_nonfinite and not math.isfinite(loss):
            raise RunFailed(
                f"the loss became {loss} at step {step}; lower the learning rate or clip_norm, or "
                "set stop_on_nonfinite to false to go on"
            )

    def _checkpoint_together(self) -> None:
        """With nothing in flight; without those who have left, who take part in it no more."""
        if self._strategy.quiesce(self._worker, self._state, self.position.steps):
            self._take_checkpoint()

    def _all_stop(self) -> bool:
        """Whether this step is the last: agreed with its loss, or found as a common one."""
        step = self._worker.step
        if step.agreed or not self._strategy.currently_lockstep(self._state):
            return step.stop
        plan_step = self.position.plan_step
        if self._leaving is None:
            self._leaving = CommonStep(self._worker, steps=plan_step - 1)
        return self._leaving.reached(plan_step, wish=step.stop)

    def close(self) -> None:
        """Collective, after the strategy has stopped: end what finds a common step to leave at."""
        if self._leaving is not None:
            self._leaving.close()
            self._leaving = None

    def _offer_buffers(self, weight: float) -> None:
        """For snapshots: the first worker's in synchronous steps, else the mean of all."""
        wanted = bool(weight and self._worker.snapshots.due)
        vector = buffers_vector(self._worker.buffers) if wanted else None
        if vector is not None:
            self._worker.snapshots.offer(
                self._worker.step.consumed, vector, weight=weight, kind="buffers"
            )

    def _take_checkpoint(self) -> None:
        with self._trace.aside("checkpoint"):
            self._recorder.pause()
            self._checkpoint()
            self._recorder.resume()
