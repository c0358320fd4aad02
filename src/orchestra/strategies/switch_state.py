"""The state of a switch: what its rule has seen, step by step or by rounds of a queue."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestra import exchange, optimizers
from orchestra.strategies.switch_rules import Rule, RuleState

if TYPE_CHECKING:
    from orchestra.exchange import CommonStep
    from orchestra.schedules.work_queue import Report, WorkQueue
    from orchestra.worker.worker import QueueOf, Step, Worker


@dataclass
class SwitchState:
    """The state of the phase under way; `rule` is what `when` remembers, after `steps` steps.

    The end of the first phase is that of the phase number `level`. A switch inside the second phase
    of another one begins after the `before` steps of its first.

    `leaving` finds the step to switch at where workers do not decide alike; their steps so far
    have cost `seconds` of this worker's computation and communication.

    Where the workers take batches from a queue in place of steps, `rule` and `steps` are those of
    the sample number `begun`, at which that began. On the rank that holds the queue a rule that
    observes goes on meanwhile, and has `fired` where the queue is to end. `queue` is a copy of it;
    `queue_of` makes queues that end with the budget alone.
    """

    when: Rule = field(metadata=optimizers.TRANSIENT)
    level: int = field(metadata=optimizers.TRANSIENT)
    rule: RuleState
    inner: Any = None
    switched: bool = False
    steps: int = 0
    before: int = 0
    begun: int | None = None
    fired: bool = False
    queue: WorkQueue | None = field(default=None, metadata=optimizers.TRANSIENT)
    seconds: float = field(default=0.0, metadata=optimizers.TRANSIENT)
    leaving: CommonStep | None = field(default=None, metadata=optimizers.TRANSIENT)
    queue_of: QueueOf | None = field(default=None, metadata=optimizers.TRANSIENT)

    def observe(self, step: Step) -> bool:
        """Let the rule take note of `step`; True to switch now."""
        return self.when.observe(self.rule, step)

    def watch(self, worker: Worker) -> None:
        """Begin to report to the first worker, which observes for all."""
        self.leaving = exchange.CommonStep(
            worker, steps=self.steps, level=self.level + 1, observe=self.observe
        )
        self.seconds = exchange.own_seconds(worker)
        worker.gradients.measures_square = self.when.reads_gradients

    def report(self, worker: Worker) -> tuple[float, ...]:
        """The fields of a `Report` of the step, from its loss on."""
        step, before = worker.step, self.seconds
        self.seconds = exchange.own_seconds(worker)
        rate = step.rates[0] if step.rates else 0.0
        return (step.loss, self.seconds - before, rate, step.epoch, step.fraction)

    def is_over(self, worker: Worker, square: float) -> bool:
        """After a step: whether all are to switch; `square` is |g|^2 of the average."""
        if self.leaving is None:
            return self.observe(worker.step)
        squares = (worker.gradients.square, square)
        self.leaving.report(self.steps, worker.step.samples, *self.report(worker), *squares)
        return self.leaving.reached(self.steps, wish=False)

    def end_watch(self) -> None:
        """Collective over the workers, where they report: report no more."""
        if self.leaving is not None:
            self.leaving.close()
            self.leaving = None

    def limit_queues(self, worker: Worker) -> None:
        """From now on a queue ends where `when` says.

        In a loop of the user's own, whose epochs have ends of their own, there is none until then.
        """
        self.queue_of = worker.queue_of
        if worker.own_loop:
            worker.queue_of = None
        elif worker.queue_of is not None:
            worker.queue_of = self._queue

    def _queue(self, start: int, shares: tuple[float, ...]) -> WorkQueue:
        """Make one of the first phase, or of a phase inside it that begins at sample `start`."""
        assert self.queue_of is not None
        queue = self.queue_of(start, shares)
        assert queue is not None
        if self.inner is not None:
            self.count_rounds(start)
        if self.begun is None:
            self.begun = start
        self.queue = queue
        if self.when.counts:
            queue.end_at(self._end(queue, self.begun), self.level)
            return queue
        from orchestra.schedules.work_queue import Rounds  # NumPy comes with it

        queue.watch(Rounds(queue, functools.partial(self._observe, queue)))
        if self.fired:
            queue.end(self.level)
        return queue

    def _end(self, queue: WorkQueue, position: int) -> int:
        """Find the sample before which a phase ends by a rule that counts, from `position` on."""
        assert queue.budget is not None
        rule, over = copy.deepcopy(self.rule), False
        while position < queue.budget and not over:
            position = min(position + queue.round, queue.budget)
            over = self.when.observe(rule, exchange.counted(position, queue.budget))
        return position

    def _observe(
        self, queue: WorkQueue, reports: Sequence[Report], seconds: tuple[float, ...]
    ) -> None:
        """On the rank that holds the queue: all batches of a round are done."""
        if not self.fired and self.observe(exchange.step_of_round(reports, seconds)):
            self.fired = True
            queue.end(self.level)

    def count_rounds(self, position: int) -> None:
        """The queue under way has come to its end at `position`: go on counting from there."""
        if self.begun is None or self.queue is None:
            return
        while self.begun < position:
            self.begun = min(self.begun + self.queue.round, position)
            self.steps += 1
            if self.when.counts:
                self.observe(exchange.counted(self.begun, self.queue.budget))
        self.fired = False
