"""The coordinator: each sample once, whichever worker asks, is lost, rests or stops, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra.coordinator.batches import BatchQueue, HeldWork, Sizes, WorkInHand, rebuilt
from orchestra.coordinator.core import Applied, Coordinator
from orchestra.coordinator.events import (
    Done,
    Finish,
    Free,
    Instruction,
    Lost,
    RestAt,
    Rested,
    Started,
    Take,
    Wait,
    Wish,
    instruction_of,
    numbers_of,
)
from orchestra.coordinator.rest import Reason, Rest

TWO = ((0, 4), (1, 4))


def checkpoint(at: int) -> RestAt:
    return RestAt(at, Rest(Reason.CHECKPOINT))


def stop(at: int) -> RestAt:
    return RestAt(at, Rest(Reason.STOP))


def coordinator(budget: int, sizes: Sizes = TWO, rest_every: int | None = None) -> Coordinator:
    return Coordinator(BatchQueue(0, budget, sizes, rest_every))


def test_first_instructions_follow_from_the_position_and_need_no_message() -> None:
    queue = BatchQueue(10, 100, ((0, 4), (2, 8)))
    assert queue.first(10) == {0: Take(10, 14), 2: Take(14, 22)}
    assert WorkInHand(queue, 2).take() == Take(14, 22)
    assert Coordinator(queue).handle(Free(2)) == [(2, Take(22, 30))]


def test_a_worker_that_waits_leaves_once_all_batches_are_done() -> None:
    core = coordinator(10)
    assert core.handle(Free(0)) == [(0, Take(8, 10))], "the last batch is cut"
    assert core.handle(Free(1)) == [(1, Wait())], "worker 0 may be lost, with its batch"
    assert core.handle(Free(1)) == []
    assert core.idle == {1}
    assert core.handle(Free(0)) == [(0, Finish(10)), (1, Finish(10))]


def test_a_worker_that_asks_ahead_holds_two_batches() -> None:
    core = coordinator(16)
    assert core.handle(Started(0)) == [(0, Take(8, 12))]
    assert core.handle(Started(0)) == [(0, Take(12, 16))]
    core.handle(Lost(0))
    assert [core.handle(Free(1))[0] for _ in range(3)] == [
        (1, Take(8, 12)),
        (1, Take(12, 16)),
        (1, Finish(16)),
    ]


def test_nobody_waits_where_the_run_ends_with_the_first_lost_worker() -> None:
    core = Coordinator(BatchQueue(0, 8, TWO), expendable=False)
    assert core.handle(Started(0)) == [(0, Finish(8))]


def test_batches_of_a_lost_worker_are_handed_out_first() -> None:
    core = coordinator(12)
    assert core.handle(Lost(1)) == []
    assert core.handle(Free(0)) + core.handle(Free(0)) == [(0, Take(4, 8)), (0, Take(8, 12))]


def test_batches_of_a_worker_lost_before_the_phase_are_handed_out_first() -> None:
    core = Coordinator(BatchQueue(0, 12, TWO), gone=[1])
    assert core.handle(Free(0)) == [(0, Take(4, 8))]


def test_an_idle_worker_takes_over_the_batch_of_a_lost_one() -> None:
    core = coordinator(8)
    assert core.handle(Free(0)) == [(0, Wait())]
    assert core.handle(Free(0)) == []
    assert core.handle(Lost(1)) == [(0, Take(4, 8))]
    assert core.handle(Free(0)) == [(0, Finish(8))]


def test_a_batch_that_is_done_does_not_come_back_though_its_worker_has_no_other() -> None:
    """A server applies a push, and its worker is lost before it is answered."""
    core = coordinator(8)
    assert core.handle(Done(1, 4, 8)) == []
    assert core.handle(Free(0)) == [(0, Wait())], "worker 1 has not asked yet"
    assert core.handle(Free(0)) == []
    assert core.handle(Lost(1)) == [(0, Finish(8))]


def test_all_rest_where_a_checkpoint_is_due_and_go_on_from_there() -> None:
    core = coordinator(100, rest_every=10)
    assert core.handle(Free(1)) == [(1, Take(8, 10))], "no batch crosses the point"
    assert core.handle(Free(0)) + core.handle(Free(1)) == [(0, checkpoint(10)), (1, checkpoint(10))]
    assert core.handle(Rested()) == []
    assert core.handle(Free(0)) == [(0, Take(18, 20))]
    hand = WorkInHand(BatchQueue(0, 100, TWO, rest_every=10), 1)
    hand.next = checkpoint(10)
    assert [hand.take(), hand.take()] == [checkpoint(10), Take(14, 18)]


def test_a_worker_that_goes_on_tells_that_all_have_rested() -> None:
    core = coordinator(100, rest_every=8)
    assert core.handle(Started(0)) + core.handle(Started(1)) == [
        (0, checkpoint(8)),
        (1, checkpoint(8)),
    ]
    # Workers 0 and 1 know [8, 12) and [12, 16) by themselves.
    assert core.handle(Started(0)) == [(0, checkpoint(16))]


def test_a_rest_in_mid_phase_hands_out_nothing() -> None:
    core = coordinator(100, rest_every=8)
    assert core.handle(Free(0)) == [(0, checkpoint(8))]
    core.handle(Rested())
    assert core.handle(Free(1)) == [(1, checkpoint(8))]


def test_a_wish_to_stop_ends_it_for_all_until_they_have_rested() -> None:
    core = coordinator(100)
    core.handle(Wish(0))
    assert core.handle(Free(0)) + core.handle(Free(1)) == [(0, stop(8)), (1, stop(8))]
    core.handle(Rested())
    assert core.handle(Free(0)) == [(0, Take(16, 20))]


def test_a_wish_to_stop_waits_where_some_workers_are_to_rest_and_go_on() -> None:
    core = coordinator(100, rest_every=8)
    assert core.handle(Free(0)) == [(0, checkpoint(8))]
    core.handle(Wish(1))
    assert core.handle(Free(1)) == [(1, checkpoint(8))], "it would leave, and worker 0 wait for it"
    # The wish comes again with each batch.
    assert core.handle(Started(0), Wish(0)) == [(0, stop(16))]
    assert core.handle(Free(1)) == [(1, stop(16))]


def test_applied_grows_over_gaps_as_they_close() -> None:
    applied = Applied(8)
    applied.add(12, 16)
    assert applied.before == 8
    applied.add(8, 12)
    assert applied.before == 16


@pytest.mark.parametrize(
    "instruction",
    [Take(4, 9), Wait(), Finish(9), *(RestAt(9, Rest(each, 2)) for each in Reason)],
)
def test_instructions_survive_the_wire(instruction: Instruction) -> None:
    assert instruction_of(numbers_of(instruction)) == instruction


class Workers:
    """Workers that follow the coordinator, in an order drawn by chance; `ahead`: some ask ahead."""

    def __init__(self, queue: BatchQueue, data: st.DataObject, *, ahead: bool) -> None:
        self.queue, self.data, self.ahead = queue, data, ahead
        self.core = Coordinator(queue)
        self.known: dict[int, list[Instruction]] = {
            rank: [first] for rank, first in queue.first(queue.start).items()
        }
        self.computing: dict[int, Take] = {}
        self.done: list[int] = []

    def hear(self, told: list[tuple[int, Instruction]]) -> None:
        for worker, instruction in told:
            self.known[worker].append(instruction)

    def run(self) -> None:
        """Until all have left."""
        while self.known:
            resting = {
                rank: its[0]
                for rank, its in self.known.items()
                if its and rank not in self.computing and isinstance(its[0], RestAt)
            }
            if len(resting) == len(self.known):
                assert len(set(resting.values())) == 1, "some go on, and some do not"
                self.rest(next(iter(resting.values())).at)
                continue
            free = [rank for rank, its in self.known.items() if rank not in resting and its]
            free += [rank for rank in self.computing if rank not in free]
            assert free, "all wait for nobody"
            self.act(self.data.draw(st.sampled_from(sorted(free))))

    def rest(self, at: int) -> None:
        first = self.queue.first(at)
        self.known = {rank: [first[rank]] for rank in self.known}
        # Otherwise the first worker that starts tells the coordinator.
        if not self.ahead or not any(isinstance(first[rank], Take) for rank in self.known):
            self.hear(self.core.handle(Rested()))

    def act(self, worker: int) -> None:
        # A batch that was asked ahead of may be done without a message, and would come back.
        if not self.ahead and len(self.known) > 1 and self.data.draw(st.integers(0, 9)) == 0:
            del self.known[worker]
            self.computing.pop(worker, None)
            self.hear(self.core.handle(Lost(worker)))
            return
        wish = [Wish(worker)] if self.data.draw(st.integers(0, 20)) == 0 else []
        if worker in self.computing:
            batch = self.computing.pop(worker)
            self.done += range(batch.start, batch.stop)
            if not self.ahead:
                self.hear(self.core.handle(Done(worker, *batch)))
                self.hear(self.core.handle(*wish))
                self.hear(self.core.handle(Free(worker)))
            elif self.data.draw(st.booleans()):
                self.hear(self.core.handle(Done(worker, *batch)))
            return
        instruction = self.known[worker].pop(0)
        if isinstance(instruction, Take):
            self.computing[worker] = instruction
            if self.ahead:
                self.hear(self.core.handle(Started(worker), *wish))
        elif isinstance(instruction, Wait):
            self.hear(self.core.handle(Free(worker)))
        else:
            assert isinstance(instruction, Finish)
            del self.known[worker]
            if not self.ahead:  # a worker of a server signs off, as a lost one does
                self.hear(self.core.handle(Lost(worker)))


@given(data=st.data(), ahead=st.booleans())
def test_every_sample_is_done_exactly_once(data: st.DataObject, ahead: bool) -> None:
    ranks = data.draw(st.integers(1, 5))
    start, length = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 200))
    sizes = tuple((rank, data.draw(st.integers(1, 9))) for rank in range(ranks))
    every = data.draw(st.none() | st.integers(1, 60))
    workers = Workers(BatchQueue(start, start + length, sizes, every), data, ahead=ahead)
    workers.run()
    assert len(workers.done) == len(set(workers.done)), "some sample was taken twice"
    missing = set(range(start, start + length)) - set(workers.done)
    held = {n for batch in workers.core._returned for n in range(batch.start, batch.stop)}
    assert missing == held, "some sample was taken by nobody"


# A coordinator that is lost


def test_batches_that_workers_hold_are_owed_unless_they_are_applied() -> None:
    held = [HeldWork(20, 8, 12, pushed=True), HeldWork(24, 20, 24), HeldWork(16)]
    assert rebuilt(held, applied=16) == (24, ((8, 12), (20, 24)))
    assert rebuilt(held, applied=20) == (24, ((20, 24),)), "the answer was lost"


def test_first_batch_after_a_rest_is_owed_once_a_worker_is_past_the_rest() -> None:
    waits = HeldWork(16, 20, 24)
    assert rebuilt([waits, HeldWork(16, 8, 12)], applied=12) == (16, ((8, 12),))
    assert rebuilt([waits, HeldWork(24, 16, 20)], applied=16) == (24, ((16, 20), (20, 24)))


def test_owed_batches_are_handed_out_first() -> None:
    queue = BatchQueue(20, 24, TWO, owed=((0, 4), (8, 12), (12, 15)))
    core, hand = Coordinator(queue), WorkInHand(queue, 1)
    assert queue.first(20) == {0: Take(0, 4), 1: Take(8, 12)}
    owes = [core.owes]
    assert core.handle(Free(0)) + core.handle(Free(1)) == [(0, Take(12, 15)), (1, Take(20, 24))]
    assert [*owes, core.owes] == [True, False]
    hand.next = checkpoint(20)
    assert [hand.take(), hand.take()] == [checkpoint(20), Finish(24)]
    applied = Applied.of(queue)
    applied.add(0, 4)
    assert applied.before == 8
    applied.add(12, 15)
    applied.add(8, 12)
    assert applied.before == 20


class Served:
    """Workers whose servers apply and answer pushes, in an order drawn by chance."""

    def __init__(self, queue: BatchQueue, done: list[int]) -> None:
        self.core, self.done = Coordinator(queue), done
        self.hands = {rank: WorkInHand(queue, rank) for rank, _ in queue.sizes}
        self.resting: set[int] = set()
        self.left: set[int] = set()

    @property
    def free(self) -> list[int]:
        """The workers that do not wait."""
        return sorted(self.hands.keys() - self.resting - self.left - self.core.idle)

    def act(self, worker: int) -> None:
        instruction = self.hands[worker].take()
        if isinstance(instruction, Take | Wait):
            if isinstance(instruction, Take):
                self.done += range(*instruction)
                self.hear(self.core.handle(Done(worker, *instruction)))
            self.hear(self.core.handle(Free(worker)))
        elif isinstance(instruction, RestAt):
            self.resting.add(worker)
            if self.resting == self.hands.keys():
                self.resting.clear()
                self.hear(self.core.handle(Rested()))
        else:
            self.left.add(worker)
            self.hear(self.core.handle(Lost(worker)))

    def hear(self, told: list[tuple[int, Instruction]]) -> None:
        for worker, instruction in told:
            self.hands[worker].give(instruction)


@given(data=st.data())
def test_queue_rebuilt_from_what_workers_hold_has_each_sample_once(data: st.DataObject) -> None:
    start, length = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 100))
    every = data.draw(st.none() | st.integers(1, 60))
    end, done = start + length, list[int]()

    def served(start: int, owed: tuple[tuple[int, int], ...] = ()) -> Served:
        workers = range(data.draw(st.integers(1, 4)))
        sizes = tuple((rank, data.draw(st.integers(1, 9))) for rank in workers)
        return Served(BatchQueue(start, end, sizes, every, owed=owed), done)

    before = served(start)
    for _ in range(data.draw(st.integers(0, 30))):
        if before.free:
            before.act(data.draw(st.sampled_from(before.free)))
    unanswered = set()
    for rank in before.free:
        hand = before.hands[rank]
        if isinstance(hand.next, Take) and data.draw(st.booleans()):
            done += range(*hand.take()[:2])
            unanswered.add(rank)
    held = [hand.held(pushed=rank in unanswered) for rank, hand in before.hands.items()]
    after = served(*rebuilt(held, start + len(done)))
    while after.free:
        after.act(data.draw(st.sampled_from(after.free)))
    assert sorted(done) == list(range(start, end))
