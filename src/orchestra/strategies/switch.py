"""One strategy first, another later: Strategy-Switch and its kin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from orchestra import exchange, optimizers
from orchestra.coordinator.batches import BatchQueue, Observer
from orchestra.coordinator.rest import Reason, Rest
from orchestra.errors import InputError
from orchestra.settings import setting
from orchestra.settings.base import REQUIRED
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Roles, Strategy
from orchestra.strategies.life_cycle import hand_over, resume
from orchestra.strategies.phased import Phased, PhasedMember
from orchestra.strategies.switch_rules import LossStable, Rule, RuleState
from orchestra.strategies.traits import Dealing, Pace, Partition, Traits, WorkMode

if TYPE_CHECKING:
    from orchestra.coordinator.events import Done
    from orchestra.exchange import CommonStep
    from orchestra.parameter_server.messages import QuietPoint
    from orchestra.strategies.member import Member
    from orchestra.worker.worker import QueueOf, Step, Worker


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

    first: Strategy = setting(REQUIRED, "the strategy of the first phase")
    then: Strategy = setting(REQUIRED, "the strategy of the second phase")
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
    def phases(self) -> tuple[Strategy, ...]:
        return self.first, self.then

    def traits(self, work: WorkMode = "shared") -> Traits:
        rule, of_phases = self.when, super().traits(work)
        reads_values = rule.reads_loss or rule.reads_gradients or of_phases.reads_values
        return replace(
            of_phases,
            depends_on_speed=self.is_announced or of_phases.depends_on_speed,
            optimizer=self.then.traits().optimizer,
            reads_loss=rule.reads_loss or of_phases.reads_loss,
            reads_values=reads_values,
        )

    @property
    def is_announced(self) -> bool:
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

    def join(self, worker: Worker) -> SwitchMember:
        member = SwitchMember(self, worker, self.when.begin())
        member.before = worker.measures.switched_at_step or 0
        member.begin_first(lambda: self.first.join(worker))
        return member

    def resume(self, worker: Worker, saved: Mapping[str, Any]) -> SwitchMember:
        """Join in the phase that the checkpoint was taken in."""
        member = SwitchMember(self, worker, self.when.begin())
        exchange.require_fit(worker, member, saved)
        member.steps, member.before = saved["steps"], saved.get("before", 0)
        optimizers.restore(member.rule, saved["rule"])
        if saved["switched"]:
            member.queue_of = worker.queue_of
            member.begin_second(lambda: resume(self.then, worker, saved["inner"]))
        else:
            member.begun, member.fired = saved["begun"], saved["fired"]
            member.begin_first(lambda: resume(self.first, worker, saved["inner"]))
        return member

    @property
    def nesting(self) -> int:
        """How many switches may be waiting inside the phases of this one."""
        return max((p.nesting + 1 for p in self.phases if isinstance(p, Switch)), default=0)


@dataclass(eq=False)
class SwitchMember(PhasedMember[Switch]):
    """One rank's end of the phase under way, and what watches it.

    Where the workers take batches from a queue in place of steps, `rule` and `steps` are those of
    the sample number `begun`, at which that began. On the rank that holds the queue a rule that
    observes goes on meanwhile, and has `fired` where the queue is to end. `queue` is that queue;
    `queue_of` makes queues that end with the budget alone. `leaving` finds the step to switch at
    where workers do not decide alike; `seconds` are this worker's own up to its last report.
    """

    rule: RuleState  # what `when` remembers
    switched: bool = False
    steps: int = 0  # that `rule` has observed
    before: int = 0  # steps of another switch's first phase, if this one is in its second
    begun: int | None = None
    fired: bool = False
    queue: BatchQueue | None = field(default=None, metadata=optimizers.TRANSIENT)
    seconds: float = field(default=0.0, metadata=optimizers.TRANSIENT)
    leaving: CommonStep | None = field(default=None, metadata=optimizers.TRANSIENT)
    queue_of: QueueOf | None = field(default=None, metadata=optimizers.TRANSIENT)

    @property
    def traits(self) -> Traits:
        """The traits of the phase under way; until the switch free workers count steps alike."""
        traits = self.inner.traits
        if not self.switched and traits.pace is Pace.FREE and traits.dealing is Dealing.PLAN:
            return replace(traits, pace=Pace.ROUNDS)
        return traits

    def begin_first(self, join: Callable[[], Member[Any]]) -> None:
        """Watch the steps, and be there where a phase inside the first one, or its queue, ends."""
        worker, strategy = self.worker, self.strategy
        self.queue_of = worker.queue_of
        if worker.own_loop:  # whose epochs have ends of their own
            worker.queue_of = None
        elif worker.queue_of is not None:
            worker.queue_of = self._make_queue
        self.inner = join()
        if isinstance(strategy.first, Switch):
            worker.before_phase.append(self._share_count)
        self._watch()

    def begin_second(self, join: Callable[[], Member[Any]]) -> None:
        """Begin the second phase; `join` makes its member."""
        worker, strategy = self.worker, self.strategy
        first, roles = len(worker.workers), strategy.then.roles(worker.budget_ranks)
        worker.begin_phase(roles.workers)
        worker.queue_of = self.queue_of
        if strategy.learning_rate == "divided":
            worker.rate_scale /= len(roles.workers)
        elif strategy.learning_rate == "multiplied":
            worker.rate_scale *= first
        self.switched = True
        self.inner = join()

    def _takes(self) -> bool:
        """Return whether workers take batches from a queue in the phase under way."""
        return self.traits.dealing is Dealing.QUEUE

    def end_phase(self, level: int) -> None:
        """Switch, or let a switch inside the phase under way do so."""
        strategy = self.strategy
        if not self.switched and level == strategy.nesting:
            self._switch()
            return
        before = self.innermost
        assert isinstance(self.inner, PhasedMember)
        self.inner.end_phase(level)
        self._follow(before)

    def _share_count(self) -> None:
        """Collective over all ranks, where a phase inside the first one ends after a step.

        Its workers have counted their steps, and observe this one. Other ranks have not, but may
        have to in the phase that begins. Of batches from a queue all know the number.
        """
        worker, strategy = self.worker, self.strategy
        if self.switched or self._takes():
            return
        workers = worker.workers.ranks
        if worker.rank in workers and not strategy.when.counts:
            self.fired = self._is_over(square=0.0)
            if self.leaving is not None:
                self.leaving.settle()
        counted = (self.steps, self.fired, optimizers.capture(self.rule))
        there = next(rank for rank in worker.everyone.ranks if rank in workers)
        self.steps, self.fired, rule = exchange.agree_on_data(worker, counted, there)
        optimizers.restore(self.rule, rule)

    def _follow(self, before: Member[Any]) -> None:
        """Where the first phase has gone on from the phase `before` inside it, go on from there."""
        worker = self.worker
        if self.switched or self.innermost is before:
            return
        self._end_watch()
        if before.traits.dealing is Dealing.QUEUE:
            self._count_rounds(worker.step.consumed)
        if not self._takes():
            self.begun = None
        if self.fired:
            self._switch()
        else:
            self._watch()

    def _watch(self) -> None:
        """Begin to report, where workers do not decide alike."""
        worker, strategy = self.worker, self.strategy
        if self._takes():
            self.seconds = exchange.own_seconds(worker)
            return
        if not strategy.first.traits().lockstep and worker.rank == worker.workers.ranks[0]:
            worker.reporter.expendable(False)  # it announces the step to leave after
        if strategy.is_announced and worker.rank in worker.workers.ranks:
            self.leaving = exchange.CommonStep(
                worker, steps=self.steps, level=strategy.nesting + 1, observe=self._observe
            )
            self.seconds = exchange.own_seconds(worker)
            worker.gradients.measures_square = strategy.when.reads_gradients

    def update(self) -> None:
        """Update as the phase under way does; then, in the first, see whether it is over."""
        worker, strategy = self.worker, self.strategy
        if self.switched:
            self.inner.update()
            return
        if self._takes():
            if strategy.is_announced:
                worker.step.report = self._report()
            self.inner.update()
            return
        square = 0.0
        if strategy.when.reads_gradients:  # before it may be clipped
            square = float(worker.gradients.current().double().square().sum())
        self.steps += 1
        # Rules that count do so before a phase inside may begin, and with it a queue, by them.
        if strategy.when.counts:
            self.fired = self._observe(worker.step)
        before = self.innermost
        self.inner.update()
        if self.innermost is not before:
            self._follow(before)
            return
        if not strategy.when.counts:
            self.fired = self._is_over(square)
        if self.fired:
            self._switch()

    def _switch(self) -> None:
        """Come to rest, agree on parameters, hand over moments, and start the second phase."""
        worker, strategy = self.worker, self.strategy
        position = max(worker.step.consumed, worker.step.planned)
        before = self.innermost
        if worker.rank in worker.workers.ranks:
            self.inner.quiesce(Rest(Reason.PHASE, strategy.nesting))
        hand_over(self.inner, strategy.moments)
        self._leave_together(position)
        worker.measures.switched_at_step = self.before + self.steps
        worker.measures.switched_at_sample = worker.step.consumed
        # Buffers of this step are offered once it is over, unless workers step together.
        worker.snapshots.skip(worker.step.consumed, buffers=before.strategy.traits().lockstep)
        self.begin_second(lambda: strategy.then.join(worker))
        worker.inherited = {}

    def _leave_together(self, position: int) -> None:
        """End the watch; agree on what workers at their own pace, or servers, cannot count."""
        worker, strategy = self.worker, self.strategy
        if self.leaving is not None:
            self._end_watch()
            worker.gradients.measures_square = False
        roles = self.inner.roles
        there = next(rank for rank in worker.everyone.ranks if rank in roles.workers)
        if strategy.first.traits().lockstep:  # a server may still wait for one who is to leave
            own = self.steps if worker.rank == there else 0
            self.steps = exchange.wait_for_everyone(worker, own)
            return
        if self._takes():
            self._count_rounds(position)
        known = [position, self.steps]
        worker.step.consumed, self.steps = exchange.agree_on_data(worker, known, there)

    def serve(self) -> QuietPoint | None:
        """Serve as the phase under way does; where its workers switch, switch with them."""
        strategy = self.strategy
        before, switched = self.innermost, self.switched
        paused = self.inner.serve()
        if switched or paused is None:
            return paused
        if paused.rest == Rest(Reason.PHASE, strategy.nesting):
            self._switch()
        else:
            self._follow(before)
        return paused

    def quiesce(self, rest: Rest) -> bool:
        """Come to rest as the phase under way does, with all reports in the rule's state."""
        complete = self.inner.quiesce(rest)
        if complete and self.leaving is not None:
            self.leaving.settle()
        return complete

    def stop(self) -> None:
        self.inner.stop()
        self._end_watch()

    def _end_watch(self) -> None:
        """Collective over the workers, where they report: report no more."""
        if self.leaving is not None:
            self.leaving.close()
            self.leaving = None

    def _observe(self, step: Step) -> bool:
        """Let the rule take note of `step`; True to switch now."""
        strategy = self.strategy
        return strategy.when.observe(self.rule, step)

    def _report(self) -> tuple[float, ...]:
        """Return the fields of `Done` about the step, from its loss on."""
        worker = self.worker
        step, before = worker.step, self.seconds
        self.seconds = exchange.own_seconds(worker)
        rate = step.rates[0] if step.rates else 0.0
        return (step.loss, self.seconds - before, rate, step.epoch, step.fraction)

    def _is_over(self, square: float) -> bool:
        """Return after a step whether all are to switch; `square` is |g|^2 of the average."""
        worker = self.worker
        if self.leaving is None:
            return self._observe(worker.step)
        values = (*self._report(), worker.gradients.square, square)
        self.leaving.report(self.steps, worker.step.samples, *values)
        return self.leaving.reached(self.steps, wish=False)

    def _make_queue(self, start: int, shares: tuple[float, ...]) -> BatchQueue:
        """Make a queue of the first phase, or of one inside it that begins at sample `start`."""
        strategy = self.strategy
        assert self.queue_of is not None
        queue = self.queue_of(start, shares)
        assert queue is not None
        self._count_rounds(start)
        if self.begun is None:
            self.begun = start
        self.queue = queue
        if strategy.when.counts:
            return queue.ending(self._end(queue, self.begun), strategy.nesting)

        def observe(reports: Sequence[Done], seconds: tuple[float, ...]) -> bool:
            """Called on the rank of the coordinator, when all batches of a round are done."""
            if self.fired:
                return False
            self.fired = self._observe(exchange.step_of_round(reports, seconds))
            return self.fired

        return queue.watched(Observer(strategy.nesting, observe, self.fired))

    def _end(self, queue: BatchQueue, position: int) -> int:
        """Find the sample before which a phase ends by a rule that counts, from `position` on."""
        strategy = self.strategy
        assert queue.budget is not None
        # On a copy: the rule itself observes the rounds once they are done (`count_rounds`).
        rule, over = copy.deepcopy(self.rule), False
        while position < queue.budget and not over:
            position = min(position + queue.round, queue.budget)
            over = strategy.when.observe(rule, exchange.counted(position, queue.budget))
        return position

    def _count_rounds(self, position: int) -> None:
        """Count the rounds of a queue that has ended at `position`, and go on from there."""
        strategy = self.strategy
        if self.begun is None or self.queue is None:
            return
        while self.begun < position:
            self.begun = min(self.begun + self.queue.round, position)
            self.steps += 1
            if strategy.when.counts:
                self._observe(exchange.counted(self.begun, self.queue.budget))
        self.fired = False


def phases(strategy: Strategy) -> list[Strategy]:
    """Return the phases of a switch, also of switches in it, in order; else `strategy` itself."""
    if not isinstance(strategy, Switch):
        return [strategy]
    return [*phases(strategy.first), *phases(strategy.then)]
