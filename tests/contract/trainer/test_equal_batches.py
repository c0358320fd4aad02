"""Equal global batches, and parts of a batch by the speed of each rank."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from studies.retiming import retimed
from tests.support.answers import fair, headline, source, study, timed, told
from tests.support.paths import ROOT
from tests.support.simulated import simulated
from tests.support.training import Trained, distance, equal, settings, train_threads

import orchestra
from orchestra.data import DataPlan, shares_of
from orchestra.errors import InputError
from orchestra.records.record import RunRecord
from orchestra.report.table import table
from orchestra.settings import parse
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer import setup
from orchestra.trainer.checkpoint_files import complete
from orchestra.trainer.checkpoints import read_rank
from orchestra.trainer.settings import Training

ONE_SLOW = str(ROOT / "examples" / "simulation" / "one_slow.yaml")
IMAGES = "images(samples=240, dtype='float64')"
ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"


def strategy(text: str) -> Strategy:
    found: Strategy = parse(text, STRATEGIES, where="test")
    return found


def trained(folder: Path, text: str, ranks: int, **training: Any) -> Trained:
    options = {"equal": "global_batch", "optimizer": "SGD(lr=0.05)", "steps": 6, **training}
    return train_threads(strategy(text), ranks, folder, IMAGES, **options)


# Which batch is held equal


def test_beside_a_server_workers_have_more_so_that_all_take_as_many_steps() -> None:
    training = Training(ranks=4, batch_size=32, steps=180)
    shares = (1.0, 1.0, 1.0, 0.0)
    plan = DataPlan(0, 180 * 128, training.global_batch(shares), shares)
    assert plan.counts(0) == (43, 43, 42, 0)
    assert plan.steps == 180
    each = training.with_setting("equal", "worker_batch")
    assert each.global_batch(shares) == 96
    assert each.global_batch((4.0,)) == training.global_batch((4.0,)) == 128


@pytest.mark.parametrize("text", ["ParameterServer", "ParameterServer(returns='gradients')"])
def test_a_server_on_a_rank_of_its_own_takes_the_steps_of_all_reduce(
    text: str, tmp_path: Path
) -> None:
    """Two workers of 12 samples: to the bit those of AllReduce on two ranks."""
    served = trained(tmp_path / "server", text, 3)
    reduced = trained(tmp_path / "ring", "AllReduce('ring')", 2, batch_size=12)
    assert [line["samples"] for line in served.lines(0)] == [12] * 6
    assert equal(served.final, reduced.final)


def test_uneven_parts_of_a_global_batch_weigh_what_they_hold(tmp_path: Path) -> None:
    """Three workers of 11, 11 and 10 samples make the updates of four that have 8."""
    served = trained(tmp_path / "server", "ParameterServer", 4)
    reduced = trained(tmp_path / "ring", "AllReduce('ring')", 4)
    assert [served.lines(rank)[0]["samples"] for rank in range(3)] == [11, 11, 10]
    assert distance(served.final, reduced.final) < 1e-12
    each = trained(tmp_path / "each", "AllReduce('ring')", 4, equal="worker_batch")
    assert equal(each.final, reduced.final)


def test_a_switch_keeps_the_global_batch(tmp_path: Path) -> None:
    text = f"Switch(AllReduce('ring'), {ASYNCHRONOUS}, when=AfterSteps(3), moments='reset')"
    lines = trained(tmp_path, text, 4, work="equal").lines(0)
    assert [line["samples"] for line in lines] == [8, 8, 8, 11, 11, 11]


def test_the_record_tells_the_batches(tmp_path: Path) -> None:
    def kept(text: str, held: str) -> RunRecord:
        run = settings(strategy(text), 4, "images()", steps=3, equal=held, tensors="shapes",
                       engine="simulation")  # fmt: skip
        return simulated(run, tmp_path / text / held)

    even, each = (kept(ASYNCHRONOUS, held) for held in ("global_batch", "worker_batch"))
    assert (even.batching.global_batch, even.batching.worker_batches, even.learned.steps) == (
        32,
        [11, 11, 10],
        3,
    )
    assert (each.batching.global_batch, each.batching.worker_batches, each.learned.steps) == (
        24,
        [8, 8, 8],
        4,
    )
    assert even.pacing.synchronous is False
    assert kept("Single", "global_batch").batching.worker_batches == [32]
    assert kept("ParameterServer", "global_batch").pacing.synchronous


# What a report makes of it

UNLIKE = {"server": 96, "one process": 128, "ring": 128}


def unlike(times: Mapping[str, list[float]], **batches: int) -> list[RunRecord]:
    """Runs of 3 workers with 96 samples a step, and of 4 with 128."""
    return [
        run
        for label, batch in {**UNLIKE, **batches}.items()
        for run in timed({label: times[label]}, global_batch=batch, steps=23040 // batch,
                         worker_batches=[batch] if label == "one process" else [32] * (batch // 32),
                         synchronous=True, by_rank=[])
    ]  # fmt: skip


TIMES = {"server": [2.0, 2.1], "one process": [3.0, 3.1], "ring": [4.0, 4.1]}


def test_who_is_first_with_another_batch_is_said_to_be() -> None:
    assert headline(source(unlike(TIMES))) == (
        "Server on 4 ranks (batch 96) reached accuracy 0.95 first, after 2.05 s (mean of 2 seeds); "
        "one process with all cores (batch 128) took 3.05 s, 1.5 times as long: with unlike "
        "batches, whether distributing pays does not follow."
    )
    one, ring = [5.0, 5.1], [2.5, 2.6]
    said = told(source(unlike({"server": [2.0, 2.1], "one process": one, "ring": ring})))
    assert "The next after server was ring on 4 ranks (batch 128)" in " ".join(said.detail)


def test_rows_with_the_batch_of_the_first_are_set_beside_it() -> None:
    assert "At the same batch" not in " ".join(told(source(unlike(TIMES))).detail)
    single = {"server": [3.0, 3.1], "one process": [1.0, 1.1], "ring": [4.0, 4.1]}
    text = " ".join(told(source(unlike(single))).detail)
    assert "At the same batch, 128, ring took 4.05" in text


def test_with_equal_batches_there_is_a_verdict() -> None:
    said = headline(source(unlike(TIMES, server=128)))
    assert said.endswith("took 3.05 s, 1.5 times as long: on this machine distributing paid.")
    assert "batch" not in said


def test_final_figures_of_unlike_batches_are_told_as_such() -> None:
    runs = unlike(TIMES)
    assert headline(source(runs, target=None)).endswith(
        "with unlike batches, that is a difference of batch and strategy together."
    )
    assert "together" not in headline(source(unlike(TIMES, server=128), target=None))


def test_fairness_and_caption_say_which_batch_was_equal() -> None:
    even, odd = unlike(TIMES, server=128), unlike(TIMES)
    text = " ".join(fair(even).equal)
    assert "The same global batch: 128 samples in every row. The same number of steps: 180." in text
    assert not fair(even).doubts
    assert "the same global batch and the same seed" in table(study(source(even))).beside
    verdict = fair(odd)
    assert "The same batch for each worker: 32 samples." in verdict.equal
    assert verdict.doubts[0].startswith(
        "Not the same global batch: 96 samples in each of 240 steps (server); "
        "128 samples in each of 180 steps (one process and ring)."
    )
    assert "not every row has its global batch" in table(study(source(odd))).beside
    lines = table(study(source(odd))).sheet.lines
    cells = {line[0].text: line[2].details for line in lines}
    assert cells["server"] == ["32 a worker", "240 steps"]
    assert cells["one process"] == ["180 steps"]


def test_more_samples_on_more_ranks_are_no_doubt() -> None:
    runs = [run for ranks in (2, 4) for run in timed({"ring": [1.0]}, ranks, global_batch=ranks)]
    assert not any("batch" in doubt for doubt in fair(runs).doubts)


def test_the_global_batch_of_those_apart_is_said_to_be_a_sum() -> None:
    runs = timed({"ring": [1.0]}, synchronous=True) + timed({"server": [1.0]}, synchronous=False)
    assert any(text.startswith("Under server not every update is") for text in fair(runs).equal)


# Parts by speed


def on_one_slow(text: str, folder: Path, **training: Any) -> RunRecord:
    """20 steps of 8 machines, one of them at a quarter of the others' speed: 3.2 s a gradient."""
    options: dict[str, Any] = {"batch_size": 320, "steps": 20, "trace_steps": 0, "threads": 1}
    options |= training
    run = settings(strategy(text), 8, "", **options)
    return simulated(replace(run, task=HEAVY), folder, ONE_SLOW)


HEAVY = "synthetic(100_000, tensors=1, sample_flops=1e9)"
IDEAL = 20 * 8 * 3.2 / 7.25
"""Seconds: all samples over the sum of the speeds."""


@pytest.mark.parametrize("text", ["AllReduce('ring')", "LocalSGD(10)"])
def test_measured_parts_come_near_the_sum_of_the_speeds(text: str, tmp_path: Path) -> None:
    shapes: dict[str, Any] = {"engine": "simulation", "tensors": "shapes"}
    even = on_one_slow(text, tmp_path / "even", **shapes)
    by_speed = on_one_slow(text, tmp_path / "speed", **shapes, shares="measured")
    assert even.time.training is not None
    assert by_speed.time.training is not None
    assert even.time.training > 3.5 * IDEAL
    assert IDEAL < by_speed.time.training < 1.05 * IDEAL
    assert by_speed.batching.shares == pytest.approx([8 / 7.25] * 7 + [2 / 7.25], abs=1e-3)
    assert by_speed.batching.worker_batches == [353] * 7 + [89]
    assert on_one_slow(text, tmp_path / "again", **shapes, shares="measured").summary() | {
        "wall_seconds": None
    } == by_speed.summary() | {"wall_seconds": None}


def test_who_waits_for_nobody_has_equal_parts(tmp_path: Path) -> None:
    shapes: dict[str, Any] = {"engine": "simulation", "tensors": "shapes", "shares": "measured"}
    for number, text in enumerate([ASYNCHRONOUS, "PairwiseAveraging()", "Single"]):
        record = on_one_slow(text, tmp_path / str(number), **shapes, steps=2)
        assert record.batching.shares == ()
        assert max(record.batching.worker_batches) - min(record.batching.worker_batches) <= 1
    beside = "ParameterServer(consistency='asynchronous', placement='beside')"
    text = f"Switch(AllReduce('ring'), {beside}, when=AfterSteps(1), moments='reset')"
    record = on_one_slow(text, tmp_path / "switch", **shapes, steps=2)
    assert record.batching.worker_batches == [353] * 7 + [89]
    samples = [rank.samples for rank in record.machine.by_rank]
    assert samples == [353 + 320] * 7 + [89 + 320], "in the second phase parts are equal"


def test_cores_that_ranks_share_count_in_their_speeds(tmp_path: Path) -> None:
    """Three ranks on a node of two cores are slower than one that has a node of its own."""
    lines = [
        "name: crowded",
        "all_nodes: {flops: 1 GFLOP/s, loopback: {bandwidth: 1 GB/s, latency: 1 us}}",
        "nodes:",
        "  a: {cores: 2, link: {bandwidth: 1 Gbit/s, latency: 1 us}}",
        "  b: {cores: 2, link: {bandwidth: 1 Gbit/s, latency: 1 us}}",
        "ranks: [a, a, a, a, b]",
    ]
    (tmp_path / "crowded.yaml").write_text("\n".join(lines))
    run = settings(
        strategy("AllReduce('ring')"), 5, "", steps=2, shares="measured", tensors="shapes",
        engine="simulation", threads=1,
    )  # fmt: skip
    record = simulated(replace(run, task=HEAVY), tmp_path / "run", str(tmp_path / "crowded.yaml"))
    assert record.batching.shares == pytest.approx([5 / 6] * 4 + [5 / 3], abs=1e-3)


@pytest.fixture
def four_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 takes four seconds for a gradient, the others one."""
    monkeypatch.setattr(setup, "_seconds", lambda runtime, *_: [1.0 if runtime.rank else 4.0])


@pytest.mark.usefixtures("four_to_one")
def test_real_ranks_agree_on_what_they_measured(tmp_path: Path) -> None:
    options = {"batch_size": 9, "epochs": 1, "steps": None}
    by_speed = trained(tmp_path / "speed", "AllReduce('ring')", 3, shares="measured", **options)
    assert {report.shares for report in by_speed.reports} == {(0.333, 1.333, 1.333)}
    assert [by_speed.lines(rank)[0]["samples"] for rank in range(3)] == [3, 12, 12]
    even = trained(tmp_path / "even", "AllReduce('ring')", 3, **options)
    assert distance(by_speed.final, even.final) < 1e-12


@pytest.mark.usefixtures("four_to_one")
@pytest.mark.parametrize("text", ["AllReduce('ring')", "LocalSGD(4)"])
def test_a_resumed_run_keeps_what_was_measured(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"shares": "measured", "steps": 12, "checkpoint_every": 4}
    whole = trained(tmp_path, text, 3, **options)
    newest = max(complete(tmp_path / "checkpoints"))
    shutil.rmtree(tmp_path / "checkpoints" / f"{newest:04d}")
    saved = read_rank(tmp_path / "checkpoints", newest - 1, 1)
    assert (saved["shares"], saved["position"]["steps"]) == ([0.333, 1.333, 1.333], 8)
    monkeypatch.delattr(setup, "_seconds")  # nothing is measured again
    resumed = trained(tmp_path, text, 3, **options)
    assert [report.shares for report in resumed.reports] == [(0.333, 1.333, 1.333)] * 3
    assert equal(resumed.final, whole.final)


def test_processes_measure_record_and_repeat(tmp_path: Path) -> None:
    def made(name: str, shares: Any) -> RunRecord:
        return orchestra.train(
            "tests.support.tasks_for_tests:digits_in_one_thread()", "AllReduce('ring')", 3,
            shares=shares, out=tmp_path / name, quiet=True, record_order=True, steps=5,
            batch_size=8, optimizer="SGD(lr=0.05)", snapshots=1,
        )  # fmt: skip

    measured = made("measured", "measured")
    assert len(measured.batching.shares) == 3
    assert [*measured.machine.alone] == ["rank 0", "rank 1", "rank 2"]
    speed, together = measured.time.samples_per_second, sum(measured.machine.alone.values())
    assert speed is not None
    assert measured.machine.heterogeneous_efficiency == pytest.approx(speed / together)
    assert sum(measured.batching.shares) == pytest.approx(3, abs=2e-3)
    assert sum(measured.batching.worker_batches) == 24
    by_hand = made("by hand", list(measured.batching.shares))
    assert by_hand.learned.parameters_sha256 == measured.learned.parameters_sha256
    assert by_hand.batching.shares == ()
    assert orchestra.replay(tmp_path / "measured", out=tmp_path / "replay", quiet=True).equal


def test_shares_are_the_speeds_of_mean_1() -> None:
    assert shares_of([2.0, 1.0, 1.0]) == (1.5, 0.75, 0.75)
    assert min(shares_of([1e-9, 1.0])) > 0


def test_a_run_whose_parts_follow_from_speed_cannot_be_timed_elsewhere(tmp_path: Path) -> None:
    run = settings(strategy("AllReduce('ring')"), 2, "images()", shares="measured")
    with pytest.raises(InputError, match="or give the shares as numbers"):
        retimed(run, timed({"ring": [1.0]})[0], "lan_1gbit", tmp_path)


def unequal(compute: list[float], **changes: Any) -> list[str]:
    by_rank = [
        {"rank": rank, "role": "worker", "samples": 100, "seconds": {"compute": seconds}}
        for rank, seconds in enumerate(compute)
    ]
    told_by = {"by_rank": by_rank, "worker_batches": [10] * 4, "global_batch": 40}
    runs = timed({"ring": [1.0]}, **{"steps_together": True, **told_by, **changes})
    return [text for text in told(source(runs)).caveats if "shares" in text]


def test_on_unlike_workers_a_report_says_what_parts_by_speed_would_bring() -> None:
    """10 samples at 100 in 4 s: 0.4 s; all 40 at 3 x 100 + 25 a second: 0.123 s."""
    (text,) = unequal([1.0, 1.0, 1.0, 4.0])
    assert text.startswith("Under ring all wait for the slowest worker, which computes for")
    assert "0.400" in text
    assert "0.123" in text
    assert not unequal([1.0, 1.05, 1.0, 1.1])
    assert not unequal([1.0, 1.0, 1.0, 4.0], steps_together=False)
    assert not unequal([1.0, 1.0, 1.0, 4.0], shares=[1.2, 1.2, 1.2, 0.3])
