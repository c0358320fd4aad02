"""One rank's live end of a strategy: the methods that a run calls, in the order of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from orchestra import exchange, optimizers
from orchestra.strategies.base import Roles, Strategy, roles_of
from orchestra.strategies.traits import Dealing, Traits

if TYPE_CHECKING:
    from torch import optim

    from orchestra.coordinator.batches import WorkSource
    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import Kept, Learnt, SharedWork
    from orchestra.parameter_server.messages import QuietPoint
    from orchestra.worker.batches import Batch
    from orchestra.worker.worker import Worker

S = TypeVar("S", bound=Strategy)


@dataclass(eq=False)
class Member(ABC, Generic[S]):
    """One rank's live end of one phase; `strategy.join(worker)` makes it.

    Subclasses are dataclasses. Their fields are what a checkpoint keeps: tensors, numbers, texts,
    optimizers, and such dataclasses, lists or dicts of them. A field that `join` makes anew, such
    as a connection or a flow, has the metadata `TRANSIENT`. The defaults are those of a worker that
    exchanges nothing.
    """

    strategy: S = field(metadata=optimizers.TRANSIENT)
    worker: Worker = field(metadata=optimizers.TRANSIENT)

    @property
    def work(self) -> WorkSource | None:
        """The source of this worker's batches now; None if they follow the plan."""
        return None

    @property
    def innermost(self) -> Member[Any]:
        """The member of the phase under way; itself if its strategy has no phases."""
        return self

    @property
    def roles(self) -> Roles:
        """The roles in the phase under way, which `worker.begin_phase` changes."""
        # The ranks of the budget, not those that run: Single() is given more than it uses.
        return roles_of(self.strategy, self.worker.budget_ranks)

    @property
    def traits(self) -> Traits:
        """The traits of the phase under way."""
        return self.strategy.traits(self.worker.work)

    # A step, on workers

    def begin(self) -> None:
        """Called before the first forward pass of a step; the place to exchange buffers."""

    def gradient(self, batch: Batch | None) -> None:
        """Compute the gradient of `batch` and exchange it. `batch` is None if this rank has no
        samples in this step.
        """
        self.begin()
        self.worker.backward(batch)
        self.exchange()

    def exchange(self) -> None:
        """Exchange the gradient. It is complete; what reads it, such as clipping, comes later."""

    @abstractmethod
    def update(self) -> None:
        """Update the parameters from the gradient."""

    # On ranks without data

    def serve(self) -> QuietPoint | None:
        """Serve until a quiet point; return None once all workers have left."""
        return None

    # Between steps

    def quiesce(self, rest: Rest) -> bool:
        """Wait until nothing is in flight anywhere, on a worker; `rest` says why.

        Return False if some workers have finished or were lost.
        """
        return True

    def stop(self) -> None:
        """Land what is in flight, and close. Collective; no step follows."""

    def learnt(self) -> Iterable[Learnt]:
        """Return what this rank contributes to the model; nothing is in flight. Collective.

        By default its replica, unless all workers are in lockstep and have equal ones.
        """
        if self.strategy.traits().lockstep:
            return ()
        return [exchange.Learnt.replica(self.worker.parameters)]

    def rebase(self) -> None:
        """Go on from the parameters, which have become the model that all ranks have learnt."""

    def kept(self) -> Kept:
        """Return where the optimizer's moments are; by default in `optimizer`, if any."""
        return exchange.Kept(getattr(self, "optimizer", None))

    @property
    def buffers_weight(self) -> float:
        """The weight of this worker's buffers in their mean, if training goes on."""
        return 1.0


@dataclass(eq=False)
class ReplicaMember(Member[S]):
    """A worker that trains a replica of its own.

    `queue` is its end of the queue from which free workers take batches, if there is one.
    """

    optimizer: optim.Optimizer
    queue: SharedWork | None = field(default=None, kw_only=True, metadata=optimizers.TRANSIENT)

    def __post_init__(self) -> None:
        # One queue for all who take batches at their own pace: whoever is free takes the next.
        if self.traits.dealing is Dealing.QUEUE:
            self.queue = exchange.share_work(self.worker, self.roles.shares)

    @property
    def work(self) -> WorkSource | None:
        """This worker's end of the queue, if workers take batches at their own pace."""
        return self.queue

    def exchange(self) -> None:
        """Keep the gradient on this worker."""
        # Left where autograd put it, not copied: optimizers read tensor by tensor.
        exchange.keep_gradient(self.worker)

    def settle(self) -> None:
        """Wait until nothing of the workers is in flight. Collective over the workers."""

    def quiesce(self, rest: Rest) -> bool:
        """Wait until nothing is in flight; all workers are present."""
        self.settle()
        return True

    def stop(self) -> None:
        """Land what is in flight, and close the queue."""
        self.settle()
        # Closed before the last snapshot: the queue's last answer tells how much all have consumed,
        # and a due point may lie between this worker's last batch and that.
        if self.queue is not None:
            self.queue.close()
            self.worker.snapshots.offer(self.worker.step.consumed, self.worker.parameters)
