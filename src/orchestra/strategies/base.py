"""The base of all strategies: settings, and a method for each point of a run.

`Replicas` is the base of those whose workers train apart, each with an optimizer of its own.

State never lives in a strategy object: all ranks of a simulation share it. `start` returns it.
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

if TYPE_CHECKING:
    from torch import Tensor, nn, optim

    from orchestra.exchange import SharedWork
    from orchestra.optimizers.spec import OptimizerPart
    from orchestra.parameter_server.messages import Pause
    from orchestra.schedules.work_queue import WorkSource
    from orchestra.worker.batches import Batch
    from orchestra.worker.layout import Share
    from orchestra.worker.worker import Worker

S = TypeVar("S")
R = TypeVar("R", bound="ReplicaState")

CHANGED = -1
"""In place of the step of a pause: the workers paused because the phase changes.

Of nested phases the one with the number `level` ends at CHANGED - level.
"""


@dataclass(frozen=True)
class Roles:
    """Which ranks are workers and which are servers, for a number of ranks.

    `shares` has one entry for each process: its part of the data in per-worker batches a step
    (0: a rank without data). `servers` are the ranks that own slices of the parameters. `reads`
    holds for each rank the rank whose part of the data it works on; if empty, each its own. Where
    slices have `replicas` the run survives the loss of a server.
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
        """A rank without which the run cannot go on; it gathers and evaluates."""
        if self.servers and not self.replicas:
            return self.servers[0]
        return next(rank for rank in self.workers if rank not in self.servers)


@dataclass(frozen=True)
class Footprint:
    """The memory of a rank while it trains, in multiples of what it trains: a whole model, or its
    `ModelPart`.

    `copies` are vectors of all parameters beside the optimizer's state: for what arrives, for
    anchors and outer momenta. `batches` are per-worker batches whose activations are there at a
    time. `windows` is how often two buckets are there, beside a rank's shard: for gradients, and
    for parameters in use.
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
    """The part of a model that one rank trains, its tensors named as in the whole.

    `owned` are the names of those that snapshots and the final model take from this rank.
    """

    module: nn.Module
    owned: frozenset[str]


@dataclass(frozen=True, repr=False)
class Strategy(Settings, ABC, Generic[S]):
    """A distribution strategy. The defaults are those of a worker that exchanges nothing."""

    use: ClassVar[str] = ""
    """When to use it: a line of `orchestra list`."""

    variants: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Notable settings of it, in the notation, each with when to use them."""

    distributed: ClassVar[bool] = True
    """Several processes train, given several ranks; False of `Single` alone."""

    switches: ClassVar[bool] = False
    """A rule may end a phase and begin another one, as in `Switch`."""

    divides_model: ClassVar[bool] = False
    """Each rank has a part of the model only."""

    @property
    def shards_parameters(self) -> bool:
        """Each rank keeps a shard of the model only, and what it needs of the rest at the time."""
        return False

    def share_of(self, rank: int, ranks: int) -> Share | None:
        """The shard of `rank`, where `shards_parameters`; None: it keeps all parameters."""
        return None

    @property
    def synchronous(self) -> bool:
        """All workers take every step together, and agree on its loss."""
        return True

    @property
    def depends_on_speed(self) -> bool:
        """The parameters depend on how fast ranks and links are.

        Where they do not, a simulation on one cluster knows them for every other.
        """
        return not self.synchronous

    @property
    def answers_beside(self) -> bool:
        """Workers answer others from a background flow, on the core that their gradients want."""
        return False

    @property
    def steps_together(self) -> bool:
        """Workers wait for one another, so that the slowest sets the pace of all."""
        return self.synchronous or not self.depends_on_speed

    def under_way(self, state: S) -> Strategy[Any]:
        """The strategy of the phase under way: itself, where there are no phases."""
        return self

    def currently_lockstep(self, state: S) -> bool:
        """In the phase under way, a worker takes part in steps in which it has no samples.

        Synchronous strategies need that, and others that exchange in every step.
        """
        return self.synchronous

    @property
    def self_paced(self) -> bool:
        """A worker that is free can take the next batch, whatever the others do.

        The batches of the run then lie in one queue (`worker.make_queue`), unless the experiment
        says that all workers get equal parts.
        """
        return False

    def work(self, state: S) -> WorkSource | None:
        """The source of this worker's batches in the phase under way; None: the plan."""
        return None

    def end_phase(self, worker: Worker, state: S, level: int) -> None:
        """Collective, where `work` has ended before the budget: begin the phase after the one that
        is over, the number `level` of nested ones."""
        raise AssertionError(f"{self!r} has no phases")

    @property
    def exchanges_as(self) -> Strategy[Any] | None:
        """A strategy whose exchange takes as long as one of its own, and which can `rehearse` it.

        Its workers wait for one another, and exchange after every `exchange_every` of their steps.
        None: that is not known, and it can be no candidate of `Auto`.
        """
        return None

    exchange_every: ClassVar[int] = 1

    def rehearse(self, worker: Worker, values: Tensor) -> None:
        """Collective over the workers: one exchange with `values`, flat, in place of gradients.

        They belong to nobody, and have any values afterwards. Only where `exchanges_as` is itself.
        """
        raise AssertionError(f"{self!r} has no exchange that could be rehearsed")

    @property
    def hands_over_moments(self) -> bool:
        """A following phase can inherit the optimizer's moments from the workers."""
        return True

    @property
    def native(self) -> bool:
        """torch.distributed's own collectives (gloo, NCCL) are used."""
        return False

    def part_of(
        self, module: nn.Module, loss_of: Callable[[nn.Module], Tensor], rank: int, ranks: int
    ) -> ModelPart | None:
        """The part of `module` that `rank` trains; None: all of it.

        Pure, so that all ranks agree. `loss_of` gives a model's loss on a few samples.
        """
        return None

    def roles(self, ranks: int) -> Roles:
        """The roles at the start; raises `InputError` for an impossible number of ranks."""
        return Roles((1.0,) * ranks)

    def refusal(self, ranks: int) -> str | None:
        """Why it cannot run on that many ranks; None if it can."""
        try:
            self.roles(ranks)
        except InputError as error:
            return str(error)
        return None

    def footprint(self, rank: int, ranks: int) -> Footprint:
        """The memory of `rank`, with a budget of `ranks`: by default a model and its optimizer."""
        roles = roles_of(self, ranks)
        return Footprint(batches=roles.shares[roles.part(rank)])

    def current_roles(self, worker: Worker, state: S) -> Roles:
        """The roles now: they change where a strategy calls `worker.begin_phase` on all ranks."""
        return roles_of(self.under_way(state), worker.budget_ranks)

    @abstractmethod
    def start(self, worker: Worker) -> S:
        """Collective: agree on the parameters, and allocate the state."""

    @property
    def reads_loss(self) -> bool:
        """True if the decisions of the strategy depend on the training loss."""
        return False

    @property
    def reads_values(self) -> bool:
        """The timing of its communication depends on losses, gradients or parameters."""
        return self.reads_loss

    def before_forward(self, worker: Worker, state: S) -> None:
        """Called before a step's first forward pass: the place to share buffers."""

    def gradient(self, worker: Worker, state: S, batch: Batch | None) -> None:
        """The gradient of `batch` (None: this rank has no samples in this step), exchanged."""
        self.before_forward(worker, state)
        worker.backward(batch)
        self.reduce(worker, state)

    def reduce(self, worker: Worker, state: S) -> None:
        """Called with a complete gradient, before anybody reads it, clipping included."""

    @abstractmethod
    def update(self, worker: Worker, state: S) -> None:
        """The gradient becomes new parameters."""

    def serve(self, worker: Worker, state: S) -> Pause | None:
        """On a rank without data: serve until the next quiet point; None once all workers left."""
        return None

    def quiesce(self, worker: Worker, state: S, step: int) -> bool:
        """On a worker after its step `step`: return when nothing is in flight anywhere.

        False if some workers have finished, or were lost.
        """
        return True

    def agree(self, worker: Worker, state: S) -> None:
        """Collective, with nothing in flight: `worker.parameters` of every rank become equal."""

    def stop(self, worker: Worker, state: S) -> None:
        """Collective: end, and agree on the final parameters."""
        self.agree(worker, state)

    def resume(self, worker: Worker, saved: Mapping[str, Any]) -> S:
        """Collective: `start`, then go on from what a checkpoint kept of the state.

        Replicas may differ: each rank keeps the parameters and buffers that it has.
        """
        own = [worker.parameters, *(buffer for _, buffer in worker.buffers)]
        kept = [tensor.clone() for tensor in own]
        state = self.start(worker)
        optimizers.restore(state, saved)
        optimizers.restore(own, kept)
        # A flow in the background, as of a server beside a worker, answers whoever asks: nobody
        # does before what it answers from is restored.
        exchange.wait_for_everyone(worker)
        return state

    def restart(self, worker: Worker, state: S, renew: Callable[[], None]) -> S:
        """Collective: stop, and start the phase under way anew, with what `renew` puts in place.

        For parameters, or moments, that were loaded: everybody takes those of the first rank.
        """
        self.stop(worker, state)
        renew()
        return self.start(worker)

    def optimizer_of(self, state: S) -> optim.Optimizer | None:
        """The optimizer whose moments a following phase may inherit: `state.optimizer`, if any."""
        optimizer: optim.Optimizer | None = getattr(state, "optimizer", None)
        return optimizer

    def optimizer_parts(self, worker: Worker, state: S) -> list[OptimizerPart]:
        """What this rank has of optimizers whose moments lie in parts on several ranks."""
        return []


_roles_of: Callable[[Strategy[Any], int], Roles] = lru_cache(256)(lambda each, n: each.roles(n))


def roles_of(strategy: Strategy[Any], ranks: int) -> Roles:
    """`strategy.roles(ranks)`, worked out once: with many ranks that takes a while."""
    try:
        return _roles_of(strategy, ranks)
    except TypeError:  # a setting of it, such as a list, cannot be looked up
        return strategy.roles(ranks)


@dataclass
class ReplicaState:
    """State of a worker that trains a replica: its optimizer, and its end of the batch queue."""

    optimizer: optim.Optimizer
    work: SharedWork | None = field(default=None, kw_only=True, metadata=optimizers.TRANSIENT)


@dataclass(frozen=True, repr=False)
class Replicas(Strategy[R]):
    """Each worker trains a replica of its own, which it averages with some or all others.

    The final parameters are the exact mean of the replicas.
    """

    synchronous = False  # replicas differ, and losses are each worker's own

    def work(self, state: R) -> WorkSource | None:
        """The queue of the first worker, where workers take batches at their own pace."""
        return state.work

    def currently_lockstep(self, state: R) -> bool:
        """Where work is dealt out, and not taken from a queue, all workers count the same steps."""
        return state.work is None

    def start(self, worker: Worker) -> R:
        """Everyone begins with the parameters of the first rank."""
        exchange.agree_on_parameters(worker)
        worker.reporter.expendable(False)
        shares = roles_of(self, worker.budget_ranks).shares
        work = exchange.share_work(worker, shares) if self.self_paced else None
        return self.allocate(worker, work)

    @abstractmethod
    def allocate(self, worker: Worker, work: SharedWork | None) -> R:
        """The state at the start."""

    def settle(self, worker: Worker, state: R) -> None:
        """Collective over the workers: return when nothing of theirs is in flight."""

    def quiesce(self, worker: Worker, state: R, step: int) -> bool:
        """Nothing is in flight; all workers are here."""
        self.settle(worker, state)
        return True

    def reduce(self, worker: Worker, state: R) -> None:
        """The gradient stays here."""
        exchange.keep_gradient(worker)

    def agree(self, worker: Worker, state: R) -> None:
        """The exact mean of the replicas, and of their buffers."""
        self.settle(worker, state)
        exchange.exact_mean(worker)
        exchange.exact_mean_of_buffers(worker)

    def stop(self, worker: Worker, state: R) -> None:
        """The exact mean of the replicas."""
        self.settle(worker, state)
        if state.work is not None:
            state.work.close()
            worker.snapshots.offer(worker.step.consumed, worker.parameters)
        exchange.exact_mean(worker)
