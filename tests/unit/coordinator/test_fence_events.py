"""How a fence is found: events in, instructions out, without a transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra.coordinator.events import (
    Announced,
    AskPromise,
    Dismissed,
    Done,
    Ended,
    Event,
    Free,
    Grant,
    Lost,
    Promised,
    Renew,
    Reported,
    RestAfter,
    Settle,
    Settled,
    Started,
    Wish,
    events_of,
    instruction_of,
    numbers_of,
    numbers_of_events,
)
from orchestra.coordinator.fence import LEASE, FencedWorker, FenceLeader, Told

THREE = (0, 1, 2)


def to_all(event: Event, workers: Sequence[int] = THREE) -> Told:
    return [(worker, event) for worker in workers]


def leader(workers: Sequence[int] = THREE, fires: float = inf) -> FenceLeader:
    """A leader whose rule fires when the losses of a step reach `fires` in sum."""

    def observe(reports: Sequence[Reported]) -> int | None:
        return 2 if sum(each.loss for each in reports) >= fires else None

    return FenceLeader(workers, observe)


def report(worker: int, step: int, loss: float = 1.0) -> Reported:
    return Reported(worker, step, 8, loss, 0.5, 0.1, 0.0, 0.0, 0.0, 0.0)


# A worker's lease


def test_a_lease_is_renewed_without_a_message_to_another_rank() -> None:
    worker = FencedWorker(2)
    assert worker.handle(AskPromise(0)) == [(0, Promised(2, LEASE))]
    worker = FencedWorker(2)
    assert worker.handle(Renew(2, LEASE)) == [(2, Grant(2 * LEASE))]
    assert worker.handle(AskPromise(0)) == [(0, Promised(2, 2 * LEASE))]


def test_a_worker_that_has_promised_waits_at_its_lease_for_the_fence() -> None:
    worker = FencedWorker(2)
    worker.handle(AskPromise(0))
    assert worker.handle(Renew(2, LEASE)) == []
    assert worker.handle(Announced(0, 9)) == [(2, RestAfter(9))]


def test_a_worker_that_is_slow_learns_the_fence_at_its_lease() -> None:
    worker = FencedWorker(2)
    worker.handle(AskPromise(0))
    assert worker.handle(Announced(0, 9)) == []
    assert worker.handle(Renew(2, LEASE)) == [(2, RestAfter(9))]


def test_a_part_is_over_when_the_leader_knows_that_all_have_left() -> None:
    worker = FencedWorker(2)
    assert not worker.over
    assert worker.handle(Dismissed(0)) == []
    assert worker.over


# The leader


def test_a_wish_asks_all_for_promises_and_the_largest_is_announced() -> None:
    core = leader()
    assert core.handle(Wish(1)) == to_all(AskPromise(0))
    assert core.handle(Promised(0, 4)) == []
    assert core.handle(Promised(2, 12)) == []
    assert core.handle(Promised(1, 8)) == to_all(Announced(0, 12))


def test_a_second_wish_changes_nothing() -> None:
    core = leader()
    core.handle(Wish(1))
    assert core.handle(Wish(2)) == []
    assert core.handle(Promised(0, 4), Promised(1, 4), Promised(2, 4)) == to_all(Announced(0, 4))
    assert core.handle(Wish(0)) == []


def test_the_leader_is_a_worker_too() -> None:
    core = leader()
    assert core.handle(Renew(0, 4)) == [(0, Grant(8))]
    assert core.handle(AskPromise(0)) == [(0, Promised(0, 8))]
    assert core.handle(Renew(0, 8)) == []
    assert core.handle(Announced(0, 12)) == [(0, RestAfter(12))]
    core.handle(Dismissed(0))
    assert core.over


def test_a_worker_that_is_lost_in_the_middle_is_not_waited_for() -> None:
    core = leader()
    core.handle(Wish(1))
    core.handle(Promised(0, 4), Promised(1, 8))
    assert core.handle(Lost(2)) == to_all(Announced(0, 8))


def test_the_promise_of_a_worker_that_is_lost_afterwards_counts() -> None:
    core = leader()
    core.handle(Wish(1))
    assert core.handle(Promised(2, 12), Lost(2), Promised(0, 4)) == []
    assert core.handle(Promised(1, 8)) == to_all(Announced(0, 12))


def test_a_worker_that_leaves_while_all_are_asked_has_promised_its_steps() -> None:
    core = leader()
    core.handle(Wish(1))
    core.handle(Promised(0, 8), Promised(1, 8))
    assert core.handle(Ended(2, 10)) == to_all(Announced(0, 10))


def test_all_are_dismissed_once_all_have_left() -> None:
    core = leader()
    core.handle(Wish(0))
    core.handle(Promised(0, 8), Promised(1, 8), Promised(2, 8))
    assert core.handle(Ended(0, 8), Ended(2, 8)) == []
    assert core.handle(Ended(1, 8)) == to_all(Dismissed(0))
    assert core.handle(Lost(1)) == []


def test_nobody_waits_for_a_lost_worker_to_leave() -> None:
    core = leader((0, 1))
    core.handle(Ended(0, 8))
    assert core.handle(Lost(1))[-2:] == to_all(Dismissed(0), (0, 1))


def test_reports_of_a_step_are_put_together_and_may_wish_for_all() -> None:
    heard: list[list[int]] = []

    def observe(reports: Sequence[Reported]) -> int | None:
        heard.append([each.worker for each in reports])
        return 1 if reports[0].step == 2 else None

    core = FenceLeader(THREE, observe)
    assert core.handle(report(2, 1), report(2, 2), report(0, 1), report(1, 1)) == []
    assert heard == [[0, 1, 2]]
    assert core.handle(report(0, 2), report(1, 2)) == to_all(AskPromise(0))


def test_the_end_of_the_outermost_phase_goes_before_a_stop() -> None:
    """Whatever is known by the announcement counts; the user's wish comes again in the next."""
    ends = iter([None, 1, 2, None])
    core = FenceLeader((0, 1), lambda reports: next(ends))
    core.handle(Wish(1))
    assert core.handle(*(report(worker, step) for step in (1, 2, 3, 4) for worker in (0, 1))) == []
    announced = Announced(0, 8, 2)
    assert core.handle(Promised(0, 4), Promised(1, 8)) == to_all(announced, (0, 1))


def test_reports_are_put_together_without_a_lost_worker() -> None:
    """Also those of steps that the others have reported already."""
    core = leader(fires=4.0)
    core.handle(report(0, 1), report(1, 1), report(0, 2, 3.0), report(1, 2))
    assert core.handle(Lost(2)) == to_all(AskPromise(0))


def test_the_reports_of_a_worker_count_that_was_lost_after_them() -> None:
    heard: list[list[int]] = []

    def observe(reports: Sequence[Reported]) -> None:
        heard.append([each.worker for each in reports])

    core = FenceLeader(THREE, observe)
    core.handle(report(2, 1), Lost(2), report(0, 1), report(1, 1), report(0, 2), report(1, 2))
    assert heard == [[0, 1, 2], [0, 1]]


def test_all_settle_together_with_their_reports_observed() -> None:
    core = leader()
    assert core.handle(Settle(2), Settle(0)) == []
    assert core.handle(Settle(1)) == [(0, Settled()), (1, Settled()), (2, Settled())]
    assert core.handle(Settle(0), Settle(1)) == []
    assert core.handle(Lost(2)) == [(0, Settled()), (1, Settled())]


def test_nobody_settles_where_nobody_waits() -> None:
    core = leader((0, 1))
    assert core.handle(Lost(1)) == []


# All parts together


class Run:
    """Workers that do `steps`, with messages that are delivered in an order drawn by chance."""

    def __init__(self, data: st.DataObject, workers: int, steps: int) -> None:
        self.data, self.steps = data, steps
        ranks = range(workers)
        self.cores: list[FencedWorker] = [FencedWorker(rank) for rank in ranks]
        self.cores[0] = FenceLeader(ranks, lambda reports: None)
        self.done = dict.fromkeys(ranks, 0)
        self.limit: dict[int, Grant | RestAfter] = dict.fromkeys(ranks, Grant(LEASE))
        self.waiting: set[int] = set()
        self.left: dict[int, int] = {}
        self.lost: set[int] = set()
        # by sender, whether by its main flow, and receiver: messages between two keep their order
        self.in_flight: dict[tuple[int, bool, int], deque[Event]] = {}

    def tell(self, sender: int, to: int, event: Event, *, main: bool) -> None:
        self.in_flight.setdefault((sender, main, to), deque()).append(event)

    def run(self) -> None:
        while not all(core.over for core in self.cores if core not in self._dead()):
            working = [
                rank
                for rank in self.done
                if rank not in self.waiting and rank not in self.left and rank not in self.lost
            ]
            flights = [key for key, queue in self.in_flight.items() if queue]
            assert working or flights, "all wait for nobody"
            if flights and (not working or self.data.draw(st.booleans())):
                sender, main, to = self.data.draw(st.sampled_from(flights))
                self.hear(to, self.in_flight[sender, main, to].popleft())
            else:
                self.step(self.data.draw(st.sampled_from(working)))

    def _dead(self) -> list[FencedWorker]:
        return [self.cores[rank] for rank in self.lost]

    def hear(self, rank: int, event: Event) -> None:
        if rank in self.lost:
            return
        for to, told in self.cores[rank].handle(event):
            if isinstance(told, Grant | RestAfter):
                self.limit[to] = told
                self.waiting.discard(to)
            else:
                assert isinstance(told, Event)
                self.tell(rank, to, told, main=False)

    def step(self, rank: int) -> None:
        if rank and self.data.draw(st.integers(0, 30)) == 0:
            self.lost.add(rank)
            self.tell(rank, 0, Lost(rank), main=True)
            return
        if self.done[rank] >= self.limit[rank].step and isinstance(self.limit[rank], Grant):
            self.waiting.add(rank)
            self.tell(rank, rank, Renew(rank, self.done[rank]), main=True)
            return
        if self.done[rank] in (self.steps, self._fence(rank)):
            self.left[rank] = self.done[rank]
            self.tell(rank, 0, Ended(rank, self.done[rank]), main=True)
            return
        self.done[rank] += 1
        if self.data.draw(st.integers(0, 20)) == 0:
            self.tell(rank, 0, Wish(rank), main=True)

    def _fence(self, rank: int) -> int | None:
        limit = self.limit[rank]
        return limit.step if isinstance(limit, RestAfter) else None


@given(st.data(), st.integers(2, 4), st.integers(0, 30))
def test_all_leave_after_the_same_step_whatever_is_lost(
    data: st.DataObject, workers: int, steps: int
) -> None:
    run = Run(data, workers, steps)
    run.run()
    assert len(set(run.left.values())) == 1


# Messages


@pytest.mark.parametrize(
    "events",
    [
        [Started(3), Wish(3)],
        [Done(3, 8, 16, 0.25, 0.5, 0.1, 2.0, 0.75), Free(3)],
        [report(3, 2**40, 0.1), Settle(3)],
        [Renew(3, 4)],
        [Ended(3)],
        [Ended(3, 2**31 + 1)],
        [AskPromise(3)],
        [Promised(3, 4)],
        [Announced(3, 4)],
        [Announced(3, 4, 2)],
        [Dismissed(3)],
    ],
)
def test_events_survive_the_wire(events: list[Event]) -> None:
    read = events_of(3, numbers_of_events(*events))
    assert read == events
    sent = [type(field) for event in events for field in event]
    assert [type(field) for event in read for field in event] == sent


@pytest.mark.parametrize("instruction", [Settled(), Grant(2**40), RestAfter(7), RestAfter(7, 2)])
def test_instructions_about_steps_survive_the_wire(
    instruction: Settled | Grant | RestAfter,
) -> None:
    assert instruction_of(numbers_of(instruction)) == instruction
