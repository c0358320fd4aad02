"""One strategy first, another later: Strategy-Switch and its kin."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from orchestra.errors import InputError
from orchestra.settings import setting
from orchestra.settings.base import REQUIRED
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Phased, Roles, Strategy
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.switch_rules import LossStable, Rule
from orchestra.strategies.traits import Partition, Traits, WorkMode


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
        entered = flattened_phases(self.then)[0]
        server_divides = isinstance(entered, ParameterServer) and entered.learning_rate == "divided"
        if self.learning_rate == "divided" and server_divides:
            raise InputError(
                f"Switch: learning_rate='divided' and {entered!r} would both divide the learning "
                "rate by the number of workers: leave it out of one of them"
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


def flattened_phases(strategy: Strategy) -> list[Strategy]:
    """Return the phases of a switch, also of switches in it, in order; else `strategy` itself."""
    if not isinstance(strategy, Switch):
        return [strategy]
    return [*flattened_phases(strategy.first), *flattened_phases(strategy.then)]
