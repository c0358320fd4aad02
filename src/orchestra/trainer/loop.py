"""The loop that every rank runs, whatever the strategy and the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestra.data.feed import Feed, Samples
from orchestra.data.plan import plan_of
from orchestra.errors import RunFailed
from orchestra.exchange import CommonStep
from orchestra.strategies.base import CHANGED, Roles, Strategy
from orchestra.trainer.evaluation import buffers_vector
from orchestra.trainer.recorder import Recorder
from orchestra.trainer.settings import Training
from orchestra.transports.tracer import Tracer
from orchestra.worker.batches import mover
from orchestra.worker.worker import Step, Worker


@dataclass
class Position:
    """How far a rank has come; kept in checkpoints.

    `steps` are the gradients that it computed. `consumed` are the samples of the cluster, as far
    as this rank knows; the plan under way began at `plan_start` and stands at `plan_step`.
    """

    steps: int = 0
    consumed: int = 0
    plan_start: int = 0
    plan_step: int = 0


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
        tracer: Tracer,
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
        self._tracer = tracer
        self._checkpoint = checkpoint
        self._measured = measured
        self._base_rates = worker.optimizer.base_rates
        self._roles = strategy.current_roles(worker, state)
        self._switched_at = worker.measures.switched_at_step
        self._feed = self._feed_for(self._roles)
        self._leaving: CommonStep | None = None
        self._moved = mover(worker.layout.device)

    def _feed_for(self, roles: Roles) -> Feed:
        start = min(self.position.plan_start, self._budget)
        together = self._strategy.currently_together(self._state)
        shares = self._training.weighted(roles.shares, self._measured if together else None)
        global_batch = self._training.global_batch(roles.shares)
        plan = plan_of(start, self._budget, global_batch, shares)
        own = self._training.sharding is not None
        self._works = self._worker.rank in roles.workers
        return Feed(self._samples(shares), plan, roles.part(self._worker.rank), own)

    def run(self) -> None:
        """Train to the end of the budget, or to the step at which the user's stop is agreed."""
        self._trace_phase()
        while True:
            self._follow_phase()
            if not self._works:
                if not self._serve():
                    return
            elif self.stopped or self.position.plan_step >= self._feed.plan.steps:
                return
            else:
                self._step()

    def _follow_phase(self) -> None:
        """Where the strategy has changed its roles, share out what is left of the data."""
        roles = self._strategy.current_roles(self._worker, self._state)
        switched_at = self._worker.measures.switched_at_step
        if switched_at != self._switched_at and self._worker.rank == self._roles.workers[0]:
            self._tracer.happened(f"switch, after step {switched_at}")
        self._switched_at = switched_at
        if roles != self._roles:
            self.close()
            self.position.plan_start = self.position.consumed
            self.position.plan_step = 0
            self._roles = roles
            self._feed = self._feed_for(roles)
            self._trace_phase()

    def _trace_phase(self) -> None:
        """Write down the beginning of what this rank does in the phase under way."""
        if self._works:
            self._tracer.open_for_steps(self.position.steps + 1)
        else:
            self._tracer.open_for_requests(len(self._roles.workers))

    def _serve(self) -> bool:
        self._worker.reporter.phase("serving")
        paused = self._strategy.serve(self._worker, self._state)
        self.position.consumed = self._worker.step.consumed
        self._worker.reporter.phase("training")
        if paused is not None and paused.step != CHANGED and paused.complete:
            self._take_checkpoint()
        return paused is not None

    def _step(self) -> None:
        worker, position = self._worker, self.position
        batch, samples = self._feed.next(position.plan_step)
        deal = self._feed.plan.deal(position.plan_step)
        position.plan_step += 1
        synchronous = self._strategy.currently_synchronous(self._state)
        if not samples and not self._strategy.currently_lockstep(self._state):
            return
        fraction = position.consumed / self._budget
        factor = self._training.schedule.factor(fraction)
        consumed = min(position.consumed + deal.samples, self._budget)
        worker.begin_step(
            Step(
                samples,
                deal.samples,
                consumed,
                consumed / self._epoch_samples,
                tuple(rate * factor for rate in self._base_rates),
                planned=deal.stop,
                fraction=deal.stop / self._budget,
            )
        )
        moved = self._moved(batch) if samples else None
        self._strategy.gradient(worker, self._state, moved)
        if synchronous:  # before the update, which may end the phase
            first = self._roles.part(worker.rank) == self._roles.workers[0]
            self._offer_buffers(1.0 if first else 0.0)
        self._strategy.update(worker, self._state)
        if not synchronous:
            self._offer_buffers(float(self._recorder.totals.samples + samples))
        self._finish_step()

    def _finish_step(self) -> None:
        worker, position = self._worker, self.position
        position.steps += 1
        position.consumed = worker.step.consumed
        self._recorder.step(position.steps)
        self._tracer.step_ended(position.steps)
        worker.reporter.progress(
            step=position.steps,
            samples=self._recorder.totals.samples,
            loss=worker.step.loss,
            fraction=position.consumed / self._budget,
        )
        if self._training.stop_on_nonfinite and not math.isfinite(worker.step.loss):
            raise RunFailed(
                f"the loss became {worker.step.loss} at step {position.steps}; lower the learning "
                "rate or clip_norm, or set stop_on_nonfinite to false to go on"
            )
        self.stopped = self._all_stop()
        every = self._training.checkpoint_every
        if self.stopped or (every is not None and position.steps % every == 0):
            complete = self._strategy.quiesce(worker, self._state, position.steps)
            if complete:  # who has left takes part in nothing collective any more
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
        with self._tracer.aside("checkpoint"):
            self._recorder.pause()
            self._checkpoint()
            self._recorder.resume()
