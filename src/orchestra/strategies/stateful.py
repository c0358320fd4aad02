"""Strategies whose methods take the worker and a state, until each has a `Member` of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from orchestra import exchange, optimizers
from orchestra.strategies.base import Strategy, replica_memory, roles_of
from orchestra.strategies.member import Member
from orchestra.strategies.traits import Dealing, Footprint, Pace, Traits, WorkMode

if TYPE_CHECKING:
    from torch import optim

    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import Kept, Learnt, SharedWork
    from orchestra.parameter_server.messages import QuietPoint
    from orchestra.schedules.work_queue import WorkSource
    from orchestra.worker.batches import Batch
    from orchestra.worker.worker import Worker

S = TypeVar("S")
R = TypeVar("R", bound="ReplicaState")


@dataclass(frozen=True, repr=False)
class Stateful(Strategy, Generic[S]):
    """A strategy with its state apart."""

    def join(self, worker: Worker) -> Member[Any]:
        return StatefulMember(self, worker, self.start(worker))

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

    def serve(self, worker: Worker, state: S) -> QuietPoint | None:
        """On a rank without data, serve until a quiet point; return None once all have left."""
        return None

    def quiesce(self, worker: Worker, state: S, rest: Rest) -> bool:
        """Wait until nothing is in flight anywhere, on a worker; `rest` says why.

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


@dataclass(eq=False)
class StatefulMember(Member[Stateful[Any]]):
    """The member of a `Stateful` strategy."""

    state: Any

    def state_dict(self) -> Mapping[str, Any]:
        return {
            item.name: getattr(self.state, item.name)
            for item in fields(self.state)
            if not item.metadata.get("transient")
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        optimizers.restore(self.state, saved)

    @property
    def work(self) -> WorkSource | None:
        return self.strategy.work(self.state)

    def begin(self) -> None:
        self.strategy.before_forward(self.worker, self.state)

    def gradient(self, batch: Batch | None) -> None:
        self.strategy.gradient(self.worker, self.state, batch)

    def exchange(self) -> None:
        self.strategy.reduce(self.worker, self.state)

    def update(self) -> None:
        self.strategy.update(self.worker, self.state)

    def serve(self) -> QuietPoint | None:
        return self.strategy.serve(self.worker, self.state)

    def quiesce(self, rest: Rest) -> bool:
        return self.strategy.quiesce(self.worker, self.state, rest)

    def stop(self) -> None:
        self.strategy.stop(self.worker, self.state)

    def learnt(self) -> Iterable[Learnt]:
        return self.strategy.learnt(self.worker, self.state)

    def rebase(self) -> None:
        self.strategy.rebase(self.worker, self.state)

    def kept(self) -> Kept:
        return self.strategy.kept(self.worker, self.state)

    @property
    def buffers_weight(self) -> float:
        weight = getattr(self.strategy, "buffers_weight", None)
        return 1.0 if weight is None else weight(self.state)


@dataclass
class ReplicaState:
    """The state of a worker that trains a replica: `work` is its end of a queue of batches."""

    optimizer: optim.Optimizer
    work: SharedWork | None = field(default=None, kw_only=True, metadata=optimizers.TRANSIENT)


@dataclass(frozen=True, repr=False)
class StatefulReplicas(Stateful[R]):
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

    def quiesce(self, worker: Worker, state: R, rest: Rest) -> bool:
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
