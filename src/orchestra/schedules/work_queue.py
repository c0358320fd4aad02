"""A queue of batches for workers that need not step together: dynamic self-scheduling."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Sizes = tuple[tuple[int, int], ...]


class Kind(enum.IntEnum):
    """The kinds of what a worker does next."""

    BATCH = 0  # the gradient of these samples
    PAUSE = 1  # wait with all others for a quiet point, then go on
    STOP = 2  # the same, and do not go on: the user wishes to stop
    END = 3  # leave: the budget is used up, or the phase is over
    WAIT = 4  # ask again: others hold the last batches, which come back if they are lost


class WorkItem(NamedTuple):
    """Samples [start, stop) of the global order. Where there are none, all before `start` are
    handed out. `level`: of an END, which of nested phases it ends; 0 is the innermost one."""

    kind: Kind
    start: int
    stop: int
    level: int = 0

    @property
    def samples(self) -> int:
        return self.stop - self.start


class WorkSource(Protocol):
    """Gives one worker its batches, one after the other."""

    def take(self) -> WorkItem:
        """Return the next item of work; the one before is done."""

    def skip(self, values: Tensor) -> None:
        """Note that nobody computes the last item's batch; renew the flat parameters `values`.

        For loops of the user's own, which may take a batch and make no step with it.
        """


def item_of(numbers: Sequence[float]) -> WorkItem:
    kind, start, stop, level = numbers
    return WorkItem(Kind(int(kind)), int(start), int(stop), int(level))


class Report(NamedTuple):
    """A worker's report on its batch, the samples [start, stop), for a rule that ends the phase."""

    worker: int
    start: int
    stop: int
    loss: float
    seconds: float
    rate: float
    epoch: float
    fraction: float


Observe = Callable[[Sequence[Report], tuple[float, ...]], None]


class WorkQueue:
    """Hands out the samples [start, stop) of the global order, each once, to whoever is free.

    One rank holds the queue that counts. Every worker has a copy for `first`: the first batch, and
    the first after a pause, follow from the position alone and need no message.

    Args:
        start: the first sample to hand out.
        stop: the end of the budget; None where it is not known.
        sizes: the samples in a batch of each worker, as (rank, samples).
        pause_every: all workers pause when the samples before each multiple of this are handed
            out; None: never. No batch crosses such a point.
    """

    def __init__(
        self, start: int, stop: int | None, sizes: Sizes, pause_every: int | None = None
    ) -> None:
        self.start, self.budget = start, stop
        self.round = sum(size for _, size in sizes)
        self.expendable = True  # workers may be lost: nobody ends before all batches are done
        self.idle: set[int] = set()  # workers that wait for a batch to come back, or for the end
        self._stop, self._level = stop, 0
        self._due: int | None = None
        self._rounds: list[Rounds] = []
        self._sizes, self._size_of = sizes, dict(sizes)
        self._pause_every = pause_every
        self._next = start
        self._limit = self._pause_after(start)
        self._closed = False
        self._held: dict[int, list[WorkItem]] = {}  # batches that are not done
        self._paused = {rank for rank, _ in sizes}  # those that know no batch before a quiet point
        self._gone: set[int] = set()
        self._returned: list[WorkItem] = []

    def first(self, position: int) -> Mapping[int, WorkItem]:
        """Return an item for each worker, in rank order, if all before `position` is done."""
        limit = self._pause_after(position)
        return _first(position, self._stop, limit, self._sizes, self._level)

    def restart(self) -> Mapping[int, WorkItem]:
        """Hand out `first`: at the beginning, and after a pause, when no worker holds a batch."""
        items = self.first(self._next)
        self._limit = self._pause_after(self._next)
        self._closed = False
        self._held = {rank: [item] for rank, item in items.items() if item.kind is Kind.BATCH}
        self._next = max(item.stop for item in items.values())
        self._paused = {rank for rank, item in items.items() if item.kind is Kind.PAUSE}
        # Items are dealt out by the position alone; those of lost workers come back at once.
        for worker in self._gone:
            self.lose(worker)
        if self._due is not None:
            self.end(self._due)
        return items

    def resume(self, worker: int) -> None:
        """Let `worker` go on: if it had to pause, all have passed the quiet point."""
        if worker in self._paused:
            self.restart()

    def take(self, worker: int, *, ahead: bool = False) -> WorkItem:
        """Return the next item of `worker`, whose last batch is done, or (`ahead`) begins now."""
        self._held[worker] = self._held.get(worker, [])[-1:] if ahead else []
        # The last batches may come back from a worker that is lost, so that nobody leaves before.
        over = self._next == self._stop and not (self._returned or self._closed)
        if over and self.expendable and any(self._held.values()):
            return WorkItem(Kind.WAIT, self._next, self._next)
        item = self._take(worker)
        if item.kind is Kind.BATCH:
            self._held[worker].append(item)
        elif item.kind is not Kind.END:
            self._paused.add(worker)
        return item

    def _take(self, worker: int) -> WorkItem:
        first = self._next
        if self._returned:
            # The earliest first: under a bound all wait for the first gap in what is applied.
            return heapq.heappop(self._returned)
        if first == self._stop:
            return WorkItem(Kind.END, first, first, self._level)
        if self._closed or first == self._limit:
            return WorkItem(Kind.STOP if self._closed else Kind.PAUSE, first, first)
        self._next = _earliest(first + self._size_of[worker], self._stop, self._limit)
        return WorkItem(Kind.BATCH, first, self._next)

    def finish(self, worker: int) -> None:
        """Note that `worker` has done its last batch."""
        self._held.pop(worker, None)

    def wait(self, worker: int) -> None:
        """Note that `worker` has done its last batch, was told to wait, and will be `woken`."""
        self.finish(worker)
        self.idle.add(worker)

    def woken(self) -> Iterator[tuple[int, WorkItem]]:
        """Pairs of a waiting worker and an item, for the workers that now have one."""
        for worker in sorted(self.idle):
            item = self.take(worker)
            if item.kind is not Kind.WAIT:
                self.idle.discard(worker)
                yield worker, item

    def lose(self, worker: int) -> None:
        """Note that `worker` is gone: others take the batches that it holds, if any."""
        for item in self._held.pop(worker, ()):
            heapq.heappush(self._returned, item)
        self.idle.discard(worker)
        self._gone.add(worker)
        for rounds in self._rounds:
            rounds.lose(worker)

    def close(self) -> None:
        """Give nobody another batch before the next `restart`: the user wishes to stop.

        Not while somebody is to pause and go on: all go on then, and whoever wishes says it again
        with its next batch.
        """
        self._closed = self._closed or not self._paused

    def end_at(self, stop: int, level: int) -> None:
        """End the phase `level` with the samples before `stop`; for all copies, before `first`."""
        assert self._stop is not None
        # At the same sample the outer phase ends, and with it those inside.
        if (stop, -level) < (self._stop, -self._level):
            self._stop, self._level = stop, level

    def end(self, level: int) -> None:
        """End the phase `level` as soon as possible: with the samples that are handed out.

        Workers that are to pause here go on first: each with the batch that it knows.
        """
        self._due = level
        if not self._paused:
            self._due = None
            if self._next != self._stop:
                self._stop, self._level = self._next, level

    def watch(self, observe: Observe) -> None:
        """Let `observe` know of each round of which all batches have been reported."""
        self._rounds.append(Rounds(self, observe))

    def report(self, report: Report) -> None:
        for rounds in self._rounds:
            rounds.report(report)

    def _pause_after(self, position: int) -> int | None:
        every = self._pause_every
        return None if every is None else (position // every + 1) * every


@lru_cache(maxsize=16)  # all workers of a simulation ask for the same
def _first(
    position: int, stop: int | None, limit: int | None, sizes: Sizes, level: int
) -> Mapping[int, WorkItem]:
    items = {}
    for rank, size in sizes:
        end = _earliest(position + size, stop, limit)
        if end > position:
            items[rank] = WorkItem(Kind.BATCH, position, end)
        elif end == stop:
            items[rank] = WorkItem(Kind.END, position, end, level)
        else:
            items[rank] = WorkItem(Kind.PAUSE, position, end)
        position = end
    return items


def _earliest(*ends: int | None) -> int:
    return min(end for end in ends if end is not None)


class WorkInHand:
    """The next item of a worker. `queue` is its copy; the one that counts is elsewhere."""

    def __init__(self, queue: WorkQueue, rank: int) -> None:
        self._queue = queue
        self._rank = rank
        self.item = queue.first(queue.start)[rank]

    def take(self) -> WorkItem:
        """Return the item; where that is a pause, the next call gives the first batch after it."""
        item = self.item
        if item.kind in (Kind.PAUSE, Kind.STOP):
            self.item = self._queue.first(item.start)[self._rank]
        return item


class Applied:
    """The samples of the global order that are applied: all before `before`, and some after it."""

    def __init__(self, start: int) -> None:
        self.before = start
        self._later: dict[int, int] = {}

    def add(self, start: int, stop: int) -> None:
        self._later[start] = stop
        while self.before in self._later:
            self.before = self._later.pop(self.before)


class Rounds:
    """Puts the reports of batches together, by rounds of the global order.

    A round is as many samples as all workers take in a step; batches belong to the one in which
    they begin. Once all of a round are done, whoever did them, `observe(reports, seconds)` hears
    of them, in their order, with the seconds of a batch of each worker, in rank order: their mean
    in this round, or what is known of before.
    """

    def __init__(self, queue: WorkQueue, observe: Observe) -> None:
        self._observe = observe
        self._round = queue.round
        self._applied = Applied(queue.start)
        # The first batches of all workers are in the first round, wherever it begins.
        self._end = -(-queue.start // self._round) * self._round + self._round
        self._reports: dict[int, Report] = {}
        self._seconds: dict[int, float] = {}

    def report(self, report: Report) -> None:
        self._reports[report.start] = report
        self._applied.add(report.start, report.stop)
        while self._applied.before >= self._end:
            begun = sorted(start for start in self._reports if start < self._end)
            reports = [self._reports.pop(start) for start in begun]
            self._end += self._round
            own: dict[int, list[float]] = {}
            for done in reports:
                own.setdefault(done.worker, []).append(done.seconds)
            self._seconds.update((worker, fmean(seconds)) for worker, seconds in own.items())
            self._observe(reports, tuple(self._seconds[rank] for rank in sorted(self._seconds)))

    def lose(self, worker: int) -> None:
        self._seconds.pop(worker, None)
