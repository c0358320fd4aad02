"""One strategy first, another later: Strategy-Switch and its kin."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from orchestra import exchange, optimizers
from orchestra.errors import InputError
from orchestra.settings import setting
from orchestra.settings.base import REQUIRED
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import CHANGED, Roles, Strategy
from orchestra.strategies.life_cycle import hand_over, resume
from orchestra.strategies.phased import (
    Phased,
    SwitchState,
    current_roles,
    current_traits,
    under_way,
)
from orchestra.strategies.switch_rules import LossStable, Rule
from orchestra.strategies.traits import Dealing, Partition, Traits, WorkMode

if TYPE_CHECKING:
    from orchestra.parameter_server.messages import Pause
    from orchestra.schedules.work_queue import WorkSource
    from orchestra.worker.worker import Worker


@dataclass(frozen=True, repr=False)
class Switch(Phased):
    """Train with `first` until `when` says so, with `then` from there on.

    Strategy-Switch (Provatas et al., IEEE Access 2025) is
    Switch(AllReduce("ring"), ParameterServer(consistency="asynchronous"), when=LossStable()).
    Each phase has its own roles: a rank that is to become a server works in the first phase, and
    the data is shared out anew at the change. Phases may be switches again: Switch(Switch(a, b,
    when=x), c, when=y), or Switch(a, Switch(b, c, when=y), when=x), whose y begins after x.

    Workers that know the same of each step switch at the step that the rule says. Others report
    to the first one, which observes for all; they switch a few steps later, at one that none of
    them has passed. Where workers take batches from a queue, a step is a round: as many samples as
    all workers have in one. A rule that counts ends the queue after its rounds; any other one once
    all batches of a round are done, and then no further batch is handed out.

    With moments="averaged" counts of steps are averaged too. Moments of a parameter that some
    worker has never updated begin anew.
    """

    use = "where the early steps need another strategy than the late ones"
    variants = (
        (
            'Switch(AllReduce("ring"), ParameterServer(consistency="asynchronous"), when='
            'LossStable(window=6, threshold=0.12, every=10), learning_rate="divided")',
            "for workers of unlike speed, once the loss is calm (Strategy-Switch)",
        ),
        ('Switch(AllReduce("ring"), LocalSGD(8), when=AfterFraction(0.5))',
         "for slow links, where local steps from the start lose accuracy (post-local SGD)"),
    )  # fmt: skip

    first: Strategy[Any] = setting(REQUIRED, "the strategy of the first phase")
    then: Strategy[Any] = setting(REQUIRED, "the strategy of the second phase")
    _: KW_ONLY
    when: Rule = setting(LossStable(), "the rule that ends the first phase")
    learning_rate: Literal["kept", "divided", "multiplied"] = setting(
        "kept",
        "divided: by the number of workers of the second phase, to damp staleness; "
        "multiplied: by that of the first",
    )
    moments: Literal["kept", "averaged", "reset"] = setting(
        "kept", "what the second phase inherits of the moments of the first phase's workers"
    )

    def check(self) -> None:
        """Phases train whole models; gradients are compared where their average is at hand."""
        for phase in self.phases:
            if phase.traits().partition is not Partition.REPLICATED:
                raise InputError(
                    f"Switch: {phase!r} gives each rank a part of the model, which no other phase "
                    "can go on with: use it alone"
                )
        first = self.first
        averages = isinstance(first, AllReduce) and first.shard == "nothing" and not first.backup
        if self.when.reads_gradients and not averages:
            raise InputError(
                f"Switch: when={self.when!r} needs whole averaged gradients, which first="
                f"{self.first!r} does not have; begin with AllReduce()"
            )

    @property
    def phases(self) -> tuple[Strategy[Any], ...]:
        return self.first, self.then

    def traits(self, work: WorkMode = "shared") -> Traits:
        rule, of_phases = self.when, super().traits(work)
        reads_values = rule.reads_loss or rule.reads_gradients or of_phases.reads_values
        return replace(
            of_phases,
            depends_on_speed=self._announced or of_phases.depends_on_speed,
            optimizer=self.then.traits().optimizer,
            reads_loss=rule.reads_loss or of_phases.reads_loss,
            reads_values=reads_values,
        )

    @property
    def _announced(self) -> bool:
        """True if workers report, and one announces the change; elsewhere all decide alike."""
        alike = self.first.traits().lockstep and not self.when.compares_workers
        return not alike and not self.when.counts

    def roles(self, ranks: int) -> Roles:
        """Return the roles of the first phase; those of the second have to be possible too."""
        first, then = self.first.roles(ranks), self.then.roles(ranks)
        if len(then.shares) != len(first.shares):
            raise InputError(
                f"Switch: {self.first!r} and {self.then!r} run on different numbers of processes"
            )
        self._check_moments(first, then)
        return first

    def _check_moments(self, first: Roles, then: Roles) -> None:
        if self.moments == "reset":
            return
        before, after = self.first.traits(), self.then.traits()
        if self.moments == "kept" and after.lockstep and not before.lockstep:
            raise InputError(
                f"Switch: under first={self.first!r} each worker has moments of its own, and "
                f"then={self.then!r} needs equal ones: set moments='averaged' or 'reset'"
            )
        # Ranks that update later, and have had no optimizer until then.
        without = {*then.workers, *then.servers} - set(first.workers)
        if without or before.optimizer is not Partition.REPLICATED:
            raise InputError(
                f"Switch: under first={self.first!r} not every rank that updates later has the "
                f"optimizer's moments, so they cannot be {self.moments}: set moments='reset'"
            )

    def work(self, state: SwitchState) -> WorkSource | None:
        return self.phase(state).work(state.inner)

    def start(self, worker: Worker) -> SwitchState:
        before = worker.measures.switched_at_step or 0
        state = SwitchState(self.when, self.nesting, self.when.begin(), before=before)
        self._begin_first(worker, state, lambda: self.first.start(worker))
        return state

    def resume(self, worker: Worker, saved: Mapping[str, Any]) -> SwitchState:
        """Resume in the phase that the checkpoint was taken in."""
        state = SwitchState(self.when, self.nesting, self.when.begin())
        exchange.require_fit(worker, state, saved)
        state.steps, state.before = saved["steps"], saved.get("before", 0)
        optimizers.restore(state.rule, saved["rule"])
        if saved["switched"]:
            state.queue_of = worker.queue_of
            self._begin_second(worker, state)
            state.inner = resume(self.then, worker, saved["inner"])
        else:
            state.begun, state.fired = saved["begun"], saved["fired"]
            self._begin_first(worker, state, lambda: resume(self.first, worker, saved["inner"]))
        return state

    def _begin_first(self, worker: Worker, state: SwitchState, start: Callable[[], Any]) -> None:
        """Watch the steps, and be there where a phase inside the first one, or its queue, ends."""
        state.queue_of = worker.queue_of
        if worker.own_loop:  # whose epochs have ends of their own
            worker.queue_of = None
        elif worker.queue_of is not None:
            worker.queue_of = state.make_queue
        state.inner = start()
        if isinstance(self.first, Switch):
            worker.before_phase.append(functools.partial(self._share_count, worker, state))
        self._watch(worker, state)

    def _begin_second(self, worker: Worker, state: SwitchState) -> None:
        first, roles = len(worker.workers), self.then.roles(worker.budget_ranks)
        worker.begin_phase(roles.workers)
        worker.queue_of = state.queue_of
        if self.learning_rate == "divided":
            worker.rate_scale /= len(roles.workers)
        elif self.learning_rate == "multiplied":
            worker.rate_scale *= first
        state.switched = True

    def _takes(self, worker: Worker, state: SwitchState) -> bool:
        """Return whether workers take batches from a queue in the phase under way."""
        return current_traits(self, worker, state).dealing is Dealing.QUEUE

    def end_phase(self, worker: Worker, state: SwitchState, level: int) -> None:
        """Switch, or let a switch inside the phase under way do so."""
        if not state.switched and level == self.nesting:
            self._switch(worker, state)
            return
        before = under_way(self, state)
        inner = self.phase(state)
        assert isinstance(inner, Phased)
        inner.end_phase(worker, state.inner, level)
        self._follow(worker, state, before)

    def _share_count(self, worker: Worker, state: SwitchState) -> None:
        """Collective over all ranks, where a phase inside the first one ends after a step.

        Its workers have counted their steps, and observe this one. Other ranks have not, but may
        have to in the phase that begins. Of batches from a queue all know the number.
        """
        if state.switched or self._takes(worker, state):
            return
        workers = worker.workers.ranks
        if worker.rank in workers and not self.when.counts:
            state.fired = state.is_over(worker, square=0.0)
            if state.leaving is not None:
                state.leaving.settle()
        counted = (state.steps, state.fired, optimizers.capture(state.rule))
        there = next(rank for rank in worker.everyone.ranks if rank in workers)
        state.steps, state.fired, rule = exchange.agree_on_data(worker, counted, there)
        optimizers.restore(state.rule, rule)

    def _follow(self, worker: Worker, state: SwitchState, before: Strategy[Any]) -> None:
        """Where the first phase has gone on from the phase `before` inside it, go on from there."""
        if state.switched or under_way(self, state) is before:
            return
        state.end_watch()
        if before.traits(worker.work).dealing is Dealing.QUEUE:
            state.count_rounds(worker.step.consumed)
        if not self._takes(worker, state):
            state.begun = None
        if state.fired:
            self._switch(worker, state)
        else:
            self._watch(worker, state)

    def _watch(self, worker: Worker, state: SwitchState) -> None:
        """Begin to report, where workers do not decide alike."""
        if self._takes(worker, state):
            state.seconds = exchange.own_seconds(worker)
            return
        if not self.first.traits().lockstep and worker.rank == worker.workers.ranks[0]:
            worker.reporter.expendable(False)  # it announces the step to leave after
        if self._announced and worker.rank in worker.workers.ranks:
            state.leaving = exchange.CommonStep(
                worker, steps=state.steps, level=self.nesting + 1, observe=state.observe
            )
            state.seconds = exchange.own_seconds(worker)
            worker.gradients.measures_square = self.when.reads_gradients

    @property
    def nesting(self) -> int:
        """How many switches may be waiting inside the phases of this one."""
        return max((p.nesting + 1 for p in self.phases if isinstance(p, Switch)), default=0)

    def update(self, worker: Worker, state: SwitchState) -> None:
        """Update as the phase under way does; then, in the first, see whether it is over."""
        if state.switched:
            self.then.update(worker, state.inner)
            return
        if self._takes(worker, state):
            if self._announced:
                worker.step.report = state.report(worker)
            self.first.update(worker, state.inner)
            return
        square = 0.0
        if self.when.reads_gradients:  # before it may be clipped
            square = float(worker.gradients.current().double().square().sum())
        state.steps += 1
        # Rules that count do so before a phase inside may begin, and with it a queue, by them.
        if self.when.counts:
            state.fired = state.observe(worker.step)
        before = under_way(self, state)
        self.first.update(worker, state.inner)
        if under_way(self, state) is not before:
            self._follow(worker, state, before)
            return
        if not self.when.counts:
            state.fired = state.is_over(worker, square)
        if state.fired:
            self._switch(worker, state)

    def _switch(self, worker: Worker, state: SwitchState) -> None:
        """Come to rest, agree on parameters, hand over moments, and start the second phase."""
        position = max(worker.step.consumed, worker.step.planned)
        before = under_way(self, state)
        if worker.rank in worker.workers.ranks:
            self.first.quiesce(worker, state.inner, CHANGED - self.nesting)
        hand_over(self.first, worker, state.inner, self.moments)
        self._leave_together(worker, state, position)
        worker.measures.switched_at_step = state.before + state.steps
        worker.measures.switched_at_sample = worker.step.consumed
        self._begin_second(worker, state)
        # Buffers of this step are offered once it is over, unless workers step together.
        worker.snapshots.skip(worker.step.consumed, buffers=before.traits().lockstep)
        state.inner = self.then.start(worker)
        worker.inherited = {}

    def _leave_together(self, worker: Worker, state: SwitchState, position: int) -> None:
        """End the watch; agree on what workers at their own pace, or servers, cannot count."""
        if state.leaving is not None:
            state.end_watch()
            worker.gradients.measures_square = False
        roles = current_roles(self.first, worker, state.inner)
        there = next(rank for rank in worker.everyone.ranks if rank in roles.workers)
        if self.first.traits().lockstep:  # a server may still wait for one who is to leave
            own = state.steps if worker.rank == there else 0
            state.steps = exchange.wait_for_everyone(worker, own)
            return
        if self._takes(worker, state):
            state.count_rounds(position)
        known = [position, state.steps]
        worker.step.consumed, state.steps = exchange.agree_on_data(worker, known, there)

    def serve(self, worker: Worker, state: SwitchState) -> Pause | None:
        """Serve as the phase under way does; where its workers switch, switch with them."""
        before, switched = under_way(self, state), state.switched
        paused = self.phase(state).serve(worker, state.inner)
        if switched or paused is None:
            return paused
        if paused.step == CHANGED - self.nesting:
            self._switch(worker, state)
        else:
            self._follow(worker, state, before)
        return paused

    def quiesce(self, worker: Worker, state: SwitchState, step: int) -> bool:
        """Come to rest as the phase under way does, with all reports in the rule's state."""
        complete: bool = super().quiesce(worker, state, step)
        if complete and state.leaving is not None:
            state.leaving.settle()
        return complete

    def stop(self, worker: Worker, state: SwitchState) -> None:
        self.phase(state).stop(worker, state.inner)
        state.end_watch()

    def phase(self, state: SwitchState) -> Strategy[Any]:
        return self.then if state.switched else self.first


def phases(strategy: Strategy[Any]) -> list[Strategy[Any]]:
    """Return the phases of a switch, also of switches in it, in order; else `strategy` itself."""
    if not isinstance(strategy, Switch):
        return [strategy]
    return [*phases(strategy.first), *phases(strategy.then)]
