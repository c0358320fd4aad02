"""The base classes of strategies: their settings, and a method for each point of a run.

A strategy object has no state, because all ranks of a simulation share it; `start` returns one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from orchestra import exchange, optimizers
from orchestra.errors import InputError
from orchestra.settings import Settings
from orchestra.settings.notation import LazyModule

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor, nn, optim

    from orchestra.exchange import SharedWork
    from orchestra.optimizers.spec import OptimizerPart
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
        # With replicas any server may be lost: a worker has to stay, and gathers (decision 23)
        if self.servers and not self.replicas:
            return self.servers[0]
        # A worker beside a server would be lost together with it
        return next(rank for rank in self.workers if rank not in self.servers)


@dataclass(frozen=True)
class Footprint:
    """The memory of a rank in training, in multiples of what it trains: a model or part.

    `copies` are vectors of all parameters beside the optimizer's state: for arriving values, for
    anchors and outer momenta. `batches` is the number of per-worker batches whose activations
    are held at the same time. `windows` is how often two buckets are held beside a rank's shard:
    for gradients, and for parameters in use.
    """

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    copies: float = 0.0
    batches: float = 1.0
    windows: float = 0.0

    def joined(self, other: Footprint, how: Callable[[float, float], float]) -> Footprint:
        """Combine two footprints part by part with `how` (a sum, a maximum)."""
        return Footprint(*map(how, astuple(self), astuple(other)))


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
    distributed: ClassVar[bool] = True  # several processes train, given several ranks
    switches: ClassVar[bool] = False  # a rule may end a phase and begin another one
    divides_model: ClassVar[bool] = False  # each rank has only a part of the model

    @property
    def shards_parameters(self) -> bool:
        """True if each rank keeps only a shard of the model, and gathers the rest as needed."""
        return False

    def share_of(self, rank: int, ranks: int) -> Share | None:
        """Return the shard of `rank` if `shards_parameters`; None if it keeps all parameters."""
        return None

    @property
    def synchronous(self) -> bool:
        """True if all workers take every step together and agree on its loss."""
        return True

    @property
    def depends_on_speed(self) -> bool:
        """True if the parameters depend on the speed of ranks and links.

        If not, a simulation on one cluster knows them for every other.
        """
        return not self.synchronous

    @property
    def answers_beside(self) -> bool:
        """True if workers answer others in a background flow, on the core of their gradients."""
        return False

    @property
    def steps_together(self) -> bool:
        """True if workers wait for one another, so that the slowest sets the pace of all."""
        # Without waiting, what a worker computes would depend on which of them is ahead
        return self.synchronous or not self.depends_on_speed

    def under_way(self, state: S) -> Strategy[Any]:
        """Return the strategy of the current phase; itself if it has no phases."""
        return self

    def currently_lockstep(self, state: S) -> bool:
        """Return whether, in this phase, a worker takes part in steps without samples of its own.

        Synchronous strategies need that, and others that exchange in every step.
        """
        return self.synchronous

    @property
    def self_paced(self) -> bool:
        """True if a free worker can take the next batch, whatever the others do.

        The batches of the run then lie in one queue (`worker.make_queue`), unless the experiment
        says that all workers get equal parts.
        """
        return False

    def work(self, state: S) -> WorkSource | None:
        """Return the source of this worker's batches now; None if they follow the plan."""
        return None

    def end_phase(self, worker: Worker, state: S, level: int) -> None:
        """Begin the phase after the one that is over, the number `level` of nested ones.
        Collective, called when `work` has ended before the budget.
        """
        raise AssertionError(f"{self!r} has no phases")

    @property
    def exchanges_as(self) -> Strategy[Any] | None:
        """A strategy whose exchange takes as long as one of this, and which can `rehearse` it.

        Its workers wait for one another, and exchange after every `exchange_every` of their steps.
        None: that is not known, and it can be no candidate of `Auto`.
        """
        return None

    exchange_every: ClassVar[int] = 1

    def rehearse(self, worker: Worker, values: Tensor) -> None:
        """Exchange `values`, a flat vector, in place of gradients. Collective over the workers.

        They belong to nobody, and have any values afterwards. Only where `exchanges_as` is itself.
        """
        raise AssertionError(f"{self!r} has no exchange that could be rehearsed")

    @property
    def hands_over_moments(self) -> bool:
        """True if a following phase can inherit the optimizer's moments from the workers."""
        return True

    @property
    def native(self) -> bool:
        """True if torch.distributed's own collectives (gloo, NCCL) are used."""
        return False

    def part_of(
        self, module: nn.Module, loss_of: Callable[[nn.Module], Tensor], rank: int, ranks: int
    ) -> ModelPart | None:
        """Return the part of `module` that `rank` trains; None if it trains all of it.

        It is pure, so that all ranks agree. `loss_of` returns a model's loss on a few samples.
        """
        return None

    def roles(self, ranks: int) -> Roles:
        """Return the roles at the start.

        Raises:
            InputError: the strategy cannot run on `ranks` ranks.
        """
        return Roles((1.0,) * ranks)

    def refusal(self, ranks: int) -> str | None:
        """Return why the strategy cannot run on `ranks` ranks; None if it can."""
        try:
            self.roles(ranks)
        except InputError as error:
            return str(error)
        return None

    def footprint(self, rank: int, ranks: int) -> Footprint:
        """Return the memory of `rank` out of `ranks`: by default a model and its optimizer."""
        roles = roles_of(self, ranks)
        return Footprint(batches=roles.shares[roles.part(rank)])

    def current_roles(self, worker: Worker, state: S) -> Roles:
        """Return the current roles, which `worker.begin_phase`, called on all ranks, changes."""
        # The ranks of the budget, not those that run: Single() is given more than it uses
        return roles_of(self.under_way(state), worker.budget_ranks)

    @abstractmethod
    def start(self, worker: Worker) -> S:
        """Agree on the parameters, and return the state. Collective."""

    @property
    def reads_loss(self) -> bool:
        """True if the decisions of the strategy depend on the training loss."""
        return False

    @property
    def reads_values(self) -> bool:
        """True if the timing of its communication depends on losses, gradients or parameters."""
        return self.reads_loss

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

    def agree(self, worker: Worker, state: S) -> None:
        """Make `worker.parameters` of all ranks equal. Collective; nothing is in flight."""

    def stop(self, worker: Worker, state: S) -> None:
        """End, and agree on the final parameters. Collective."""
        self.agree(worker, state)

    def resume(self, worker: Worker, saved: Mapping[str, Any]) -> S:
        """Start, then restore the state that a checkpoint kept. Collective.

        Replicas may differ: each rank keeps the parameters and buffers that it has.
        """
        # Kept beside `start`, which gives everyone the first rank's parameters
        put_back = worker.keep()
        state = self.start(worker)
        optimizers.restore(state, saved)
        put_back()
        # A flow in the background, as of a server beside a worker, answers whoever asks: nobody
        # does before what it answers from is restored.
        exchange.wait_for_everyone(worker)
        return state

    def restart(self, worker: Worker, state: S, renew: Callable[[], None]) -> S:
        """Stop, and start the current phase anew with what `renew` puts in place. Collective.

        For loaded parameters or moments: all ranks take those of the first rank.
        """
        self.stop(worker, state)
        renew()
        return self.start(worker)

    def optimizer_of(self, state: S) -> optim.Optimizer | None:
        """Return the optimizer whose moments a next phase inherits: `state.optimizer`, if any."""
        return getattr(state, "optimizer", None)

    def optimizer_parts(self, worker: Worker, state: S) -> list[OptimizerPart]:
        """Return this rank's parts of optimizers whose moments are spread over several ranks."""
        return []


_roles_of: Callable[[Strategy[Any], int], Roles] = lru_cache(256)(lambda each, n: each.roles(n))


def roles_of(strategy: Strategy[Any], ranks: int) -> Roles:
    """Return `strategy.roles(ranks)`, cached because computing it takes a while for many ranks."""
    try:
        return _roles_of(strategy, ranks)
    except TypeError:  # a setting of it, such as a list, cannot be looked up
        return strategy.roles(ranks)


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

    synchronous = False  # replicas differ, and losses are each worker's own

    def work(self, state: R) -> WorkSource | None:
        """Return this worker's end of the queue, if workers take batches at their own pace."""
        return state.work

    def currently_lockstep(self, state: R) -> bool:
        """Return True unless batches come from a queue: if they follow the plan, all workers
        count the same steps.
        """
        return state.work is None  # where batches follow the plan, all count the same steps

    def start(self, worker: Worker) -> R:
        """Give all workers the parameters of the first rank, and allocate the state."""
        exchange.agree_on_parameters(worker)
        # The final parameters are the exact mean, for which every replica is needed
        worker.reporter.expendable(False)
        shares = roles_of(self, worker.budget_ranks).shares
        # One queue for all who take batches at their own pace: whoever is free takes the next
        work = exchange.share_work(worker, shares) if self.self_paced else None
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
        # Left where autograd put it, not copied: optimizers read tensor by tensor (decision 122)
        exchange.keep_gradient(worker)

    def agree(self, worker: Worker, state: R) -> None:
        """Set the parameters and buffers to the exact mean of the replicas."""
        self.settle(worker, state)
        exchange.exact_mean(worker)
        exchange.exact_mean_of_buffers(worker)

    def stop(self, worker: Worker, state: R) -> None:
        """Set the parameters to the exact mean of the replicas."""
        self.settle(worker, state)
        # Closed before the last snapshot: the queue's last answer tells how much all have consumed,
        # and a due point may lie between this worker's last batch and that.
        if state.work is not None:
            state.work.close()
            worker.snapshots.offer(worker.step.consumed, worker.parameters)
        exchange.exact_mean(worker)
