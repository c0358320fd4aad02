"""The ranks of a run with parameter servers: dedicated servers, and a class for each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from orchestra import exchange
from orchestra.strategies.base import Strategy
from orchestra.strategies.member import Member

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.coordinator.batches import HeldWork
    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import Connection, Kept, ServerChannel
    from orchestra.parameter_server import Answer, QuietPoint
    from orchestra.worker.batches import Batch
    from orchestra.worker.worker import Worker

S = TypeVar("S", bound=Strategy)


@dataclass(eq=False)
class ServedMember(Member[S]):
    """A rank that is connected to parameter servers, or is one of them."""

    connection: Connection

    @property
    def channel(self) -> ServerChannel:
        """The end of a worker."""
        channel = self.connection.channel
        assert channel is not None, "a rank without data has no channel"
        return channel

    def open(self, *, fresh: bool) -> None:
        """Connect. The first server hands out batches, if workers take them from a queue."""
        self.connection.open()
        channel = self.connection.channel
        if channel is not None and channel.work is not None:
            self.worker.source = channel

    def serve(self) -> QuietPoint | None:
        return self.connection.serve()

    def held_work(self) -> HeldWork | None:
        channel = self.connection.channel
        return None if channel is None else channel.held_work()

    def rest(self, rest: Rest) -> Kept:
        """Wait until every push is applied and every worker is here; leave at the end.

        Servers give all ranks the model, if they are to take it.
        """
        complete = self.connection.rest(rest)
        if rest.reason.ends:
            self.worker.source = None
        kept = replace(self.kept(), complete=complete, owes=self.connection.owes)
        return replace(kept, learnt=()) if rest.reason.takes_model else kept

    def kept(self) -> Kept:
        """Return what this rank has of the slices: its own values and moments."""
        connection = self.connection
        own = super().kept()
        return replace(own, learnt=connection.learnt(), parts=connection.optimizer_parts)


@dataclass(eq=False)
class DedicatedServer(ServedMember[Strategy]):
    """A server without data: `serve` is all that it does."""

    def update(self) -> None:
        raise AssertionError("a rank without data takes no steps")


@dataclass(eq=False)
class PushingWorker(ServedMember[Strategy]):
    """A worker whose servers run the optimizer.

    A step is `begin`, backward, `exchange` (all three in `gradient`), and `update`, which pushes.
    """

    def exchange(self) -> None:
        """Gather the gradient, which no other worker sees."""
        self.channel.collect()
        self.worker.gradients.forget_unused()


@dataclass(eq=False)
class AsynchronousWorker(PushingWorker):
    """Push the gradient at the parameters that were read; pull the servers' values.

    Li et al. (OSDI 2014), and stale synchronous parallel (Ho et al., NIPS 2013): the servers decide
    when they answer.
    """

    def update(self) -> None:
        """Push the gradient, and go on from the values that come back."""
        self.worker.clip()
        note_staleness(self.worker, self.channel.push(into=self.worker.parameters))


@dataclass(eq=False)
class SynchronousWorker(PushingWorker):
    """Push the gradient; pull what the servers make of the average of all."""

    def begin(self) -> None:
        """Take the first worker's buffers."""
        exchange.broadcast_buffers(self.worker, self.worker.workers)

    def update(self) -> None:
        """Push the gradient, and go on from the values that come back."""
        note_agreement(self.worker, self.channel.push(into=self.worker.parameters))


@dataclass(eq=False)
class AveragingWorker(ServedMember[Strategy]):
    """Push the gradient, pull the average of all, and take the same step on every worker."""

    optimizer: Optimizer

    def begin(self) -> None:
        """Take the first worker's buffers."""
        exchange.broadcast_buffers(self.worker, self.worker.workers)

    def exchange(self) -> None:
        """g <- the average gradient."""
        worker, channel = self.worker, self.channel
        channel.collect()
        if channel.compression is not None:
            channel.compression.begin_sum(worker)
        note_agreement(worker, channel.push(into=worker.gradients.vector))
        worker.gradients.forget_unused()

    def update(self) -> None:
        """Step on the average."""
        worker = self.worker
        worker.clip()
        worker.update_locally(self.optimizer)
        worker.offer_equal_parameters()


@dataclass
class Missed:
    """`steps` of its plan that a worker has still to pass over: the others took them without it."""

    steps: int = 0
    loss: float = 0.0  # of its last push, like `consumed`
    consumed: int = 0


@dataclass(eq=False)
class BackupWorker(PushingWorker):
    """Push the gradient; if it came too late for its step, go on after the newest step.

    Chen et al. (2016): the servers average the first gradients of a step, and drop later ones.
    """

    missed: Missed = field(default_factory=Missed)

    def gradient(self, batch: Batch | None) -> None:
        """Compute the gradient; in a step that the others have completed pass over the batch."""
        step, missed = self.worker.step, self.missed
        if not missed.steps:
            super().gradient(batch)
            return
        missed.steps -= 1
        step.samples, step.loss, step.consumed = 0, missed.loss, missed.consumed

    def update(self) -> None:
        """Push the gradient, and go on from the values that come back."""
        channel, step = self.channel, self.worker.step
        if not step.samples:
            return  # the step was passed over
        before = channel.clock
        note_staleness(self.worker, channel.push(into=self.worker.parameters))
        # A dropped push skips steps.
        self.missed = Missed(channel.clock - before - 1, step.loss, step.consumed)


def note_agreement(worker: Worker, answers: Sequence[Answer]) -> None:
    """Note the mean loss of all workers, and whether any of them wishes to stop."""
    step = worker.step
    step.loss, step.stop = answers[0].loss, any(answer.stop for answer in answers)
    step.loss_is_global = True


def note_staleness(worker: Worker, answers: Sequence[Answer]) -> None:
    """Note what all have consumed, and how stale this worker's gradient was."""
    step = worker.step
    step.consumed = max(answer.consumed for answer in answers)
    step.staleness = tuple(answer.staleness for answer in answers if not answer.dropped)
    worker.measures.count_staleness(step.staleness)
    worker.measures.dropped += any(answer.dropped for answer in answers)
