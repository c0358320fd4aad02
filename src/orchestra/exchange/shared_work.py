"""A queue of batches that one rank holds; workers ask it a step ahead."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.schedules.work_queue import Kind, Report, WorkInHand, WorkItem, WorkQueue, item_of
from orchestra.transports.protocol import Handle, Task, Transport, send_unless_lost
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker


class _Request(enum.IntEnum):
    """What a worker asks of the flow that holds the queue."""

    NEXT = 0  # give me the item after the one that I begin now
    STOP = 1  # the same, and the user wishes to stop
    CLOSE = 2  # I take nothing more
    DONE = 3  # my batch is done, and I have begun no other; answer when you have read this
    WAIT = 4  # the same; answer with what I do next, as soon as there is something


def share_work(
    worker: Worker,
    shares: tuple[float, ...],
    holder: int | None = None,
    *,
    expendable: bool = False,
) -> SharedWork | None:
    """Make this rank's end of a queue of all batches that are left; None if work is dealt out.

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
            queue.expendable = expendable
            self._flow = worker.transport.spawn(_Holder(queue, worker.workers.ranks).run)

    def take(self) -> WorkItem:
        """Return what this worker does next; the item before is done."""
        if self._asked is not None:
            self._in_hand.item = item_of(self._asked.wait().tolist())
            self._asked = None
        item, report = self._in_hand.take(), self._report()
        self._begun = item.kind is Kind.BATCH
        if self._begun:
            stop = self._worker.reporter.stop_requested()
            # Asked now, a step ahead: the answer is there when this batch is done.
            self._tell(_Request.STOP if stop else _Request.NEXT, report)
            self._asked = self._worker.transport.receive(self._holder, Tag.WORK)
        elif item.kind is Kind.WAIT:
            self._tell(_Request.WAIT, report)
            self._asked = self._worker.transport.receive(self._holder, Tag.WORK)
        elif report:
            self._tell(_Request.DONE, report)
            self._worker.transport.receive(self._holder, Tag.WORK).wait()
        return item

    def skip(self, values: Tensor) -> None:
        """Do nothing: the next item was asked for already."""

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

    def _tell(self, request: _Request, report: tuple[float, ...] = ()) -> None:
        values = torch.tensor([request, *report], dtype=torch.float64)
        self._worker.transport.send(values, self._holder, Tag.WORK_REQUEST).wait()


class _Holder:
    """The background flow: it answers at once, whatever the main flows do."""

    def __init__(self, queue: WorkQueue, workers: tuple[int, ...]) -> None:
        self._queue = queue
        self._open = set(workers)

    def run(self, transport: Transport) -> None:
        """Answer until all workers have closed."""
        queue, gone = self._queue, transport.lost()
        queue.restart()
        # Lost in a phase before.
        for rank in self._open & gone:
            queue.lose(rank)
        self._open -= gone
        while self._open:
            message = transport.receive(None, Tag.WORK_REQUEST)
            try:
                request, *report = message.wait().tolist()
            except PeerLost as lost:
                self._open.discard(lost.rank)
                queue.lose(lost.rank)
            else:
                if report:
                    start, stop, *seen = report
                    queue.report(Report(message.source, int(start), int(stop), *seen))
                self._heed(transport, message.source, _Request(int(request)))
            for worker, item in queue.woken():
                _answer(transport, worker, item)

    def _heed(self, transport: Transport, worker: int, request: _Request) -> None:
        if request is _Request.CLOSE:
            self._open.discard(worker)
            self._queue.finish(worker)
        elif request is _Request.WAIT:
            self._queue.wait(worker)
        elif request is _Request.DONE:
            # Its content does not matter. The worker goes on once its report has been observed.
            _answer(transport, worker, WorkItem(Kind.WAIT, 0, 0))
        else:
            self._queue.resume(worker)
            if request is _Request.STOP:
                self._queue.close()
            _answer(transport, worker, self._queue.take(worker, ahead=True))


def _answer(transport: Transport, worker: int, item: WorkItem) -> None:
    send_unless_lost(transport, torch.tensor(item, dtype=torch.float64), worker, Tag.WORK)
