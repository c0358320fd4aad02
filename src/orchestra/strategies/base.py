"""The base classes of strategies: their settings, and a method for each point of a run.

A strategy object has no state, because all ranks of a simulation share it; `start` returns one.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from orchestra import exchange, optimizers
from orchestra.errors import InputError
from orchestra.settings import Settings
from orchestra.settings.notation import LazyModule
from orchestra.strategies.traits import Dealing, Footprint, Pace, Traits, WorkMode

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor, nn, optim

    from orchestra.exchange import Kept, Learnt, SharedWork
    from orchestra.parameter_server.messages import Pause
    from orchestra.schedules.work_queue import WorkSource
    from orchestra.worker.batches import Batch
    from orchestra.worker.layout import Share
    from orchestra.worker.worker import Worker
else:
    torch = LazyModule("torch")  # for all strategies, which are settings, and load without it

S = TypeVar("S")
R = TypeVar("R", bound="ReplicaState")

# Below 0, so that it is the number of no step
CHANGED = -1
"""In place of the step of a pause: the workers paused because the phase changes.

Of nested phases the one with the number `level` ends at CHANGED - level.
"""


@dataclass(frozen=True)
class Roles:
    """The workers and servers of a run, for a number of ranks.

    `shares` has one entry for each process: its part of the data, in per-worker batches a step
    (0: a rank without data). `servers` are the ranks that own slices of the parameters. `reads`
    holds for each rank the rank whose part of the data it works on; if empty, each works on its
    own. If slices have `replicas`, the run survives the loss of a server.
    """

    shares: tuple[float, ...]
    servers: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    replicas: int = 0

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The ranks that have data."""
        return tuple(rank for rank in range(len(self.shares)) if self.shares[self.part(rank)] > 0)

    def part(self, rank: int) -> int:
        """The rank whose part of the data `rank` works on."""
        return self.reads[rank] if self.reads else rank

    @property
    def leader(self) -> int:
        """The rank that gathers and evaluates. The run cannot go on without it."""
        # With replicas any server may be lost: a worker has to stay, and gathers.
        if self.servers and not self.replicas:
            return self.servers[0]
        # A worker beside a server would be lost together with it
        return next(rank for rank in self.workers if rank not in self.servers)


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that one rank trains; its tensors have their names in the whole model."""

    module: nn.Module
    owned: frozenset[str]  # the tensors that snapshots and the final model take from this rank


@dataclass(frozen=True, repr=False)
class Strategy(Settings, ABC, Generic[S]):
    """A distribution strategy. The defaults are those of a worker that exchanges nothing."""

    use: ClassVar[str] = ""  # when to use it: a line of `orchestra list`
    # Notable settings of it, in the notation, each with when to use them
    variants: ClassVar[tuple[tuple[str, str], ...]] = ()

    def traits(self, work: WorkMode = "shared") -> Traits:
        """Return the traits of the strategy in a run with this setting of `work`. Pure."""
        return Traits(functools.partial(replica_memory, self))

    def roles(self, ranks: int) -> Roles:
        """Return the roles at the start.

        Raises:
            InputError: the strategy cannot run on `ranks` ranks.
        """
        return Roles((1.0,) * ranks)

    def place(
        self, module: nn.Module, loss_of: Callable[[nn.Module], Tensor], rank: int, ranks: int
    ) -> ModelPart | Share | None:
        """Return the stage or shard of `module` that `rank` holds; None if it holds all of it.

        Called before there is a `Worker`. Pure, so that all ranks agree. `loss_of` returns a
        model's loss on a few samples.
        """
        return None

    def work(self, state: S) -> WorkSource | None:
        """Return the source of this worker's batches now; None if they follow the plan."""
        return None

    @abstractmethod
    def start(self, worker: Worker) -> S:
        """Agree on the parameters, and return the state. Collective."""

    def before_forward(self, worker: Worker, state: S) -> None:
        """Called before the first forward pass of a step; the place to exchange buffers."""

    def gradient(self, worker: Worker, state: S, batch: Batch | None) -> None:
        """Compute the gradient of `batch` and exchange it. `batch` is None if this rank has no
        samples in this step.
        """
        self.before_forward(worker, state)
        worker.backward(batch)
        self.reduce(worker, state)

    def reduce(self, worker: Worker, state: S) -> None:
        """Exchange the gradient. It is complete; what reads it, such as clipping, comes later."""

    @abstractmethod
    def update(self, worker: Worker, state: S) -> None:
        """Update the parameters from the gradient."""

    def serve(self, worker: Worker, state: S) -> Pause | None:
        """On a rank without data, serve until a quiet point; return None once all have left."""
        return None

    def quiesce(self, worker: Worker, state: S, step: int) -> bool:
        """Wait until nothing is in flight anywhere, on a worker after its step `step`.

        Return False if some workers have finished or were lost.
        """
        return True

    def stop(self, worker: Worker, state: S) -> None:
        """Land what is in flight, and close. Collective; no step follows."""

    def learnt(self, worker: Worker, state: S) -> Iterable[Learnt]:
        """Return what this rank contributes to the model; nothing is in flight. Collective.

        By default its replica, unless all workers are in lockstep and have equal ones.
        """
        return () if self.traits().lockstep else [exchange.Learnt.replica(worker.parameters)]

    def rebase(self, worker: Worker, state: S) -> None:
        """Take over the parameters, which have become the model that all ranks have learnt."""

    def kept(self, worker: Worker, state: S) -> Kept:
        """Return where the optimizer's moments are; by default in `state.optimizer`, if any."""
        return exchange.Kept(getattr(state, "optimizer", None))


_roles_of: Callable[[Strategy[Any], int], Roles] = lru_cache(256)(lambda each, n: each.roles(n))


def roles_of(strategy: Strategy[Any], ranks: int) -> Roles:
    """Return `strategy.roles(ranks)`, cached because computing it takes a while for many ranks."""
    try:
        return _roles_of(strategy, ranks)
    except TypeError:  # a setting of it, such as a list, cannot be looked up
        return strategy.roles(ranks)


def refusal_of(strategy: Strategy[Any], ranks: int) -> str | None:
    """Return why `strategy` cannot run on `ranks` ranks; None if it can."""
    try:
        strategy.roles(ranks)
    except InputError as error:
        return str(error)
    return None


def replica_memory(strategy: Strategy[Any], rank: int, ranks: int) -> Footprint:
    """Return the memory of a worker that trains a replica: a model and its optimizer."""
    roles = roles_of(strategy, ranks)
    return Footprint(batches=roles.shares[roles.part(rank)])


@dataclass
class ReplicaState:
    """The state of a worker that trains a replica: `work` is its end of a queue of batches."""

    optimizer: optim.Optimizer
    work: SharedWork | None = field(default=None, kw_only=True, metadata=optimizers.TRANSIENT)


@dataclass(frozen=True, repr=False)
class Replicas(Strategy[R]):
    """Each worker trains a replica of its own, and averages it with some or all others.

    The final parameters are the exact mean of the replicas.
    """

    def traits(self, work: WorkMode = "shared") -> Traits:
        """Return the traits of replicas that all count the same steps."""
        return Traits(self._memory, Pace.ROUNDS)

    def _free_traits(self, work: WorkMode) -> Traits:
        """Return the traits of replicas at their own pace. Over a plan all count the same steps."""
        if work == "shared":
            return Traits(self._memory, Pace.FREE, Dealing.QUEUE)
        return Traits(self._memory, Pace.ROUNDS, depends_on_speed=True)

    def _memory(self, rank: int, ranks: int) -> Footprint:
        return replica_memory(self, rank, ranks)

    def work(self, state: R) -> WorkSource | None:
        """Return this worker's end of the queue, if workers take batches at their own pace."""
        return state.work

    def start(self, worker: Worker) -> R:
        """Give all workers the parameters of the first rank, and allocate the state."""
        exchange.agree_on_parameters(worker)
        # The final parameters are the exact mean, for which every replica is needed
        worker.reporter.expendable(False)
        shares = roles_of(self, worker.budget_ranks).shares
        # One queue for all who take batches at their own pace: whoever is free takes the next
        queued = self.traits(worker.work).dealing is Dealing.QUEUE
        work = exchange.share_work(worker, shares) if queued else None
        return self.allocate(worker, work)

    @abstractmethod
    def allocate(self, worker: Worker, work: SharedWork | None) -> R:
        """Return the state at the start."""

    def settle(self, worker: Worker, state: R) -> None:
        """Wait until nothing of the workers is in flight. Collective over the workers."""

    def quiesce(self, worker: Worker, state: R, step: int) -> bool:
        """Wait until nothing is in flight; all workers are present."""
        self.settle(worker, state)
        return True

    def reduce(self, worker: Worker, state: R) -> None:
        """Keep the gradient on this worker."""
        # Left where autograd put it, not copied: optimizers read tensor by tensor.
        exchange.keep_gradient(worker)

    def stop(self, worker: Worker, state: R) -> None:
        """Land what is in flight, and close the queue."""
        self.settle(worker, state)
        # Closed before the last snapshot: the queue's last answer tells how much all have consumed,
        # and a due point may lie between this worker's last batch and that.
        if state.work is not None:
            state.work.close()
            worker.snapshots.offer(worker.step.consumed, worker.parameters)

    def buffers_weight(self, state: R) -> float:
        """Return the weight of this worker's buffers in their mean, where training goes on."""
        return 1.0
