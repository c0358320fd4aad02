"""A queue of batches for workers that need not step together: dynamic self-scheduling."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

Sizes = tuple[tuple[int, int], ...]


class Kind(enum.IntEnum):
    """What a worker does next."""

    BATCH = 0  # the gradient of these samples
    PAUSE = 1  # wait with all others for a quiet point, then go on
    STOP = 2  # the same, and do not go on: the user wishes to stop
    END = 3  # leave: the budget is used up
    WAIT = 4  # ask again: others hold the last batches, which come back if they are lost


class WorkItem(NamedTuple):
    """Samples [start, stop) of the global order. Where there are none, all before `start` are
    handed out."""

    kind: Kind
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """How many samples the batch has."""
        return self.stop - self.start


def item_of(numbers: Sequence[float]) -> WorkItem:
    """The item that three numbers stand for."""
    kind, start, stop = numbers
    return WorkItem(Kind(int(kind)), int(start), int(stop))


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
        self.start = start
        self.round = sum(size for _, size in sizes)
        self._stop = stop
        self._sizes = sizes
        self._size_of = dict(sizes)
        self._pause_every = pause_every
        self._next = start
        self._limit = self._pause_after(start)
        self._closed = False
        self._held: dict[int, WorkItem] = {}
        self._returned: list[WorkItem] = []

    def first(self, position: int) -> Mapping[int, WorkItem]:
        """One item for each worker, in rank order, where the samples before `position` are done."""
        return _first(position, self._stop, self._pause_after(position), self._sizes)

    def restart(self) -> Mapping[int, WorkItem]:
        """Hand out `first`: at the beginning, and after a pause, when no worker holds a batch."""
        items = self.first(self._next)
        self._limit = self._pause_after(self._next)
        self._closed = False
        self._held = {rank: item for rank, item in items.items() if item.kind is Kind.BATCH}
        self._next = max(item.stop for item in items.values())
        return items

    def take(self, worker: int) -> WorkItem:
        """The next item of `worker`, whose last batch is done."""
        self._held.pop(worker, None)
        over = self._next == self._stop and not (self._returned or self._closed)
        if over and self._held:
            return WorkItem(Kind.WAIT, self._next, self._next)
        return self._hold(worker)

    def lose(self, worker: int) -> None:
        """`worker` is gone: another one takes the batch that it holds, if any."""
        if worker in self._held:
            self.give_back(self._held.pop(worker))

    def give_back(self, item: WorkItem) -> None:
        """Nobody computes the batch `item`: it is the next one to be handed out."""
        heapq.heappush(self._returned, item)

    def close(self) -> None:
        """The user wishes to stop: nobody is given another batch before the next `restart`."""
        self._closed = True

    def next(self, worker: int) -> WorkItem:
        """An item for `worker`, which may still hold another one."""
        first = self._next
        if self._returned:
            return heapq.heappop(self._returned)
        if first == self._stop:
            return WorkItem(Kind.END, first, first)
        if self._closed:
            return WorkItem(Kind.STOP, first, first)
        if first == self._limit:
            return WorkItem(Kind.PAUSE, first, first)
        self._next = _earliest(first + self._size_of[worker], self._stop, self._limit)
        return WorkItem(Kind.BATCH, first, self._next)

    def _pause_after(self, position: int) -> int | None:
        every = self._pause_every
        return None if every is None else (position // every + 1) * every

    def _hold(self, worker: int) -> WorkItem:
        item = self.next(worker)
        if item.kind is Kind.BATCH:
            self._held[worker] = item
        return item


@lru_cache(maxsize=16)  # all workers of a simulation ask for the same
def _first(
    position: int, stop: int | None, limit: int | None, sizes: Sizes
) -> Mapping[int, WorkItem]:
    items = {}
    for rank, size in sizes:
        end = _earliest(position + size, stop, limit)
        kind = Kind.BATCH
        if end == position:
            kind = Kind.END if end == stop else Kind.PAUSE
        items[rank] = WorkItem(kind, position, end)
        position = end
    return items


def _earliest(*ends: int | None) -> int:
    return min(end for end in ends if end is not None)


class WorkInHand:
    """What a worker does next. `queue` is its copy; the one that counts is elsewhere."""

    def __init__(self, queue: WorkQueue, rank: int) -> None:
        self._queue = queue
        self._rank = rank
        self.item = queue.first(queue.start)[rank]

    def take(self) -> WorkItem:
        """The item; where that is a pause, the next call gives the first batch after it."""
        item = self.item
        if item.kind in (Kind.PAUSE, Kind.STOP):
            self.item = self._queue.first(item.start)[self._rank]
        return item


class Applied:
    """Which samples of the global order are applied: all before `before`, and some after it."""

    def __init__(self, start: int) -> None:
        self.before = start
        self._later: dict[int, int] = {}

    def add(self, start: int, stop: int) -> None:
        """[start, stop) are applied."""
        self._later[start] = stop
        while self.before in self._later:
            self.before = self._later.pop(self.before)
