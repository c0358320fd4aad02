"""A queue of batches that one rank holds; workers ask it a step ahead."""

from __future__ import annotations

import contextlib
import enum

import torch
from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.schedules.work_queue import Kind, Report, WorkInHand, WorkItem, WorkQueue, item_of
from orchestra.transports.protocol import Handle, Task, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker


class _Word(enum.IntEnum):
    """What a worker asks of the flow that holds the queue."""

    NEXT = 0  # give me the item after the one that I begin now
    STOP = 1  # the same, and the user wishes to stop
    CLOSE = 2  # I take nothing more
    DONE = 3  # my batch is done, and I have begun no other; answer when you have read this


def share_work(
    worker: Worker,
    shares: tuple[float, ...],
    holder: int | None = None,
    *,
    expendable: bool = False,
) -> SharedWork | None:
    """This rank's end of a queue of all that is left; None where work is dealt out.

    Args:
        holder: the rank that holds it: the first worker, unless another one is named.
        expendable: whether the run goes on without a worker that is lost. Then no worker ends
            before all batches are done, since another one's may come back.
    """
    queue, copy = worker.make_queue(shares), worker.make_queue(shares)
    if queue is None or copy is None:
        return None
    rank = worker.workers.ranks[0] if holder is None else holder
    return SharedWork(worker, queue, copy, rank, expendable)


class SharedWork:
    """A worker's batches from a queue that a background flow of the rank `holder` holds.

    A worker asks for its next item when it begins a batch, so that the answer is there when the
    batch is done: no step waits for a round trip. A checkpoint keeps nothing of it: at a pause no
    batch is under way, and all that follows is known from the samples before it. Where a rule
    watches the phase, the report of a batch comes with the next question; before a pause alone.

    Args:
        queue: held by the flow.
        copy: the same, for what a worker knows without a message.
    """

    def __init__(
        self, worker: Worker, queue: WorkQueue, copy: WorkQueue, holder: int, expendable: bool
    ) -> None:
        self._worker = worker
        self._holder = holder
        self._works = worker.rank in worker.workers.ranks
        if self._works:
            self._in_hand = WorkInHand(copy, worker.rank)
        self._asked: Handle | None = None
        self._begun = False
        self._flow: Task[None] | None = None
        if worker.rank == holder:
            self._flow = worker.transport.spawn(
                _Holder(queue, worker.workers.ranks, expendable).run
            )

    def take(self) -> WorkItem:
        """What this worker does next; the one before is done."""
        if self._asked is not None:
            self._in_hand.item = item_of(self._asked.wait().tolist())
            self._asked = None
        item, report = self._in_hand.take(), self._report()
        self._begun = item.kind is Kind.BATCH
        if self._begun:
            stop = self._worker.reporter.stop_requested()
            self._tell(_Word.STOP if stop else _Word.NEXT, report)
            self._asked = self._worker.transport.receive(self._holder, Tag.WORK)
        elif report or item.kind is Kind.WAIT:
            self._tell(_Word.DONE, report)
            answer = self._worker.transport.receive(self._holder, Tag.WORK)
            if item.kind is Kind.WAIT:
                self._asked = answer
            else:
                answer.wait()
        return item

    def skip(self, values: Tensor) -> None:
        """The next item was asked for already."""

    def _report(self) -> tuple[float, ...]:
        """Of the batch that is done, if anybody wants to know."""
        step = self._worker.step
        if not self._begun or not step.report:
            return ()
        assert step.position is not None
        return (step.position, step.position + step.samples, *step.report)

    def close(self) -> None:
        """Collective over the workers and the holder: nobody takes anything more."""
        if self._works:
            self._tell(_Word.CLOSE)
        if self._flow is not None:
            self._flow.wait()

    def _tell(self, word: _Word, report: tuple[float, ...] = ()) -> None:
        message = torch.tensor([word, *report], dtype=torch.float64)
        self._worker.transport.send(message, self._holder, Tag.WORK_REQUEST).wait()


class _Holder:
    """The background flow: it answers at once, whatever the main flows do.

    Where workers are expendable, one for whom nothing is left has to wait, and asks again when
    its last batch is done. That question is answered when another worker's batch has come back, or
    when all batches are done.
    """

    def __init__(self, queue: WorkQueue, workers: tuple[int, ...], expendable: bool) -> None:
        self._queue = queue
        self._open = set(workers)
        self._expendable = expendable
        self._has_to_wait: set[int] = set()
        self._waiting: set[int] = set()

    def _restart(self) -> None:
        items = self._queue.restart()
        self._held = {rank: [item] for rank, item in items.items()}
        self._paused = {rank for rank, item in items.items() if item.kind is Kind.PAUSE}
        for rank in items.keys() - self._open:
            self._lose(rank)

    def run(self, transport: Transport) -> None:
        """Until all workers have closed."""
        self._open -= transport.lost()
        self._restart()
        while self._open:
            request = transport.receive(None, Tag.WORK_REQUEST)
            try:
                number, *report = request.wait().tolist()
            except PeerLost as lost:
                self._lose(lost.rank)
            else:
                if report:
                    start, stop, *seen = report
                    self._queue.report(Report(request.source, int(start), int(stop), *seen))
                self._heed(transport, request.source, _Word(int(number)))
            self._end_waiting(transport)

    def _heed(self, transport: Transport, worker: int, word: _Word) -> None:
        if word is _Word.CLOSE:
            self._open.discard(worker)
            del self._held[worker]
        elif word is not _Word.DONE:
            self._answer(transport, worker, self._next(worker, word))
        elif worker in self._has_to_wait:
            self._has_to_wait.remove(worker)
            self._held[worker] = []
            self._waiting.add(worker)
        else:
            self._answer(transport, worker, self._held[worker][-1])

    def _answer(self, transport: Transport, worker: int, item: WorkItem) -> None:
        answer = torch.tensor(item, dtype=torch.float64)
        with contextlib.suppress(PeerLost):
            transport.send(answer, worker, Tag.WORK).wait()

    def _next(self, worker: int, word: _Word) -> WorkItem:
        """The item after the one that `worker` begins; what it had before that one is done."""
        if worker in self._paused:  # all have passed the quiet point, and this one is the first
            self._restart()
        if word is _Word.STOP:
            self._queue.close()
        self._held[worker] = self._held[worker][-1:]
        item = self._queue.next(worker)
        if item.kind is Kind.END and self._expendable:
            self._has_to_wait.add(worker)
            return WorkItem(Kind.WAIT, item.start, item.stop)
        self._hold(worker, item)
        return item

    def _hold(self, worker: int, item: WorkItem) -> None:
        if item.kind is Kind.BATCH:
            self._held[worker].append(item)
        elif item.kind is not Kind.END:
            self._paused.add(worker)

    def _end_waiting(self, transport: Transport) -> None:
        """Answer those that wait and can be: with what came back, or as nothing can any more."""
        for worker in sorted(self._waiting):
            item = self._queue.next(worker)
            if item.kind is Kind.END and self._some_hold_batches():
                return
            self._hold(worker, item)
            self._waiting.remove(worker)
            self._answer(transport, worker, item)

    def _some_hold_batches(self) -> bool:
        return any(item.kind is Kind.BATCH for items in self._held.values() for item in items)

    def _lose(self, worker: int) -> None:
        self._open.discard(worker)
        self._waiting.discard(worker)
        self._queue.forget(worker)
        for item in self._held.pop(worker, ()):
            if item.kind is Kind.BATCH:
                self._queue.give_back(item)
