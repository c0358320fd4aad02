"""Asynchronous elastic averaging: replicas that servers hold together, each at its own pace."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, optimizers, parameter_server
from orchestra.settings import MAX_RANKS, MAX_STEPS, setting
from orchestra.strategies.base import Roles, replica_memory, roles_of
from orchestra.strategies.server_strategy import (
    NOTHING,
    ServerStrategy,
    ServerStrategyState,
    placed_roles,
)  # fmt: skip
from orchestra.strategies.traits import Dealing, Footprint, Pace, Traits, WorkMode

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.exchange import Learnt
    from orchestra.worker.worker import Worker


@dataclass
class ElasticAveragingState(ServerStrategyState):
    """The state of a worker; a server's is that of every `ServerStrategy`."""

    clock: int = 0  # t
    samples: int = 0  # since the last exchange
    velocity: Tensor | None = None  # v (EAMSGD)
    # alpha (x - c) of the step under way, where it has an exchange
    force: Tensor | None = field(default=None, metadata=optimizers.TRANSIENT)
    begun: bool = field(default=False, metadata=optimizers.TRANSIENT)  # a step
    work: exchange.SharedWork | None = field(default=None, metadata=optimizers.TRANSIENT)
    # x while the model shows the centre, between two epochs of a loop of the user's own
    own: Tensor | None = field(default=None, metadata=optimizers.TRANSIENT)


@dataclass(frozen=True, repr=False)
class ElasticAveraging(ServerStrategy[ElasticAveragingState]):
    """Each worker trains alone, and is pulled to a common centre that it pulls, too.

    Asynchronous EASGD and EAMSGD (Zhang, Choromanska and LeCun, NeurIPS 2015), Algorithms 1 and 2;
    the latter where `momentum` is above 0, as in the authors' code (optim-eamsgd.lua of
    sixin-zh/mpiT). The servers own the centre c. Worker i with parameters x, clock t from 0:

        if tau divides t:  d <- alpha (x - c), c <- c + d;  else d <- 0
        v <- delta v - eta g_i(x + delta v);  x <- x + v - d;  t <- t + 1

    so gradient and elastic force are those of one x. alpha is beta / p for p workers. An exchange
    is between one worker and the servers, each of which takes one after the other; no worker waits
    for another. eta g_i is the step of whatever optimizer is set: SGD without momentum in the
    paper. The centre is the model that is evaluated, and the final one. `LocalSGD(outer=Elastic())`
    is the synchronous variant.
    """

    use = "for workers of unlike speed and slow links: nobody waits, and an exchange is rare"
    variants = (
        ("ElasticAveraging(10)", use),
        ("ElasticAveraging(10, momentum=0.9)", "the same, with momentum on each worker (EAMSGD)"),
    )

    every: int = setting(
        10, "tau: steps of a worker from one exchange to the next", low=1, high=MAX_STEPS
    )
    _: KW_ONLY
    beta: float = setting(
        0.9, "pull of all workers on the centre; alpha is beta / p", above=0, high=1
    )
    momentum: float = setting(0.0, "delta: of Nesterov's momentum on each worker", low=0, high=1)
    servers: int = setting(
        1, "servers that the centre is cut over, balanced by bytes", low=1, high=MAX_RANKS
    )
    placement: Literal["dedicated", "beside"] = setting(
        "dedicated", "servers on the last ranks, without data; or beside the first workers"
    )

    def traits(self, work: WorkMode = "shared") -> Traits:
        return Traits(self._memory, Pace.FREE, Dealing.QUEUE if work == "shared" else Dealing.PLAN)

    def work(self, state: ElasticAveragingState) -> exchange.SharedWork | None:
        return state.work

    def roles(self, ranks: int) -> Roles:
        """Dedicated servers come out of the budget of ranks; servers beside workers do not."""
        return placed_roles("ElasticAveraging", ranks, self.servers, self.placement)

    def _memory(self, rank: int, ranks: int) -> Footprint:
        """Add a worker's elastic force and v, and a server's slice and the pushes it holds."""
        roles = roles_of(self, ranks)
        own = NOTHING
        if rank in roles.workers:
            copies = 2.0 if self.momentum else 1.0
            own = replace(replica_memory(self, rank, ranks), copies=copies)
        if rank not in roles.servers:
            return own
        part = 1 / self.servers
        served = Footprint(part, part, 0.0, part * len(roles.workers), 0.0)
        return own.joined(served, operator.add)

    def start(self, worker: Worker) -> ElasticAveragingState:
        """Begin with the parameters of the first rank, on workers and in the centre."""
        exchange.agree_on_parameters(worker)
        roles = self.roles(worker.budget_ranks)
        state = ElasticAveragingState(exchange.slices_of(worker, roles.servers, updates=False))
        if worker.rank in roles.servers:
            rules = exchange.ServerRules(
                parameter_server.Asynchronous(), parameter_server.ElasticCentre
            )
            state.server = exchange.make_server(worker, state.slices, roles.workers, rules)
        if worker.rank in roles.workers:
            state.client = parameter_server.Client(worker.transport, state.slices)
            state.optimizer = worker.local_optimizer()
            if self.momentum:
                state.velocity = worker.parameters.new_zeros(worker.parameters.shape)
            if state.server is not None:
                state.flow = worker.transport.spawn(state.server.serve_to_the_end)
        holder = roles.servers[0]
        state.work = exchange.share_work(worker, roles.shares, holder=holder, expendable=True)
        worker.reporter.expendable(worker.rank not in roles.servers)
        return state

    def before_forward(self, worker: Worker, state: ElasticAveragingState) -> None:
        """Exchange if it is time; then, under EAMSGD, move to where the gradient is taken."""
        if state.own is not None:
            worker.parameters.copy_(state.own)
        state.own = state.force = None
        state.begun = True
        if state.clock % self.every == 0:
            state.force = worker.parameters.new_empty(worker.parameters.shape)
            answers = self._push(worker, state, self.beta / len(worker.workers), state.force)
            step = worker.step
            step.consumed += step.total_samples  # as if all took the step that begins
            step.staleness = tuple(answer.staleness for answer in answers)
            worker.measures.count_staleness(step.staleness)
        if (v := state.velocity) is not None:
            x = worker.parameters
            exchange.charge(worker, "mix", x.numel(), lambda: x.add_(v, alpha=self.momentum))

    def _push(
        self, worker: Worker, state: ElasticAveragingState, alpha: float, into: Tensor
    ) -> list[parameter_server.Answer]:
        """Let the servers set c <- c + alpha (x - c); write alpha (x - c) into flat `into`."""
        assert state.client is not None
        step, used = worker.step, (True,) * len(worker.layout.slots)
        push = parameter_server.Push(
            worker.rank, state.client.clock + 1, state.samples, state.samples, step.loss, step.stop,
            (alpha,), used,
        )  # fmt: skip
        answers = state.client.push(push, worker.parameters, into)
        state.samples = 0
        worker.step.consumed = max(answer.consumed for answer in answers)
        return answers

    def reduce(self, worker: Worker, state: ElasticAveragingState) -> None:
        exchange.keep_gradient(worker)

    def update(self, worker: Worker, state: ElasticAveragingState) -> None:
        """Take a local step, and add the elastic force of where it began."""
        assert state.optimizer is not None
        worker.clip()
        x, v, force = worker.parameters, state.velocity, state.force
        charge = functools.partial(exchange.charge, worker, "mix", x.numel())
        if v is not None:  # x is at x + delta v: v becomes what x moves by without the force
            charge(lambda: v.mul_(self.momentum).sub_(x))
        worker.update_locally(state.optimizer)
        if v is not None:
            # v = delta v - (x + delta v) + (x + delta v - eta g) = delta v - eta g.
            charge(lambda: v.add_(x))
        if force is not None:
            charge(lambda: x.sub_(force))
        state.force, state.begun = None, False
        state.clock += 1
        state.samples += worker.step.samples

    def quiesce(self, worker: Worker, state: ElasticAveragingState, step: int) -> bool:
        """Wait until every exchange is over and every worker is here."""
        self._take_back(worker, state)
        self._account(worker, state)
        return super().quiesce(worker, state, step)

    def learnt(self, worker: Worker, state: ElasticAveragingState) -> Iterable[Learnt]:
        """Return the centre, which everybody's model shows until a worker goes on from its own."""
        if state.client is not None:
            state.own = worker.parameters.clone()
        return super().learnt(worker, state)

    def stop(self, worker: Worker, state: ElasticAveragingState) -> None:
        if state.client is not None:
            self._account(worker, state)
        if state.work is not None:
            state.work.close()
        super().stop(worker, state)

    def _take_back(self, worker: Worker, state: ElasticAveragingState) -> None:
        """End a step that has begun without an update: x keeps what it gave to the centre only."""
        x = worker.parameters
        if state.begun and state.velocity is not None:
            x.sub_(state.velocity, alpha=self.momentum)
        if state.force is not None:
            x.sub_(state.force)
        state.force, state.begun = None, False

    def _account(self, worker: Worker, state: ElasticAveragingState) -> None:
        """Tell the servers of the samples since the last exchange, with alpha = 0."""
        if state.samples:
            nothing = worker.parameters.new_empty(worker.parameters.shape)
            # Nothing moves, and servers and workers agree on what was consumed.
            self._push(worker, state, 0.0, nothing)
