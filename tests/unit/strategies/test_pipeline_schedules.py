"""What a pipeline decides without a model: the order of passes, and where to cut."""

from __future__ import annotations

from collections import deque
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra.exchange.stages import SLACK, balanced_cuts
from orchestra.strategies.pipeline import Pass, passes_of

SCHEDULES = ["1f1b", "gpipe"]


def ticks(schedule: str, stages: int, microbatches: int) -> int:
    """Steps of a clock until all are through, if each pass takes one; fails where they block.

    A pass can start when the one that it needs has ended in the tick before.
    """
    waiting = [deque(passes_of(schedule, stages, k, microbatches)) for k in range(stages)]
    done: set[tuple[int, Pass]] = set()
    count = 0
    while any(waiting):
        ready = [k for k in range(stages) if waiting[k] and needs(k, waiting[k][0], stages) <= done]
        assert ready, "the stages wait for each other"
        done |= {(k, waiting[k].popleft()) for k in ready}
        count += 1
    return count


def needs(stage: int, current: Pass, stages: int) -> set[tuple[int, Pass]]:
    neighbour = stage + (1 if current.backward else -1)
    return {(neighbour, current)} if 0 <= neighbour < stages else set()


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(stages=st.integers(1, 8), microbatches=st.integers(1, 12))
def test_the_bubble_is_what_the_formula_says(schedule: str, stages: int, microbatches: int) -> None:
    """Of M + S - 1 pairs of passes M are work: (S - 1) / (M + S - 1) of the time is waiting."""
    assert ticks(schedule, stages, microbatches) == 2 * (microbatches + stages - 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(stages=st.integers(1, 8), microbatches=st.integers(1, 12))
def test_every_micro_batch_passes_once_each_way_and_in_order(
    schedule: str, stages: int, microbatches: int
) -> None:
    for stage in range(stages):
        passes = passes_of(schedule, stages, stage, microbatches)
        for backward in (False, True):
            numbers = [number for way, number in passes if way == backward]
            assert numbers == list(range(microbatches))
        kept = peak = 0
        for backward, _ in passes:
            kept += -1 if backward else 1
            assert kept >= 0
            peak = max(peak, kept)
        bound = stages - stage if schedule == "1f1b" else microbatches
        assert peak == min(bound, microbatches)


chains = st.lists(
    st.tuples(st.integers(0, 20), st.none() | st.integers(1, 9), st.booleans()),
    min_size=1,
    max_size=8,
)


@given(rows=chains, stages=st.integers(1, 4))
def test_cuts_are_the_best_there_are(rows: list[tuple[int, int | None, bool]], stages: int) -> None:
    costs, crossing, trained = zip(*rows, strict=True)
    options = {}
    for cuts in combinations(range(1, len(rows)), stages - 1):
        spans = list(pairwise((0, *cuts, len(rows))))
        allowed = all(crossing[cut] is not None for cut in cuts)
        if allowed and all(any(trained[a:b]) for a, b in spans):
            largest = max(sum(costs[a:b]) for a, b in spans)
            options[cuts] = (largest, sum(crossing[cut] or 0 for cut in cuts))
    found = balanced_cuts(costs, crossing, trained, stages)
    if not options:
        assert found is None
        return
    assert found is not None
    least = min(largest for largest, _ in options.values())
    good = {c: sent for c, (largest, sent) in options.items() if largest <= least * (1 + SLACK)}
    assert found in good
    assert good[found] == min(good.values())
