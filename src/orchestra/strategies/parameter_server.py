"""Parameter servers (Li et al., OSDI 2014): parameters in slices, each owned by one server."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from orchestra import exchange
from orchestra.compression.base import Compressor
from orchestra.errors import InputError
from orchestra.parameter_server.how import (
    AdaptiveDelayCompensation,
    Application,
    Correction,
    DelayCompensation,
    DividedByStaleness,
    DividedByWorkers,
    GradientsBack,
    OptimizerStep,
)
from orchestra.parameter_server.placement import parts_by_links
from orchestra.parameter_server.when import (
    Asynchronous,
    Bounded,
    FirstArrivals,
    Synchronous,
    When,
)
from orchestra.settings import MAX_RANKS, MAX_STEPS, setting
from orchestra.strategies.base import Roles, Strategy, replica_memory, roles_of
from orchestra.strategies.server_members import (
    AsynchronousWorker,
    AveragingWorker,
    BackupWorker,
    DedicatedServer,
    ServedMember,
    SynchronousWorker,
)
from orchestra.strategies.server_strategy import (
    NOTHING,
    contradictions,
    contradictions_with,
    placed_roles,
)
from orchestra.strategies.traits import (
    AfterLoss,
    Dealing,
    Footprint,
    Pace,
    Partition,
    Rehearsal,
    Traits,
    WorkMode,
)

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.exchange.servers import ServerRules
    from orchestra.parameter_server.placement import Slice
    from orchestra.worker.worker import Worker


@dataclass(frozen=True, repr=False)
class ParameterServer(Strategy):
    """Workers push gradients to servers, which update their slices, and pull parameters.

    What to use when (`consistency`):

    synchronous   one update a step, from the average over all workers; as exact as all-reduce.
                  For workers of equal speed, where the servers have the memory or the links
    synchronous, backup=b   the first gradients make the step, the b late ones are dropped (Chen
                  et al., 2016). For many workers that are slow by turns: who always is slow
                  contributes nothing
    asynchronous  one update a push, on arrival: nobody waits. For workers of unlike speed; the
                  more of them, the more updates lie between a gradient's read and its write
                  (its staleness), and the more accuracy that costs
    bounded       as asynchronous, but nobody is more than `staleness` steps ahead of the slowest
                  (stale synchronous parallel; Ho et al., NIPS 2013). For speeds that change.
                  staleness=0 is synchronous, in everything
    Buffered(K)   one update from every K pushes, from any workers, and nobody waits (FedBuff;
                  Nguyen et al., AISTATS 2022). For many workers of unlike speed: an average of K
                  stale gradients has less noise than each of them

    Against staleness, where each push is applied on arrival: learning_rate="divided" by the
    workers, which makes a round of pushes as large as one synchronous step; "by_staleness" (alpha /
    tau; Zhang et al., IJCAI 2016), where few gradients are very stale. `delay_compensation`
    (DC-ASGD; Zheng et al., ICML 2017) gives the optimizer g + lambda g*g*(w - w_read) in place of
    g, for one more copy of the model a worker: lambda is "constant" (DC-ASGD-c), or "adaptive"
    (DC-ASGD-a), lambda0 / sqrt(mean square of g), for one copy more.

    With replicas=1 the run survives the death of a server, without the loss of any push that was
    answered: the next server holds the same slice, is passed on each push before it is answered,
    and serves the slice from then on. A server then sends and updates twice as much, and a push
    waits for two servers. Another death ends the run where it takes the last replica of a slice.
    The first worker (beside: the first one without a server) evaluates, and cannot be lost.

    With `compression` pushes travel compressed, and values as they are.
    """

    use = "for a server with memory or links to spare; asynchronous for workers of unlike speed"
    variants = (
        ("ParameterServer()", "for workers of equal speed, and a rank to spare"),
        ('ParameterServer(placement="beside")', "the same without a rank to spare"),
        (
            'ParameterServer(placement="beside", returns="gradients")',
            "for optimizers that no slice can run",
        ),
        ("ParameterServer(backup=1)", "for many workers that are slow by turns"),
        ('ParameterServer(consistency="asynchronous")', "for unlike speeds: nobody waits"),
        (
            'ParameterServer(consistency="asynchronous", placement="beside")',
            "the same without a rank to spare",
        ),
        (
            'ParameterServer(consistency="asynchronous", learning_rate="by_staleness")',
            "where a few gradients are very stale",
        ),
        (
            'ParameterServer(consistency="bounded", staleness=1)',
            "for speeds that change: nobody is far ahead",
        ),
        (
            'ParameterServer(consistency="asynchronous", delay_compensation="constant")',
            "where staleness costs accuracy, and memory is there for one more copy",
        ),
        (
            'ParameterServer(consistency="asynchronous", delay_compensation="adaptive")',
            "the same, where gradients differ much in size; two more copies",
        ),
        (
            "ParameterServer(consistency=Buffered(2), learning_rate=PolynomialStaleness(0.5))",
            "for unlike speeds: an update averages several stale gradients (FedBuff)",
        ),
        ("ParameterServer(servers=2, replicas=1)", "for long runs, where a server may die"),
    )  # fmt: skip

    _: KW_ONLY
    servers: int = setting(
        1, "servers that the parameters are cut over, balanced by bytes", low=1, high=MAX_RANKS
    )
    slices: tuple[float, ...] | Literal["links"] | None = setting(
        None,
        "weight of each server's slice; links: by the bandwidth of its link, where the cluster is "
        "described; equal if none", low=1e-12, high=1e12, above=0,
    )  # fmt: skip
    consistency: Literal["synchronous", "asynchronous", "bounded"] | When = setting(
        "synchronous",
        "whether a pull waits for the pushes of all workers, or how far for them; or a rule, as "
        "Buffered(4)",
    )
    staleness: int | None = setting(
        None, "with bounded: steps a worker may be ahead of the slowest", low=0, high=MAX_STEPS
    )
    placement: Literal["dedicated", "beside"] = setting(
        "dedicated", "servers on the last ranks, without data; or beside the first workers"
    )
    returns: Literal["parameters", "gradients"] = setting(
        "parameters", "gradients: servers only average, and each worker runs the optimizer"
    )
    backup: int = setting(
        0, "workers not waited for: the first N - backup make the average", low=0, high=MAX_RANKS
    )
    learning_rate: Literal["kept", "divided", "by_staleness"] | Correction = setting(
        "kept",
        "of a push: divided by the number of workers, or by its staleness if above 0; or a rule, "
        "as PolynomialStaleness(0.5)",
    )
    delay_compensation: Literal["none", "constant", "adaptive"] = setting(
        "none", "what the gradient's square times the delay is weighted with"
    )
    lambda0: float | None = setting(
        None, "strength of delay compensation; none: 0.04 constant, 2 adaptive", low=0, high=1e9
    )
    mean_square: float | None = setting(
        None, "m, adaptive: what the mean square keeps in a push; none: 0.95", low=0, high=1
    )
    replicas: int = setting(
        0,
        "further copies of each slice, on the next server: the run survives a server",
        low=0,
        high=1,
    )
    compression: Compressor | None = setting(
        None, "what pushes are compressed by, as TopK(0.01); none: not at all"
    )

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        for message in contradictions(self):
            raise InputError(f"ParameterServer: {message}")

    @property
    def averages(self) -> bool:
        """True if a step has one update, an average over workers."""
        return self.when(1).averages

    def traits(self, work: WorkMode = "shared") -> Traits:
        beside, lockstep = self.placement == "beside", self.when(1).lockstep
        rehearsed = lockstep and beside and not self.replicas and self.compression is None
        queued = work == "shared" and not self.averages
        return Traits(
            self._memory,
            Pace.LOCKSTEP if lockstep else Pace.FREE,
            Dealing.QUEUE if queued else Dealing.PLAN,
            answers_beside=beside and not lockstep,
            optimizer=Partition.REPLICATED if self.returns == "gradients" else Partition.SHARDED,
            exchange=Rehearsal(repr(self), self._rehearse) if rehearsed else None,
            after_loss=self._after_loss(lockstep=lockstep, queued=queued),
        )

    def _after_loss(self, *, lockstep: bool, queued: bool) -> AfterLoss:
        if lockstep:
            return AfterLoss.CHECKPOINT if self.replicas else AfterLoss.HANDED_OVER
        # What workers know of a queue is enough if an answer says that the push is applied. Beside
        # a server a lost rank holds a batch, which the others do not know.
        known = queued and self.when(1).applies_singly and self.placement == "dedicated"
        return AfterLoss.IN_PLACE_HANDED_OVER if known and not self.replicas else AfterLoss.IN_PLACE

    def roles(self, ranks: int) -> Roles:
        """Dedicated servers come out of the budget of ranks; servers beside workers do not."""
        roles = placed_roles("ParameterServer", ranks, self.servers, self.placement, self.replicas)
        if self.backup >= len(roles.workers):
            raise InputError(
                f"ParameterServer: {self.backup} backup workers of {len(roles.workers)} leave none "
                "to wait for: raise ranks or lower backup"
            )
        return roles

    def _memory(self, rank: int, ranks: int) -> Footprint:
        """A server has slices: values, their sum of gradients, and for each worker its last push
        and what delay compensation needs. Optimizer states are where the updates are. Parameters
        arrive in a copy, where a worker pulls while it computes."""
        roles, updates = roles_of(self, ranks), self.returns == "parameters"
        whole = NOTHING
        if rank in roles.workers:
            copies = 1.0 if updates and not self.replicas else 0.0  # that arrive
            if self.compression is not None:
                copies = self.compression.footprint
            optimizer = 0.0 if updates else 1.0
            whole = replace(replica_memory(self, rank, ranks), optimizer=optimizer, copies=copies)
        if rank not in roles.servers:
            return whole
        weights = self.slices if isinstance(self.slices, tuple) else (1.0,) * self.servers
        held = [weights[roles.servers.index(rank) - k] for k in range(1 + self.replicas)]
        part = sum(held) / sum(weights)
        kept = sum(
            correction.copies for correction in self.corrections(len(roles.workers)).values()
        )
        pushes = len(roles.workers) * (1 + kept)
        served = Footprint(part, part, part if updates else 0.0, part * pushes, 0.0)
        return whole.joined(served, operator.add)

    def _rehearse(self, worker: Worker, values: Tensor) -> None:
        slices = self._slices(worker, self.roles(worker.budget_ranks))
        exchange.push_and_pull_once(worker, slices, values)

    def member(self, worker: Worker) -> ServedMember[Any]:
        """Each server takes its slice."""
        for message in contradictions_with(self, worker):
            raise InputError(f"ParameterServer: {message}")
        roles = self.roles(worker.budget_ranks)
        slices = self._slices(worker, roles)
        rules = self._rules(worker, roles, slices)
        kind = exchange.ReplicatedConnection if self.replicas else exchange.Connection
        connection = kind(worker, slices, roles.workers, roles.leader, rules)
        if worker.rank not in roles.workers:
            return DedicatedServer(self, worker, connection)
        if self.returns == "gradients":
            return AveragingWorker(self, worker, connection, worker.local_optimizer())
        if rules.when.lockstep:
            return SynchronousWorker(self, worker, connection)
        if rules.when.averages:
            return BackupWorker(self, worker, connection)
        return AsynchronousWorker(self, worker, connection)

    def _slices(self, worker: Worker, roles: Roles) -> list[Slice]:
        updates, weights = self.returns == "parameters", self._weights(worker, roles)
        return exchange.slices_of(worker, roles.servers, updates=updates, weights=weights)

    def _weights(self, worker: Worker, roles: Roles) -> Sequence[float]:
        """Return the weight of each server's slice, or none where all are equal."""
        if self.slices != "links":
            return self.slices or ()
        bandwidths = worker.runtime.bandwidths
        if not bandwidths:
            raise InputError(
                "ParameterServer: slices='links' needs an engine that knows the links, simulation "
                "or emulation: give weights, such as what orchestra calibrate --links tells"
            )
        own, each, least, workers = 0.0, 1.0, 0.0, len(roles.workers)
        if self.placement == "beside" and self.traits().lockstep:
            least = 1 / workers  # with less than that a link's own pushes and pulls take longer
        elif self.placement == "beside":
            own, each = 1.0, max(workers - 2, 1)  # pushes and answers pass each other all the time
        return parts_by_links([bandwidths[rank] for rank in roles.servers], own, each, least)

    def _rules(self, worker: Worker, roles: Roles, slices: Sequence[Slice]) -> ServerRules:
        updates, workers = self.returns == "parameters", len(roles.workers)
        when = self.when(workers)
        corrections = tuple(self.corrections(workers).values())
        # Replicas take whole pushes, and what is compressed goes slice by slice.
        whole = self.replicas or self.compression is not None
        parts = [] if whole else exchange.parts_of(worker, slices)
        # Corrections need whole pushes.
        stepwise = (worker.optimizer.elementwise or not updates) and not corrections
        return exchange.ServerRules(
            when,
            self.application,
            corrections,
            clips=updates and when.averages,
            queue_shares=None if when.averages else roles.shares,
            compression=self.compression,
            parts=parts,
            apply_per_part=when.lockstep and stepwise and bool(parts),
        )

    def when(self, workers: int) -> When:
        """Return when servers apply the pushes of so many workers, and answer them."""
        if isinstance(self.consistency, When):
            return self.consistency
        if self.consistency == "synchronous" or self.staleness == 0:
            count = max(workers - self.backup, 1)
            return FirstArrivals(count) if self.backup else Synchronous()
        return Asynchronous() if self.staleness is None else Bounded(self.staleness)

    @property
    def application(self) -> type[Application]:
        """What applies updates on the servers."""
        return OptimizerStep if self.returns == "parameters" else GradientsBack

    def corrections(self, workers: int) -> dict[str, Correction]:
        """Return how servers correct the pushes of so many workers for their staleness.

        Each is found by the setting that asks for it.
        """
        corrections: dict[str, Correction] = {}
        given = {"lambda0": self.lambda0, "mean_square": self.mean_square}
        own = {name: value for name, value in given.items() if value is not None}
        setting = f"delay_compensation={self.delay_compensation!r}"
        if self.delay_compensation == "constant":
            corrections[setting] = DelayCompensation(**own)
        elif self.delay_compensation == "adaptive":
            corrections[setting] = AdaptiveDelayCompensation(**own)
        setting = f"learning_rate={self.learning_rate!r}"
        if isinstance(self.learning_rate, Correction):
            corrections[setting] = self.learning_rate
        elif self.learning_rate == "divided":
            corrections[setting] = DividedByWorkers(workers)
        elif self.learning_rate == "by_staleness":
            corrections[setting] = DividedByStaleness()
        return corrections
