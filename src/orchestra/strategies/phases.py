"""The phases of a run on one rank, one after the other, and what ends them.

A strategy without phases is the only one. A `Switch` is a transition from each phase of its first
strategy to the first one of its second; `Auto` goes from one candidate to another. To change, all
ranks come to rest, hand over what they have learnt, and join the next strategy.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from orchestra import exchange, optimizers
from orchestra.coordinator.batches import BatchQueue, Observer
from orchestra.coordinator.rest import Reason, Rest
from orchestra.settings.base import Mismatch
from orchestra.strategies.auto import Auto, CandidateChoice
from orchestra.strategies.base import (
    Roles,
    Strategy,
    require_keepable,
    restore_state,
    roles_of,
    state_of,
)
from orchestra.strategies.switch import Switch, phases
from orchestra.strategies.switch_rules import RuleState
from orchestra.strategies.traits import Dealing, Pace, Traits, WorkMode

if TYPE_CHECKING:
    from orchestra.coordinator.events import Done
    from orchestra.exchange import Fence, Kept
    from orchestra.parameter_server.messages import QuietPoint
    from orchestra.strategies.member import Member
    from orchestra.worker.batches import Batch
    from orchestra.worker.worker import Worker

Moments = Literal["kept", "averaged", "reset"]


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
    target = first + len(phases(strategy.first))
    inner = transitions_of(strategy.first, first) + transitions_of(strategy.then, target)
    return [*inner, Transition(strategy, first, target)]


@dataclass
class Watch:
    """What is known of a transition that may come.

    Where workers take batches from a queue in place of steps, `rule` and `steps` are those of the
    sample number `begun`, at which that began. On the rank that holds the queue a rule that
    observes goes on meanwhile, and has `fired` where the queue is to end. `queue` is that queue.
    Where workers do not decide alike, `fence` finds the step after which all leave.
    """

    rule: RuleState
    steps: int  # of the run, that the rule has observed
    begun: int | None = None
    fired: bool = False
    queue: BatchQueue | None = field(init=False, default=None)
    fence: Fence | None = field(init=False, default=None)


class Phases:
    """One rank's way through the phases of `strategy`; `member` is its end of the one under way.

    Collective over all ranks. With `saved`, a `state` from a checkpoint, it goes on in that phase.

    Raises:
        Mismatch: `saved` does not fit, on some rank. Nothing is open.
    """

    def __init__(
        self, strategy: Strategy, worker: Worker, saved: Mapping[str, Any] | None = None
    ) -> None:
        self.worker = worker
        self._strategies = phases(strategy)
        self._transitions = transitions_of(strategy)
        self._watches: dict[int, Watch] = {}  # by the number of the transition
        self._queue_of = worker.queue_of  # makes queues that end with the budget
        self._choice: CandidateChoice | None = None
        self._seconds = 0.0  # of this worker alone, up to its last report
        self._phase = 0
        self._known: tuple[Strategy, WorkMode, Traits] | None = None  # traits that were asked for
        if saved is None:
            self._watch_from(worker.measures.switched_at_step or 0)
        else:
            self._restore(saved)
        kept = None if saved is None else saved["member"]
        self.member: Member[Any] = self._under_way.join(worker, kept)
        self._begin_reports()

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, at rest.

        Raises:
            InputError: the member has come to hold something that no checkpoint can keep.
        """
        choice = self._choice
        require_keepable(self.member)
        return {
            "phase": self._phase,
            "watches": {str(number): watch for number, watch in self._watches.items()},
            "choice": None if choice is None else state_of(choice),
            "member": state_of(self.member),
        }

    def _restore(self, saved: Mapping[str, Any]) -> None:
        worker = self.worker
        exchange.require_fit(worker, {"phase": 0, "watches": {}, "member": {}}, saved)
        number = saved["phase"]
        fits = 0 <= number < len(self._strategies)
        if exchange.wait_for_everyone(worker, int(not fits)):
            raise Mismatch("" if fits else f"strategy/phase: there is no phase {number}")
        if number:
            worker.begin_phase(roles_of(self._strategies[number], worker.budget_ranks).workers)
        self._phase = number
        self._watch_from(0)
        # Of rules as they begin: what they remember has the same kinds of values.
        watches = {str(number): watch for number, watch in self._watches.items()}
        exchange.require_fit(worker, watches, saved["watches"])
        for name, watch in watches.items():
            optimizers.restore(watch, saved["watches"][name])
        if self._choice is not None:
            restore_state(worker, self._choice, saved["choice"])

    # What is under way

    @property
    def _under_way(self) -> Strategy:
        """The strategy of the phase, without phases of its own."""
        choice = self._choice
        return self._strategies[self._phase] if choice is None else choice.candidate

    @property
    def roles(self) -> Roles:
        """The roles in the phase under way."""
        # The ranks of the budget, not those that run: Single() is given more than it uses.
        return roles_of(self._under_way, self.worker.budget_ranks)

    @property
    def traits(self) -> Traits:
        """The traits of the phase under way; before a transition free workers count steps alike."""
        traits = self._traits_of(self._under_way, self.worker.work)
        if self._watches and traits.pace is Pace.FREE and traits.dealing is Dealing.PLAN:
            return replace(traits, pace=Pace.ROUNDS)
        return traits

    def _traits_of(self, strategy: Strategy, work: WorkMode) -> Traits:
        """Return traits of `strategy`; made once, since each step asks for them."""
        if self._known is None or self._known[:2] != (strategy, work):
            self._known = strategy, work, strategy.traits(work)
        return self._known[2]

    @property
    def _takes(self) -> bool:
        """True if workers take batches from a queue in the phase under way."""
        return self.traits.dealing is Dealing.QUEUE

    # A step, on workers

    def gradient(self, batch: Batch | None) -> None:
        """Compute the gradient of `batch`, and exchange it."""
        if self._choice is not None:
            self._choice.begin_step()
        self.member.gradient(batch)

    def update(self) -> None:
        """Update the parameters; then change, if that step was the last one of the phase."""
        worker, watches = self.worker, self._watches
        if self._takes:
            if any(self._is_announced(number) for number in watches):
                worker.step.report = self._report()
            self.member.update()
            return
        square = 0.0
        if any(self._switch(number).when.reads_gradients for number in watches):
            # Before it may be clipped
            square = float(worker.gradients.current().double().square().sum())
        self.member.update()
        if ending := self._observe_step(square):
            self.change_by(max(ending))  # the outermost one, which leaves out those inside
        elif self._choice is not None and (new := self._choice.after_step()) is not None:
            self._change_candidate(new)

    def serve(self) -> QuietPoint | None:
        """Serve as the phase under way does; where its workers change, change with them."""
        paused = self.member.serve()
        if paused is not None and paused.rest.reason is Reason.PHASE:
            self.change_by(paused.rest.transition)
        return paused

    # Between steps

    def rest(self, reason: Reason) -> Kept:
        """Land what is in flight anywhere. All rules have observed all steps then. Collective."""
        return self._rest(Rest(reason))

    def _rest(self, rest: Rest) -> Kept:
        kept = self.member.rest(rest)
        for watch in self._watches.values():
            if watch.fence is None:
                continue
            if rest.reason.ends:
                watch.fence.close()
                watch.fence = None
            elif kept.complete:
                watch.fence.settle()
        return kept

    def go_on(self) -> None:
        """Go on after a rest, from where this rank was. Collective."""
        self.member.open(fresh=False)

    def agree(self, kept: Kept) -> None:
        """After a rest, let all ranks take the model and buffers that were learnt, and go on from
        them. Collective.
        """
        self._take_model()
        if self._has_own_buffers:
            exchange.exact_mean_of_buffers(self.worker, kept.buffers_weight)
        self.member.open(fresh=True)

    def finish(self, reason: Reason = Reason.END) -> Kept:
        """End, and let all ranks take the parameters that were learnt. Collective."""
        kept = self._rest(Rest(reason))
        self._take_model()
        return kept

    def begin_anew(self, renew: Callable[[Kept], None]) -> None:
        """End the phase under way, and begin it anew with what `renew` puts in place: all ranks
        take the parameters of the first one, and the moments that they inherit. Collective.
        """
        kept = self.member.rest(Rest(Reason.RESTART))
        self._take_model()
        renew(kept)
        self.member = self._under_way.join(self.worker)

    def _take_model(self) -> None:
        self.member.take_model(tolerant=not self.traits.lockstep)

    @property
    def _has_own_buffers(self) -> bool:
        """True if each worker has buffers of its own, which are averaged at the end."""
        return not self.traits.lockstep and not self.roles.servers

    # Changes

    def _leave(self, moments: Moments, number: int, staying: Mapping[int, Watch]) -> None:
        """End the phase under way; leave model, buffers and `moments` to the next one. The rules
        of `staying` have observed all of its steps then.
        """
        worker = self.worker
        for watch in staying.values():
            if watch.fence is not None:
                watch.fence.settle()
        kept = self._rest(Rest(Reason.PHASE, number))
        self._take_model()
        if self._has_own_buffers:
            exchange.exact_mean_of_buffers(worker)
        exchange.hand_over(worker, kept, moments)

    def _enter(self, workers: Sequence[int], steps: int, *, buffers: bool) -> None:
        """Begin the next phase after the step number `steps`; `workers` have data in it.
        `buffers`: snapshots have those of the step before.
        """
        worker = self.worker
        worker.measures.switched_at_step = steps
        worker.measures.switched_at_sample = worker.step.consumed
        # Buffers of this step are offered once it is over, unless workers step together.
        worker.snapshots.skip(worker.step.consumed, buffers=buffers)
        worker.begin_phase(workers)

    def change_by(self, number: int) -> None:
        """Change to the next phase by the transition `number`. Collective over all ranks."""
        worker, transition = self.worker, self._transitions[number]
        switch = transition.switch
        position = max(worker.step.consumed, worker.step.planned)
        lockstep, before = self.traits.lockstep, len(worker.workers)
        target, watches = transition.target, self._watches
        staying = {n: w for n, w in watches.items() if self._transitions[n].watches(target)}
        self._leave(switch.moments, number, staying)
        steps = self._agree_on_steps(watches[number], position)
        if staying:
            self._share(staying)
        roles = roles_of(self._strategies[target], worker.budget_ranks)
        self._enter(roles.workers, steps, buffers=lockstep)
        if switch.learning_rate == "divided":
            worker.rate_scale /= len(roles.workers)
        elif switch.learning_rate == "multiplied":
            worker.rate_scale *= before
        self._phase, self._watches = target, staying
        self._watch_from(steps)
        self.member = self._under_way.join(worker)
        worker.inherited = {}
        self._begin_reports()

    def _agree_on_steps(self, watch: Watch, position: int) -> int:
        """Return the steps of all workers, which some ranks cannot count, as `watch` has them;
        agree on what all have consumed. The phase has ended at `position`.
        """
        worker, takes = self.worker, self._takes
        there = self._first_worker
        if self._under_way.traits().lockstep:  # a server may still wait for one who is to leave
            return exchange.wait_for_everyone(worker, watch.steps if worker.rank == there else 0)
        if takes:
            for number, each in self._watches.items():
                self._count_rounds(number, each, position)
        known = [position, watch.steps]
        worker.step.consumed, steps = exchange.agree_on_data(worker, known, there)
        return int(steps)

    def _share(self, watches: Mapping[int, Watch]) -> None:
        """Let all ranks know what those that have counted the steps, or observed them, know."""
        worker, roles = self.worker, self.roles
        there = self._first_worker
        if self._takes and roles.servers:  # of which the first held the coordinator
            there = next(rank for rank in roles.servers if rank in worker.everyone.ranks)
        known = {str(number): optimizers.capture(watch) for number, watch in watches.items()}
        known = exchange.agree_on_data(worker, known, there)
        for number, watch in watches.items():
            optimizers.restore(watch, known[str(number)])

    @property
    def _first_worker(self) -> int:
        """The first worker that is not lost."""
        everyone = self.worker.everyone.ranks
        return next(rank for rank in self.worker.workers.ranks if rank in everyone)

    def _change_candidate(self, new: int) -> None:
        """Go on with another candidate of `Auto`, on the same workers."""
        worker, choice = self.worker, self._choice
        assert choice is not None
        before, after = self.traits, choice.strategy.candidates[new].traits()
        apart = after.lockstep and not before.lockstep
        self._leave("averaged" if apart else "kept", 0, self._watches)
        self._enter(worker.workers.ranks, choice.steps, buffers=before.lockstep)
        choice.change_to(new)
        # Parameters are equal now: to broadcast them would take N - 1 times their size, and go on
        # in the background of the first steps, which would be measured as slow.
        exchange.broadcast_buffers(worker, worker.everyone)
        agreed, worker.parameters_equal = worker.parameters_equal, True
        self.member = self._under_way.join(worker)
        worker.parameters_equal, worker.inherited = agreed, {}
        self._begin_reports()
        exchange.wait_for_workers(worker)

    # What is watched

    def _switch(self, number: int) -> Switch:
        return self._transitions[number].switch

    def _is_announced(self, number: int) -> bool:
        return self._switch(number).is_announced

    def _watch_from(self, steps: int) -> None:
        """Begin to watch what may follow the phase, after the step number `steps`."""
        worker, strategy = self.worker, self._strategies[self._phase]
        for number, transition in enumerate(self._transitions):
            if transition.watches(self._phase) and number not in self._watches:
                self._watches[number] = Watch(transition.switch.when.begin(), steps)
        self._choice = CandidateChoice(strategy, worker) if isinstance(strategy, Auto) else None
        worker.queue_of = self._queue_of
        if self._watches and self._queue_of is not None:
            # Epochs of a loop of the user's own have ends of their own.
            worker.queue_of = None if worker.own_loop else self._make_queue

    def _begin_reports(self) -> None:
        """Begin to report, where workers do not decide alike."""
        worker = self.worker
        self._seconds = exchange.own_seconds(worker)
        worker.gradients.measures_square = False
        if self._takes:
            return
        for number, watch in self._watches.items():
            watch.begun = None
            switch = self._switch(number)
            first = worker.rank == worker.workers.ranks[0]
            if not switch.first.traits().lockstep and first:
                worker.reporter.expendable(False)  # it announces the step to leave after
            if switch.is_announced and worker.rank in worker.workers.ranks:
                observe = functools.partial(switch.when.observe, watch.rule)
                watch.fence = exchange.Fence(
                    worker, steps=watch.steps, level=number + 1, observe=observe
                )
                worker.gradients.measures_square |= switch.when.reads_gradients

    def _observe_step(self, square: float) -> list[int]:
        """Let the rules take note of the step, and return the transitions that it ends the phase
        by; `square` is |g|^2 of the average.
        """
        worker = self.worker
        report: tuple[float, ...] = ()
        if any(watch.fence is not None for watch in self._watches.values()):
            report = (*self._report(), worker.gradients.square, square)
        for number, watch in self._watches.items():
            watch.steps += 1
            if watch.fence is None:
                watch.fired = self._switch(number).when.observe(watch.rule, worker.step)
            else:
                watch.fence.report(watch.steps, worker.step.samples, *report)
                watch.fired = watch.fence.reached(watch.steps, wish=False)
        return [number for number, watch in self._watches.items() if watch.fired]

    def _report(self) -> tuple[float, ...]:
        """Return the fields of `Done` about the step, from its loss on."""
        step, before = self.worker.step, self._seconds
        self._seconds = exchange.own_seconds(self.worker)
        rate = step.rates[0] if step.rates else 0.0
        return (step.loss, self._seconds - before, rate, step.epoch, step.fraction)

    # Queues of batches, which end with the phase

    def _make_queue(self, start: int, shares: tuple[float, ...]) -> BatchQueue:
        """Make a queue of the phase under way, or of what is left of it from sample `start` on."""
        assert self._queue_of is not None
        queue = self._queue_of(start, shares)
        assert queue is not None
        for number, watch in sorted(self._watches.items(), reverse=True):
            self._count_rounds(number, watch, start)
            if watch.begun is None:
                watch.begun = start
            watch.queue = queue
            if self._switch(number).when.counts:
                queue = queue.ending(self._end_of(number, watch), number)
            else:
                observe = self._observer_of_rounds(number, watch)
                queue = queue.watched(Observer(number, observe, watch.fired))
        return queue

    def _observer_of_rounds(
        self, number: int, watch: Watch
    ) -> Callable[[Sequence[Done], tuple[float, ...]], bool]:
        when = self._switch(number).when

        def observe(reports: Sequence[Done], seconds: tuple[float, ...]) -> bool:
            """Called on the rank of the coordinator, when all batches of a round are done."""
            if watch.fired:
                return False
            watch.fired = when.observe(watch.rule, exchange.step_of_round(reports, seconds))
            return watch.fired

        return observe

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
        """Count the rounds of a queue that has ended at `position`, and go on from there."""
        when = self._switch(number).when
        if watch.begun is None or watch.queue is None:
            return
        while watch.begun < position:
            watch.begun = min(watch.begun + watch.queue.round, position)
            watch.steps += 1
            if when.counts:
                when.observe(watch.rule, exchange.counted(watch.begun, watch.queue.budget))
        watch.fired = False
