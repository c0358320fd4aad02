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


class Word(enum.IntEnum):
    """What a worker asks of the flow that holds the queue."""

    NEXT = 0  # give me the item after the one that I begin now
    STOP = 1  # the same, and the user wishes to stop
    CLOSE = 2  # I take nothing more
    DONE = 3  # here is my report; answer when it has been read


def share_work(
    worker: Worker, shares: tuple[float, ...], holder: int | None = None
) -> SharedWork | None:
    """This rank's end of a queue of all that is left; None where work is dealt out.

    `holder` is the rank that holds it: the first worker, unless another one is named.
    """
    queue, copy = worker.make_queue(shares), worker.make_queue(shares)
    if queue is None or copy is None:
        return None
    return SharedWork(worker, queue, copy, worker.workers.ranks[0] if holder is None else holder)


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

    def __init__(self, worker: Worker, queue: WorkQueue, copy: WorkQueue, holder: int) -> None:
        self._worker = worker
        self._holder = holder
        self._works = worker.rank in worker.workers.ranks
        if self._works:
            self._in_hand = WorkInHand(copy, worker.rank)
        self._asked: Handle | None = None
        self._begun = False
        self._flow: Task[None] | None = None
        if worker.rank == holder:
            self._flow = worker.transport.spawn(_Holder(queue, worker.workers.ranks).run)

    def take(self) -> WorkItem:
        """What this worker does next; the one before is done."""
        if self._asked is not None:
            self._in_hand.item = item_of(self._asked.wait().tolist())
            self._asked = None
        item, report = self._in_hand.take(), self._report()
        self._begun = item.kind is Kind.BATCH
        if self._begun:
            stop = self._worker.reporter.stop_requested()
            self._tell(Word.STOP if stop else Word.NEXT, report)
            self._asked = self._worker.transport.receive(self._holder, Tag.WORK)
        elif report:
            self._tell(Word.DONE, report)
            self._worker.transport.receive(self._holder, Tag.WORK).wait()
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
            self._tell(Word.CLOSE)
        if self._flow is not None:
            self._flow.wait()

    def _tell(self, word: Word, report: tuple[float, ...] = ()) -> None:
        message = torch.tensor([word, *report], dtype=torch.float64)
        self._worker.transport.send(message, self._holder, Tag.WORK_REQUEST).wait()


class _Holder:
    """The background flow: it answers at once, whatever the main flows do."""

    def __init__(self, queue: WorkQueue, workers: tuple[int, ...]) -> None:
        self._queue = queue
        self._open = set(workers)

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
                continue
            word, worker = Word(int(number)), request.source
            if word is Word.CLOSE:
                self._open.discard(worker)
                continue
            if report:
                start, stop, *seen = report
                self._queue.report(Report(worker, int(start), int(stop), *seen))
            item = self._held[worker][-1] if word is Word.DONE else self._next(worker, word)
            answer = torch.tensor(item, dtype=torch.float64)
            with contextlib.suppress(PeerLost):
                transport.send(answer, worker, Tag.WORK).wait()

    def _next(self, worker: int, word: Word) -> WorkItem:
        """The item after the one that `worker` begins; what it had before that one is done."""
        if worker in self._paused:  # all have passed the quiet point, and this one is the first
            self._restart()
        if word is Word.STOP:
            self._queue.close()
        item = self._queue.next(worker)
        if item.kind is Kind.BATCH:
            self._held[worker] = [*self._held[worker][-1:], item]
        elif item.kind is not Kind.END:
            self._paused.add(worker)
        return item

    def _lose(self, worker: int) -> None:
        self._open.discard(worker)
        self._queue.forget(worker)
        for item in self._held.pop(worker, ()):
            if item.kind is Kind.BATCH:
                self._queue.give_back(item)
