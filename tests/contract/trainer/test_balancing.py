"""Batches that follow the speeds of workers: the rules, the plan under them, and whole runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.support.lab import some
from tests.support.simulated import simulated
from tests.support.training import Trained, distance, equal, settings, train_threads

import orchestra
from orchestra.data import DataPlan
from orchestra.errors import InputError
from orchestra.experiments.file import load
from orchestra.records.record import RunRecord
from orchestra.records.store import collect
from orchestra.report.answer import answer
from orchestra.report.figures.bars import batches as batches_figure
from orchestra.report.study import Study
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.balancing import BALANCINGS, LBBSP, Balancer, Balancing, Proportional
from orchestra.trainer.checkpoint_files import complete
from orchestra.trainer.checkpoints import read_rank
from orchestra.trainer.settings import Run, Training

IMAGES = "images(samples=240, dtype='float64')"
SPEEDS = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9)
RULES = [LBBSP(), Proportional()]


# The rules


def test_batches_go_by_the_expected_speeds() -> None:
    assert LBBSP().decide((32, 32, 32, 32), (4.0, 4.0, 4.0, 1.0)) == (40, 39, 39, 10)
    assert LBBSP(newest=0.5).predicted((4.0, 0.0), (12.0, 8.0)) == (6.0, 8.0)


def test_proportional_control_corrects_a_part_of_the_error() -> None:
    """Iteration times of 8, 8 and 32 s, whose mean is 16 s: b - X (tau - 16) = 64, 64 and 16."""
    batches, speeds = (32, 32, 32), (4.0, 4.0, 1.0)
    assert Proportional(gain=1.0).wanted(batches, speeds) == [64.0, 64.0, 16.0]
    assert Proportional(gain=0.5).wanted(batches, speeds) == [48.0, 48.0, 24.0]
    assert Proportional(gain=0.5).decide(batches, speeds) == (39, 38, 19)


@pytest.mark.parametrize("rule", RULES)
def test_what_chance_does_to_speeds_stays_within_the_dead_band(rule: Balancing) -> None:
    batches = (100, 100, 100)
    assert rule.decide(batches, (1.04, 1.0, 0.97)) is batches
    assert rule.decide(batches, (1.1, 1.0, 0.9)) == (110, 100, 90)
    assert replace(rule, dead_band=0.2).decide(batches, (1.1, 1.0, 0.9)) is batches


@given(
    wanted=SPEEDS, total=st.integers(1, 5000), low=st.integers(1, 40), room=st.integers(0, 400),
    bounded=st.booleans(),
)  # fmt: skip
def test_fitted_batches_have_their_sum_and_keep_the_bounds(
    wanted: list[float], total: int, low: int, room: int, bounded: bool
) -> None:
    rule = LBBSP(low=low, high=low + room if bounded else None)
    high = low + room if bounded else total
    if not low * len(wanted) <= total <= high * len(wanted):
        with pytest.raises(InputError, match=r"cannot share the \d+ samples"):
            rule.fitted(wanted, total)
        return
    fitted = rule.fitted(wanted, total)
    assert sum(fitted) == total
    assert all(low <= batch <= high for batch in fitted)
    inside = [(b, w) for b, w in zip(fitted, wanted, strict=True) if low < b < high]
    for (b, w), (other, v) in pairwise(inside):  # in proportion, to a sample
        assert abs(b / w - other / v) <= 1.001 * (1 / w + 1 / v)


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(InputError, match=r"LBBSP: high=3 is below low=4"):
        LBBSP(low=4, high=3)


# The plan


@given(
    st.integers(0, 50), st.integers(0, 300), st.integers(4, 20),
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.floats(0.1, 10), min_size=4, max_size=4))),
)  # fmt: skip
def test_every_sample_is_read_once_whenever_batches_change(
    start: int, samples: int, batch: int, changes: list[tuple[int, list[float]]]
) -> None:
    plan = DataPlan(start, start + samples, batch, (1.0,) * 4)
    batches, at = LBBSP().fitted(plan.shares, batch), dict(changes)
    read: list[int] = []
    for step in range(plan.steps):
        if step in at:
            batches = LBBSP(dead_band=0).decide(batches, tuple(at[step]))
        plan = replace(plan, shares=tuple(map(float, batches)))
        if sum(plan.counts(step)) == batch:
            assert plan.counts(step) == batches
        for rank in range(4):
            read += range(*plan.part(step, rank))
    assert read == list(range(start, start + samples))


# Runs on threads, whose speeds are given


def measure(monkeypatch: pytest.MonkeyPatch, *speeds: tuple[float, ...]) -> None:
    """Each decision of a rank finds the next of `speeds`, and the last one from there on."""
    told: dict[int, int] = {}

    def measured(self: Balancer) -> list[float]:
        place = told.get(id(self), 0)
        told[id(self)] = place + 1
        now = speeds[min(place, len(speeds) - 1)]
        return [now[rank] for rank in self._worker.workers.ranks]

    monkeypatch.setattr(Balancer, "_measured", measured)


def trained(folder: Path, text: str, ranks: int, **training: Any) -> Trained:
    options = {"equal": "global_batch", "optimizer": "SGD(lr=0.05)", "steps": 12, **training}
    strategy = parse(text, STRATEGIES, where="test")
    return train_threads(strategy, ranks, folder, IMAGES, **options)


def batches(run: Trained) -> list[list[int]]:
    return next(report.batches for report in run.reports if report.batches)


@pytest.mark.parametrize(
    "text",
    [
        "AllReduce('ring')",
        pytest.param("AllReduce(shard='gradients')", marks=pytest.mark.lab),
        pytest.param("ParameterServer(placement='beside')", marks=pytest.mark.lab),
        "ParameterServer()",
    ],
)
def test_the_weighted_mean_is_the_gradient_of_the_global_batch(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(monkeypatch, (4.0, 4.0, 1.0), (1.0, 2.0, 4.0), (1.0, 1.0, 1.0))
    ranks = 4 if text == "ParameterServer()" else 3
    options: dict[str, Any] = {"batch_size": 27 // ranks * 2, "accumulation": 2}
    rule = LBBSP(every=4, newest=1.0)
    balanced = trained(tmp_path / "balanced", text, ranks, shares=rule, **options)
    even = trained(tmp_path / "even", text, ranks, **options)
    assert distance(balanced.final, even.final) < 1e-12
    assert [change[0] for change in batches(balanced)] == [0, 2, 4, 8]
    assert {sum(of_ranks) for _, *of_ranks in batches(balanced)} == {ranks * options["batch_size"]}
    of_last = [change[3] for change in batches(balanced)]
    expected = [
        batch for batch, steps in zip(of_last, [2, 2, 4, 4], strict=True) for _ in range(steps)
    ]
    assert [line["samples"] for line in balanced.lines(2)] == expected


@pytest.mark.lab
@pytest.mark.parametrize(
    "text",
    [
        "AllReduce(backup=1)",
        "AllReduce(compression=TopK(0.1))",
        "LocalSGD(4, overlap=2)",
        "Gossip()",
        "StochasticGradientPush()",
        "ParameterServer(servers=2, replicas=1)",
        "Switch(Switch(AllReduce('ring'), LocalSGD(2), when=AfterSteps(3)), Gossip(), "
        "when=AfterSteps(7))",
    ],
)
def test_whoever_steps_together_is_balanced(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(monkeypatch, (4.0, 2.0, 2.0, 1.0), (1.0, 1.0, 2.0, 1.0), (2.0, 2.0, 1.0, 1.0))
    rule = LBBSP(every=2, dead_band=0.0)
    run = trained(tmp_path, text, 4, shares=rule, checkpoint_every=5, steps=24)
    assert len(batches(run)) > 3
    assert {sum(of_ranks) for _, *of_ranks in batches(run)} == {32}
    samples = sum(report.samples for report in run.reports)
    assert samples == 24 * 32 or "backup" in text


def test_local_replicas_weigh_what_they_have_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(monkeypatch, (4.0, 1.0))
    run = trained(tmp_path, "LocalSGD(3)", 2, shares=Proportional(every=4), batch_size=10)
    assert [line["samples"] for line in run.lines(0)] == [10, 10, *[16] * 10]
    assert [line["consumed"] for line in run.lines(1)] == [20 * step for step in range(1, 13)]


@pytest.mark.parametrize("every", [1, 3])
def test_a_resumed_run_goes_on_with_its_batches(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint after 8 of 12 steps lies between two decisions, or at one."""
    measure(monkeypatch, (4.0, 2.0, 1.0))
    options: dict[str, Any] = {"shares": LBBSP(every=every), "checkpoint_every": 4}
    whole = trained(tmp_path, "AllReduce('ring')", 3, **options)
    newest = max(complete(tmp_path / "checkpoints"))
    shutil.rmtree(tmp_path / "checkpoints" / f"{newest:04d}")
    saved = read_rank(tmp_path / "checkpoints", newest - 1, 1)
    assert (saved["balance"]["batches"], saved["position"]["steps"]) == ([14, 7, 3], 8)
    resumed = trained(tmp_path, "AllReduce('ring')", 3, **options)
    assert batches(resumed) == batches(whole)
    assert equal(resumed.final, whole.final)


def test_phases_go_on_from_what_is_known_of_the_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that served, of which nothing is known, counts as the mean of the others.

    It knows of them what they do: 24 samples at speeds of 1.5 (between 3 and 1), 1 and 2.
    """
    by_phase = [3.0, 1.0], [1.0, 1.0, 2.0]
    monkeypatch.setattr(Balancer, "_measured", lambda self: by_phase[self._worker.phase])
    text = "Switch(ParameterServer(), LocalSGD(2), when=AfterSteps(4), moments='reset')"
    run = trained(tmp_path, text, 3, shares=LBBSP(every=2), batch_size=8, steps=8)
    assert batches(run) == [[0, 12, 12, 0], [2, 18, 6, 0], [4, 12, 4, 8], [6, 8, 5, 11]]
    assert [line["samples"] for line in run.lines(2)] == [8, 8, 11, 11]


@pytest.mark.parametrize("work", ["shared", "equal"])
def test_a_phase_in_which_nobody_waits_has_equal_batches(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(monkeypatch, (3.0, 1.0))
    then = "ParameterServer(consistency='asynchronous', placement='beside')"
    text = f"Switch(AllReduce('ring'), {then}, when=AfterSteps(4), moments='reset')"
    run = trained(tmp_path, text, 2, shares=LBBSP(every=2), batch_size=8, steps=8, work=work)
    assert [line["samples"] for line in run.lines(0)][:5] == [8, 8, 12, 12, 8]


def test_shards_and_batches_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="read their shards more often"):
        orchestra.train("digits", "AllReduce", shares="LBBSP()", sharding="IID", out=tmp_path)
    with pytest.raises(InputError, match="3 workers cannot share the 24 samples"):
        trained(tmp_path, "AllReduce('ring')", 3, shares=LBBSP(low=9))


# Simulated runs: exact


CLUSTER = """\
name: one of four
all_nodes:
  {cores: 4, flops: 100 GFLOP/s, jitter: null, loopback: {bandwidth: 3 GB/s, latency: 1 us}}
nodes:
  fast: {count: 3, link: {bandwidth: 1 Gbit/s, latency: 50 us}}
  slow: {FLOPS link: {bandwidth: 1 Gbit/s, latency: 50 us}}
ranks: spread
"""
TASK = "synthetic(100_000, tensors=1, sample_flops=1e9)"
STEPS, BATCH = 200, 32
IDEAL = STEPS * 4 * BATCH * 0.01 / 3.25
"""Seconds: all samples over the sum of the speeds, of 100 samples a second three times and 25."""


def on_unlike_nodes(
    text: str,
    folder: Path,
    shares: Any = None,
    faults: str = "",
    flops: str = "flops: 25 GFLOP/s,",
) -> RunRecord:
    folder.mkdir(parents=True)
    cluster = folder / "cluster.yaml"
    cluster.write_text(CLUSTER.replace("FLOPS", flops) + faults)
    training = Training(
        ranks=4, steps=STEPS, batch_size=BATCH, threads=1, engine="simulation", tensors="shapes",
        shares=shares, trace_steps=0, snapshots=0,
    )  # fmt: skip
    run = Run("test", TASK, parse(text, STRATEGIES, where="test"), training=training)
    return simulated(run, folder / "run", str(cluster))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "text", some(["AllReduce('ring')", "ParameterServer(placement='beside')", "LocalSGD(10)"])
)
def test_a_node_at_a_quarter_of_the_speed_costs_little(
    text: str, rule: Balancing, tmp_path: Path
) -> None:
    balanced = on_unlike_nodes(text, tmp_path / "balanced", rule)
    assert balanced.time.training is not None
    assert IDEAL < balanced.time.training < 1.1 * IDEAL
    assert sorted(balanced.batching.changes[-1][1:]) == [10, 39, 39, 40]
    assert list(balanced.batching.worker_batches) == [32] * 4, "those at the start"


def test_without_a_rule_the_slow_node_sets_the_pace(tmp_path: Path) -> None:
    even = on_unlike_nodes("AllReduce('ring')", tmp_path / "even")
    assert even.time.training is not None
    assert 3.2 * IDEAL < even.time.training < 3.3 * IDEAL
    assert not even.batching.changes


def test_profiled_batches_are_there_from_the_first_step(tmp_path: Path) -> None:
    rule = LBBSP(start="measured")
    record = on_unlike_nodes("AllReduce('ring')", tmp_path / "measured", rule)
    assert sorted(record.batching.worker_batches) == [10, 39, 39, 40]
    again = on_unlike_nodes("AllReduce('ring')", tmp_path / "again", rule)
    other = {"wall_seconds": None, "cluster": None}
    assert again.summary() | other == record.summary() | other


def test_sharded_parameters_learn_the_same_with_balanced_batches(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER.replace("FLOPS", "flops: 25 GFLOP/s,"))
    finals = []
    for shares in (None, LBBSP()):
        run = settings(
            parse("AllReduce(shard='parameters')", STRATEGIES, where="test"), 4, IMAGES, steps=8,
            shares=shares, engine="simulation", optimizer="SGD(lr=0.05)",
        )  # fmt: skip
        record = simulated(run, tmp_path / str(shares), str(cluster))
        finals.append(load_file(record.folder / "parameters.safetensors"))
        assert bool(record.batching.changes) == (shares is not None)
    assert distance(*finals) < 1e-12


def test_a_slow_down_in_mid_run_is_followed(tmp_path: Path) -> None:
    """Equal nodes, the last of which has a quarter of its speed from 10 s to 40 s."""
    slow = "faults:\n  - SlowDown: {node: slow, factor: 4, at: 10 s, until: 40 s}\n"
    record = on_unlike_nodes("AllReduce('ring')", tmp_path / "balanced", LBBSP(), slow, flops="")
    last = [change[4] for change in record.batching.changes]
    assert last[0] == 32
    assert min(last) == 10
    assert last[-1] >= 31, "within the dead band"
    even = on_unlike_nodes("AllReduce('ring')", tmp_path / "even", None, slow, flops="")
    assert record.time.training is not None
    assert even.time.training is not None
    assert record.time.training < 0.9 * even.time.training


# Processes


def test_a_recorded_run_is_repeated_with_its_batches(tmp_path: Path) -> None:
    record = orchestra.train(
        "tests.support.tasks_for_tests:digits_in_one_thread()", "AllReduce('ring')", 3,
        shares=LBBSP(every=2, dead_band=0.0), out=tmp_path / "run", quiet=True, record_order=True,
        steps=8, batch_size=32, optimizer="SGD(lr=0.05)", snapshots=1,
    )  # fmt: skip
    assert len(record.batching.changes) > 1, "three processes are never equally fast to a sample"
    assert {sum(of_ranks) for _, *of_ranks in record.batching.changes} == {96}
    assert orchestra.replay(tmp_path / "run", out=tmp_path / "replay", quiet=True).equal


def test_a_rule_is_written_in_the_notation() -> None:
    text = "Proportional(gain=0.5, low=2)"
    assert parse(text, BALANCINGS, where="test") == Proportional(gain=0.5, low=2)


# Slices of servers


LINKS = """\
name: unlike links
all_nodes:
  {cores: 4, flops: 100 GFLOP/s, jitter: null, loopback: {bandwidth: 3 GB/s, latency: 15 us}}
nodes:
  worker: {count: 4, link: {bandwidth: 10 Gbit/s, latency: 50 us}}
  wide: {link: {bandwidth: 1 Gbit/s, latency: 50 us}}
  narrow: {link: {bandwidth: 250 Mbit/s, latency: 50 us}}
ranks: spread
"""


def test_slices_by_links_keep_the_narrow_one_from_being_the_last(tmp_path: Path) -> None:
    """4 of 5 parts on 1 Gbit/s in place of a half on a quarter of it: 2.5 times as fast a link."""
    (tmp_path / "links.yaml").write_text(LINKS)
    training = Training(
        ranks=6, steps=3, engine="simulation", tensors="shapes", trace_steps=0, snapshots=0
    )

    def seconds(slices: str) -> float:
        text = f"ParameterServer(servers=2, slices={slices})"
        run = Run(
            "test", "synthetic(4_000_000, tensors=8, sample_flops=1e6)",
            parse(text, STRATEGIES, where="test"), training=training,
        )  # fmt: skip
        record = simulated(run, tmp_path / slices, str(tmp_path / "links.yaml"))
        assert record.time.training is not None
        return record.time.training

    by_links = seconds("'links'")
    assert 2.1 * by_links < seconds("None") < 2.6 * by_links
    assert by_links == seconds("(4.0, 1.0)")


def test_an_engine_that_knows_no_links_refuses_slices_by_them(tmp_path: Path) -> None:
    text = "ParameterServer(servers=2, placement='beside', slices='links')"
    with pytest.raises(InputError, match="needs an engine that knows the links"):
        trained(tmp_path, text, 2)
    with pytest.raises(InputError, match="one weight for each of 2 servers"):
        parse("ParameterServer(servers=2, slices=(1,))", STRATEGIES, where="test")


# The speeds of the last run, and what reports tell


def unlike_run(folder: Path, shares: Any = None) -> RunRecord:
    (folder / "cluster.yaml").write_text(CLUSTER.replace("FLOPS", "flops: 25 GFLOP/s,"))
    return orchestra.train(
        "tests.support.tasks_for_tests:images(samples=240)", "AllReduce('ring')", 4,
        shares=shares, steps=8, engine="simulation", cluster=str(folder / "cluster.yaml"),
        calibration="none", snapshots=2, batch_size=16, out=folder / "run", quiet=True,
    )  # fmt: skip


def test_the_speeds_of_another_run_are_shares_as_numbers(tmp_path: Path) -> None:
    unlike_run(tmp_path)
    (tmp_path / "next.yaml").write_text(
        "task: digits\nstrategies: {ring: AllReduce}\nshares: ./run"
    )
    shares = load(tmp_path / "next.yaml").training.shares
    assert shares == pytest.approx([4 / 3.25] * 3 + [1 / 3.25], rel=0.05)
    with pytest.raises(InputError, match="4 weights for 2 ranks"):
        load(tmp_path / "next.yaml", ["ranks=2"])
    for text, message in (
        ("shares=./none", "none is not the folder of a run"),
        ("shares=LBSP", "unknown rule of balancing 'LBSP'"),
    ):
        with pytest.raises(InputError, match=message):
            load(tmp_path / "next.yaml", [text])
    summary = (tmp_path / "run" / "summary.json").read_text()
    (tmp_path / "run" / "summary.json").write_text(summary.replace("completed", "stopped"))
    with pytest.raises(InputError, match="tells no speeds"):
        load(tmp_path / "next.yaml")


def test_a_report_tells_and_shows_how_batches_changed(tmp_path: Path) -> None:
    (_, *sizes) = unlike_run(tmp_path, LBBSP()).batching.changes[-1]
    study = Study(collect([tmp_path / "run"]))
    (text,) = [text for text in answer(study).why if "speeds" in text]
    assert text.endswith(
        f"2 times: from 16 samples a worker to between {min(sizes)} and {max(sizes)}."
    )
    assert not any("slowest worker" in text for text in answer(study).caveats)
    (drawn,) = batches_figure(study)
    values = [value for data in drawn.spec["datasets"].values() for value in data]
    assert [value["batch"] for value in values if value["rank"] == "rank 3"][-1] == min(sizes)
