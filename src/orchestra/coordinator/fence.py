"""Finds a fence: a step that no worker has passed yet, for all to rest after. Pure.

Each worker has a lease, a step up to which it goes without asking. On a wish, of a user to stop or
of a rule to end the phase, the leader asks all workers for a promise, which is the end of their
lease, and announces the largest one. A worker at the end of its lease waits for the announcement if
it has promised. So no worker has passed the step that is announced, and the search waits for no
worker's computation: there is no deadlock, whatever workers wait for among themselves. Without a
wish no worker sends another one a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestra.coordinator.events import (
    Announced,
    AskPromise,
    Dismissed,
    Ended,
    Event,
    Grant,
    Instruction,
    Lost,
    Promised,
    Renew,
    Reported,
    RestAfter,
    Settle,
    Settled,
    Wish,
)

LEASE = 4
"""Steps that a worker goes on without asking. More cost less, and a wish takes longer."""

Told = list[tuple[int, Event | Instruction]]


class FencedWorker:
    """One worker's part: its lease, and its promise, in steps since the fence was made.

    `over`: all workers have left.
    """

    def __init__(self, worker: int) -> None:
        self.over = False
        self._worker = worker
        self._lease = LEASE
        self._is_asking = False
        self._has_promised = False
        self._fence: RestAfter | None = None

    def handle(self, *events: Event) -> Told:
        """Take note of events; return instructions for workers, and events for their parts."""
        return [told for event in events for told in self._hear(event)]

    def _hear(self, event: Event) -> Told:
        match event:
            # A promise holds: the worker stops at its lease until the fence is known.
            case Renew() if self._has_promised:
                self._is_asking = True
            case Renew(worker, steps):
                self._lease = steps + LEASE
                return [(worker, Grant(self._lease))]
            case AskPromise(leader):
                self._has_promised = True
                return [(leader, Promised(self._worker, self._lease))]
            case Announced(_, step, transition):
                self._fence = RestAfter(step, transition)
            case Dismissed():
                self.over = True
        if self._fence is None or not self._is_asking:
            return []
        self._is_asking = False
        return [(self._worker, self._fence)]


class FenceLeader(FencedWorker):
    """The first worker's part, which also asks for promises, and announces the fence.

    It puts the reports of all workers on a step together for `observe`, in rank order. Where that
    returns the number of a transition, the phase ends by it, or by an outer one, whose number is
    higher, if `observe` returns that before the announcement. Else a wish stops the run. Nobody
    waits for a worker that has left, or is lost.
    """

    def __init__(
        self, workers: Sequence[int], observe: Callable[[Sequence[Reported]], int | None]
    ) -> None:
        super().__init__(workers[0])
        self._workers = workers
        self._observe = observe
        self._transition: int | None = None
        self._reports: dict[int, dict[int, Reported]] = {}  # by step and worker
        self._promises: dict[int, int] = {}
        self._settling: set[int] = set()
        self._gone: set[int] = set()  # workers that have left, or are lost
        self._told_all: set[type[Event]] = set()

    def _hear(self, event: Event) -> Told:
        match event:
            case Wish():
                return self._tell_all(AskPromise(self._worker))
            case Reported(worker, step):
                self._reports.setdefault(step, {})[worker] = event
            case Promised(worker, steps):
                self._promises[worker] = steps
            case Settle(worker):
                self._settling.add(worker)
            case Ended(worker, steps):
                assert steps is not None
                self._promises[worker] = steps
                self._gone.add(worker)
            case Lost(worker):
                self._gone.add(worker)
            case _:
                return super()._hear(event)
        return self._due()

    def _due(self) -> Told:
        """Return what all workers, or those that wait, are to know now."""
        told: Told = []
        if self._put_together():
            told += self._tell_all(AskPromise(self._worker))
        if self._has_all(self._promises.keys() | self._gone):
            # No worker is beyond its promise, so none has passed the largest one.
            fence = max(self._promises.values())
            told += self._tell_all(Announced(self._worker, fence, self._transition))
        if self._settling and self._has_all(self._settling | self._gone):
            told += [(worker, Settled()) for worker in sorted(self._settling)]
            self._settling.clear()
        if self._has_all(self._gone):
            told += self._tell_all(Dismissed(self._worker))
        return told

    def _put_together(self) -> bool:
        """Observe the steps that all workers have reported; return whether the phase is to end."""
        ends = False
        while self._reports:
            step, reports = next(iter(self._reports.items()))  # the first: workers report in order
            if not self._has_all(reports.keys() | self._gone):
                break
            del self._reports[step]
            transition = self._observe([reports[worker] for worker in sorted(reports)])
            if transition is not None:
                ends = True
                self._transition = max(transition, self._transition or 0)
        return ends

    def _has_all(self, workers: set[int]) -> bool:
        return workers.issuperset(self._workers)

    def _tell_all(self, event: Event) -> Told:
        """Tell all workers, unless they were told such an event before."""
        if type(event) in self._told_all:
            return []
        self._told_all.add(type(event))
        return [(worker, event) for worker in self._workers]
