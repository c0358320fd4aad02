"""Workers at their own pace: a step that all leave after, and a queue of batches on one rank."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchestra.coordinator.batches import BatchQueue, WorkInHand
from orchestra.coordinator.core import Coordinator
from orchestra.coordinator.events import (
    Done,
    Event,
    Free,
    Instruction,
    Lost,
    Started,
    Take,
    Wait,
    Wish,
    instruction_of,
    numbers_of,
)
from orchestra.errors import PeerLost
from orchestra.transports.protocol import Handle, Task, Transport, send_unless_lost
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Step, Worker

LEASE = 4
"""Steps that a worker goes on without asking. More cost less, and a wish takes longer."""

Observe = Callable[[Step], bool]
"""Take note of a step as all workers know it together; True to wish for a common step now."""


class _MessageKind(enum.IntEnum):
    """The kinds of messages of the control flows; most carry a number of a step."""

    RENEW = 0  # my main flow has done that many steps, and asks for more
    GRANT = 1  # it may go up to that step
    WISH = 2  # let us leave at a common step
    REPORT = 3  # of a worker's step, to be observed
    REQUEST = 4  # promise a step that you will not go beyond
    PROMISE = 5  # this one
    ANNOUNCE = 6  # everyone leaves after that step
    SETTLE = 7  # I wait until all reports have been observed, or: they have
    END = 8  # I have finished, after so many steps
    BYE = 9  # all have finished


class CommonStep:
    """Finds, when anyone wishes for it, a step that no worker has passed, for all to leave after.

    Each rank has a control flow, which answers while the main flow computes or is blocked. It
    grants the main flow a lease, a step up to which it goes without asking. On a wish the flow
    of the leader asks all flows for a promise, which is that lease, and announces the largest.
    A main flow at the end of its lease waits until the announcement, if a promise was given.
    So nobody has passed the step announced, and nobody waits for a main flow: there is no
    deadlock, whatever main flows wait for among themselves. Without a wish it costs a message
    to oneself every few steps.

    All workers take part; the first one is the leader. `steps` is how many steps this one has done;
    `level` keeps apart those that exist at the same time. The leader puts the reports of a step
    together for `observe`, which may wish for everyone.
    """

    def __init__(
        self, worker: Worker, *, steps: int = 0, level: int = 0, observe: Observe | None = None
    ) -> None:
        self._transport = worker.transport
        self._leader = worker.workers.ranks[0]
        self._tag = Tag.COMMON_STEP + 2 * level
        self._steps = steps
        self._lease = steps + LEASE
        self._final = False
        self._wished = False
        self._control = _Control(worker, self._tag, self._lease, observe or (lambda step: False))
        self._flow: Task[None] | None = None
        if len(worker.workers) > 1:
            self._flow = worker.transport.spawn(self._control.run)

    def reached(self, steps: int, *, wish: bool) -> bool:
        """Return whether step number `steps` of this worker, which is over, is the common one.

        With `wish` this worker wants one to be found. A worker alone has its wish at once.
        """
        self._steps = steps
        if self._flow is None:
            self._wished |= wish
            return self._wished
        if wish and not self._wished:
            self._wished = True
            self._tell(self._leader, _MessageKind.WISH)
        if steps >= self._lease and not self._final:
            own = self._transport.rank
            self._tell(own, _MessageKind.RENEW, steps)
            kind, number = self._transport.receive(own, self._tag + 1).wait().tolist()
            if kind == _MessageKind.END:
                self._flow.wait()  # raises what the control flow raised
            self._lease, self._final = int(number), kind == _MessageKind.ANNOUNCE
        return self._final and steps >= self._lease

    def report(self, steps: int, *values: float) -> None:
        """Tell the leader what this worker saw in its step: the fields of a `Step`."""
        if self._flow is not None:
            self._tell(self._leader, _MessageKind.REPORT, steps, *values)
        else:
            self._wished |= self._control.report(steps, self._transport.rank, list(values))

    def settle(self) -> None:
        """Collective over the workers, after a step of all: wait until reports are observed."""
        if self._flow is not None:
            self._tell(self._leader, _MessageKind.SETTLE)
            self._transport.receive(self._leader, self._tag + 1).wait()

    def close(self) -> None:
        """Collective over the workers: end the control flow."""
        if self._flow is not None:
            self._tell(self._leader, _MessageKind.END, self._steps)
            self._flow.wait()
            self._flow = None

    def _tell(self, rank: int, kind: _MessageKind, *values: float) -> None:
        self._transport.send(_message(kind, *values), rank, self._tag).wait()


def _message(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass
class _Control:
    """The control flow of one rank; that of the leader also gathers and announces."""

    _worker: Worker
    _tag: int
    _lease: int
    _observe: Observe
    _promised = False
    _asked = False  # the main flow waits for an answer
    _common: int | None = None
    _requested = _announced = False  # from here on of the leader alone
    _reports: dict[int, dict[int, list[float]]] = field(default_factory=dict)  # by step and rank
    _promises: dict[int, int] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _settled: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._leader, *_ = ranks = self._worker.workers.ranks
        self._ranks = set(ranks)

    def run(self, transport: Transport) -> None:
        """Answer until everyone has finished."""
        self._transport = transport
        try:
            while self._answer_next():
                pass
        except BaseException:
            # A main flow that waits for a grant learns of the failure by this, and raises it.
            self._tell_main(_MessageKind.END, 0)
            raise

    def _answer_next(self) -> bool:
        """Answer a message, or note a loss; False once all have finished."""
        handle = self._transport.receive(None, self._tag)
        try:
            kind, *values = handle.wait().tolist()
        except PeerLost as lost:
            # Without the leader nobody announces a step.
            if lost.rank == self._leader:
                raise
            self._end(lost.rank)
            return True
        self._take(kind, handle.source, values)
        return bool(kind != _MessageKind.BYE)

    def _take(self, kind: float, source: int, values: list[float]) -> None:
        number = int(values[0]) if values else 0
        match kind:
            # A promise holds: the main flow stops at its lease until the common step is known.
            case _MessageKind.RENEW if self._promised:
                self._asked = True
                self._grant()
            case _MessageKind.RENEW:
                self._lease = number + LEASE
                self._tell_main(_MessageKind.GRANT, self._lease)
            case _MessageKind.REQUEST:
                self._promised = True
                self._tell(self._leader, _MessageKind.PROMISE, self._lease)
            case _MessageKind.ANNOUNCE:
                self._common = number
                self._grant()
            case _MessageKind.WISH:
                self._request()
            case _MessageKind.REPORT:
                if self.report(number, source, values[1:]):
                    self._request()
            case _MessageKind.PROMISE:
                self._promises[source] = number
                self._announce()
            case _MessageKind.SETTLE:
                self._settled.add(source)
                self._settle()
            case _MessageKind.END:
                self._promises[source] = number
                self._end(source)

    def _grant(self) -> None:
        if self._asked and self._common is not None:
            self._tell_main(_MessageKind.ANNOUNCE, self._common)

    def _tell_main(self, kind: _MessageKind, number: int) -> None:
        transport = self._transport
        transport.send(_message(kind, number), transport.rank, self._tag + 1).wait()

    # The leader's part

    def _request(self) -> None:
        if not self._requested:
            self._requested = True
            self._tell_all(_MessageKind.REQUEST)

    def report(self, step: int, rank: int, report: list[float]) -> bool:
        """Put the reports of all on a step together; return whether then all are to leave."""
        there = self._reports.setdefault(step, {})
        there[rank] = report
        # Not all are there yet; nobody waits for a lost worker.
        if set(self._worker.workers.ranks) - self._worker.transport.lost() - there.keys():
            return False
        del self._reports[step]
        reports = [there[rank] for rank in sorted(there)]
        samples, losses, seconds, rates, epochs, fractions, own, mean = zip(*reports, strict=True)
        together = _together(
            tuple(map(int, samples)), losses, seconds=seconds, rates=(min(rates),),
            epoch=min(epochs), fraction=min(fractions), squares=own, square=mean[0],
        )  # fmt: skip
        return self._observe(together)

    def _announce(self) -> None:
        everyone = self._promises.keys() | self._ended >= self._ranks
        if self._promises and everyone and not self._announced:
            self._announced = True
            # Nobody is beyond its promise, so nobody has passed the largest one.
            self._tell_all(_MessageKind.ANNOUNCE, max(self._promises.values()))

    def _settle(self) -> None:
        if self._settled and self._settled | self._ended >= self._ranks:
            for rank in sorted(self._settled):
                message = _message(_MessageKind.SETTLE)
                send_unless_lost(self._transport, message, rank, self._tag + 1)
            self._settled.clear()

    def _end(self, rank: int) -> None:
        if self._transport.rank != self._leader:
            return
        self._ended.add(rank)
        self._announce()
        self._settle()
        if self._ended >= self._ranks:
            self._tell_all(_MessageKind.BYE)

    def _tell_all(self, kind: _MessageKind, *values: float) -> None:
        for rank in sorted(self._ranks):
            self._tell(rank, kind, *values)

    def _tell(self, rank: int, kind: _MessageKind, *values: float) -> None:
        send_unless_lost(self._transport, _message(kind, *values), rank, self._tag)


def step_of_round(reports: Sequence[Done], seconds: tuple[float, ...]) -> Step:
    """Make one step of a round of batches, before whose end all samples are done."""
    counts = tuple(report.stop - report.start for report in reports)
    losses = tuple(report.loss or 0.0 for report in reports)
    rates, epochs, fractions = zip(*((r.rate, r.epoch, r.fraction) for r in reports), strict=True)
    seen = {"rates": (min(rates),), "epoch": max(epochs), "fraction": max(fractions)}
    return _together(counts, losses, seconds=seconds, **seen)


def _together(counts: tuple[int, ...], losses: tuple[float, ...], **seen: Any) -> Step:
    """Return the step of all workers that have had `counts` samples each."""
    samples = sum(counts)
    total = sum(count * loss for count, loss in zip(counts, losses, strict=True))
    loss = total / samples if samples else 0.0
    return Step(samples, samples, loss=loss, losses=losses, counts=counts, **seen)


# A queue of batches


class _Request(enum.IntEnum):
    """What a worker asks of the flow that holds the coordinator."""

    NEXT = 0  # tell me what follows the batch that I begin now
    STOP = 1  # the same, and the user wishes to stop
    CLOSE = 2  # I take nothing more
    DONE = 3  # my batch is done, as I report, and I have begun no other; say when you know
    WAIT = 4  # the same; answer with what I do next, as soon as there is something


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
    """A worker's batches from a queue that a background flow of the rank `holder` holds.

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
        self._asked: Handle | None = None
        self._begun = False
        self._flow: Task[None] | None = None
        if worker.rank == holder:
            flow = _Holder(queue, expendable, set(worker.workers.ranks))
            self._flow = worker.transport.spawn(flow.run)

    def take(self) -> Instruction:
        """Return what this worker does next; the batch before is done."""
        if self._asked is not None:
            self._in_hand.next = instruction_of(self._asked.wait().tolist())
            self._asked = None
        instruction, report = self._in_hand.take(), self._report()
        self._begun = isinstance(instruction, Take)
        if self._begun:
            stop = self._worker.reporter.stop_requested()
            # Asked now, a step ahead: the answer is there when this batch is done.
            self._asked = self._ask(_Request.STOP if stop else _Request.NEXT, report)
        elif isinstance(instruction, Wait):
            self._asked = self._ask(_Request.WAIT, report)
        elif report:
            self._ask(_Request.DONE, report).wait()
        return instruction

    def skip(self, values: Tensor) -> None:
        """Do nothing: this worker has asked for its next instruction already."""

    def _report(self) -> tuple[float, ...]:
        """The report on the finished batch, empty if no rule asked for one."""
        step = self._worker.step
        if not self._begun or not step.report:
            return ()
        assert step.position is not None
        return (step.position, step.position + step.samples, *step.report)

    def close(self) -> None:
        """Collective over the workers and the holder: nobody takes anything more."""
        if self._works:
            self._tell(_Request.CLOSE)
        if self._flow is not None:
            self._flow.wait()

    def _ask(self, request: _Request, report: tuple[float, ...]) -> Handle:
        self._tell(request, *report)
        return self._worker.transport.receive(self._holder, Tag.WORK)

    def _tell(self, *message: float) -> None:
        self._worker.transport.send(_message(*message), self._holder, Tag.WORK_REQUEST).wait()


@dataclass
class _Holder:
    """The background flow: it answers at once, whatever the main flows do."""

    _queue: BatchQueue
    _expendable: bool
    _open: set[int]  # workers

    def run(self, transport: Transport) -> None:
        """Answer until all workers have closed."""
        gone = self._open & transport.lost()  # in a phase before
        coordinator = Coordinator(self._queue, expendable=self._expendable, gone=gone)
        self._open -= gone
        while self._open:
            message = transport.receive(None, Tag.WORK_REQUEST)
            try:
                request, *report = message.wait().tolist()
            except PeerLost as lost:
                # A worker that has closed has done its batches.
                told = coordinator.handle(Lost(lost.rank)) if lost.rank in self._open else []
                self._open.discard(lost.rank)
            else:
                told = coordinator.handle(*_events(message.source, request, report))
                if request == _Request.CLOSE:
                    self._open.discard(message.source)
                elif request == _Request.DONE:
                    # The rules know the report now. The content of the answer does not matter.
                    told = [(message.source, Wait()), *told]
            for worker, instruction in told:
                send_unless_lost(transport, _message(*numbers_of(instruction)), worker, Tag.WORK)


def _events(worker: int, request: float, report: Sequence[float]) -> list[Event]:
    """Translate a message of `worker`."""
    events: list[Event] = []
    if report:
        start, stop, *seen = report
        events.append(Done(worker, int(start), int(stop), *seen))
    if request in (_Request.NEXT, _Request.STOP):
        events.append(Started(worker))
    elif request == _Request.WAIT:
        events.append(Free(worker))
    if request == _Request.STOP:
        events.append(Wish(worker))
    return events
