"""One rank's live end of a strategy: the methods that a run calls, in the order of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from orchestra import exchange
from orchestra.settings.base import Completed
from orchestra.strategies.base import Strategy, roles_of
from orchestra.strategies.traits import Dealing

if TYPE_CHECKING:
    from torch import optim

    from orchestra.coordinator.batches import HeldWork
    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import Kept, SharedWork
    from orchestra.parameter_server.messages import QuietPoint
    from orchestra.worker.batches import Batch
    from orchestra.worker.worker import Worker

S = TypeVar("S", bound=Strategy)


@dataclass(eq=False)
class Member(Completed, ABC, Generic[S]):
    """One rank's live end of one phase; `strategy.join(worker)` makes it, and opens it.

    Subclasses are dataclasses. A checkpoint keeps all arguments of their constructor, except
    `strategy` and `worker`: tensors, numbers, texts, optimizers, and such dataclasses, lists or
    dicts of them. Objects that `open` makes, such as a connection or a flow, are fields with
    `field(init=False)`. The defaults are those of a worker that exchanges nothing.
    """

    strategy: S
    worker: Worker

    # Between steps

    def open(self, *, fresh: bool) -> None:
        """Open connections, begin background flows, and register hooks. Collective.

        Called before the first step, and after each rest that does not end the phase. `fresh`: go
        on from the parameters, which all have equal; else from what there was at the rest.
        """

    def rest(self, rest: Rest) -> Kept:
        """Land what is in flight, and end what `open` has begun; return what there is then.

        Collective; `rest` says why. Where `rest.reason.takes_model`, all ranks take what was
        `learnt` next; a member that lets them do so itself returns nothing learnt. A member may
        keep open what is costly to open again, unless `rest.reason.ends` the phase.
        """
        return self.kept()

    def kept(self) -> Kept:
        """Return what there is at rest: what this rank has learnt, and where its moments are.

        Changes nothing: a checkpoint asks, too, and the run goes on from where it was. By default
        a rank has learnt its replica, unless all workers are in lockstep and have equal ones, and
        the moments are in `optimizer`, if there is such a field.
        """
        equal, optimizer = self.strategy.traits().lockstep, getattr(self, "optimizer", None)
        learnt = () if equal else (exchange.Learnt(0, self.worker.parameters),)
        return exchange.Kept(learnt, optimizer)

    def held_work(self) -> HeldWork | None:
        """Return what this rank holds of a queue that servers deal out; None if there is none.

        Asked when a server is lost, in the midst of a step.
        """
        return None

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


@dataclass(eq=False)
class ReplicaMember(Member[S]):
    """A worker that trains a replica of its own.

    `queue` is its end of the queue from which free workers take batches, if there is one.
    """

    optimizer: optim.Optimizer
    queue: SharedWork | None = field(default=None, init=False)

    def open(self, *, fresh: bool) -> None:
        """Open the queue, if workers take batches at their own pace."""
        worker, strategy = self.worker, self.strategy
        # One queue for all who take batches at their own pace: whoever is free takes the next.
        if self.queue is None and strategy.traits(worker.work).dealing is Dealing.QUEUE:
            roles = roles_of(strategy, worker.budget_ranks)
            self.queue = worker.source = exchange.share_work(worker, roles.shares)

    def exchange(self) -> None:
        """Keep the gradient on this worker."""
        # Left where autograd put it, not copied: optimizers read tensor by tensor.
        exchange.keep_gradient(self.worker)

    def settle(self, rest: Rest) -> None:
        """Wait until nothing of the workers is in flight. Collective over the workers."""

    def rest(self, rest: Rest) -> Kept:
        """Land what is in flight; close the queue at the end."""
        self.settle(rest)
        if self.queue is not None and rest.reason.ends:
            self.close_queue()
            # The queue's last answer tells how much all have consumed, and a due point may lie
            # between this worker's last batch and that.
            self.worker.snapshots.offer(self.worker.step.consumed, self.worker.parameters)
        return super().rest(rest)

    def close_queue(self) -> None:
        """Take no more batches. Collective over the workers."""
        if self.queue is not None:
            self.queue.close()
            self.queue = self.worker.source = None
