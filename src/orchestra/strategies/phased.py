"""Strategies that train in phases: what they have in common, and what a `Switch` keeps."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestra import exchange, optimizers
from orchestra.strategies.base import Roles, Strategy, roles_of
from orchestra.strategies.switch_rules import Rule, RuleState
from orchestra.strategies.traits import Dealing, Pace, Traits, WorkMode, combined

if TYPE_CHECKING:
    from orchestra.schedules.work_queue import Report, WorkQueue
    from orchestra.worker.worker import QueueOf, Step, Worker


def _by_phase(name: str) -> Any:
    """Return a method that does what the phase under way does."""

    def method(strategy: Phased, worker: Worker, state: Any, *args: Any) -> Any:
        return getattr(strategy.phase(state), name)(worker, state.inner, *args)

    return method


class Phased(Strategy[Any]):
    """A strategy whose steps are those of another one, its phase under way.

    `state.inner` is the state of that phase.
    """

    @property
    @abstractmethod
    def phases(self) -> tuple[Strategy[Any], ...]:
        """The strategies that may be under way."""

    @abstractmethod
    def phase(self, state: Any) -> Strategy[Any]:
        """Return the phase under way, whose state is `state.inner`."""

    @abstractmethod
    def resume(self, worker: Worker, saved: Mapping[str, Any]) -> Any:
        """Resume in the phase that the checkpoint was taken in; return the state. Collective."""

    def traits(self, work: WorkMode = "shared") -> Traits:
        return combined([phase.traits(work) for phase in self.phases])

    def end_phase(self, worker: Worker, state: Any, level: int) -> None:
        """Begin the phase after the one that is over, the number `level` of nested ones.
        Collective, called when `work` has ended before the budget.
        """
        raise AssertionError(f"no queue ends a phase of {self!r}")

    before_forward = _by_phase("before_forward")
    gradient = _by_phase("gradient")
    reduce = _by_phase("reduce")
    quiesce = _by_phase("quiesce")
    stop = _by_phase("stop")
    learnt = _by_phase("learnt")
    rebase = _by_phase("rebase")
    kept = _by_phase("kept")


def innermost(strategy: Strategy[Any], state: Any) -> tuple[Strategy[Any], Any]:
    """Return the strategy of the phase under way, and its state."""
    while isinstance(strategy, Phased):
        strategy, state = strategy.phase(state), state.inner
    return strategy, state


def under_way(strategy: Strategy[Any], state: Any) -> Strategy[Any]:
    """Return the strategy of the phase under way; `strategy` itself if it has no phases."""
    return innermost(strategy, state)[0]


def current_roles(strategy: Strategy[Any], worker: Worker, state: Any) -> Roles:
    """Return the current roles, which `worker.begin_phase`, called on all ranks, changes."""
    # The ranks of the budget, not those that run: Single() is given more than it uses.
    return roles_of(under_way(strategy, state), worker.budget_ranks)


def current_traits(strategy: Strategy[Any], worker: Worker, state: Any) -> Traits:
    """Return the traits of the phase under way."""
    is_watched = False
    while isinstance(strategy, Phased):
        is_watched |= isinstance(state, SwitchState) and not state.switched
        strategy, state = strategy.phase(state), state.inner
    traits = strategy.traits(worker.work)
    if is_watched and traits.pace is Pace.FREE and traits.dealing is Dealing.PLAN:
        return replace(traits, pace=Pace.ROUNDS)  # they count steps, to leave after the same one
    return traits


@dataclass
class SwitchState:
    """The state of the phase under way.

    Where the workers take batches from a queue in place of steps, `rule` and `steps` are those of
    the sample number `begun`, at which that began. On the rank that holds the queue a rule that
    observes goes on meanwhile, and has `fired` where the queue is to end. `queue` is a copy of it;
    `queue_of` makes queues that end with the budget alone. `leaving` finds the step to switch at
    where workers do not decide alike; `seconds` are this worker's own up to its last report.
    """

    when: Rule = field(metadata=optimizers.TRANSIENT)
    level: int = field(metadata=optimizers.TRANSIENT)  # of the first phase, among nested ones
    rule: RuleState  # what `when` remembers
    inner: Any = None
    switched: bool = False
    steps: int = 0  # that `rule` has observed
    before: int = 0  # steps of another switch's first phase, if this one is in its second
    begun: int | None = None
    fired: bool = False
    queue: WorkQueue | None = field(default=None, metadata=optimizers.TRANSIENT)
    seconds: float = field(default=0.0, metadata=optimizers.TRANSIENT)
    leaving: exchange.CommonStep | None = field(default=None, metadata=optimizers.TRANSIENT)
    queue_of: QueueOf | None = field(default=None, metadata=optimizers.TRANSIENT)

    def end_watch(self) -> None:
        """Collective over the workers, where they report: report no more."""
        if self.leaving is not None:
            self.leaving.close()
            self.leaving = None

    def observe(self, step: Step) -> bool:
        """Let the rule take note of `step`; True to switch now."""
        return self.when.observe(self.rule, step)

    def report(self, worker: Worker) -> tuple[float, ...]:
        """Return the fields of a `Report` of the step, from its loss on."""
        step, before = worker.step, self.seconds
        self.seconds = exchange.own_seconds(worker)
        rate = step.rates[0] if step.rates else 0.0
        return (step.loss, self.seconds - before, rate, step.epoch, step.fraction)

    def is_over(self, worker: Worker, square: float) -> bool:
        """Return after a step whether all are to switch; `square` is |g|^2 of the average."""
        if self.leaving is None:
            return self.observe(worker.step)
        values = (*self.report(worker), worker.gradients.square, square)
        self.leaving.report(self.steps, worker.step.samples, *values)
        return self.leaving.reached(self.steps, wish=False)

    def make_queue(self, start: int, shares: tuple[float, ...]) -> WorkQueue:
        """Make a queue of the first phase, or of one inside it that begins at sample `start`."""
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

        def observe(reports: Sequence[Report], seconds: tuple[float, ...]) -> None:
            """Called on the rank that holds the queue, when all batches of a round are done."""
            if not self.fired and self.observe(exchange.step_of_round(reports, seconds)):
                self.fired = True
                queue.end(self.level)

        queue.watch(observe)
        if self.fired:
            queue.end(self.level)
        return queue

    def _end(self, queue: WorkQueue, position: int) -> int:
        """Find the sample before which a phase ends by a rule that counts, from `position` on."""
        assert queue.budget is not None
        # On a copy: the rule itself observes the rounds once they are done (`count_rounds`).
        rule, over = copy.deepcopy(self.rule), False
        while position < queue.budget and not over:
            position = min(position + queue.round, queue.budget)
            over = self.when.observe(rule, exchange.counted(position, queue.budget))
        return position

    def count_rounds(self, position: int) -> None:
        """Count the rounds of a queue that has ended at `position`, and go on from there."""
        if self.begun is None or self.queue is None:
            return
        while self.begun < position:
            self.begun = min(self.begun + self.queue.round, position)
            self.steps += 1
            if self.when.counts:
                self.observe(exchange.counted(self.begun, self.queue.budget))
        self.fired = False
