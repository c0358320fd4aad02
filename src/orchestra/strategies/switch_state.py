"""The state of a switch, and the queues of batches that end where its first phase does."""

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
    from orchestra.worker.worker import QueueOf, Worker


@dataclass
class SwitchState:
    """The state of the phase under way; `rule` is what `when` remembers, after `steps` steps.

    A switch inside the second phase of another one begins after the `before` steps of its first.

    `leaving` finds the step to switch at where workers do not decide alike; their steps so far
    have cost `seconds` of this worker's computation and communication.

    Where the workers take batches from a queue in place of steps, `rule` and `steps` are those of
    the sample number `begun`, at which that began. On the rank that holds the queue a rule that
    observes goes on meanwhile, and has `fired` where the queue is to end. `queue` is a copy of it;
    `queue_of` makes queues that end with the budget alone.
    """

    inner: Any
    rule: RuleState
    switched: bool = False
    steps: int = 0
    before: int = 0
    begun: int | None = None
    fired: bool = False
    queue: WorkQueue | None = field(default=None, metadata=optimizers.TRANSIENT)
    seconds: float = field(default=0.0, metadata=optimizers.TRANSIENT)
    leaving: CommonStep | None = field(default=None, metadata=optimizers.TRANSIENT)
    queue_of: QueueOf | None = field(default=None, metadata=optimizers.TRANSIENT)

    def limit_queues(self, worker: Worker, when: Rule, level: int) -> None:
        """From now on a queue ends where `when` says, as the end of the phase number `level`.

        In a loop of the user's own, whose epochs have ends of their own, there is none until then.
        """
        self.queue_of = worker.queue_of
        if worker.own_loop:
            worker.queue_of = None
        elif worker.queue_of is not None:
            worker.queue_of = functools.partial(self._queue, when, level)

    def _queue(self, when: Rule, level: int, start: int, shares: tuple[float, ...]) -> WorkQueue:
        """One of the first phase, or of a phase inside it that begins at the sample `start`."""
        assert self.queue_of is not None
        queue = self.queue_of(start, shares)
        assert queue is not None
        if self.inner is not None:
            self.count_rounds(when, start)
        if self.begun is None:
            self.begun = start
        self.queue = queue
        if when.counts:
            queue.end_at(self._end(when, queue, self.begun), level)
            return queue
        from orchestra.schedules.work_queue import Rounds  # NumPy comes with it

        queue.watch(Rounds(queue, functools.partial(self._observe, when, level, queue)))
        if self.fired:
            queue.end(level)
        return queue

    def _end(self, when: Rule, queue: WorkQueue, position: int) -> int:
        """The sample before which a phase ends by a rule that counts, from `position` on."""
        assert queue.budget is not None
        rule, over = copy.deepcopy(self.rule), False
        while position < queue.budget and not over:
            position = min(position + queue.round, queue.budget)
            over = when.observe(rule, exchange.counted(position, queue.budget))
        return position

    def _observe(
        self,
        when: Rule,
        level: int,
        queue: WorkQueue,
        reports: Sequence[Report],
        seconds: tuple[float, ...],
    ) -> None:
        """All batches of a round are done; on the rank that holds the queue."""
        if not self.fired and when.observe(self.rule, exchange.step_of_round(reports, seconds)):
            self.fired = True
            queue.end(level)

    def count_rounds(self, when: Rule, position: int) -> None:
        """The queue under way has come to its end at `position`: go on counting from there."""
        if self.begun is None or self.queue is None:
            return
        while self.begun < position:
            self.begun = min(self.begun + self.queue.round, position)
            self.steps += 1
            if when.counts:
                when.observe(self.rule, exchange.counted(self.begun, self.queue.budget))
        self.fired = False
