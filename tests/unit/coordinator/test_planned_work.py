"""What all workers of a plan do next: events in, instructions out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestra.coordinator.events import Finish, RestAt, Take
from orchestra.coordinator.planned import PlannedWork
from orchestra.coordinator.rest import Reason, Rest
from orchestra.data import DataPlan

CHECKPOINT, STOP = Rest(Reason.CHECKPOINT), Rest(Reason.STOP)


@given(
    st.integers(0, 60),
    st.integers(1, 9),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 9),
)
def test_each_sample_is_dealt_once_and_rests_are_where_all_expect_them(
    samples: int, batch: int, every: int | None, stop: int | None
) -> None:
    plan = DataPlan(0, samples, batch, (1.0, 1.0))
    work = PlannedWork(plan, 0, every, [lambda: STOP if work.step == stop else None])
    taken: list[int] = []
    rests: list[tuple[int, Rest]] = []
    while not isinstance(item := work.take(), Finish):
        if isinstance(item, RestAt):
            rests.append((work.step, item.rest))
            assert item.at == plan.position(work.step)
            if item.rest is STOP:
                break  # as the loop does, which may also go on
            continue
        assert isinstance(item, Take)
        taken += range(item.start, item.stop)
        work.done()
    last = plan.steps if stop is None else min(stop, plan.steps)
    assert taken == list(range(plan.position(last)))
    assert item.at == plan.position(last)
    expected = [(step, CHECKPOINT) for step in range(1, last + 1) if every and step % every == 0]
    if stop is not None and stop <= plan.steps:
        expected = [pair for pair in expected if pair[0] < stop] + [(stop, STOP)]
    assert rests == expected


def test_a_resumed_plan_goes_on_behind_its_rest() -> None:
    plan = DataPlan(0, 40, 8, (1.0,))
    work = PlannedWork(plan, 2, rest_every=2)
    assert work.take() == Take(16, 24)


def test_the_first_policy_that_asks_for_a_rest_has_it_and_the_others_are_not_asked() -> None:
    asked: list[str] = []

    def ends() -> Rest | None:
        asked.append("rules")
        return Rest(Reason.PHASE, 3) if len(asked) == 3 else None

    def balance() -> None:
        asked.append("balance")

    work = PlannedWork(DataPlan(0, 40, 8, (1.0,)), 0, 2, [ends, balance])
    assert work.take() == Take(0, 8)
    work.done()
    assert asked == ["rules", "balance"]
    assert work.take() == Take(8, 16)
    work.done()
    assert asked == ["rules", "balance", "rules"]
    assert work.take() == RestAt(16, Rest(Reason.PHASE, 3))
