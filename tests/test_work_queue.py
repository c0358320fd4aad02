"""The queue of batches: each sample once, whoever asks when, is lost, pauses or stops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra.schedules.work_queue import Applied, Kind, WorkInHand, WorkItem, WorkQueue


def batch(start: int, stop: int) -> WorkItem:
    return WorkItem(Kind.BATCH, start, stop)


def pauses(item: WorkItem) -> bool:
    return item.kind in (Kind.PAUSE, Kind.STOP)


def test_first_items_follow_from_the_position_and_need_no_message() -> None:
    queue = WorkQueue(10, 100, ((0, 4), (2, 8)))
    assert queue.restart() == {0: batch(10, 14), 2: batch(14, 22)} == queue.first(10)
    assert WorkInHand(WorkQueue(10, 100, ((0, 4), (2, 8))), 2).take() == batch(14, 22)
    assert queue.take(2) == batch(22, 30)


def test_the_last_batches_are_cut_and_then_nothing_is_left() -> None:
    queue = WorkQueue(0, 10, ((0, 4), (1, 4)))
    queue.restart()
    assert queue.take(0) == batch(8, 10)
    assert queue.take(1) == WorkItem(Kind.WAIT, 10, 10), "worker 0 may be lost, with its batch"
    assert queue.take(0) == WorkItem(Kind.END, 10, 10)
    assert queue.take(1) == WorkItem(Kind.END, 10, 10)


def test_what_a_lost_worker_held_is_handed_out_first() -> None:
    queue = WorkQueue(0, 12, ((0, 4), (1, 4)))
    queue.restart()
    queue.lose(1)
    assert [queue.take(0), queue.take(0)] == [batch(4, 8), batch(8, 12)]


def test_who_waits_for_the_end_takes_over_what_is_lost() -> None:
    queue = WorkQueue(0, 8, ((0, 4), (1, 4)))
    queue.restart()
    assert queue.take(0) == WorkItem(Kind.WAIT, 8, 8)
    queue.lose(1)
    assert queue.take(0) == batch(4, 8)


def test_all_pause_where_a_checkpoint_is_due_and_go_on_from_there() -> None:
    queue = WorkQueue(0, 100, ((0, 4), (1, 4)), pause_every=10)
    queue.restart()
    assert queue.take(1) == batch(8, 10), "no batch crosses the point"
    assert [queue.take(0), queue.take(1)] == [WorkItem(Kind.PAUSE, 10, 10)] * 2
    assert queue.restart() == {0: batch(10, 14), 1: batch(14, 18)}
    hand = WorkInHand(WorkQueue(0, 100, ((0, 4), (1, 4)), pause_every=10), 1)
    hand.item = WorkItem(Kind.PAUSE, 10, 10)
    assert [hand.take(), hand.take()] == [WorkItem(Kind.PAUSE, 10, 10), batch(14, 18)]


def test_a_wish_to_stop_ends_it_for_all_until_a_restart() -> None:
    queue = WorkQueue(0, 100, ((0, 4), (1, 4)))
    queue.restart()
    queue.close()
    assert [queue.take(0), queue.take(1)] == [WorkItem(Kind.STOP, 8, 8)] * 2
    assert queue.restart() == {0: batch(8, 12), 1: batch(12, 16)}


def test_a_wish_to_stop_waits_where_some_are_to_pause_and_go_on() -> None:
    queue = WorkQueue(0, 100, ((0, 4), (1, 4)), pause_every=8)
    queue.restart()
    assert queue.take(0).kind is Kind.PAUSE
    queue.close()
    assert queue.take(1).kind is Kind.PAUSE, "one would go on and wait for one that has left"
    queue.resume(0)
    queue.close()  # it is said with each batch
    assert [queue.take(0).kind, queue.take(1).kind] == [Kind.STOP] * 2


def test_applied_grows_over_gaps_as_they_close() -> None:
    applied = Applied(8)
    applied.add(12, 16)
    assert applied.before == 8
    applied.add(8, 12)
    assert applied.before == 16


@given(data=st.data())
def test_every_sample_is_done_exactly_once(data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, 5))
    start, length = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 200))
    sizes = tuple((rank, data.draw(st.integers(1, 9))) for rank in range(workers))
    every = data.draw(st.none() | st.integers(1, 60))
    queue = WorkQueue(start, start + length, sizes, every)
    hands = dict(queue.restart())
    done: list[int] = []
    while hands:
        waiting = [rank for rank, item in hands.items() if item is None]
        paused = [
            r for r, i in hands.items() if i is not None and i.kind in (Kind.PAUSE, Kind.STOP)
        ]
        if len(paused) == len(hands):
            assert len({hands[rank].kind for rank in paused}) == 1, "some go on, and some do not"
            if not queue._returned:
                assert sorted(done) == list(range(start, start + len(done)))
            items = queue.restart()
            for rank in items.keys() - hands.keys():
                queue.lose(rank)
            hands = {rank: items[rank] for rank in hands}
            continue
        free = [rank for rank in hands if rank not in paused and rank not in waiting]
        assert free, "all wait for nobody"
        rank = data.draw(st.sampled_from(free))
        item = hands[rank]
        if item.kind is Kind.END:
            del hands[rank]
            continue
        if len(hands) > 1 and data.draw(st.integers(0, 9)) == 0:
            queue.lose(rank)
            del hands[rank]
        else:
            if data.draw(st.integers(0, 20)) == 0:
                queue.close()
            done += range(item.start, item.stop)
            hands[rank] = queue.take(rank)
        for other in [other for other, its in hands.items() if its.kind is Kind.WAIT]:
            hands[other] = queue.take(other)
    assert len(done) == len(set(done)), "some sample was taken twice"
    missing = set(range(start, start + length)) - set(done)
    held = {n for item in queue._returned for n in range(item.start, item.stop)}
    assert missing == held, "some sample was taken by nobody"


@pytest.mark.parametrize("position", [0, 3, 8, 10])
def test_a_copy_knows_the_first_items_at_any_position(position: int) -> None:
    queue, copy = (WorkQueue(0, 10, ((0, 4), (1, 4)), pause_every=8) for _ in range(2))
    queue._next = position
    assert queue.restart() == copy.first(position)
