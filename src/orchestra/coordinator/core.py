"""The coordinator: events in, instructions out."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Set
from itertools import pairwise
from statistics import fmean

from orchestra.coordinator.batches import BatchQueue, Observer, earliest
from orchestra.coordinator.events import (
    Done,
    Ended,
    Event,
    Free,
    Instruction,
    Lost,
    RestAt,
    Rested,
    Settle,
    Settled,
    Started,
    Take,
    Wait,
    Wish,
)
from orchestra.coordinator.rest import Reason, Rest

Told = list[tuple[int, Instruction]]


class Coordinator:
    """Tells workers what to do next, so that each sample of a queue is done exactly once.

    A worker holds one batch, or two where it asks ahead. The batches of a lost worker are handed
    out again. `gone`: workers that are lost already.

    Args:
        expendable: workers may be lost, so that nobody leaves before all batches are done.
    """

    def __init__(
        self, queue: BatchQueue, *, expendable: bool = True, gone: Iterable[int] = ()
    ) -> None:
        self._queue = queue
        self._expendable = expendable
        self._size_of = dict(queue.sizes)
        self._rounds = [Rounds(queue, observer) for observer in queue.observers]
        self._stop, self._transition = queue.stop, queue.transition
        self._next = queue.start  # the first sample that is not handed out
        self._limit = queue.rest_after(queue.start)
        self._closed = False  # the user wishes to stop: nobody gets another batch before a rest
        # A phase that is to end once all workers know a batch behind the rest.
        self._due: int | None = None
        self._held: dict[int, list[Take]] = {}  # by workers that have not asked since
        self._resting: set[int] = set()  # workers that know no batch before a rest
        self._waiting: set[int] = set()  # workers that were told to wait, and will ask again
        self._idle: set[int] = set()  # workers that have asked again
        self._gone = set(gone)
        self._ended: set[int] = set()  # workers that have done their batches, and left
        # The first ones of what is owed follow from the position.
        self._returned = [Take(*batch) for batch in queue.owed[len(queue.sizes) :]]
        for observer in queue.observers:
            if observer.fired:
                self._due = observer.transition
        self._deal()
        self._queue = queue.begun

    @property
    def over(self) -> bool:
        """True once all workers have left, or are lost."""
        return self._size_of.keys() <= self._gone | self._ended

    @property
    def owes(self) -> bool:
        """True if a lost worker's batch from before the last rest is to be handed out again."""
        return any(batch.start < self._dealt_from for batch in self._returned)

    @property
    def idle(self) -> Set[int]:
        """The workers that are owed an instruction, and wait for it."""
        return self._idle

    def handle(self, *events: Event) -> Told:
        """Take note of events, in their order; return the instructions that workers are owed now.

        A worker that asks in these events is served before the workers that already waited.
        """
        asking = None
        told: Told = []
        for event in events:
            if isinstance(event, Done):
                self._done(event)
            elif isinstance(event, Free):
                asking = self._free(event.worker)
            elif isinstance(event, Started):
                asking = self._started(event.worker)
            elif isinstance(event, Settle):
                # The reports of the worker came before, and were observed at once.
                told.append((event.worker, Settled()))
            else:
                self._note(event)
        if asking is not None:
            told.append((asking, self._instruct(asking)))
        if self._idle:
            for worker in sorted(self._idle):
                if self._has_to_wait():
                    break
                self._idle.discard(worker)
                told.append((worker, self._instruct(worker)))
        return told

    def _note(self, event: Event) -> None:
        """Take note of an event that asks for nothing."""
        if isinstance(event, Rested):
            # Not where all rest for something else, and some workers go on with their batches.
            if self._size_of.keys() - self._gone <= self._resting:
                self._deal()
        elif isinstance(event, Ended):
            self._ended.add(event.worker)
        elif isinstance(event, Lost):
            if event.worker not in self._ended:
                self._lose(event.worker)
        else:
            assert isinstance(event, Wish)
            # Where some workers are to rest and go on, all of them go on: the user's wish comes
            # again with the next batch.
            if not self._resting:
                self._closed = True

    def _free(self, worker: int) -> int | None:
        """Return `worker`, or None if it was told to wait before."""
        self._held.pop(worker, None)
        if worker not in self._waiting:
            return worker
        self._waiting.discard(worker)
        self._idle.add(worker)
        return None

    def _started(self, worker: int) -> int:
        if worker in self._resting:  # it goes on, so that all have rested
            self._deal()
        del self._held[worker][:-1]
        return worker

    def _done(self, done: Done) -> None:
        held = self._held.get(done.worker)
        if held and held[0].start == done.start:
            del held[0]
        if done.loss is not None:
            for rounds in self._rounds:
                if rounds.report(done):
                    self._end(rounds.transition)

    def _lose(self, worker: int) -> None:
        self._gone.add(worker)
        self._waiting.discard(worker)
        self._idle.discard(worker)
        for batch in self._held.pop(worker, ()):
            heapq.heappush(self._returned, batch)
        for rounds in self._rounds:
            rounds.lose(worker)

    def _deal(self) -> None:
        """Hand out what follows from the position alone, when no worker holds a batch."""
        position = self._dealt_from = self._next
        first = self._queue.first(position)
        self._limit = self._queue.rest_after(position)
        self._closed = False
        self._held.clear()
        self._resting.clear()
        for worker, instruction in first.items():
            if isinstance(instruction, Take):
                self._held[worker] = [instruction]
                self._next = max(self._next, instruction.stop)
            elif isinstance(instruction, RestAt) and instruction.rest.reason is not Reason.PHASE:
                self._resting.add(worker)
        # The position knows nothing of lost workers: their batches come back at once.
        for worker in self._gone:
            self._lose(worker)
        if self._due is not None:
            self._end(self._due)

    def _instruct(self, worker: int) -> Instruction:
        """Return what `worker` does next."""
        if self._has_to_wait():
            self._waiting.add(worker)
            return Wait()
        start = self._next
        if self._returned:
            # The earliest first: under a bound all wait for the first gap in what is applied.
            batch = heapq.heappop(self._returned)
        elif start == self._stop:
            return self._queue.at_end(self._transition, start)
        elif self._closed or start == self._limit:
            reason = Reason.STOP if self._closed else self._queue.reason
            self._resting.add(worker)
            return RestAt(start, Rest(reason))
        else:
            self._next = earliest(start + self._size_of[worker], self._stop, self._limit)
            batch = Take(start, self._next)
        self._held.setdefault(worker, []).append(batch)
        return batch

    def _has_to_wait(self) -> bool:
        """Return whether only batches are left that other workers may yet lose."""
        over = self._next == self._stop and not (self._returned or self._closed)
        return over and self._expendable and bool(self._held)

    def _end(self, transition: int) -> None:
        """End the phase by `transition` as soon as possible: with the samples that are handed out.

        Workers that are to rest here go on first: each with the batch that it knows.
        """
        self._due = transition
        if not self._resting:
            self._due = None
            if self._next != self._stop:
                self._stop, self._transition = self._next, transition


class Applied:
    """The samples of the global order that are applied: all before `before`, and some after it."""

    def __init__(self, start: int) -> None:
        self.before = start
        self._later: dict[int, int] = {}

    @staticmethod
    def of(queue: BatchQueue) -> Applied:
        """Return what is applied when `queue` begins: all before its start, but what is owed."""
        if not queue.owed:
            return Applied(queue.start)
        applied = Applied(queue.owed[0][0])
        for (_, stop), (start, _) in pairwise([*queue.owed, (queue.start, queue.start)]):
            if stop < start:
                applied.add(stop, start)
        return applied

    def add(self, start: int, stop: int) -> None:
        """Add the samples [start, stop)."""
        self._later[start] = stop
        while self.before in self._later:
            self.before = self._later.pop(self.before)


class Rounds:
    """Puts the reports of batches together, by rounds of the global order.

    A round is as many samples as all workers take in a step; a batch belongs to the round in which
    it begins. Any worker may do any batch. Once all batches of a round are done, the observer gets
    their reports in the global order, and the seconds of a batch of each worker, in rank order: the
    mean in this round, or the last one known.
    """

    def __init__(self, queue: BatchQueue, observer: Observer) -> None:
        self.transition = observer.transition
        self._observe = observer.observe
        self._round = queue.round
        self._applied = Applied(queue.start)
        # The first batches of all workers are in the first round, wherever it begins.
        self._end = -(-queue.start // self._round) * self._round + self._round
        self._reports: dict[int, Done] = {}
        self._seconds: dict[int, float] = {}

    def report(self, done: Done) -> bool:
        """Take note of a batch; return whether the observer ends its phase."""
        self._reports[done.start] = done
        self._applied.add(done.start, done.stop)
        ends = False
        while self._applied.before >= self._end:
            begun = sorted(start for start in self._reports if start < self._end)
            reports = [self._reports.pop(start) for start in begun]
            self._end += self._round
            own: dict[int, list[float]] = {}
            for each in reports:
                own.setdefault(each.worker, []).append(each.seconds)
            self._seconds.update((worker, fmean(seconds)) for worker, seconds in own.items())
            seconds = tuple(self._seconds[rank] for rank in sorted(self._seconds))
            ends = self._observe(reports, seconds) or ends
        return ends

    def lose(self, worker: int) -> None:
        """Leave out the seconds of `worker` from now on."""
        self._seconds.pop(worker, None)
