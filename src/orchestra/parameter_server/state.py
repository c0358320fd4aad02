"""How a server decides: messages in, decisions out, no input or output of its own.

A rule (`When`) says which pushes become updates, and which workers may go on.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from orchestra.coordinator.core import Applied, Coordinator
from orchestra.coordinator.events import Done, Event, Free, Instruction, Lost, Rested, Wish
from orchestra.coordinator.rest import Reason, Rest
from orchestra.errors import RunFailed, shortened
from orchestra.parameter_server.messages import Answer, Kind, Push, QuietPoint, Request
from orchestra.parameter_server.when import When


class Update(NamedTuple):
    """Pushes that are applied together, as one update from their average.

    `samples` are those of all pushes, and `used` says which tensors any of them has used.
    """

    pushes: tuple[Push, ...]
    samples: int
    used: tuple[bool, ...]


class Decision(NamedTuple):
    """Apply the updates, in order; then answer, give `work` to those that waited for it, and tell
    all live workers of the `quiet` point, if it is one."""

    apply: tuple[Update, ...] = ()
    answers: tuple[Answer, ...] = ()
    work: tuple[tuple[int, Instruction], ...] = ()
    quiet: QuietPoint | None = None


@dataclass
class ServerState:
    """A server's knowledge about its workers.

    `live` workers are expected to push; `paused` ones wait for the quiet point, and nobody waits
    for them. `clocks` holds the step of each worker's last push, or of the step that was applied
    when it came too late; `read` the version of the values that it was last given. `pending` are
    the pushes that were not applied yet, in order of arrival; `waiting` holds the answers that are
    not given yet. `newest` is the last step that was applied, and `dropped` counts the pushes that
    came too late.

    Where workers take batches from a queue, `applied` holds those that are, `positions` where
    the last one of each worker began, and `round` the samples that all workers take together. One
    server holds the `coordinator`.
    """

    when: When
    live: set[int]
    version: int = 0
    consumed: int = 0
    newest: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    pending: list[Push] = field(default_factory=list)
    paused: set[int] = field(default_factory=set)
    waiting: dict[int, Answer] = field(default_factory=dict)
    dropped: int = 0
    coordinator: Coordinator | None = None
    applied: Applied | None = None
    round: int = 0
    positions: dict[int, int] = field(default_factory=dict)
    _at_work: frozenset[int] | None = field(default=None, compare=False, repr=False)
    """Live, not paused and not idle, as long as that has not changed."""
    _given: dict[int, Instruction] = field(default_factory=dict, compare=False, repr=False)
    """What each worker was last told to do."""
    _repeat_pushers: set[int] = field(default_factory=set, compare=False, repr=False)
    """Workers whose last push was a second or later one for the same batch."""
    _told: dict[int, Instruction] = field(default_factory=dict, compare=False, repr=False)
    """What the coordinator has told workers since the last decision."""
    _rest: Rest = field(default=Rest(Reason.CHECKPOINT), compare=False, repr=False)
    """The rest that the last worker has paused for."""
    _complete: bool = field(default=True, compare=False, repr=False)
    """No worker has left; see `QuietPoint`."""

    @property
    def idle(self) -> Set[int]:
        """The workers that wait for work."""
        return frozenset() if self.coordinator is None else self.coordinator.idle

    def take(self, request: Request) -> Decision:
        """Carry out a request."""
        if request.push is not None:
            return self.push(request.push)
        if request.kind is Kind.PAUSE:
            decision = self.pause(request.worker, Rest.of(request.step))
        elif request.kind is Kind.WAIT:
            decision = self.wait(request.worker)
        elif request.kind is Kind.LEAVE:
            decision = self.leave(request.worker)
        else:
            decision = self.lose(request.worker)
        if decision.quiet is not None and self.live:
            self.resume()  # before anybody takes a checkpoint of it
        return decision

    def push(self, push: Push) -> Decision:
        """Take a gradient that has arrived."""
        assert push.worker in self.live, f"push of worker {push.worker}, which is not live"
        assert push.worker not in self.waiting, f"push of worker {push.worker}, which waits"
        expected = self.clocks.get(push.worker, 0) + 1
        assert push.clock == expected, f"worker {push.worker}: step {push.clock}, not {expected}"
        if self.coordinator is not None:
            if push.stop:
                self._tell(Wish(push.worker))
            # A further push for the batch before brings no further batch.
            if push.position is None:
                self._repeat_pushers.add(push.worker)
        if self.when.drops_late and push.clock <= self.newest:
            self._drop(push)
            return self._decide()
        self.clocks[push.worker] = push.clock
        # No update comes between the arrival of a push and its own: they are applied in order.
        push = push._replace(staleness=self.version - self.read.get(push.worker, 0))
        self.pending.append(push)
        if self.when.answers_on_arrival:
            self._hold(push, push.loss, push.stop, push.used)
        return self._decide()

    def pause(self, worker: int, rest: Rest) -> Decision:
        """`worker` pushes no more until all have paused for `rest`: then nothing is in flight."""
        self._rest = rest
        self.paused.add(worker)
        self._at_work = None
        return self._decide()

    def wait(self, worker: int) -> Decision:
        """`worker`, whose last answer held no work, asks again."""
        self._tell(Free(worker))
        self._at_work = None
        return self._decide()

    def leave(self, worker: int) -> Decision:
        """`worker` has finished."""
        self._complete = False
        return self.lose(worker)

    def lose(self, worker: int) -> Decision:
        """`worker` is gone for good, with its push, if any."""
        self.live.discard(worker)
        self._at_work = None
        self.paused.discard(worker)
        if not self.when.answers_on_arrival:  # a push that was answered stays
            self.pending = [push for push in self.pending if push.worker != worker]
        self.waiting.pop(worker, None)
        if self.coordinator is not None:
            self._tell(Lost(worker))
        return self._decide()

    def resume(self) -> None:
        """After a quiet point: the paused workers may push again."""
        self.paused.clear()
        self._at_work = None
        if self.coordinator is not None:
            self._tell(Rested())

    def all_have_read(self) -> None:
        """Note, at a quiet point, that every worker was given the present values."""
        self.read = dict.fromkeys(self.live, self.version)

    def _decide(self) -> Decision:
        # Kept between changes: with a thousand workers it is too much to form for each push.
        if self._at_work is None:
            self._at_work = frozenset(self.live - self.paused - self.idle)
        at_work = self._at_work
        updates = [self._account(pushes) for pushes in self._take_ready(len(at_work))]
        answers = self._answers(at_work)
        self.read.update((answer.worker, answer.version) for answer in answers)
        # Nothing held, nobody unanswered, and all who are there have paused: nothing is in flight.
        is_quiet = not self.pending and not self.waiting and self.live <= self.paused
        quiet = QuietPoint(self._rest, self._complete) if is_quiet else None
        work = tuple(self._told.items())
        if not (updates or answers or work):
            self._require_progress(len(at_work))
        if work:
            self._given.update(work)
            self._told.clear()
            self._at_work = None
        return Decision(tuple(updates), tuple(answers), work, quiet)

    def _take_ready(self, working: int) -> list[tuple[Push, ...]]:
        """Take the groups of pushes that the rule applies now out of `pending`.

        Raises:
            RunFailed: the rule returned something else, or left pushes although nobody works.
        """
        groups = self.when.ready(self.pending, working)
        try:
            taken = [tuple(group) for group in groups]
            for push in chain.from_iterable(taken):
                self.pending.remove(push)
            is_right = all(taken)
        except (TypeError, ValueError):  # no groups; no push, or one that is not pending
            is_right = False
        if not is_right:
            message = (
                f"{type(self.when).__name__}.ready() has to return lists of pending pushes, none "
                f"empty and no push twice; it returned {groups!r}"
            )
            raise RunFailed(shortened(message))
        if self.pending and not working:
            raise self._left_over("no worker pushes any more: with working=0 it has to return all")
        return taken

    def _require_progress(self, working: int) -> None:
        """Raise `RunFailed` if every worker at work waits for its push, and none is applied."""
        # Each of them has one push that is pending, or an answer that is held back.
        blocked = len(self.pending) + len(self.waiting) >= working
        if self.pending and blocked and not self.when.answers_on_arrival:
            why = f"every worker waits for its answer: with working={working} it has to return some"
            raise self._left_over(why)

    def _left_over(self, although: str) -> RunFailed:
        rule, count = type(self.when).__name__, len(self.pending)
        pushes = f"{count} push{'es' * (count > 1)}"
        return RunFailed(f"{rule}.ready() left {pushes} unapplied, although {although}")

    def _answers(self, at_work: frozenset[int]) -> list[Answer]:
        """Return the answers to workers that may go on."""
        released = sorted(self.waiting)
        if released and self.when.waits_for_slowest:
            # Only those at work: to wait for a worker that has paused would be a deadlock.
            slowest = self._slowest(at_work)
            near = [
                worker for worker in released if self.when.may_go(self._steps(worker) - slowest)
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

    def _tell(self, event: Event) -> None:
        """Let the coordinator know of `event`."""
        assert self.coordinator is not None
        self._told.update(self.coordinator.handle(event))

    def _work_for(self, worker: int) -> Instruction | None:
        """Return what `worker` does next: the same after a further push for one batch."""
        if self.coordinator is not None and worker not in self._repeat_pushers:
            self._tell(Free(worker))
            self._given[worker] = self._told.pop(worker)
        self._repeat_pushers.discard(worker)
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
        # Pushes without samples change nothing, and make nobody's values stale.
        self.version += bool(samples)
        # A step's dropped samples are used up with it, and those that nobody came to compute.
        self.consumed += pushes[0].step_samples if self.when.drops_late else samples
        for push in pushes:
            self.newest = max(self.newest, push.clock)
            if self.applied is not None and push.position is not None:
                self.applied.add(push.position, push.position + push.step_samples)
                self.positions[push.worker] = push.position
                if self.coordinator is not None:
                    stop_at = push.position + push.samples
                    self._tell(Done(push.worker, push.position, stop_at, *push.report))
            if not self.when.answers_on_arrival:
                self._hold(push, loss, stop, used)
        return Update(pushes, samples, used)

    def _hold(self, push: Push, loss: float, stop: bool, used: tuple[bool, ...]) -> None:
        """Hold the answer to `push` until its worker may go on; `_answers` completes it."""
        self.waiting[push.worker] = Answer(
            push.worker, 0, push.staleness, loss, stop, 0, push.clock, used=used
        )

    def _drop(self, push: Push) -> None:
        """Drop a late `push`: its worker goes on with the step after the newest."""
        self.dropped += 1
        self.clocks[push.worker] = self.newest
        self.waiting[push.worker] = Answer(
            push.worker, 0, 0, push.loss, push.stop, 0, self.newest, dropped=True, used=push.used
        )
