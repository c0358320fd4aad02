"""One strategy first, another later: Strategy-Switch and its kin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from orchestra import exchange, optimizers
from orchestra.errors import InputError
from orchestra.settings import setting
from orchestra.settings.base import REQUIRED
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import CHANGED, Footprint, Roles, Strategy, WorkSource
from orchestra.strategies.switch_rules import LossStable, Rule, RuleState

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.exchange import CommonStep
    from orchestra.parameter_server import Pause
    from orchestra.worker.batches import Batch
    from orchestra.worker.worker import QueueOf, Step, Worker


@dataclass
class SwitchState:
    """The state of the phase under way; `rule` is what `when` remembers, after `steps` steps.

    `leaving` finds the step to switch at where workers do not decide alike; their steps so far
    have cost `seconds` of this worker's computation and communication. `queue_of` is put aside
    until the switch: workers that are to leave a phase after a common step take equal parts in it.
    """

    inner: Any
    rule: RuleState
    switched: bool = False
    steps: int = 0
    seconds: float = field(default=0.0, metadata=optimizers.TRANSIENT)
    leaving: CommonStep | None = field(default=None, metadata=optimizers.TRANSIENT)
    queue_of: QueueOf | None = field(default=None, metadata=optimizers.TRANSIENT)


@dataclass(frozen=True, repr=False)
class Switch(Strategy[SwitchState]):
    """Train with `first` until `when` says so, with `then` from there on.

    Strategy-Switch (Provatas et al., IEEE Access 2025) is
    Switch(AllReduce("ring"), ParameterServer(consistency="asynchronous"), when=LossStable()).
    Each phase has its own roles: a rank that is to become a server works in the first phase, and
    the data is shared out anew at the change. Phases may be switches again: Switch(Switch(a, b,
    when=x), c, when=y), or Switch(a, Switch(b, c, when=y), when=x), whose y begins after x.

    Workers that know the same of each step switch at the step that the rule says. Others report
    to the first one, which observes for all; they switch a few steps later, at one that none of
    them has passed.
    """

    use = "where the early steps need another strategy than the late ones"
    variants = (
        (
            'Switch(AllReduce("ring"), ParameterServer(consistency="asynchronous"), when='
            'LossStable(window=6, threshold=0.12, every=10), learning_rate="divided")',
            "for workers of unlike speed, once the loss is calm (Strategy-Switch)",
        ),
        (
            'Switch(AllReduce("ring"), LocalSGD(8), when=AfterFraction(0.5))',
            "for slow links, where local steps from the start lose accuracy (post-local SGD)",
        ),
    )

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
        for phase in (self.first, self.then):
            if phase.divides_model:
                raise InputError(
                    f"Switch: {phase!r} gives each rank a part of the model, which no other phase "
                    "can go on with: use it alone"
                )
        averages = (
            isinstance(self.first, AllReduce)
            and self.first.shard == "nothing"
            and not self.first.backup
        )
        if self.when.reads_gradients and not averages:
            raise InputError(
                f"Switch: when={self.when!r} needs whole averaged gradients, which first="
                f"{self.first!r} does not have; begin with AllReduce()"
            )

    @property
    def synchronous(self) -> bool:
        """Only if both phases are."""
        return self.first.synchronous and self.then.synchronous

    @property
    def depends_on_speed(self) -> bool:
        """As a phase does; and at what step an announced change comes."""
        phases = self.first.depends_on_speed or self.then.depends_on_speed
        return phases or self._announced

    @property
    def _announced(self) -> bool:
        """Whether workers report, and are told when to change; elsewhere all decide alike."""
        alike = self.first.synchronous and not self.when.compares_workers
        return not alike and not self.when.counts

    def roles(self, ranks: int) -> Roles:
        """Those of the first phase; the second's have to be possible too."""
        roles = self.first.roles(ranks)
        if len(self.then.roles(ranks).shares) != len(roles.shares):
            raise InputError(
                f"Switch: {self.first!r} and {self.then!r} run on different numbers of processes"
            )
        self._check_moments(roles, self.then.roles(ranks))
        return roles

    def footprint(self, rank: int, ranks: int) -> Footprint:
        """The most of each phase."""
        return self.first.footprint(rank, ranks).joined(self.then.footprint(rank, ranks), max)

    def _check_moments(self, first: Roles, then: Roles) -> None:
        if self.moments == "reset":
            return
        if self.moments == "kept" and self.then.synchronous and not self.first.synchronous:
            raise InputError(
                f"Switch: under first={self.first!r} each worker has moments of its own, and "
                f"then={self.then!r} needs equal ones: set moments='averaged' or 'reset'"
            )
        without = {*then.workers, *then.servers} - set(first.workers)
        if without or not self.first.hands_over_moments:
            raise InputError(
                f"Switch: under first={self.first!r} not every rank that updates later has the "
                f"optimizer's moments, so they cannot be {self.moments}: set moments='reset'"
            )

    def current_roles(self, worker: Worker, state: SwitchState) -> Roles:
        """The roles of the phase under way."""
        return self._phase(state).current_roles(worker, state.inner)

    @property
    def steps_together(self) -> bool:
        """In a phase at least."""
        return self.first.steps_together or self.then.steps_together

    def currently_together(self, state: SwitchState) -> bool:
        """As the phase under way does."""
        return self._phase(state).currently_together(state.inner)

    def currently_synchronous(self, state: SwitchState) -> bool:
        """As the phase under way is."""
        return self._phase(state).currently_synchronous(state.inner)

    def currently_lockstep(self, state: SwitchState) -> bool:
        """As the phase under way is; until the switch workers count the steps alike."""
        return not state.switched or self.then.currently_lockstep(state.inner)

    @property
    def self_paced(self) -> bool:
        """As the second phase is."""
        return self.then.self_paced

    def work(self, state: SwitchState) -> WorkSource | None:
        """That of the phase under way."""
        return self._phase(state).work(state.inner)

    def start(self, worker: Worker) -> SwitchState:
        """Start the first phase."""
        state = SwitchState(None, self.when.begin())
        state.queue_of, worker.queue_of = worker.queue_of, None
        state.inner = self.first.start(worker)
        self._watch(worker, state)
        return state

    def _watch(self, worker: Worker, state: SwitchState) -> None:
        """Where workers do not decide alike, begin to report."""
        if not self.first.synchronous and worker.rank == worker.workers.ranks[0]:
            worker.reporter.expendable(False)  # it announces the step to leave after
        if not self._announced or worker.rank not in worker.workers.ranks:
            return
        judge = _Judge(self.when, state.rule, worker)
        level = self.nesting + 1
        state.leaving = exchange.CommonStep(worker, steps=state.steps, level=level, judge=judge)
        state.seconds = _own_seconds(worker)
        worker.gradients.measures_square = self.when.reads_gradients

    @property
    def nesting(self) -> int:
        """How many switches may be waiting inside the first phase of this one."""
        return self.first.nesting + 1 if isinstance(self.first, Switch) else 0

    @property
    def hands_over_moments(self) -> bool:
        """As the second phase does."""
        return self.then.hands_over_moments

    @property
    def reads_loss(self) -> bool:
        """As `when` does."""
        return self.when.reads_loss

    @property
    def reads_values(self) -> bool:
        """If `when` or a phase does."""
        rule = self.when.reads_loss or self.when.reads_gradients
        return rule or self.first.reads_values or self.then.reads_values

    def before_forward(self, worker: Worker, state: SwitchState) -> None:
        """As the phase under way does."""
        self._phase(state).before_forward(worker, state.inner)

    def gradient(self, worker: Worker, state: SwitchState, batch: Batch | None) -> None:
        """As the phase under way does."""
        self._phase(state).gradient(worker, state.inner, batch)

    def reduce(self, worker: Worker, state: SwitchState) -> None:
        """As the phase under way does."""
        self._phase(state).reduce(worker, state.inner)

    def update(self, worker: Worker, state: SwitchState) -> None:
        """As the phase under way does; then, in the first, see whether it is over."""
        square = 0.0
        if not state.switched and self.when.reads_gradients:  # before it may be clipped
            square = float(worker.gradients.vector.double().square().sum())
        self._phase(state).update(worker, state.inner)
        if state.switched:
            return
        state.steps += 1
        if self._is_over(worker, state, square):
            self._switch(worker, state)

    def _is_over(self, worker: Worker, state: SwitchState, square: float) -> bool:
        if state.leaving is None:
            return self.when.observe(state.rule, worker.step)
        step, before = worker.step, state.seconds
        state.seconds = _own_seconds(worker)
        rate = step.rates[0] if step.rates else 0.0
        spent = state.seconds - before
        squares = (worker.gradients.square, square)
        report = (step.samples, step.loss, spent, rate, step.epoch, step.fraction, *squares)
        state.leaving.report(state.steps, *report)
        return state.leaving.reached(state.steps, wish=False)

    def _switch(self, worker: Worker, state: SwitchState) -> None:
        """Nothing in flight, parameters agreed, moments handed over, then the second phase."""
        if worker.rank in worker.workers.ranks:
            self.first.quiesce(worker, state.inner, CHANGED)
        self.first.stop(worker, state.inner)
        self._leave_together(worker, state)
        optimizer = self.first.optimizer_of(state.inner)
        if self.moments == "reset":
            if optimizer is not None:  # the user's own one goes on
                optimizer.state.clear()
        else:
            exchange.hand_over_moments(worker, optimizer, averaged=self.moments == "averaged")
        worker.measures.switched_at_step = state.steps
        self._begin_second(worker, state)
        state.inner = self.then.start(worker)

    def _leave_together(self, worker: Worker, state: SwitchState) -> None:
        """End the watch; agree on what workers at their own pace could not agree on before."""
        if state.leaving is not None:
            state.leaving.close()
            state.leaving = None
            worker.gradients.measures_square = False
        if self.first.synchronous:
            exchange.wait_for_everyone(worker)  # a server may still wait for one who is to leave
            return
        if not self.first.current_roles(worker, state.inner).servers:
            exchange.exact_mean_of_buffers(worker)
        worker.step.consumed = max(worker.step.consumed, worker.step.planned)

    def _begin_second(self, worker: Worker, state: SwitchState) -> None:
        first = len(worker.workers)
        roles = self.then.roles(worker.budget_ranks)
        worker.set_workers(roles.workers)
        worker.snapshots.skip(worker.step.consumed)
        worker.queue_of = state.queue_of
        if self.learning_rate == "divided":
            worker.rate_scale /= len(roles.workers)
        elif self.learning_rate == "multiplied":
            worker.rate_scale *= first
        state.switched = True

    def resume(self, worker: Worker, saved: Mapping[str, Any]) -> SwitchState:
        """Resume in the phase that the checkpoint was taken in."""
        state = SwitchState(None, self.when.begin(), steps=saved["steps"])
        optimizers.restore(state.rule, saved["rule"])
        if saved["switched"]:
            state.queue_of = worker.queue_of
            self._begin_second(worker, state)
            state.inner = self.then.resume(worker, saved["inner"])
        else:
            state.queue_of, worker.queue_of = worker.queue_of, None
            state.inner = self.first.resume(worker, saved["inner"])
            self._watch(worker, state)
        return state

    def serve(self, worker: Worker, state: SwitchState) -> Pause | None:
        """As the phase under way does; where its workers switch, this rank switches with them."""
        paused = self._phase(state).serve(worker, state.inner)
        if paused is not None and paused.step == CHANGED and not state.switched:
            self._switch(worker, state)
        return paused

    def quiesce(self, worker: Worker, state: SwitchState, step: int) -> bool:
        """As the phase under way does; what was reported is in the rule's state."""
        complete = self._phase(state).quiesce(worker, state.inner, step)
        if complete and state.leaving is not None:
            state.leaving.settle()
        return complete

    def agree(self, worker: Worker, state: SwitchState) -> None:
        """As the phase under way does."""
        self._phase(state).agree(worker, state.inner)

    def stop(self, worker: Worker, state: SwitchState) -> None:
        """Stop the phase under way."""
        self._phase(state).stop(worker, state.inner)
        if state.leaving is not None:
            state.leaving.close()

    def optimizer_of(self, state: SwitchState) -> Optimizer | None:
        """That of the phase under way."""
        return self._phase(state).optimizer_of(state.inner)

    def _phase(self, state: SwitchState) -> Strategy[Any]:
        return self.then if state.switched else self.first


def _own_seconds(worker: Worker) -> float:
    """What `worker` has needed so far, without waiting for others."""
    communicating = worker.transport.traffic.seconds_communicating
    return worker.compute.seconds + communicating + worker.measures.background_seconds


class _Judge:
    """The first worker's: puts the reports of all workers together, and lets the rule observe."""

    def __init__(self, rule: Rule, state: RuleState, worker: Worker) -> None:
        self._rule = rule
        self._state = state
        self._worker = worker
        self._reports: dict[int, dict[int, list[float]]] = {}

    def __call__(self, step: int, rank: int, report: list[float]) -> bool:
        """Whether the rule, with this report of `rank`, wants to switch."""
        reports = self._reports.setdefault(step, {})
        reports[rank] = report
        if set(self._worker.workers.ranks) - self._worker.transport.lost() - reports.keys():
            return False
        del self._reports[step]
        return self._rule.observe(self._state, _combined([reports[r] for r in sorted(reports)]))


def _combined(reports: list[list[float]]) -> Step:
    """A step as all workers know it together, from each one's report."""
    from orchestra.worker.worker import Step

    samples, losses, seconds, rates, epochs, fractions, own, mean = zip(*reports, strict=True)
    total = sum(samples)
    loss = sum(n * loss for n, loss in zip(samples, losses, strict=True)) / total if total else 0.0
    return Step(
        samples=int(total),
        total_samples=int(total),
        loss=loss,
        losses=losses,
        seconds=seconds,
        rates=(min(rates),),
        epoch=min(epochs),
        fraction=min(fractions),
        counts=tuple(map(int, samples)),
        squares=own,
        square=mean[0],
    )
