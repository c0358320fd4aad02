"""Activities that share resources: against a slow computation, a closed form and SimGrid."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.fair_shares import Change, Job, slow_ends
from tests.support.lab import some
from tests.support.laboratory import Laboratory

from orchestra.engines.simulation import sharing
from orchestra.engines.simulation.fluid import Activity, Resource

CLOSE = 1e-8
RESOURCES = 4
numbers = st.integers(1, 12).map(float)
moments = st.integers(0, 40).map(lambda number: number / 7)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    crosses = draw(st.lists(st.integers(0, RESOURCES - 1), unique=True, max_size=RESOURCES))
    bound = draw(numbers if not crosses else st.one_of(st.just(inf), numbers))
    start = draw(moments)
    lasts = draw(st.one_of(st.just(inf), st.integers(1, 30).map(lambda number: number / 11)))
    amount = draw(st.one_of(numbers, st.just(0.0), st.floats(0.1, 20)))
    weight = draw(st.sampled_from([1.0, 1.0, 0.1, 3.0]))
    return Job(start, amount, tuple(crosses), bound, start + lasts, weight)


changes = st.builds(
    Change,
    moments.map(lambda time: time + 0.01),
    st.integers(0, RESOURCES - 1),
    numbers | st.just(0.0),
)


@dataclass
class Lived:
    """What became of jobs in the fluid; of those cancelled before their end, what was `left`."""

    lab: Laboratory
    resources: Sequence[Resource]
    activities: dict[int, Activity]
    left: dict[int, float] = field(default_factory=dict)


def live(capacities: Sequence[float], wanted: Sequence[Job], changed: Sequence[Change]) -> Lived:
    lab = Laboratory()
    resources = [Resource(str(number), capacity) for number, capacity in enumerate(capacities)]
    lived = Lived(lab, resources, {})

    def begin(number: int, job: Job) -> None:
        way = [resources[crossed] for crossed in job.crosses]
        activity = lab.start(str(number), job.amount, *way, bound=job.bound, weight=job.weight)
        lived.activities[number] = activity

    def cancel(number: int) -> None:
        if lived.activities[number].running:
            lived.left[number] = lived.activities[number].left_at(lab.clock.now())
        lab.fluid.cancel(lived.activities[number])

    for number, job in enumerate(wanted):
        lab.clock.at(job.start, partial(begin, number, job))
        if job.cancelled < inf:
            lab.clock.at(job.cancelled, partial(cancel, number))
    for change in changed:
        call = partial(lab.fluid.set_capacity, resources[change.resource], change.capacity)
        lab.clock.at(change.time, call)
    return lived


def assert_fair(lived: Lived) -> None:
    """Nobody is above a limit, and everybody is held back by one (max-min fair, and only so)."""
    crossed = {r for a in lived.activities.values() for r in a.resources}
    loads = {r: sum(a.rate for a in r.activities) for r in crossed}
    for resource, load in loads.items():
        assert load <= resource.capacity * (1 + 1e-9)
    for activity in lived.activities.values():
        if activity.running:
            full = [r for r in activity.resources if loads[r] >= r.capacity * (1 - 1e-9)]
            level = activity.rate / activity.weight
            assert any(
                level >= max(a.rate / a.weight for a in r.activities) * (1 - 1e-9) for r in full
            )


@given(
    st.lists(numbers, min_size=RESOURCES, max_size=RESOURCES),
    st.lists(jobs(), min_size=1, max_size=9),
    st.lists(changes, max_size=4, unique_by=lambda change: change.time),
)
def test_random_activities_end_when_they_should(
    capacities: list[float], wanted: list[Job], changed: list[Change]
) -> None:
    ends, carried = slow_ends(capacities, wanted, changed)
    for end, job in zip(ends, wanted, strict=True):
        assume(abs(end - job.cancelled) > 1e-6 or end == inf)  # either is right

    lived = live(capacities, wanted, changed)
    clock = lived.lab.clock
    moments = {0.0, *(j.start for j in wanted), *(c.time for c in changed)}
    moments |= {e for e in (*ends, *(j.cancelled for j in wanted)) if e < inf}
    for before, after in itertools.pairwise(sorted(moments)):
        clock.run((before + after) / 2)
        assert_fair(lived)
    found = lived.lab.run()

    for number, end in enumerate(ends):
        assert found.get(str(number), inf) == pytest.approx(end, rel=CLOSE)
    for number, (job, amount) in enumerate(zip(wanted, carried, strict=True)):
        if str(number) not in found:
            left = lived.left.get(number, lived.activities[number].left_at(clock.now()))
            assert job.amount - left == pytest.approx(amount, rel=CLOSE, abs=CLOSE)


@given(
    st.lists(numbers, min_size=RESOURCES, max_size=RESOURCES),
    st.lists(jobs(), min_size=1, max_size=14),
    st.lists(changes, max_size=4, unique_by=lambda change: change.time),
)
def test_random_activities_that_share_evenly_end_when_they_should(
    capacities: list[float], wanted: list[Job], changed: list[Change]
) -> None:
    """Pools come and go: two activities make one."""
    ends, _ = slow_ends(capacities, wanted, changed)
    for end, job in zip(ends, wanted, strict=True):
        assume(abs(end - job.cancelled) > 1e-6 or end == inf)
    with mock.patch.object(sharing, "LEAST", 2):
        lived = live(capacities, wanted, changed)
        found = lived.lab.run()
    for number, end in enumerate(ends):
        assert found.get(str(number), inf) == pytest.approx(end, rel=CLOSE)
    assert not any(resource.equal for resource in lived.resources if not resource.activities)


def test_a_thousand_messages_through_one_link() -> None:
    """They come one by one, and each end is looked up once, not a thousand times."""
    count, lab = 1000, Laboratory()
    shared = Resource("shared", 100.0)
    own = [Resource(str(number), 100.0) for number in range(count)]
    sizes = [50.0 + (7 * number) % 31 for number in range(count)]
    for number, size in enumerate(sizes):
        start = partial(lab.start, str(number), size, shared, own[number])
        lab.clock.at(number / 100, start)
    found = lab.run()
    jobs = [Job(number / 100, size, (0,)) for number, size in enumerate(sizes[:60])]
    early, _ = slow_ends([100.0], jobs)
    assert max(found.values()) == pytest.approx(sum(sizes) / 100.0, rel=1e-9)
    assert found["0"] > early[0]  # the others take from it
    assert lab.fluid.shares < 10 * count


def crowd(seed: int, resources: int, count: int) -> tuple[list[float], list[Job]]:
    """Flows of whole bytes over one to four links each."""
    draw = random.Random(seed)
    capacities = [float(draw.randint(50, 500)) for _ in range(resources)]
    wanted = [
        Job(
            draw.uniform(0, 20),
            draw.randint(1, 3000),
            tuple(draw.sample(range(resources), draw.randint(1, 4))),
        )
        for _ in range(count)
    ]
    return capacities, wanted


@pytest.mark.parametrize("seed", some(range(3), every=3))
def test_a_crowd_of_flows(seed: int) -> None:
    capacities, wanted = crowd(seed, 12, 60)
    ends, _ = slow_ends(capacities, wanted)
    found = live(capacities, wanted, []).lab.run()
    assert [found[str(n)] for n in range(len(wanted))] == pytest.approx(ends, rel=CLOSE)


def test_the_same_calls_give_the_same_times_to_the_last_bit() -> None:
    capacities, wanted = crowd(0, 12, 60)
    runs = []
    kept = []  # of unlike sizes, so that objects get other places in memory
    for size in range(4):
        kept.append([object() for _ in range(size * 997)])
        lived = live(capacities, wanted, [])
        lived.lab.run()
        runs.append(lived.lab.ended)
    assert all(run == runs[0] for run in runs)


# Figures known from elsewhere


def ring(ranks: int, size: float, bandwidth: float, latency: float, duplex: bool) -> float:
    """Seconds of one ring all-reduce; a message pays its latency first, and uses nothing then."""
    lab = Laboratory()
    up = [Resource(f"{rank} up", bandwidth) for rank in range(ranks)]
    down = [Resource(f"{rank} down", bandwidth) for rank in range(ranks)] if duplex else up

    def send(rank: int, round_: int) -> None:
        way = (up[rank], down[(rank + 1) % ranks])
        then = partial(arrive, rank, round_)
        lab.clock.after(latency, lambda: lab.start("", size / ranks, *way, then=then))

    def arrive(rank: int, round_: int) -> None:
        if round_ + 1 < 2 * (ranks - 1):
            send((rank + 1) % ranks, round_ + 1)

    for rank in range(ranks):
        send(rank, 0)
    lab.clock.run()
    assert len(lab.ended) == 2 * ranks * (ranks - 1)
    return lab.clock.now()


@pytest.mark.parametrize(("duplex", "seconds"), [(True, 7.56), (False, 15.06)])
def test_ring_all_reduce_takes_what_simgrid_says(duplex: bool, seconds: float) -> None:
    """SimGrid 3.32, CM02, 16 ranks, 25 MB, 1 Gbit/s, two links of 50 us: 7.5600 s and 15.06 s."""
    once = ring(16, 25e6, 1.25e8, 2 * 50e-6, duplex)
    assert 20 * once == pytest.approx(seconds, rel=1e-9)


@pytest.mark.skipif(importlib.util.find_spec("simgrid") is None, reason="needs SimGrid for Python")
@pytest.mark.parametrize("seed", range(8))
def test_flows_end_when_simgrid_says(seed: int) -> None:
    capacities, wanted = crowd(seed, 12, 60)
    flows = [(job.start, job.amount, job.crosses) for job in wanted]
    ends = json.loads(
        subprocess.run(
            [sys.executable, "-m", "tests.support.simgrid_flows"],
            input=json.dumps({"capacities": capacities, "flows": flows}),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    )
    found = live(capacities, wanted, []).lab.run()
    assert [found[str(n)] for n in range(len(wanted))] == pytest.approx(ends, rel=1e-6)
