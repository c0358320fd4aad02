"""Which candidate goes on: by what was measured, for all workers alike, and said in the record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.simulated import simulated
from tests.support.training import settings, step_lines, train_processes

import orchestra
from orchestra.errors import InputError
from orchestra.records.following import RankTrack
from orchestra.records.record import RunRecord
from orchestra.records.report import changes_in
from orchestra.records.store import RunFolder, write_summary
from orchestra.settings import parse
from orchestra.strategies.auto import PredictedPace, choose
from orchestra.strategies.registry import STRATEGIES

RING, ROUNDS = "AllReduce('ring')", "LocalSGD(8)"
TASK = "images(samples=4096, sample_flops=1e8)"
STEPS = 96
# A step computes for 80 ms; a ring among the four exchanges 14 KB in 8 ms.
FOUR = """
all_nodes:
  cores: 1
  jitter: null
  flops: 10 GFLOP/s
  loopback: {bandwidth: 30 GB/s, latency: 1 us}
  link: {bandwidth: 3 MB/s, latency: 10 us}
nodes:
  node: {count: 4}
ranks: spread
"""
DROP = "faults:\n" + "".join(
    f"  - LinkSlow: {{of: node-{number}, factor: 20, at: 4 s}}\n" for number in range(4)
)


def auto(*candidates: str, **options: Any) -> str:
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"Auto([{', '.join(candidates)}]{given})"


def trained(text: str, folder: Path, faults: str = "", **options: Any) -> RunRecord:
    folder.mkdir(exist_ok=True)
    file = folder / "nodes.yaml"
    file.write_text(FOUR + faults)
    strategy = parse(text, STRATEGIES, where="test")
    run = settings(strategy, 4, TASK, **{"steps": STEPS, **options})
    return simulated(run, folder / "run", str(file))


def steps_of(folder: Path) -> list[float]:
    """Seconds on the stopwatch at the end of each step."""
    return [line["seconds"] for line in step_lines(folder / "run", 0)]


def test_a_step_is_as_long_as_the_slowest_worker_and_the_exchange() -> None:
    own = [[1.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]]
    assert PredictedPace.of("each", 1.0, own, 0.5, 1).seconds == 2.5 + 0.5
    assert PredictedPace.of("round", 1.0, own, 0.5, 2).seconds == 2.0 + 0.25


@pytest.mark.parametrize(
    ("samples", "ratio", "margin", "chosen"),
    [
        (1.0, 1.0, 0.15, 1),
        (1.7, 1.0, 0.15, 1),  # 2 / 1.7 = 1.18 times as soon
        (1.8, 1.0, 0.15, 0),  # 1.11 times
        (1.8, 1.0, 0.05, 1),
        (2.5, 1.0, 0.0, 0),
        (1.0, 2.5, 0.0, 0),  # it took longer than predicted when it was under way
    ],
)
def test_another_candidate_has_to_be_sooner_by_the_margin(
    samples: float, ratio: float, margin: float, chosen: int
) -> None:
    paces = [PredictedPace("a", 1.0, 1.0, 2.0), PredictedPace("b", samples, 0.0, 1.0, ratio)]
    assert choose(paces, 0, margin)[0] == chosen


def test_when_links_slow_down_it_changes_and_beats_both_candidates(tmp_path: Path) -> None:
    """At the first decision after that, though most of the steps before it were fast."""
    samples = 1.3  # that local steps take, where the ring takes 1
    record = trained(auto(RING, ROUNDS, samples=[1.0, samples]), tmp_path / "auto", DROP)
    seconds = steps_of(tmp_path / "auto")
    (change,) = [d for d in record.switching.decisions if d["then"] != d["under"]]
    at, before = (
        change["step"],
        record.switching.decisions[record.switching.decisions.index(change) - 1]["step"],
    )
    assert seconds[before - 1] < 4.0 < seconds[at - 1]
    assert record.switching.at_step == at
    assert changes_in(record.switching.decisions)[0].startswith(
        f"after step {at} to {ROUNDS}: {ROUNDS} is"
    )
    # What the change took is in nobody's steps.
    after = record.switching.decisions[record.switching.decisions.index(change) + 1]
    predicted = {c["strategy"]: c["step_seconds"] for c in change["candidates"]}
    assert after["measured_step_seconds"] == pytest.approx(predicted[ROUNDS], rel=0.02)
    assert record.time.training is not None
    left = samples * (record.time.training - seconds[at - 1])
    ring = trained(RING, tmp_path / "ring", DROP).time.training
    local = trained(ROUNDS, tmp_path / "local", DROP, steps=int(STEPS * samples)).time.training
    assert ring is not None
    assert local is not None
    assert seconds[at - 1] + left < 0.95 * min(ring, local)


@pytest.mark.parametrize("first", [RING, ROUNDS])
def test_where_nothing_changes_it_changes_once_at_most(first: str, tmp_path: Path) -> None:
    """To the better candidate, and what was predicted of that is what is then measured."""
    other = ROUNDS if first == RING else RING
    samples = {RING: 1.0, ROUNDS: 1.3}
    text = auto(first, other, samples=[samples[first], samples[other]])
    record = trained(text, tmp_path)
    changes = [d for d in record.switching.decisions if d["then"] != d["under"]]
    assert [d["then"] for d in changes] == [RING] * (first != RING)
    assert len(record.switching.decisions) >= 5
    last = record.switching.decisions[-1]
    predicted = {c["strategy"]: c["step_seconds"] for c in last["candidates"]}
    assert predicted[RING] == pytest.approx(last["measured_step_seconds"])
    assert predicted[RING] == pytest.approx(0.084, rel=0.02)
    assert predicted[ROUNDS] == pytest.approx(0.0807, rel=0.02)


@pytest.mark.parametrize(("first", "at"), [(RING, 3), ("LocalSGD(2)", 4)])
def test_a_change_leaves_parameters_as_they_are(first: str, at: int, tmp_path: Path) -> None:
    """Ranks have equal ones by then, so that they need no broadcast."""
    samples = [100.0, 1.0]
    record = trained(auto(first, "LocalSGD(64)", samples=samples), tmp_path, steps=at)
    alone = trained(first, tmp_path / "alone", steps=at)
    assert record.switching.at_step == at
    assert record.learned.parameters_sha256 == alone.learned.parameters_sha256


def test_the_first_decision_comes_early(tmp_path: Path) -> None:
    """Who begins with what the links are too slow for is not to take ten steps with it."""
    assert trained(auto(RING, ROUNDS, samples=[9, 1]), tmp_path / "ring").switching.at_step == 3
    assert trained(auto("LocalSGD(4)", RING, samples=[9, 1]), tmp_path).switching.at_step == 4


def test_every_decision_is_in_the_files_of_the_run(tmp_path: Path) -> None:
    record = trained(auto(RING, ROUNDS, samples=[1.0, 1.3]), tmp_path, DROP)
    lines = decided(tmp_path / "run")
    assert lines == json.loads(json.dumps(record.switching.decisions))
    assert all(step_lines(tmp_path / "run", r)[2]["decision"] == lines[0] for r in range(4))
    write_summary(tmp_path, "test", [record])
    assert list(RunFolder(tmp_path).record.switching.decisions) == lines
    track = RankTrack(tmp_path / "run" / "steps-rank-0.jsonl")
    track.poll()
    assert changes_in(track.decisions) == changes_in(record.switching.decisions)


@pytest.mark.lab
def test_two_simulations_decide_alike(tmp_path: Path) -> None:
    text = auto(RING, ROUNDS, samples=[1.0, 1.3])
    once, again = (trained(text, tmp_path / name, DROP) for name in ("once", "again"))
    assert once.switching.decisions == again.switching.decisions
    assert once.learned.parameters_sha256 == again.learned.parameters_sha256


CANDIDATES = [
    RING,
    "LocalSGD(4)",
    "AllReduce('ring', compression=BF16())",
    "AllReduce('ring', compression=TopK(0.1))",
    "AllReduce('hierarchical', ranks_per_node=2)",
    "ParameterServer(placement='beside')",
    "ParameterServer(servers=2, placement='beside', returns='gradients')",
    "LocalSGD(4, outer=Nesterov())",
]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.lab if first % 2 else ())
        for first in range(len(CANDIDATES))
    ],
)
def test_any_candidate_follows_any_other(first: int, tmp_path: Path) -> None:
    """By samples that leave no doubt, each once: the parameters are those of no single one."""
    then = (first + 3) % len(CANDIDATES)
    text = auto(CANDIDATES[first], CANDIDATES[then], samples=[100.0, 1.0], every=4)
    options: dict[str, Any] = {"optimizer": "SGD(lr=0.05, momentum=0.9)", "snapshots": 3}
    record = trained(text, tmp_path, steps=12, **options)
    assert record.switching.at_step == (4 if "LocalSGD" in CANDIDATES[first] else 3)
    assert record.learned.samples == 12 * 32


@pytest.mark.parametrize("at", [2, 5])
def test_it_resumes_in_the_phase_that_was_under_way(at: int, tmp_path: Path) -> None:
    text = auto(RING, "LocalSGD(4)", samples=[100.0, 1.0], every=4)
    options: dict[str, Any] = {
        "optimizer": "SGD(lr=0.05, momentum=0.9)",
        "checkpoint_every": at,
        "steps": 16,
    }
    whole = trained(text, tmp_path / "whole", **options)
    there = sorted((tmp_path / "whole" / "run" / "checkpoints").iterdir())
    shutil.copytree(there[0], tmp_path / "again" / "run" / "checkpoints" / there[0].name)
    again = trained(text, tmp_path / "again", **options)
    assert again.ending.notices
    assert again.switching.at_step == whole.switching.at_step == 3
    assert again.learned.parameters_sha256 == whole.learned.parameters_sha256


def test_on_real_processes(tmp_path: Path) -> None:
    """All ranks decide alike: else the run would hang, or end with different parameters."""
    text = auto(RING, "LocalSGD(4)", samples=[100.0, 1.0], every=5)
    task = "digits_in_one_thread()"
    run = settings(parse(text, STRATEGIES, where="test"), 3, task, steps=20)
    record = train_processes(run, tmp_path)
    assert record.switching.at_step == 3
    assert [d["then"] for d in record.switching.decisions] == ["LocalSGD(4)"] * len(
        record.switching.decisions
    )
    assert all(c["step_seconds"] > 0 for d in record.switching.decisions for c in d["candidates"])


def decided(folder: Path) -> list[dict[str, Any]]:
    return [line["decision"] for line in step_lines(folder, 0) if "decision" in line]


def test_what_was_decided_by_the_clock_is_repeated_in_virtual_time(tmp_path: Path) -> None:
    text = auto("LocalSGD(2)", "LocalSGD(2, outer=Nesterov())", every=2)
    orchestra.train(
        "tests.support.tasks_for_tests:digits_in_one_thread()", text, 3, out=tmp_path / "run",
        quiet=True, record_order=True, steps=12, batch_size=8, optimizer="SGD(lr=0.05)",
    )  # fmt: skip
    assert orchestra.replay(tmp_path / "run", out=tmp_path / "replay", quiet=True).equal
    assert decided(tmp_path / "replay") == decided(tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (auto(RING), "two or more strategies"),
        (auto(RING, "AllReduce"), "each of them once"),
        (auto(RING, "Gossip"), "cannot be a candidate"),
        (auto(RING, "LocalSGD(8, overlap=2)"), "cannot be a candidate"),
        (auto(RING, "ParameterServer(consistency='asynchronous', placement='beside')"), "cannot"),
        (auto(RING, "LocalSGD(8)", samples=[1.0]), "is not one number for each of 2 candidates"),
        (auto(RING, "Single"), "cannot be a candidate"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(text, STRATEGIES, where="test")
