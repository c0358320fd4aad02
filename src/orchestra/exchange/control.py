"""The flow that carries messages to and from what decides for all workers: fences, and queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestra.coordinator.batches import BatchQueue, WorkInHand
from orchestra.coordinator.core import Coordinator
from orchestra.coordinator.events import (
    Done,
    Ended,
    Event,
    Free,
    Grant,
    Instruction,
    Lost,
    Renew,
    Reported,
    RestAfter,
    Settle,
    Started,
    Take,
    Wait,
    Wish,
    events_of,
    instruction_of,
    numbers_of,
    numbers_of_events,
)
from orchestra.coordinator.fence import LEASE, FencedWorker, FenceLeader
from orchestra.coordinator.rest import Reason, Rest
from orchestra.errors import PeerLost
from orchestra.transports.protocol import Pending, Transport, send_unless_lost
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Step, Worker


class ControlFlow:
    """A background flow that feeds the `core` of this rank with events, and sends what it tells.

    It answers while main flows compute or are blocked. Events go to it, and to those of other
    ranks, as messages of `tag`; instructions go to main flows as messages of the next tag. A rank
    without a core has no such flow. Without the `leader` none can go on.
    """

    def __init__(
        self, transport: Transport, core: Coordinator | FencedWorker | None, leader: int, tag: int
    ) -> None:
        self._transport = transport
        self._leader = leader
        self._tag = tag
        self._task: Pending[None] | None = None
        if core is not None:
            self._core = core
            self._task = transport.spawn(self._control)

    def tell(self, to: int, *events: Event) -> None:
        """Tell the core of rank `to` of events of this worker."""
        self._transport.send(_vector(numbers_of_events(*events)), to, self._tag).wait()

    def ask(self, to: int, *events: Event) -> Callable[[], Instruction]:
        """Tell the same, and return a function that waits for the instruction that follows."""
        self.tell(to, *events)
        arriving = self._transport.receive(to, self._tag + 1)

        def wait() -> Instruction:
            numbers = arriving.wait().tolist()
            if not numbers:
                self.wait()
            return instruction_of(numbers)

        return wait

    def wait(self) -> None:
        """Wait until the core is over; raise what its flow has raised."""
        if self._task is not None:
            self._task.wait()

    def _control(self, flow: Transport) -> None:
        try:
            while not self._core.over:
                self._answer(flow)
        except BaseException:
            # A main flow that waits for an instruction learns of the failure by this.
            flow.send(_vector([]), flow.rank, self._tag + 1).wait()
            raise

    def _answer(self, flow: Transport) -> None:
        """Take in a message, or a loss, and send what follows from it."""
        arriving = flow.receive(None, self._tag)
        try:
            numbers = arriving.wait().tolist()
            events = events_of(arriving.source, numbers)
        except PeerLost as lost:
            if lost.rank == self._leader:
                raise
            events = [Lost(lost.rank)]
        for rank, told in self._core.handle(*events):
            if isinstance(told, Instruction):
                send_unless_lost(flow, _vector(numbers_of(told)), rank, self._tag + 1)
            else:
                send_unless_lost(flow, _vector(numbers_of_events(told)), rank, self._tag)


def _vector(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# Over a plan


class Fence:
    """Finds a step that no worker has passed, for all to rest after, when one of them wishes so.

    All workers of a phase take part, and count its steps from here on. The first one is the leader,
    whose `observe` gets the reports of a step together, and may return the number of a transition
    that is to end the phase. Without a wish it costs a message to oneself every few steps.
    """

    def __init__(
        self, worker: Worker, observe: Callable[[Step], int | None] = lambda step: None
    ) -> None:
        ranks = worker.workers.ranks
        self._rank, self._leader = worker.rank, ranks[0]
        self._observe = observe
        self._steps = 0
        self._limit: Grant | RestAfter = Grant(LEASE)
        self._wished = False
        self._control: ControlFlow | None = None  # None: this worker is alone
        if len(ranks) > 1:
            core = FencedWorker(self._rank)
            if self._rank == self._leader:
                core = FenceLeader(ranks, lambda reports: observe(_step_of(reports)))
            self._control = ControlFlow(worker.transport, core, self._leader, Tag.FENCE)

    def reached(self, *, wish: bool, seen: Sequence[float] = ()) -> Rest | None:
        """Called after each step: return the rest that follows, on all workers after this one.

        With `wish` this worker's user wishes to stop. `seen` are the fields of `Reported` about the
        step, from its samples on; none where no rule observes. A worker alone has its wish at once.
        """
        self._steps += 1
        report = Reported._make((self._rank, self._steps, *seen)) if seen else None
        if self._control is None:
            number = self._observe(_step_of([report])) if report else None
            stop = Rest(Reason.STOP) if wish else None
            return stop if number is None else Rest(Reason.PHASE, number)
        if report:
            self._control.tell(self._leader, report)
        if wish and not self._wished:
            self._wished = True
            self._control.tell(self._leader, Wish(self._rank))
        if self._steps >= self._limit.step and isinstance(self._limit, Grant):
            instruction = self._control.ask(self._rank, Renew(self._rank, self._steps))()
            assert isinstance(instruction, Grant | RestAfter)
            self._limit = instruction
        if isinstance(self._limit, RestAfter) and self._steps >= self._limit.step:
            return self._limit.rest
        return None

    def settle(self) -> None:
        """Collective over the workers, after a step of all: wait until reports are observed."""
        if self._control is not None:
            self._control.ask(self._leader, Settle(self._rank))()

    def close(self) -> None:
        """Collective over the workers: end the control flow."""
        if self._control is not None:
            self._control.tell(self._leader, Ended(self._rank, self._steps))
            self._control.wait()


# From a queue


def share_work(
    worker: Worker, shares: tuple[float, ...], holder: int | None = None, expendable: bool = False
) -> SharedWork | None:
    """Make this rank's end of a queue of all batches that are left; None if work is dealt out.

    The first worker holds it, unless another `holder` is named. Where workers are `expendable`, the
    run goes on without one that is lost: no worker ends before all batches are done, since another
    one's may come back.
    """
    queue = worker.make_queue(shares)
    if queue is None:
        return None
    rank = worker.workers.ranks[0] if holder is None else holder
    return SharedWork(worker, queue, rank, expendable)


class SharedWork:
    """A worker's batches from a queue, which the coordinator on the rank `holder` hands out.

    A worker asks for its next item when it begins a batch, so that the answer is there when the
    batch is done: no step waits for a round trip. A checkpoint keeps nothing of it: at a pause no
    batch is under way, and all that follows is known from the samples before it. Where a rule
    watches the phase, the report of a batch comes with the next question; before a pause alone.
    """

    def __init__(self, worker: Worker, queue: BatchQueue, holder: int, expendable: bool) -> None:
        self._worker = worker
        self._holder = holder
        self._works = worker.rank in worker.workers.ranks
        if self._works:
            self._in_hand = WorkInHand(queue, worker.rank)
        self._asked: Callable[[], Instruction] | None = None
        self._begun = False
        self._core: Coordinator | None = None
        if worker.rank == holder:
            gone = worker.transport.lost().intersection(worker.workers.ranks)
            self._core = Coordinator(queue, expendable=expendable, gone=gone)
        self._control = ControlFlow(worker.transport, self._core, holder, Tag.WORK_REQUEST)

    def take(self) -> Instruction:
        """Return what this worker does next; the batch before is done."""
        if self._asked is not None:
            self._in_hand.next, self._asked = self._asked(), None
        instruction, done, rank = self._in_hand.take(), self._done(), self._worker.rank
        self._begun = isinstance(instruction, Take)
        if self._begun:
            wish = [Wish(rank)] if self._worker.wishes_to_rest() else []
            # Asked now, a step ahead: the answer is there when this batch is done.
            self._asked = self._control.ask(self._holder, *done, Started(rank), *wish)
        elif isinstance(instruction, Wait):
            self._asked = self._control.ask(self._holder, *done, Free(rank))
        elif done:
            self._control.ask(self._holder, *done, Settle(rank))()
        return instruction

    @property
    def owes(self) -> bool:
        """True if a batch of a lost worker is to be done again, as far as this rank knows."""
        return self._core is not None and self._core.owes

    def skip(self, values: Tensor) -> None:
        """Do nothing: this worker has asked for its next instruction already."""

    def _done(self) -> list[Done]:
        """The report on the finished batch; none if no rule asked for one."""
        step = self._worker.step
        if not self._begun or not step.report:
            return []
        assert step.position is not None
        stop = step.position + step.samples
        return [Done(self._worker.rank, step.position, stop, *step.report)]

    def close(self) -> None:
        """Collective over the workers and the holder: nobody takes anything more."""
        if self._works:
            self._control.tell(self._holder, Ended(self._worker.rank))
        self._control.wait()


# What rules observe


def step_of_round(reports: Sequence[Done], seconds: tuple[float, ...]) -> Step:
    """Make one step of a round of batches, before whose end all samples are done."""
    counts = tuple(report.stop - report.start for report in reports)
    losses = tuple(report.loss or 0.0 for report in reports)
    rates, epochs, fractions = zip(*((r.rate, r.epoch, r.fraction) for r in reports), strict=True)
    seen = {"rates": (min(rates),), "epoch": max(epochs), "fraction": max(fractions)}
    return _together(counts, losses, seconds=seconds, **seen)


def _step_of(reports: Sequence[Reported]) -> Step:
    """Make one step of what all workers report on theirs."""
    _, _, samples, losses, seconds, rates, epochs, fractions, own, mean = zip(*reports, strict=True)
    return _together(
        samples, losses, seconds=seconds, rates=(min(rates),),
        epoch=min(epochs), fraction=min(fractions), squares=own, square=mean[0],
    )  # fmt: skip


def _together(counts: tuple[int, ...], losses: tuple[float, ...], **seen: Any) -> Step:
    """Return the step of all workers that have had `counts` samples each."""
    samples = sum(counts)
    total = sum(count * loss for count, loss in zip(counts, losses, strict=True))
    loss = total / samples if samples else 0.0
    return Step(samples, samples, loss=loss, losses=losses, counts=counts, **seen)
