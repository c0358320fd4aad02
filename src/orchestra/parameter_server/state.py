"""How a server decides: messages in, decisions out, no input or output of its own.

A `Consistency` says when pushes become updates (`ready`), and when pulls are answered
(`may_answer`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from orchestra.parameter_server.messages import Answer, Push
from orchestra.schedules.work_queue import Applied, Report, WorkItem, WorkQueue


class Update(NamedTuple):
    """Pushes that are applied together, as one update from their average.

    `staleness` counts the updates applied between the oldest of their workers' reads and now.
    `samples` are those of all pushes, and `used` says which tensors any of them has used.
    """

    pushes: tuple[Push, ...]
    staleness: int
    samples: int
    used: tuple[bool, ...]


class Decision(NamedTuple):
    """Apply the updates, in order; then answer, and give `work` to those who asked for it."""

    apply: tuple[Update, ...] = ()
    answers: tuple[Answer, ...] = ()
    work: tuple[tuple[int, WorkItem], ...] = ()
    quiet: bool = False


class Consistency(ABC):
    """Decides which pushes are applied now, and together, and which pulls may be answered yet."""

    tolerates_loss: ClassVar[bool] = True
    """True if the others can go on without a worker that is lost."""

    drops_late: ClassVar[bool] = False
    """True if a push for a step that is over is dropped."""

    bounds: ClassVar[bool] = False
    """True if a worker may have to wait for the slowest one."""

    @abstractmethod
    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """Return groups of workers whose pending pushes are applied now, each as one update.

        `pending` holds the pushes by worker, in the order in which they came.
        """

    def may_answer(self, ahead: int) -> bool:
        """True if a worker that is `ahead` steps ahead of the slowest may go on."""
        return True


class Synchronous(Consistency):
    """One update a step, from the average over all workers that are still there."""

    tolerates_loss = False

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """All pending pushes together, once every live worker has pushed."""
        return [sorted(pending)] if pending and live <= pending.keys() else []


class FirstArrivals(Consistency):
    """One update a step, from the average of the first `count` pushes; later ones are dropped.

    The others are backup workers (Chen et al., 2016): nobody waits for the slowest of them.
    """

    drops_late = True

    def __init__(self, count: int) -> None:
        assert count > 0
        self.count = count

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """The first to arrive, in rank order; everybody where fewer are left."""
        needed = min(self.count, len(live))
        return [sorted(pending)] if pending and len(pending) >= needed else []


class Asynchronous(Consistency):
    """One update a push, on arrival."""

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """Each push alone."""
        return [[worker] for worker in sorted(pending)]


class Bounded(Asynchronous):
    """One update a push, on arrival; nobody is more than `staleness` steps ahead of the slowest.

    Stale synchronous parallel (Ho et al., NIPS 2013). Who reads with c steps behind it sees all
    pushes of steps up to c - staleness, of every worker, and its own. Where workers take batches
    from a queue, a step is a round of as many samples as all workers take together, in their global
    order: the bounded delay of Li et al. (OSDI 2014).
    """

    bounds = True

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness

    def may_answer(self, ahead: int) -> bool:
        """Once the slowest is near enough."""
        return ahead <= self.staleness


@dataclass
class ServerState:
    """A server's knowledge about its workers.

    `live` workers are expected to push; `paused` ones wait for the quiet point, and nobody waits
    for them. `clocks` holds the step that each worker has behind it, `read` the version of the
    values that it was last given, `waiting` the answers held back. `dropped` is the number of
    pushes that came too late.

    Where workers take batches from a queue, `applied` holds those that are, `positions` where
    the last one of each worker began, and `round` the samples that all workers take together. One
    server holds the `queue`.
    """

    consistency: Consistency
    live: set[int]
    version: int = 0
    consumed: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    pending: dict[int, Push] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    waiting: dict[int, Answer] = field(default_factory=dict)
    dropped: int = 0
    queue: WorkQueue | None = None
    applied: Applied | None = None
    round: int = 0
    positions: dict[int, int] = field(default_factory=dict)
    _at_work: frozenset[int] | None = field(default=None, compare=False, repr=False)
    """Live, not paused and not idle, as long as that has not changed."""
    _given: dict[int, WorkItem] = field(default_factory=dict, compare=False, repr=False)
    """What each worker was last told to do."""
    _further: set[int] = field(default_factory=set, compare=False, repr=False)
    """Workers whose last push was a second or later one for the same batch."""
    _resumed: bool = field(default=True, compare=False, repr=False)
    """Nobody has pushed since the last quiet point, or since the beginning."""

    @property
    def idle(self) -> Set[int]:
        """The workers that wait for work."""
        return frozenset() if self.queue is None else self.queue.idle

    def push(self, push: Push) -> Decision:
        """Take a gradient that has arrived."""
        assert push.worker in self.live, f"push of worker {push.worker}, which is not live"
        assert push.worker not in self.pending, f"second push of worker {push.worker}"
        expected = self.clocks.get(push.worker, 0) + 1
        assert push.clock == expected, f"worker {push.worker}: step {push.clock}, not {expected}"
        if self.queue is not None:
            if self._resumed:  # a worker may push several times for one batch, also for its last
                self.queue.resume(push.worker)
            if push.stop:
                self.queue.close()
        self._resumed = False
        drops = self.consistency.drops_late
        if drops and push.clock <= (newest := max(self.clocks.values(), default=0)):
            self._drop(push, newest)
        else:
            self.pending[push.worker] = push
        return self._decide()

    def pause(self, worker: int) -> Decision:
        """`worker` pushes no more until all have paused: then nothing is in flight."""
        self.paused.add(worker)
        self._at_work = None
        return self._decide()

    def wait(self, worker: int) -> Decision:
        """`worker`, whose last answer held no work, asks again."""
        assert self.queue is not None
        self.queue.wait(worker)
        self._at_work = None
        return self._decide()

    def leave(self, worker: int) -> Decision:
        """`worker` is gone for good: it has finished, or was lost with its push, if any."""
        self.live.discard(worker)
        self._at_work = None
        self.paused.discard(worker)
        self.pending.pop(worker, None)
        self.waiting.pop(worker, None)
        if self.queue is not None:
            self.queue.lose(worker)
        return self._decide()

    def resume(self) -> None:
        """After a quiet point: the paused workers may push again."""
        self.paused.clear()
        self._resumed = True
        self._at_work = None

    def all_have_read(self) -> None:
        """Note, at a quiet point, that every worker was given the present values."""
        self.read = dict.fromkeys(self.live, self.version)

    def _decide(self) -> Decision:
        updates = []
        # Kept between changes: with a thousand workers it is too much to form for each push.
        if self._at_work is None:
            self._at_work = frozenset(self.live - self.paused - self.idle)
        at_work = self._at_work
        for members in self.consistency.ready(self.pending, at_work):
            updates.append(self._account(tuple(self.pending.pop(worker) for worker in members)))
        answers = self._answers(at_work)
        self.read.update((answer.worker, answer.version) for answer in answers)
        # Nothing held, nobody unanswered, and all who are there have paused: nothing is in flight.
        quiet = not self.pending and not self.waiting and self.live <= self.paused
        work = () if self.queue is None else tuple(self.queue.woken())
        if work:
            self._given.update(work)
            self._at_work = None
        return Decision(tuple(updates), tuple(answers), work, quiet)

    def _answers(self, at_work: frozenset[int]) -> list[Answer]:
        """Return the answers to workers that may go on."""
        released = sorted(self.waiting)
        if released and self.consistency.bounds:
            # Only those at work: to wait for a worker that has paused would be a deadlock.
            slowest = self._slowest(at_work)
            near = [
                worker
                for worker in released
                if self.consistency.may_answer(self._steps(worker) - slowest)
            ]
            if not near and at_work <= self.waiting.keys():
                # The batch that is missing was a lost worker's: somebody has to take it. Every
                # server chooses the same one.
                near = [min(released, key=self._steps)]
            released = near
        return [
            self.waiting.pop(worker)._replace(
                version=self.version,
                consumed=self.consumed,
                work=self._work_for(worker),
            )
            for worker in released
        ]

    def _work_for(self, worker: int) -> WorkItem | None:
        """Return what `worker` does next: the same item after a further push for one batch."""
        if self.queue is not None and worker not in self._further:
            self._given[worker] = self.queue.take(worker)
        self._further.discard(worker)
        return self._given.get(worker)

    def _steps(self, worker: int) -> int:
        """Return the steps that `worker` has taken; with a queue of batches, the rounds."""
        if self.applied is None:
            return self.clocks[worker]
        return self.positions[worker] // self.round + 1

    def _slowest(self, at_work: frozenset[int]) -> int:
        """Return the steps that all at work have behind them."""
        if self.applied is None:
            return min((self.clocks.get(worker, 0) for worker in at_work), default=0)
        return self.applied.before // self.round

    def _account(self, pushes: tuple[Push, ...]) -> Update:
        samples, losses, stop, used = 0, 0.0, False, pushes[0].used
        for push in pushes:
            samples += push.samples
            losses += push.loss * push.samples
            stop = stop or push.stop
            if push.used != used:
                used = tuple(map(any, zip(used, push.used, strict=True)))
        loss = losses / samples if samples else 0.0
        before = self.version
        # Pushes without samples change nothing, and make nobody's values stale.
        self.version += bool(samples)
        # A step's dropped samples are used up with it, and those that nobody came to compute.
        self.consumed += pushes[0].step_samples if self.consistency.drops_late else samples
        oldest = 0
        for push in pushes:
            staleness = before - self.read.get(push.worker, 0)
            oldest = max(oldest, staleness)
            self.clocks[push.worker] = push.clock
            # A further push for the batch before brings no further batch (decision 102).
            if push.position is None and self.queue is not None:
                self._further.add(push.worker)
            if self.applied is not None and push.position is not None:
                self.applied.add(push.position, push.position + push.step_samples)
                self.positions[push.worker] = push.position
                if push.report and self.queue is not None:
                    stop_at = push.position + push.samples
                    self.queue.report(Report(push.worker, push.position, stop_at, *push.report))
            self.waiting[push.worker] = Answer(
                push.worker, self.version, staleness, loss, stop, self.consumed, push.clock,
                used=used,
            )  # fmt: skip
        return Update(pushes, oldest, samples, used)

    def _drop(self, push: Push, newest: int) -> None:
        """Drop a late `push`: its worker goes on with the step after the newest."""
        self.dropped += 1
        self.clocks[push.worker] = newest
        self.waiting[push.worker] = Answer(
            push.worker, self.version, 0, push.loss, push.stop, self.consumed, newest,
            dropped=True, used=push.used,
        )  # fmt: skip
