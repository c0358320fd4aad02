"""The rules that may end the phase under way, on one rank: they observe, and decide. Pure."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestra import exchange
from orchestra.coordinator.batches import BatchQueue, Observer
from orchestra.strategies.base import Strategy
from orchestra.strategies.switch import Switch, flattened_phases
from orchestra.strategies.switch_rules import RuleState

if TYPE_CHECKING:
    from orchestra.coordinator.events import Done
    from orchestra.worker.worker import Step


@dataclass(frozen=True)
class Transition:
    """From the phases `first` to `target` - 1, which `switch` watches, to the phase `target`."""

    switch: Switch
    first: int
    target: int

    def watches(self, phase: int) -> bool:
        """Return whether the rule observes the steps of `phase`."""
        return self.first <= phase < self.target


def transitions_of(strategy: Strategy, first: int = 0) -> list[Transition]:
    """Return the transitions between the phases of `strategy`, the number `first` and following.

    An inner one comes before those around it.
    """
    if not isinstance(strategy, Switch):
        return []
    target = first + len(flattened_phases(strategy.first))
    inner = transitions_of(strategy.first, first) + transitions_of(strategy.then, target)
    return [*inner, Transition(strategy, first, target)]


@dataclass
class Watch:
    """What is known of a transition that may come.

    Where workers take batches from a queue in place of steps, `rule` and `steps` are those of the
    sample number `begun`, at which that began. On the rank that holds the queue a rule that
    observes goes on meanwhile, and has `fired` where the queue is to end. `queue` is that queue.
    """

    rule: RuleState
    steps: int  # of the run, that the rule has observed
    begun: int | None = None
    fired: bool = False
    queue: BatchQueue | None = field(init=False, default=None)


class Watching:
    """The transitions of a strategy, and `watches`, by number, of those that may come next.

    Where several rules end the phase at the same step, the outermost one counts, which has the
    highest number: it leaves out the phases inside.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.transitions = transitions_of(strategy)
        self.watches: dict[int, Watch] = {}

    def begin(self, phase: int, steps: int) -> None:
        """Watch what may follow `phase`, after the step number `steps` of the run."""
        for number, transition in enumerate(self.transitions):
            if transition.watches(phase) and number not in self.watches:
                self.watches[number] = Watch(transition.switch.when.begin(), steps)

    def leave(self, target: int) -> Mapping[int, Watch]:
        """Forget what does not watch the phase `target`; return what goes on."""
        for number in list(self.watches):
            if not self.transitions[number].watches(target):
                del self.watches[number]
        return self.watches

    def _switch(self, number: int) -> Switch:
        return self.transitions[number].switch

    @property
    def is_announced(self) -> bool:
        """True if workers report to one that observes for all."""
        return any(self._switch(number).is_announced for number in self.watches)

    @property
    def decides_apart(self) -> bool:
        """True if a rule watches workers which do not step together, and need the first one."""
        return any(not self._switch(n).first.traits().lockstep for n in self.watches)

    @property
    def reads_gradients(self) -> bool:
        """True if a rule compares the workers' gradients."""
        return any(self._switch(number).when.reads_gradients for number in self.watches)

    # Steps

    def observe(self, step: Step) -> int | None:
        """Observe a step as every worker knows it; return the transition that ends the phase."""
        fired = []
        for number, watch in self.watches.items():
            watch.steps += 1
            switch = self._switch(number)
            if not switch.is_announced and switch.when.observe(watch.rule, step):
                fired.append(number)
        return max(fired, default=None)

    def observe_for_all(self, step: Step) -> int | None:
        """Observe what all workers have reported on a step; return the transition as `observe`."""
        fired = [
            number
            for number, watch in self.watches.items()
            if self._switch(number).is_announced
            and self._switch(number).when.observe(watch.rule, step)
        ]
        return max(fired, default=None)

    # Queues of batches, which end with the phase

    def watch_steps(self) -> None:
        """Count steps from here on: workers take no batches from a queue."""
        for watch in self.watches.values():
            watch.begun = None

    def watch_queue(self, queue: BatchQueue, start: int) -> BatchQueue:
        """Return the `queue` of all that is left from sample `start` on, which ends with the phase,
        as far as that is known, and lets rules observe."""
        whole = queue
        for number, watch in sorted(self.watches.items(), reverse=True):
            self._count_rounds(number, watch, start)
            if watch.begun is None:
                watch.begun = start
            watch.queue = whole
            if self._switch(number).when.counts:
                queue = queue.ending(self._end_of(number, watch), number)
            else:
                observe = functools.partial(self._observe_round, number, watch)
                queue = queue.watched(Observer(number, observe, watch.fired))
        return queue

    def count_rounds(self, position: int) -> None:
        """Count the rounds of a queue that has ended at `position`, and go on from there."""
        for number, watch in self.watches.items():
            self._count_rounds(number, watch, position)

    def _observe_round(
        self, number: int, watch: Watch, reports: Sequence[Done], seconds: tuple[float, ...]
    ) -> bool:
        """Called on the rank of the coordinator, when all batches of a round are done."""
        if watch.fired:
            return False
        step = exchange.step_of_round(reports, seconds)
        watch.fired = self._switch(number).when.observe(watch.rule, step)
        return watch.fired

    def _end_of(self, number: int, watch: Watch) -> int:
        """Find the sample before which the phase ends by a rule that counts."""
        queue, position = watch.queue, watch.begun
        assert queue is not None
        assert position is not None
        assert queue.budget is not None
        # On a copy: the rule itself observes the rounds once they are done (`_count_rounds`).
        when, rule, over = self._switch(number).when, copy.deepcopy(watch.rule), False
        while position < queue.budget and not over:
            position = min(position + queue.round, queue.budget)
            over = when.observe(rule, exchange.counted(position, queue.budget))
        return position

    def _count_rounds(self, number: int, watch: Watch, position: int) -> None:
        when = self._switch(number).when
        if watch.begun is None or watch.queue is None:
            return
        while watch.begun < position:
            watch.begun = min(watch.begun + watch.queue.round, position)
            watch.steps += 1
            if when.counts:
                when.observe(watch.rule, exchange.counted(watch.begun, watch.queue.budget))
        watch.fired = False
