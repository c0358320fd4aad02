"""A first phase whose workers take from the queue: it ends for all at one sample of the order."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.lab import by_turns, some
from tests.support.shared_orders import EIGHT, covers, positions, strategy_of
from tests.support.simulated import simulated
from tests.support.training import settings, step_lines

import orchestra
from orchestra.coordinator.batches import BatchQueue, Observer
from orchestra.coordinator.core import Coordinator, Rounds
from orchestra.coordinator.events import Done, Free, Lost, RestAt, Rested, Started, Take, Wait, Wish
from orchestra.coordinator.rest import Reason, Rest
from orchestra.records.record import RunRecord

ASYNCHRONOUS = 'ParameterServer(consistency="asynchronous")'
FIRST = {
    ASYNCHRONOUS: 9,
    'ParameterServer(consistency="bounded", staleness=2)': 9,
    'ParameterServer(consistency="asynchronous", servers=2, replicas=1, placement="beside")': 8,
    "PairwiseAveraging()": 8,
    "StochasticGradientPush(overlap=1)": 8,
    "ElasticAveraging(4)": 9,
}
RING = "AllReduce('ring')"


def switch(first: str, then: str, when: str) -> str:
    return f"Switch({first}, {then}, when={when}, moments='reset')"


def trained(
    text: str, ranks: int, folder: Path, task: str, faults: str = "", **options: Any
) -> RunRecord:
    """On eight unlike nodes and a server."""
    file = folder / "nodes.yaml"
    file.write_text(EIGHT + faults)
    return simulated(settings(strategy_of(text), ranks, task, **options), folder / "run", str(file))


def taken(folder: Path, ranks: int) -> list[tuple[int, int]]:
    return positions(folder / "run", range(ranks))


IMAGES = "images(sample_flops=1e9)"


@pytest.mark.parametrize(("first", "every"), some(by_turns([*FIRST], [None, 2])))
def test_a_rule_that_counts_ends_the_queue_at_its_round(
    first: str, every: int | None, tmp_path: Path
) -> None:
    """Each sample once over both phases; the fast workers take more in the first."""
    ranks = FIRST[first]
    text = switch(first, RING, "AfterSteps(5)")
    record = trained(text, ranks, tmp_path, IMAGES, steps=10, checkpoint_every=every)
    batches = taken(tmp_path, ranks)
    assert covers(batches, 0, 5 * 8 * 8)
    counts = [len(positions(tmp_path / "run", [rank])) for rank in range(8)]
    assert min(counts[:6]) > max(counts[6:]) or every
    assert (record.switching.at_step, record.switching.at_sample) == (5, 5 * 8 * 8)
    assert record.learned.samples == 10 * 8 * ranks
    assert (tmp_path / "run" / "checkpoints").exists() == bool(every)


@pytest.mark.parametrize("first", some([*FIRST], every=3))
def test_a_rule_that_observes_ends_the_queue_for_all_at_once(first: str, tmp_path: Path) -> None:
    ranks = FIRST[first]
    rule = "LossStable(window=3, threshold=1.0)"
    record = trained(switch(first, RING, rule), ranks, tmp_path, IMAGES, steps=20)
    batches = taken(tmp_path, ranks)
    end = batches[-1][1]
    assert covers(batches, 0, end)
    assert 3 * 64 <= end < 20 * 64
    assert record.switching.at_step == -(-end // 64)
    assert record.switching.at_sample == end
    assert record.learned.samples == 20 * 8 * ranks


@pytest.mark.parametrize(
    ("first", "rule"),
    by_turns(
        [text for text in FIRST if "Server" in text],
        ["AfterSteps(5)", "LossStable(window=3, threshold=1.0)"],
    ),
)
def test_a_worker_may_die_in_it(first: str, rule: str, tmp_path: Path) -> None:
    ranks = FIRST[first]
    faults = "faults:\n  - Death: {of: rank 3, at: 2 s}\n"
    text = switch(first, first, rule)
    record = trained(text, ranks, tmp_path, IMAGES, faults, steps=10)
    assert list(record.ending.left_out) == ["3"]
    assert record.switching.at_step is not None
    lines = [line for r in range(8) if r != 3 for line in step_lines(tmp_path / "run", r)]
    starts = [line["position"] for line in lines]
    assert len(starts) == len(set(starts))
    assert max(line["consumed"] for line in lines) == 10 * 8 * ranks


def test_queues_of_phases_inside_phases_end_where_the_first_rule_says(tmp_path: Path) -> None:
    inner = switch(ASYNCHRONOUS, "PairwiseAveraging()", "AfterSteps(3)")
    text = switch(inner, RING, "AfterSteps(7)")
    record = trained(text, 9, tmp_path, IMAGES, steps=12)
    assert record.switching.at_step == 7
    batches = taken(tmp_path, 9)
    assert covers(batches, 0, 3 * 64 + 4 * 72)
    text = switch(inner, RING, "AfterSteps(2)")
    (tmp_path / "early").mkdir()
    record = trained(text, 9, tmp_path / "early", IMAGES, steps=12)
    assert covers(taken(tmp_path / "early", 9), 0, 2 * 64)


def test_switches_of_servers_are_told_apart(tmp_path: Path) -> None:
    """A server hears of the end of the inner phase, and then of that of the outer one."""
    inner = switch(ASYNCHRONOUS, 'ParameterServer(consistency="bounded", staleness=2)',
                   "LossStable(window=2, threshold=9.0)")  # fmt: skip
    text = switch(inner, RING, "AfterSteps(9)")
    record = trained(text, 9, tmp_path, IMAGES, steps=14, checkpoint_every=2)
    assert record.switching.at_step == 9
    assert record.learned.samples == 14 * 8 * 9


def test_the_first_phase_is_as_fast_as_all_nodes_together(tmp_path: Path) -> None:
    """With shapes alone, too; in equal parts the slow nodes would set the pace."""
    options: dict[str, Any] = {"tensors": "shapes", "engine": "simulation", "steps": 40}
    text = switch(ASYNCHRONOUS, ASYNCHRONOUS, "AfterFraction(0.8)")
    shared = trained(text, 9, tmp_path, IMAGES, **options).time.samples_per_second
    (tmp_path / "equal").mkdir()
    equal = trained(
        text, 9, tmp_path / "equal", IMAGES, work="equal", **options
    ).time.samples_per_second
    assert shared is not None
    assert equal is not None
    assert shared > 0.85 * equal / (8 * 2.5) * (6 * 10 + 2 * 2.5)


@pytest.mark.parametrize(
    ("first", "rule"),
    by_turns(
        [ASYNCHRONOUS, "ElasticAveraging(4)"],
        ["AfterSteps(8)", "LossStable(window=6, threshold=9.0)"],
    ),
)
def test_it_is_resumed_in_the_first_phase(first: str, rule: str, tmp_path: Path) -> None:
    """From its last checkpoint there, after round 6; the rule that observes has fired just then."""
    text = switch(first, RING, rule)
    options: dict[str, Any] = {"steps": 10, "checkpoint_every": 6}
    whole = trained(text, 9, tmp_path, IMAGES, **options)
    assert whole.switching.at_step == (8 if "AfterSteps" in rule else 7)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "0002")  # with which the second phase began
    again = trained(text, 9, tmp_path, IMAGES, **options)
    assert any("resumed from checkpoint 1" in notice for notice in again.ending.notices)
    assert again.switching.at_step == whole.switching.at_step
    assert again.learned.samples == whole.learned.samples


TWO = ((0, 4), (1, 4))

STABLE = "LossStable(window=3, threshold=1.0)"


@pytest.mark.parametrize(
    ("first", "rule"),
    [
        (ASYNCHRONOUS, "AfterFraction(0.5)"),
        ("PairwiseAveraging()", STABLE),
        pytest.param(ASYNCHRONOUS, STABLE, marks=pytest.mark.lab),
        pytest.param("PairwiseAveraging()", "AfterFraction(0.5)", marks=pytest.mark.lab),
    ],
)
def test_it_repeats_to_the_bit(first: str, rule: str, tmp_path: Path) -> None:
    orchestra.train(
        "tests.support.tasks_for_tests:digits_in_one_thread()", switch(first, RING, rule), 3,
        out=tmp_path / "run", quiet=True, record_order=True, steps=12, batch_size=8, snapshots=2,
        optimizer="SGD(lr=0.05)", checkpoint_every=4,
    )  # fmt: skip
    assert orchestra.replay(tmp_path / "run", out=tmp_path / "replay", quiet=True).equal


# The coordinator


def ends(transition: int, at: int) -> RestAt:
    return RestAt(at, Rest(Reason.PHASE, transition))


def fires(*, fired: bool = False) -> Observer:
    """Ends phase 2 after the first round, or at the beginning."""
    return Observer(2, lambda reports, seconds: True, fired)


def test_a_phase_ends_where_it_is_known_to() -> None:
    core = Coordinator(BatchQueue(0, 100, TWO).ending(12, 1).ending(16, 0))
    assert core.handle(Free(0)) == [(0, Take(8, 12))]
    assert core.handle(Free(1)) == [(1, Wait())]
    assert core.handle(Free(0)) == [(0, ends(1, 12))]


def test_the_outer_one_of_two_phases_ends_at_the_same_sample() -> None:
    queue = BatchQueue(0, 100, TWO).ending(4, 1)
    assert queue.ending(4, 0) == queue
    assert queue.ending(4, 2).first(0)[1] == ends(2, 4)


def test_a_phase_ends_with_what_is_handed_out() -> None:
    """Where its rule has fired before: after the first batches, which all workers know."""
    core = Coordinator(BatchQueue(0, 100, TWO).watched(fires(fired=True)))
    assert core.handle(Free(0)) == [(0, Wait())]
    assert core.handle(Free(0)) == []
    assert core.handle(Lost(1)) == [(0, Take(4, 8))]
    assert core.handle(Free(0)) == [(0, ends(2, 8))]


def test_a_phase_ends_once_its_rule_has_seen_a_round() -> None:
    core = Coordinator(BatchQueue(0, 100, TWO).watched(fires()))
    assert core.handle(report(0, 0), Started(0)) == [(0, Take(8, 12))]
    assert core.handle(report(1, 4), Free(1)) == [(1, Wait())]
    assert core.handle(Free(0)) == [(0, ends(2, 12))]


@pytest.mark.parametrize("reason", [Reason.CHECKPOINT, Reason.STOP])
def test_all_rest_where_one_has_been_told_to(reason: Reason) -> None:
    core = Coordinator(BatchQueue(0, 100, TWO, rest_every=8).watched(fires()))
    if reason is Reason.STOP:
        core.handle(Wish(0))
    assert core.handle(report(0, 0), Free(0)) == [(0, RestAt(8, Rest(reason)))]
    assert core.handle(report(1, 4), Free(1)) == [(1, RestAt(8, Rest(reason)))]
    core.handle(Rested())
    assert core.handle(Free(0)) == [(0, Wait())]
    assert core.handle(Free(1)) == [(1, ends(2, 16))]


def report(worker: int, start: int) -> Done:
    return Done(worker, start, start + 4, 1.0, 1.0, 0.1, 0.0, 0.5)


def observed(start: int, reports: Sequence[tuple[int, int]]) -> list[tuple[list[int], int]]:
    """What the rounds of 8 from `start` on are made of, if batches (worker, start) are reported."""
    seen: list[tuple[list[int], int]] = []

    def observe(reports: Sequence[Done], seconds: tuple[float, ...]) -> bool:
        seen.append(([one.start for one in reports], len(seconds)))
        return False

    rounds = Rounds(BatchQueue(start, 100, TWO), Observer(0, observe))
    for worker, first in reports:
        rounds.report(report(worker, first))
    return seen


def test_a_round_is_complete_when_all_before_its_end_is_done_whoever_did_it() -> None:
    assert observed(0, [(0, 0), (0, 8), (0, 12)]) == []
    reports = [(0, 0), (0, 8), (0, 12), (1, 4)]
    assert observed(0, reports) == [([0, 4], 2), ([8, 12], 2)]


def test_the_first_round_has_a_batch_of_each_worker_wherever_it_begins() -> None:
    assert observed(4, [(0, 4), (0, 12), (1, 8)]) == [([4, 8, 12], 2)]
