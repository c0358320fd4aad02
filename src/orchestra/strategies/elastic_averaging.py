"""Asynchronous elastic averaging: replicas that servers hold together, each at its own pace."""

from __future__ import annotations

import functools
import operator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, parameter_server
from orchestra.parameter_server.how import ElasticCentre
from orchestra.parameter_server.when import Asynchronous
from orchestra.settings import MAX_RANKS, MAX_STEPS, setting
from orchestra.strategies.base import Roles, Strategy, replica_memory, roles_of, torch
from orchestra.strategies.server_members import ServedMember
from orchestra.strategies.server_strategy import NOTHING, placed_roles
from orchestra.strategies.traits import AfterLoss, Dealing, Footprint, Pace, Traits, WorkMode

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import Kept, SharedWork
    from orchestra.parameter_server import Answer
    from orchestra.worker.worker import Worker


@dataclass(frozen=True, repr=False)
class ElasticAveraging(Strategy):
    """Each worker trains alone, and is pulled to a common centre that it pulls, too.

    Asynchronous EASGD and EAMSGD (Zhang, Choromanska and LeCun, NeurIPS 2015), Algorithms 1 and 2;
    the latter where `momentum` is above 0, as in the authors' code (optim-eamsgd.lua of
    sixin-zh/mpiT). The servers own the centre c. Worker i with parameters x, clock t from 0:

        if tau divides t:  d <- alpha (x - c), c <- c + d;  else d <- 0
        v <- delta v - eta g_i(x + delta v);  x <- x + v - d;  t <- t + 1

    so gradient and elastic force are those of one x. alpha is beta / p for p workers. An exchange
    is between one worker and the servers. A server serves one exchange after the other; no worker
    waits for another worker's. eta g_i is the step of whatever optimizer is set: SGD without
    momentum in the paper. The centre is the model that is evaluated, and the final one.
    `LocalSGD(outer=Elastic())` is the synchronous variant.
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
        dealing = Dealing.QUEUE if work == "shared" else Dealing.PLAN
        return Traits(self._memory, Pace.FREE, dealing, after_loss=AfterLoss.IN_PLACE)

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

    def member(self, worker: Worker) -> ElasticServer | ElasticWorker:
        roles = self.roles(worker.budget_ranks)
        slices = exchange.slices_of(worker, roles.servers, updates=False)
        rules = exchange.ServerRules(Asynchronous(), ElasticCentre)
        connection = exchange.Connection(worker, slices, roles.workers, roles.leader, rules)
        if worker.rank not in roles.workers:
            return ElasticServer(self, worker, connection)
        member = ElasticWorker(self, worker, connection, worker.local_optimizer())
        if self.momentum:
            member.velocity = worker.parameters.new_zeros(worker.parameters.shape)
        return member


@dataclass(eq=False)
class ElasticMember(ServedMember[ElasticAveraging]):
    """`queue` is this rank's end of the queue of batches, which the first server holds."""

    queue: SharedWork | None = field(init=False, default=None)

    def open(self, *, fresh: bool) -> None:
        """Connect, and open the queue of batches on the first server."""
        super().open(fresh=fresh)
        if self.queue is None:
            roles = roles_of(self.strategy, self.worker.budget_ranks)
            holder, shares = roles.servers[0], roles.shares
            self.queue = exchange.share_work(self.worker, shares, holder, expendable=True)
            self.worker.source = self.queue

    def rest(self, rest: Rest) -> Kept:
        """Wait until every exchange is over and every worker is here."""
        queue = self.queue
        if queue is not None and rest.reason.ends:
            queue.close()
            self.queue = None
        return replace(super().rest(rest), owes=queue is not None and queue.owes)


@dataclass(eq=False)
class ElasticServer(ElasticMember):
    """A server without data."""

    def update(self) -> None:
        raise AssertionError("a rank without data takes no steps")


@dataclass(eq=False)
class ElasticWorker(ElasticMember):
    """A worker's replica x, which the centre pulls, and which pulls the centre."""

    optimizer: Optimizer
    clock: int = 0  # t
    samples: int = 0  # since the last exchange
    velocity: Tensor | None = None  # v (EAMSGD)
    # alpha (x - c) of the step under way, where it has an exchange
    force: Tensor | None = field(init=False, default=None)
    begun: bool = field(init=False, default=False)  # a step
    # x while the model shows the centre, between two epochs of a loop of the user's own
    own: Tensor | None = field(init=False, default=None)

    def begin(self) -> None:
        """Exchange if it is time; then, under EAMSGD, move to where the gradient is taken."""
        worker = self.worker
        if self.own is not None:
            worker.parameters.copy_(self.own)
        self.own = self.force = None
        self.begun = True
        if self.clock % self.strategy.every == 0:
            self.force = torch.empty_like(worker.parameters)
            answers = self._push(self.strategy.beta / len(worker.workers), self.force)
            step = worker.step
            step.consumed += step.total_samples  # as if all took the step that begins
            step.staleness = tuple(answer.staleness for answer in answers)
            worker.measures.count_staleness(step.staleness)
        if (v := self.velocity) is not None:
            x, delta = worker.parameters, self.strategy.momentum
            exchange.charge(worker, "mix", x.numel(), lambda: x.add_(v, alpha=delta))

    def _push(self, alpha: float, into: Tensor) -> list[Answer]:
        """Let the servers set c <- c + alpha (x - c); write alpha (x - c) into flat `into`."""
        worker, channel = self.worker, self.channel
        step, used = worker.step, (True,) * len(worker.layout.slots)
        push = parameter_server.Push(
            worker.rank, channel.clock + 1, self.samples, self.samples, step.loss, step.stop,
            (alpha,), used,
        )  # fmt: skip
        answers = channel.exchange(push, worker.parameters, into)
        self.samples = 0
        worker.step.consumed = max(answer.consumed for answer in answers)
        return answers

    def exchange(self) -> None:
        """Keep the gradient on this worker."""
        exchange.keep_gradient(self.worker)

    def update(self) -> None:
        """Take a local step, and add the elastic force of where it began."""
        worker = self.worker
        worker.clip()
        x, v, force = worker.parameters, self.velocity, self.force
        charge = functools.partial(exchange.charge, worker, "mix", x.numel())
        if v is not None:  # x is at x + delta v: v becomes what x moves by without the force
            charge(lambda: v.mul_(self.strategy.momentum).sub_(x))
        worker.update_locally(self.optimizer)
        if v is not None:
            # v = delta v - (x + delta v) + (x + delta v - eta g) = delta v - eta g.
            charge(lambda: v.add_(x))
        if force is not None:
            charge(lambda: x.sub_(force))
        self.force, self.begun = None, False
        self.clock += 1
        self.samples += worker.step.samples

    def rest(self, rest: Rest) -> Kept:
        """End the step, tell of the samples since the last exchange, and wait for the others.

        Where all take the centre, the model shows it until this worker goes on from its own.
        """
        self._take_back()
        self._account()
        if rest.reason.takes_model:
            self.own = self.worker.parameters.clone()
        return super().rest(rest)

    def _take_back(self) -> None:
        """End a step that has begun without an update: x keeps what it gave to the centre only."""
        x = self.worker.parameters
        if self.begun and self.velocity is not None:
            x.sub_(self.velocity, alpha=self.strategy.momentum)
        if self.force is not None:
            x.sub_(self.force)
        self.force, self.begun = None, False

    def _account(self) -> None:
        """Tell the servers of the samples since the last exchange, with alpha = 0."""
        if self.samples:
            nothing = torch.empty_like(self.worker.parameters)
            # Nothing moves, and servers and workers agree on what was consumed.
            self._push(0.0, nothing)
