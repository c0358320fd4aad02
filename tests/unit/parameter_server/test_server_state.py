"""Invariant 4: each push applied exactly once, whatever the order of messages and departures.

Each test keeps books of its own beside the server's: who has read what, and what was applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra.coordinator.batches import BatchQueue
from orchestra.coordinator.core import Applied, Coordinator
from orchestra.coordinator.events import Finish, Instruction, RestAt, Take
from orchestra.coordinator.rest import Reason, Rest
from orchestra.parameter_server.messages import Push
from orchestra.parameter_server.state import Decision, ServerState, Update
from orchestra.parameter_server.when import (
    Asynchronous,
    Bounded,
    Buffered,
    FirstArrivals,
    Synchronous,
    When,
)

WORKERS = st.integers(1, 6)
STEP_SAMPLES = 18
REST = Rest(Reason.CHECKPOINT)


@dataclass
class Books:
    """A second opinion: workers as they are, and every push by what became of it."""

    consistency: When
    workers: int
    state: ServerState = field(init=False)
    clocks: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)  # updates that had been applied
    # What was read before each push, by worker and clock
    read_of: dict[tuple[int, int], int] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)  # workers that may act
    paused: set[int] = field(default_factory=set)
    pushed: list[Push] = field(default_factory=list)
    pending: list[Push] = field(default_factory=list)
    withdrawn: list[Push] = field(default_factory=list)
    dropped: list[Push] = field(default_factory=list)
    applied: list[Push] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    newest_staleness: dict[int, int] = field(default_factory=dict)  # of each worker's last push
    updates: int = 0

    def __post_init__(self) -> None:
        self.state = ServerState(self.consistency, set(range(self.workers)))
        self.answered = set(range(self.workers))
        self.clocks = dict.fromkeys(range(self.workers), 0)
        self.read = dict.fromkeys(range(self.workers), 0)

    @property
    def live(self) -> set[int]:
        return set(self.clocks)

    def settle(self, into: list[Push], pushes: Iterable[Push]) -> None:
        """No push is settled twice, nor one that was never pushed: then it is not pending."""
        for push in list(pushes):
            assert push in self.pending, "settled twice, or never pushed"
            self.pending.remove(push)
            into.append(push)

    def of(self, worker: int) -> list[Push]:
        """What of its pushes is pending."""
        return [push for push in self.pending if push.worker == worker]

    def push(self, worker: int, samples: int) -> Decision:
        self.clocks[worker] += 1
        push = Push(worker, self.clocks[worker], samples, STEP_SAMPLES, 0.5, False)
        self.answered.remove(worker)
        self.pushed.append(push)
        self.pending.append(push)
        self.read_of[_order(push)] = self.read[worker]
        return self.follow(self.state.push(push))

    def pause(self, worker: int) -> Decision:
        self.answered.remove(worker)
        self.paused.add(worker)
        return self.follow(self.state.pause(worker, REST))

    def leave(self, worker: int) -> Decision:
        if not self.consistency.answers_on_arrival:
            self.settle(self.withdrawn, self.of(worker))
        del self.clocks[worker]
        self.answered.discard(worker)
        self.paused.discard(worker)
        return self.follow(self.state.leave(worker))

    def follow(self, decision: Decision) -> Decision:
        """Do what the server decided, and check it as far as every consistency promises it."""
        for update in decision.apply:
            for push in update.pushes:
                key = _order(push)
                assert push.staleness == self.updates - self.read_of.pop(key)
                self.newest_staleness[push.worker] = push.staleness
                self.staleness += [push.staleness] if push.samples else []
            self.settle(self.applied, [push._replace(staleness=0) for push in update.pushes])
            self.updates += any(push.samples for push in update.pushes)
        for answer in decision.answers:
            assert answer.worker in self.live
            assert answer.worker not in self.answered | self.paused
            if answer.dropped:
                self.settle(self.dropped, self.of(answer.worker))
                self.clocks[answer.worker] = self.newest
            elif not self.consistency.answers_on_arrival:
                assert answer.staleness == self.newest_staleness[answer.worker]
            assert answer.clock == self.clocks[answer.worker]
            assert self.consistency.answers_on_arrival or not self.of(answer.worker)
            assert answer.version == self.updates
            assert answer.consumed == self.consumed
            self.read[answer.worker] = self.updates
            self.answered.add(answer.worker)
        assert self.state.version == self.updates
        assert self.state.dropped == len(self.dropped)
        assert bool(decision.quiet) == (not self.pending and self.live == self.paused)
        if decision.quiet:
            self.state.resume()
            self.answered |= self.paused
            self.paused.clear()
        return decision

    def behind(self, worker: int) -> int:
        """The last step of `worker` that was applied."""
        return max((push.clock for push in self.applied if push.worker == worker), default=0)

    @property
    def newest(self) -> int:
        return max((push.clock for push in self.applied), default=0)

    @property
    def consumed(self) -> int:
        if self.consistency.drops_late:
            return STEP_SAMPLES * self.newest
        return sum(push.samples for push in self.applied)

    def finish(self) -> None:
        """Let everybody leave; every push was applied, dropped or withdrawn with its worker."""
        for worker in sorted(self.live):
            last = self.leave(worker)
        done = self.applied + self.withdrawn + self.dropped
        assert sorted(done, key=_order) == sorted(self.pushed, key=_order)
        assert last.quiet


def _order(push: Push) -> tuple[int, int]:
    return push.worker, push.clock


def _keys(update: Update) -> list[tuple[int, int]]:
    return [_order(push) for push in update.pushes]


def members_of(decision: Decision) -> list[int]:
    """The workers whose pushes became the one update of `decision`."""
    (update,) = decision.apply
    return [push.worker for push in update.pushes]


def play(
    books: Books, data: st.DataObject, steps: int = 40
) -> Iterator[tuple[Push | None, Decision]]:
    """Random messages from workers that may act, and departures of any, but for the last worker."""
    for _ in range(steps):
        choices = [("push", worker) for worker in sorted(books.answered)] * 4
        choices += [("pause", worker) for worker in sorted(books.answered)]
        choices += [("leave", worker) for worker in sorted(books.live)] * (len(books.live) > 1)
        action, worker = data.draw(st.sampled_from(choices))
        if action == "push":
            decision = books.push(worker, data.draw(st.integers(0, 3)))
            yield books.pushed[-1], decision
        else:
            yield None, books.pause(worker) if action == "pause" else books.leave(worker)


@given(WORKERS, st.data())
def test_asynchronous_applies_each_push_at_once_and_alone(
    workers: int, data: st.DataObject
) -> None:
    books = Books(Asynchronous(), workers)
    for push, decision in play(books, data):
        if push is None:
            assert not decision.apply
            assert not decision.answers
            continue
        assert [_keys(update) for update in decision.apply] == [[_order(push)]]
        (answer,) = decision.answers
        assert answer.worker == push.worker
    books.finish()
    assert books.withdrawn == []


@given(WORKERS, st.integers(1, 6), st.data())
def test_a_buffer_is_applied_when_it_is_full_and_nobody_waits_for_it(
    workers: int, size: int, data: st.DataObject
) -> None:
    """In order of arrival; with what is left of it once nobody works; an answered push stays."""
    books = Books(Buffered(size), workers)
    for push, decision in play(books, data):
        if push is not None:
            assert [answer.worker for answer in decision.answers] == [push.worker]
        arrived = [_order(push) for push in books.pushed]
        applied = [_order(push) for push in books.applied]
        assert applied == arrived[: len(applied)]
        working = books.live - books.paused
        assert len(books.pending) < size if working else not books.pending
        at_rest = decision.quiet or not working
        assert at_rest or all(len(update.pushes) == size for update in decision.apply)
    books.finish()
    assert books.withdrawn == []


@given(WORKERS, st.data())
def test_staleness_is_the_number_of_updates_between_read_and_push(
    workers: int, data: st.DataObject
) -> None:
    """Counted from the order of the messages alone."""
    state = ServerState(Asynchronous(), set(range(workers)))
    order = data.draw(st.lists(st.tuples(st.integers(0, workers - 1), st.integers(0, 2))))
    clocks = dict.fromkeys(range(workers), 0)
    for place, (worker, samples) in enumerate(order):
        clocks[worker] += 1
        push = Push(worker, clocks[worker], samples, STEP_SAMPLES, 0.0, False)
        (answer,) = state.push(push).answers
        since = next((i for i in reversed(range(place)) if order[i][0] == worker), -1)
        between = sum(n > 0 for _, n in order[since + 1 : place])
        assert answer.staleness == between
    assert state.version == sum(samples > 0 for _, samples in order)


@given(WORKERS, st.data())
def test_synchronous_makes_one_update_a_step_of_all_live_workers(
    workers: int, data: st.DataObject
) -> None:
    books = Books(Synchronous(), workers)
    for _, decision in play(books, data):
        expected = books.live - books.paused
        if decision.apply:
            members = members_of(decision)
            assert members == sorted(members)
            assert [answer.worker for answer in decision.answers] == members
        elif not decision.quiet:
            assert decision.answers == ()
            waiting = {push.worker for push in books.pending}
            assert not waiting or expected - waiting, "all are here, and nothing was applied"
    books.finish()


@given(WORKERS, st.integers(1, 5), st.randoms())
def test_synchronous_steps_hold_everybody_in_rank_order(
    workers: int, steps: int, random: object
) -> None:
    books = Books(Synchronous(), workers)
    for step in range(1, steps + 1):
        order = list(range(workers))
        random.shuffle(order)  # type: ignore[attr-defined]
        for worker in order[:-1]:
            assert books.push(worker, worker + 1) == Decision()
        last = books.push(order[-1], order[-1] + 1)
        assert members_of(last) == list(range(workers))
        assert {push.clock for push in last.apply[0].pushes} == {step}
        assert [answer.staleness for answer in last.answers] == [0] * workers
        assert books.state.version == step


@pytest.mark.parametrize("consistency", [Synchronous(), Asynchronous()])
@pytest.mark.parametrize("samples", [(0, 0), (0, 4)])
def test_a_push_without_samples_is_no_update(consistency: When, samples: tuple[int, int]) -> None:
    books = Books(consistency, 2)
    for worker, count in enumerate(samples):
        books.push(worker, count)
    assert books.state.version == (sum(samples) > 0)
    assert books.state.consumed == sum(samples)
    assert books.staleness == [0] * sum(count > 0 for count in samples)
    assert books.answered == {0, 1}


def test_leaving_in_mid_round_completes_it() -> None:
    books = Books(Synchronous(), 3)
    books.push(2, 1)
    assert books.push(0, 1) == Decision()
    decision = books.leave(1)
    assert members_of(decision) == [0, 2]
    assert [answer.worker for answer in decision.answers] == [0, 2]
    assert not decision.quiet


def test_a_worker_lost_with_its_push_takes_it_away() -> None:
    books = Books(Synchronous(), 3)
    books.push(1, 1)
    assert books.leave(1) == Decision()
    books.push(0, 1)
    decision = books.push(2, 1)
    assert members_of(decision) == [0, 2]


@pytest.mark.parametrize("consistency", [Synchronous(), Asynchronous(), Bounded(1)])
def test_quiet_when_all_have_paused_and_again_after_resuming(consistency: When) -> None:
    books = Books(consistency, 3)
    for _ in range(2):
        for worker in range(3):
            books.push(worker, 1)
        assert [bool(books.pause(worker).quiet) for worker in (1, 0, 2)] == [False, False, True]
    books.pause(0)
    books.pause(2)
    assert books.leave(1).quiet
    books.pause(0)
    assert [bool(books.leave(worker).quiet) for worker in (2, 0)] == [True, True]


def test_loss_stop_and_used_of_the_pushes_applied_together() -> None:
    state = ServerState(Synchronous(), {0, 1, 2})
    push = Push(0, 1, 1, 4, 4.0, False, (0.1,), (True, False, False))
    state.push(push)
    idle = push._replace(worker=1, samples=0, loss=99.0, used=(False, False, False))
    state.push(idle)
    last = push._replace(worker=2, samples=3, loss=2.0, stop=True, used=(False, False, True))
    for answer in state.push(last).answers:
        assert answer.loss == (1 * 4.0 + 3 * 2.0) / 4
        assert answer.stop
        assert answer.used == (True, False, True)
        assert answer.consumed == 4


@pytest.mark.parametrize(
    ("worker", "clock"), [(2, 1), (0, 1), (0, 3), (1, 2)], ids=["gone", "again", "ahead", "first"]
)
def test_pushes_that_nobody_may_send(worker: int, clock: int) -> None:
    state = ServerState(Synchronous(), {0, 1})
    state.push(Push(0, 1, 1, 2, 0.0, False))
    with pytest.raises(AssertionError, match=f"worker {worker}"):
        state.push(Push(worker, clock, 1, 2, 0.0, False))


def test_only_a_synchronous_server_cannot_go_on_without_a_worker() -> None:
    assert Asynchronous.tolerates_loss
    assert Bounded.tolerates_loss
    assert FirstArrivals.tolerates_loss
    assert not Synchronous.tolerates_loss


@given(WORKERS, st.integers(0, 4), st.data())
def test_no_bounded_read_is_staler_than_the_bound_and_nobody_waits_in_vain(
    workers: int, bound: int, data: st.DataObject
) -> None:
    """Whatever the speeds, and whoever pauses or is lost: see what each answer had to contain."""
    books = Books(Bounded(bound), workers)
    for push, decision in play(books, data):
        if push is not None:
            assert [_keys(update) for update in decision.apply] == [[_order(push)]]
        at_work = books.live - books.paused
        for answer in decision.answers:
            slowest = min(books.behind(worker) for worker in at_work)
            assert slowest >= answer.clock - bound
        assert books.answered, "nobody may act: a deadlock"
        for worker in at_work - books.answered:
            assert any(books.clocks[worker] - books.behind(w) > bound for w in at_work)
    books.finish()


@given(st.integers(2, 6), st.integers(0, 4), st.data())
def test_the_bound_on_steps_bounds_the_staleness_in_updates(
    workers: int, bound: int, data: st.DataObject
) -> None:
    """Between a read and its push each other worker pushes 2 s + 1 times at most."""
    books = Books(Bounded(bound), workers)
    favourite = data.draw(st.integers(0, workers - 1))
    for _ in range(60):
        choices = sorted(books.answered)
        fast = [worker for worker in choices if worker != favourite] or choices
        books.push(data.draw(st.sampled_from(data.draw(st.sampled_from([choices, fast])))), 1)
    assert max(books.staleness) <= (workers - 1) * (2 * bound + 1)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_fast_wait_exactly_at_the_bound(bound: int) -> None:
    books = Books(Bounded(bound), 3)
    for _ in range(bound):
        for worker in (0, 1):
            assert [answer.worker for answer in books.push(worker, 1).answers] == [worker]
    for worker in (0, 1):
        held = books.push(worker, 1)
        assert held.apply
        assert held.answers == ()
    released = books.push(2, 1)
    assert [answer.worker for answer in released.answers] == [0, 1, 2]
    assert {answer.version for answer in released.answers} == {2 * (bound + 1) + 1}
    assert books.staleness[-1] == 2 * (bound + 1)


@pytest.mark.parametrize("event", ["leave", "pause"])
def test_nobody_waits_for_a_worker_that_is_gone_or_paused(event: str) -> None:
    books = Books(Bounded(1), 3)
    for worker in (0, 0, 1, 1):
        books.push(worker, 1)
    assert books.answered == {2}
    decision = getattr(books, event)(2)
    assert [answer.worker for answer in decision.answers] == [0, 1]


@given(WORKERS, st.data())
def test_under_a_bound_out_of_reach_it_decides_as_asynchronous_does(
    workers: int, data: st.DataObject
) -> None:
    books, other = Books(Asynchronous(), workers), ServerState(Bounded(10**6), set(range(workers)))
    for push, decision in play(books, data):
        if push is not None:
            assert other.push(push) == decision
            continue
        for worker in sorted(other.live - books.live):
            assert other.leave(worker) == decision
        for worker in sorted(books.paused - other.paused):
            assert other.pause(worker, REST) == decision
        if decision.quiet:
            break  # the books have resumed already
    assert (other.version, other.read) == (books.state.version, books.state.read)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_first_arrivals_make_each_step_once_and_late_ones_are_dropped(
    workers: int, count: int, data: st.DataObject
) -> None:
    books = Books(FirstArrivals(count), workers)
    steps = 0
    for push, decision in play(books, data):
        if decision.apply:
            members = members_of(decision)
            steps += 1
            assert members == sorted(members)
            assert {push.clock for push in decision.apply[0].pushes} == {steps}
            assert {push.staleness for push in decision.apply[0].pushes} == {0}
            if push is not None:
                assert len(members) == min(count, len(books.live - books.paused))
        elif push is not None and push.clock <= steps:
            assert [(a.worker, a.dropped, a.clock) for a in decision.answers] == [
                (push.worker, True, steps)
            ]
        assert books.answered, "nobody may act: a deadlock"
    books.finish()


def test_a_late_worker_goes_on_with_the_step_after_the_newest() -> None:
    books = Books(FirstArrivals(2), 3)
    for _ in range(3):
        books.push(0, 1)
        assert members_of(books.push(1, 1)) == [0, 1]
    (late,) = books.push(2, 1).answers
    assert (late.dropped, late.clock, late.version) == (True, 3, 3)
    assert (books.state.dropped, books.state.consumed) == (1, 3 * STEP_SAMPLES)
    books.push(2, 1)
    assert members_of(books.push(1, 1)) == [1, 2]
    assert books.push(0, 1).answers[0].dropped
    assert books.staleness == [0] * 8


def test_who_was_given_the_values_at_a_quiet_point_has_read_them() -> None:
    state = ServerState(Asynchronous(), {0, 1})
    for clock in (1, 2, 3):
        state.push(Push(0, clock, 1, 1, 0.0, False))
    state.all_have_read()
    (answer,) = state.push(Push(1, 1, 1, 1, 0.0, False)).answers
    assert answer.staleness == 0


def test_a_second_push_for_the_last_batch_before_a_pause_brings_no_further_batch() -> None:
    """A loop may make several steps with one batch; the next one comes after the quiet point."""
    coordinator = Coordinator(BatchQueue(0, 8, ((0, 1), (1, 1)), rest_every=2))
    state = ServerState(Asynchronous(), {0, 1}, applied=Applied(0), round=2)
    state.coordinator = coordinator

    def next_item(worker: int, clock: int, position: int | None) -> Instruction:
        push = Push(worker, clock, 1, 1, 0.0, False, position=position)
        (answer,) = state.push(push).answers
        assert answer.work is not None
        return answer.work

    items = [
        next_item(worker, clock, position)
        for worker in (0, 1)
        for clock, position in ((1, worker), (2, None))
    ]
    assert items == [RestAt(2, Rest(Reason.CHECKPOINT))] * 4
    for worker in (0, 1):
        state.pause(worker, REST)
    state.resume()
    # Both went on, with [2, 3) and [3, 4).
    assert next_item(0, 3, 2) == RestAt(4, Rest(Reason.CHECKPOINT))


def test_a_further_push_in_mid_phase_brings_no_further_batch() -> None:
    coordinator = Coordinator(BatchQueue(0, 8, ((0, 1), (1, 1))))
    state = ServerState(Asynchronous(), {0, 1}, applied=Applied(0), round=2)
    state.coordinator = coordinator
    given = [
        state.push(Push(0, clock, 1, 1, 0.0, False, position=position)).answers[0].work
        for clock, position in enumerate((0, None, None, 2), start=1)
    ]
    assert given == [Take(2, 3)] * 3 + [Take(3, 4)]


def test_an_applied_batch_is_not_given_again_if_its_worker_is_lost_at_the_bound() -> None:
    state = ServerState(Bounded(0), {0, 1}, applied=Applied(0), round=2)
    state.coordinator = Coordinator(BatchQueue(0, 4, ((0, 1), (1, 1))))
    assert state.push(Push(1, 1, 1, 1, 0.0, False, position=1)).answers == ()
    state.leave(1)
    given = [
        state.push(Push(0, clock, 1, 1, 0.0, False, position=position)).answers[0].work
        for clock, position in ((1, 0), (2, 2), (3, 3))
    ]
    assert given == [Take(2, 3), Take(3, 4), Finish(4)]
