"""The phases of a run on one rank, one after the other.

A strategy without phases is the only one. A `Switch` is a transition from each phase of its first
strategy to the first one of its second; `Auto` goes from one candidate to another. To change, all
ranks come to rest, hand over what they have learnt, and join the next strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from orchestra import exchange, optimizers
from orchestra.coordinator.batches import BatchQueue
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
from orchestra.strategies.switch import flattened_phases
from orchestra.strategies.traits import Dealing, Pace, Traits, WorkMode
from orchestra.strategies.watching import Watching

if TYPE_CHECKING:
    from orchestra.exchange import Fence, Kept
    from orchestra.strategies.member import Member
    from orchestra.worker.worker import Worker

Moments = Literal["kept", "averaged", "reset"]


class Phases:
    """One rank's way through the phases of `strategy`; `member` is its end of the one under way.

    Collective over all ranks. With `saved`, a `state` from a checkpoint, it goes on in that phase;
    with `common`, all join the phase anew, with what is common to all ranks in it, from parameters
    and buffers that are equal already: those of a run on other ranks, say.

    Raises:
        Mismatch: `saved` does not fit, on some rank. Nothing is open.
    """

    def __init__(
        self,
        strategy: Strategy,
        worker: Worker,
        saved: Mapping[str, Any] | None = None,
        *,
        common: bool = False,
    ) -> None:
        self.worker = worker
        self._strategies = flattened_phases(strategy)
        self._watching = Watching(strategy)
        self._queue_of = worker.queue_of  # makes queues that end with the budget
        self._choice: CandidateChoice | None = None
        self._fence: Fence | None = None  # made by the first step that needs it
        self._seconds = 0.0  # of this worker alone, up to its last report
        self._square = 0.0  # |g|^2 of the average, where a rule reads it
        self._phase = 0
        self._known: tuple[Strategy, WorkMode, Traits] | None = None  # traits that were asked for
        if saved is None:
            self._watch_from(worker.measures.switched_at_step or 0)
        else:
            self._restore(saved, common=common)
        kept = None if saved is None else saved["member"]
        states = (None, kept) if common else (kept, None)
        worker.parameters_equal |= common
        self.member: Member[Any] = self._under_way.join(worker, *states)
        worker.parameters_equal &= not common
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
            "watches": {str(number): watch for number, watch in self._watching.watches.items()},
            "choice": None if choice is None else state_of(choice),
            "member": state_of(self.member),
        }

    def _restore(self, saved: Mapping[str, Any], *, common: bool) -> None:
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
        watches = {str(number): watch for number, watch in self._watching.watches.items()}
        exchange.require_fit(worker, watches, saved["watches"])
        for name, watch in watches.items():
            optimizers.restore(watch, saved["watches"][name])
        if self._choice is not None:
            choice = saved["choice"]
            # Other ranks have other speeds: the candidates are measured anew.
            choice = optimizers.common_of(self._choice, choice) if common else choice
            restore_state(worker, self._choice, choice)

    # What is under way

    @property
    def number(self) -> int:
        """The number of the phase under way, from 0."""
        return self._phase

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
        is_free = traits.pace is Pace.FREE and traits.dealing is Dealing.PLAN
        return replace(traits, pace=Pace.ROUNDS) if is_free and self._watching.watches else traits

    def _traits_of(self, strategy: Strategy, work: WorkMode) -> Traits:
        """Return traits of `strategy`; made once, since each step asks for them."""
        if self._known is None or self._known[:2] != (strategy, work):
            self._known = strategy, work, strategy.traits(work)
        return self._known[2]

    @property
    def _takes(self) -> bool:
        """True if workers take batches from a queue in the phase under way."""
        return self.traits.dealing is Dealing.QUEUE

    # Steps, on workers

    def before_update(self) -> None:
        """Called in each step, with the gradient: note what rules will observe of it."""
        worker, watching = self.worker, self._watching
        if not watching.is_announced:
            return
        if self._takes:  # the report comes with the batch
            worker.step.report = self._report()
        elif watching.reads_gradients:
            # Before it may be clipped
            self._square = float(worker.gradients.current().double().square().sum())

    def after_step(self, *, may_stop: bool) -> Rest | None:
        """Return why all ranks rest after the step that is over; None if they go on.

        Collective over the workers. `may_stop`: also because the user wishes to stop.
        """
        if self._takes:
            return None  # the queue tells
        step, watching = self.worker.step, self._watching
        alike = step.loss_is_global or self.traits.pace is Pace.FREE
        stop = may_stop and step.stop
        ending, rest = watching.observe(step), None
        if watching.is_announced or (may_stop and not alike):
            seen: tuple[float, ...] = ()
            if watching.is_announced:
                seen = (step.samples, *self._report(), self.worker.gradients.square, self._square)
            if self._fence is None:
                self._fence = exchange.Fence(self.worker, watching.observe_for_all)
            rest = self._fence.reached(wish=stop and not alike, seen=seen)
        if rest is not None and rest.reason is Reason.PHASE:
            ending = rest.to if ending is None else max(ending, rest.to)
        if ending is not None:
            return Rest(Reason.PHASE, ending)
        if rest is not None or (stop and alike):
            return Rest(Reason.STOP)
        new = None if self._choice is None else self._choice.after_step()
        return None if new is None else Rest(Reason.CANDIDATE, new)

    def _report(self) -> tuple[float, ...]:
        """Return the fields of `Done` about the step, from its loss on."""
        step, before = self.worker.step, self._seconds
        self._seconds = exchange.own_seconds(self.worker)
        rate = step.rates[0] if step.rates else 0.0
        return (step.loss, self._seconds - before, rate, step.epoch, step.fraction)

    # Between steps

    def rest(self, reason: Reason) -> Kept:
        """Land what is in flight anywhere. All rules have observed all steps then. Collective."""
        kept = self.member.rest(Rest(reason))
        if self._fence is not None and kept.complete and self._watching.is_announced:
            self._fence.settle()
        return kept

    def _close_fence(self) -> None:
        """Wait until no worker goes by the fence any more. Collective over the workers."""
        if self._fence is not None:
            self._fence.close()
            self._fence = None

    def go_on(self) -> None:
        """Go on after a rest, from where this rank was. Collective."""
        self.member.open(fresh=False)

    def agree(self, kept: Kept) -> None:
        """After a rest, let all ranks take the model and buffers that were learnt, and go on from
        them. Collective.
        """
        self._take_model(kept)
        if self._has_own_buffers:
            exchange.exact_mean_of_buffers(self.worker, kept.buffers_weight)
        self.member.open(fresh=True)

    def finish(self, reason: Reason = Reason.END) -> Kept:
        """End, and let all ranks take the parameters that were learnt. Collective."""
        kept = self.member.rest(Rest(reason))
        self._take_model(kept)
        self._close_fence()
        return kept

    def begin_anew(self, renew: Callable[[Kept], None]) -> None:
        """End the phase under way, and begin it anew with what `renew` puts in place: all ranks
        take the parameters of the first one, and the moments that they inherit. Collective.
        """
        kept = self.member.rest(Rest(Reason.RESTART))
        self._take_model(kept)
        renew(kept)
        self.member = self._under_way.join(self.worker)

    def _take_model(self, kept: Kept) -> None:
        exchange.take_consensus(self.worker, kept.learnt, tolerant=not self.traits.lockstep)

    @property
    def _has_own_buffers(self) -> bool:
        """True if each worker has buffers of its own, which are averaged at the end."""
        return not self.traits.lockstep and not self.roles.servers

    # Changes

    def change(self, rest: Rest) -> None:
        """Come to `rest`, and go on in the phase that follows. Collective over all ranks."""
        if rest.reason is Reason.CANDIDATE:
            self._change_candidate(rest)
        else:
            self._change_phase(rest)
        self.worker.inherited = {}
        self._begin_reports()

    def _leave(self, rest: Rest, moments: Moments) -> None:
        """End the phase under way; leave model, buffers and `moments` to the next one."""
        worker = self.worker
        if self._fence is not None and self._watching.is_announced:
            self._fence.settle()  # so that rules which go on have observed all steps
        kept = self.member.rest(rest)
        self._close_fence()
        self._take_model(kept)
        if self._has_own_buffers:
            exchange.exact_mean_of_buffers(worker)
        exchange.hand_over(worker, kept, moments)

    def _enter(self, workers: Sequence[int], steps: int) -> None:
        """Begin the next phase after the step number `steps`; `workers` have data in it."""
        worker = self.worker
        worker.measures.switched_at_step = steps
        worker.measures.switched_at_sample = worker.step.consumed
        worker.snapshots.skip(worker.step.consumed)
        worker.begin_phase(workers)

    def _change_phase(self, rest: Rest) -> None:
        worker, transition = self.worker, self._watching.transitions[rest.to]
        switch, target = transition.switch, transition.target
        position = max(worker.step.consumed, worker.step.planned)
        before = len(worker.workers)
        self._leave(rest, switch.moments)
        steps = self._agree_on_steps(rest.to, position)
        self._watching.leave(target)
        if self._watching.watches:
            self._share_watches()
        roles = roles_of(self._strategies[target], worker.budget_ranks)
        self._enter(roles.workers, steps)
        if switch.learning_rate == "divided":
            worker.rate_scale /= len(roles.workers)
        elif switch.learning_rate == "multiplied":
            worker.rate_scale *= before
        self._phase = target
        self._watch_from(steps)
        self.member = self._under_way.join(worker)

    def _agree_on_steps(self, number: int, position: int) -> int:
        """Return the steps of all workers, which some ranks cannot count, as the watch `number` has
        them; agree on what all have consumed. The phase has ended at `position`.
        """
        worker, watch = self.worker, self._watching.watches[number]
        there = self._first_worker
        if self._under_way.traits().lockstep:  # a server may still wait for one who is to leave
            return exchange.wait_for_everyone(worker, watch.steps if worker.rank == there else 0)
        if self._takes:
            self._watching.count_rounds(position)
        known = [position, watch.steps]
        worker.step.consumed, steps = exchange.agree_on_data(worker, known, there)
        return int(steps)

    def _share_watches(self) -> None:
        """Let all ranks know what those that have counted the steps, or observed them, know."""
        worker, roles = self.worker, self.roles
        there = self._first_worker
        if self._takes and roles.servers:  # of which the first held the coordinator
            there = next(rank for rank in roles.servers if rank in worker.everyone.ranks)
        watches = self._watching.watches
        known = {str(number): optimizers.capture(watch) for number, watch in watches.items()}
        known = exchange.agree_on_data(worker, known, there)
        for number, watch in watches.items():
            optimizers.restore(watch, known[str(number)])

    @property
    def _first_worker(self) -> int:
        """The first worker that is not lost."""
        everyone = self.worker.everyone.ranks
        return next(rank for rank in self.worker.workers.ranks if rank in everyone)

    def _change_candidate(self, rest: Rest) -> None:
        """Go on with another candidate of `Auto`, on the same workers."""
        worker, choice = self.worker, self._choice
        assert choice is not None
        before, after = self.traits, choice.strategy.candidates[rest.to].traits()
        apart = after.lockstep and not before.lockstep
        self._leave(rest, "averaged" if apart else "kept")
        self._enter(worker.workers.ranks, choice.steps)
        choice.change_to(rest.to)
        # Parameters are equal now: to broadcast them would take N - 1 times their size, and go on
        # in the background of the first steps, which would be measured as slow.
        exchange.broadcast_buffers(worker, worker.everyone)
        agreed, worker.parameters_equal = worker.parameters_equal, True
        self.member = self._under_way.join(worker)
        worker.parameters_equal = agreed
        exchange.wait_for_workers(worker)

    # What is watched

    def _watch_from(self, steps: int) -> None:
        """Begin to watch what may follow the phase, after the step number `steps`."""
        worker, strategy = self.worker, self._strategies[self._phase]
        self._watching.begin(self._phase, steps)
        self._choice = CandidateChoice(strategy, worker) if isinstance(strategy, Auto) else None
        worker.queue_of = self._queue_of
        if self._watching.watches and self._queue_of is not None:
            # Epochs of a loop of the user's own have ends of their own.
            worker.queue_of = None if worker.own_loop else self._make_queue

    def _make_queue(self, start: int, shares: tuple[float, ...]) -> BatchQueue:
        """Make a queue of the phase under way, or of what is left of it from sample `start` on."""
        assert self._queue_of is not None
        queue = self._queue_of(start, shares)
        assert queue is not None
        return self._watching.watch_queue(queue, start)

    def _begin_reports(self) -> None:
        """Begin to report, where workers do not decide alike."""
        worker, watching = self.worker, self._watching
        self._seconds = exchange.own_seconds(worker)
        worker.gradients.measures_square = False
        if self._takes:
            return
        watching.watch_steps()
        if watching.decides_apart and worker.rank == worker.workers.ranks[0]:
            worker.reporter.expendable(False)  # it announces the step to leave after
        if watching.is_announced and worker.rank in worker.workers.ranks:
            worker.gradients.measures_square = watching.reads_gradients
