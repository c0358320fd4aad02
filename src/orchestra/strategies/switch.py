"""One strategy first, another later: Strategy-Switch and its kin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

from orchestra import exchange, optimizers
from orchestra.errors import InputError
from orchestra.settings import setting
from orchestra.settings.base import REQUIRED
from orchestra.strategies.base import CHANGED, Roles, Strategy
from orchestra.strategies.switch_rules import LossStable, Rule, RuleState

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.parameter_server import Pause
    from orchestra.worker.batches import Batch
    from orchestra.worker.worker import Worker


@dataclass
class SwitchState:
    """The state of the phase under way; `rule` is what `when` remembers."""

    inner: Any
    rule: RuleState
    switched: bool = False


@dataclass(frozen=True, repr=False)
class Switch(Strategy[SwitchState]):
    """Train with `first` until `when` says so, with `then` from there on.

    Strategy-Switch (Provatas et al., IEEE Access 2025) is
    Switch(AllReduce("ring"), ParameterServer(consistency="asynchronous"), when=LossStable()).
    Each phase has its own roles: a rank that is to become a server works in the first phase, and
    the data is shared out anew at the change.
    """

    first: Strategy[Any] = setting(REQUIRED, "the strategy of the first phase; synchronous")
    then: Strategy[Any] = setting(REQUIRED, "the strategy of the second phase")
    _: KW_ONLY
    when: Rule = setting(LossStable(), "the rule that ends the first phase")
    learning_rate: Literal["kept", "divided"] = setting(
        "kept", "divided: by the number of workers of the second phase, to damp staleness"
    )
    moments: Literal["kept", "averaged", "reset"] = setting(
        "kept", "what the second phase inherits of the moments of the first phase's workers"
    )

    def check(self) -> None:
        """The rule needs a loss that all workers agree on in every step."""
        if not self.first.synchronous:
            raise InputError(
                f"Switch: first={self.first!r} is not synchronous, so its workers have no common "
                "step to switch at; begin with AllReduce, Single or a synchronous ParameterServer"
            )

    @property
    def synchronous(self) -> bool:
        """Only if both phases are."""
        return self.first.synchronous and self.then.synchronous

    def roles(self, ranks: int) -> Roles:
        """Those of the first phase; the second's have to be possible too."""
        roles = self.first.roles(ranks)
        if len(self.then.roles(ranks).shares) != len(roles.shares):
            raise InputError(
                f"Switch: {self.first!r} and {self.then!r} run on different numbers of processes"
            )
        self._check_moments(roles, self.then.roles(ranks))
        return roles

    def _check_moments(self, first: Roles, then: Roles) -> None:
        if self.moments == "reset":
            return
        without = {*then.workers, *then.servers} - set(first.workers)
        if without or not self.first.hands_over_moments:
            raise InputError(
                f"Switch: under first={self.first!r} not every rank that updates later has the "
                f"optimizer's moments, so they cannot be {self.moments}: set moments='reset'"
            )

    def current_roles(self, worker: Worker, state: SwitchState) -> Roles:
        """The roles of the phase under way."""
        return self._phase(state).current_roles(worker, state.inner)

    def currently_synchronous(self, state: SwitchState) -> bool:
        """As the phase under way is."""
        return self._phase(state).currently_synchronous(state.inner)

    def currently_lockstep(self, state: SwitchState) -> bool:
        """As the phase under way is."""
        return self._phase(state).currently_lockstep(state.inner)

    def start(self, worker: Worker) -> SwitchState:
        """Start the first phase."""
        return SwitchState(self.first.start(worker), RuleState())

    @property
    def hands_over_moments(self) -> bool:
        """As the second phase does."""
        return self.then.hands_over_moments

    @property
    def reads_loss(self) -> bool:
        """As `when` does."""
        return self.when.reads_loss

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
        self._phase(state).update(worker, state.inner)
        if not state.switched and self.when.observe(state.rule, worker.step):
            self._switch(worker, state)

    def _switch(self, worker: Worker, state: SwitchState) -> None:
        """Nothing in flight, parameters agreed, moments handed over, then the second phase."""
        if worker.rank in worker.workers.ranks:
            self.first.quiesce(worker, state.inner, CHANGED)
        self.first.stop(worker, state.inner)
        if self.moments != "reset":
            optimizer = self.first.optimizer_of(state.inner)
            exchange.hand_over_moments(worker, optimizer, averaged=self.moments == "averaged")
        worker.measures.switched_at_step = state.rule.steps
        self._begin_second(worker, state)

    def _begin_second(self, worker: Worker, state: SwitchState) -> None:
        roles = self.then.roles(worker.budget_ranks)
        worker.set_workers(roles.workers)
        worker.snapshots.skip(worker.step.consumed)
        if self.learning_rate == "divided":
            worker.rate_scale /= len(roles.workers)
        state.inner = self.then.start(worker)
        state.switched = True

    def resume(self, worker: Worker, saved: Mapping[str, Any]) -> SwitchState:
        """Resume in the phase that the checkpoint was taken in."""
        if not saved["switched"]:
            state = SwitchState(self.first.resume(worker, saved["inner"]), RuleState())
        else:
            state = SwitchState(None, RuleState())
            self._begin_second(worker, state)
            optimizers.restore(state.inner, saved["inner"])
        optimizers.restore(state.rule, saved["rule"])
        return state

    def serve(self, worker: Worker, state: SwitchState) -> Pause | None:
        """As the phase under way does; where its workers switch, this rank switches with them."""
        paused = self._phase(state).serve(worker, state.inner)
        if paused is not None and paused.step == CHANGED and not state.switched:
            self._switch(worker, state)
        return paused

    def quiesce(self, worker: Worker, state: SwitchState, step: int) -> bool:
        """As the phase under way does."""
        return self._phase(state).quiesce(worker, state.inner, step)

    def agree(self, worker: Worker, state: SwitchState) -> None:
        """As the phase under way does."""
        self._phase(state).agree(worker, state.inner)

    def stop(self, worker: Worker, state: SwitchState) -> None:
        """Stop the phase under way."""
        self._phase(state).stop(worker, state.inner)

    def optimizer_of(self, state: SwitchState) -> Optimizer | None:
        """That of the phase under way."""
        return self._phase(state).optimizer_of(state.inner)

    def _phase(self, state: SwitchState) -> Strategy[Any]:
        return self.then if state.switched else self.first
