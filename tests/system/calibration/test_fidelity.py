"""The arithmetic of fidelity, on made-up measurements; and that a small one goes through."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.fidelity.__main__ import main
from benchmarks.fidelity.cases import (
    CONTROLS,
    EMULATED_SECONDS,
    EMULATED_STEPS,
    TASKS,
    Case,
    cases,
    predicted,
    write_clusters,
)
from benchmarks.fidelity.runs import (
    FidelityRow,
    Observation,
    bench_fidelity,
    distance,
    largest_difference,
    losses_of,
    mean_and_tail,
    observe,
    pace_of,
    row_of,
    step_seconds,
)
from benchmarks.fidelity.verdicts import StrategyTurns, markdown, ratio_errors, scatter, verdicts
from safetensors.torch import save_file
from tests.support.calibrations import CALIBRATION, COSTS, flat
from tests.support.recorded import recorded

from orchestra.cli.main import guarded
from orchestra.cluster import Cluster
from orchestra.cluster.calibration import Calibration, Parameter, Timing
from orchestra.engines.simulation.costs import key_of
from orchestra.errors import InputError
from orchestra.records.record import RunRecord

CNN = TASKS["cnn"]


def row(
    label: str, real: float, simulated: float, *, noise: float = 0.0, ranks: int = 2
) -> FidelityRow:
    runs = (real - noise, real, real + noise)
    return FidelityRow("task", ranks, "", label, 24, real, runs, simulated, 2.0, 1.0, 0, None, None)


def calibration(seconds: float = 1e-3) -> Calibration:
    """A gradient, update and step of `seconds` each, and messages that take 1 us a byte."""
    one = Timing(1, flat(seconds / 16), flat(seconds / 100), flat(seconds / 16))
    tasks = []
    for subject in (CNN.subject, CNN.messages):
        task, optimizer, precision = key_of(subject.task, subject.optimizer, "float32")
        costs = dataclasses.replace(
            COSTS,
            task=task,
            optimizer=optimizer,
            precision=precision,
            timings=(one,),
            parameters=(Parameter("all", 100, 0.3, 1.0),),
        )
        tasks.append(costs)
    messages = dataclasses.replace(CALIBRATION.messages, one_way=flat(1e-6))
    return dataclasses.replace(CALIBRATION, tasks=tuple(tasks), messages=messages)


# Errors, ratios and order


def step_line(step: int, seconds: float, **parts: float) -> str:
    line = {"step": step, "seconds": seconds, "samples": 1, "consumed": step, "loss": 1.0, **parts}
    return json.dumps(line) + "\n"


def block(real: dict[str, list[float]], **predicted: float) -> StrategyTurns:
    return StrategyTurns(real, predicted)


def test_errors_have_a_sign_and_verdicts_take_their_size() -> None:
    rows = [row("a", 2.0, 1.8), row("b", 1.0, 1.2), row("c", 4.0, 4.0)]
    assert [r.error("simulated") for r in rows] == pytest.approx([-0.1, 0.2, 0.0])
    found = verdicts(rows)
    assert (found["simulation"].median, found["simulation"].worst) == pytest.approx((0.1, 0.2))
    assert (found["closed formula"].median, found["closed formula"].worst) == (0.5, 1.0)
    assert found["constant"].worst == pytest.approx(0.75)


def test_controls_are_no_strategies() -> None:
    rows = [row("a", 2.0, 2.0), row("compute only", 1.0, 9.0)]
    assert verdicts(rows)["simulation"].worst == 0.0


def test_a_machine_that_is_slower_throughout_leaves_ratios_right() -> None:
    """Every run takes twice as long as predicted, and the second round half as long again."""
    found = ratio_errors([block({"a": [2.0, 3.0], "b": [4.0, 6.0]}, a=1.0, b=2.0)])
    assert (found.median, found.worst, found.floor) == pytest.approx((0.0, 0.0, 0.0))


def test_ratios_are_those_within_a_round() -> None:
    """a / b is 1 in the first round, 1.21 in the second, in the median 1.1; 1 was predicted."""
    found = ratio_errors([block({"a": [1.0, 2.42], "b": [1.0, 2.0]}, a=1.0, b=1.0)])
    assert found.median == pytest.approx(1 - 1 / 1.1, abs=1e-9)
    assert found.floor == pytest.approx(1 - 1 / 1.1)  # half of the distance between the halves
    assert found.interval is None  # two rounds hold their median with 50 %
    six = ratio_errors([block({"a": [1.0, 2.42] * 3, "b": [1.0, 2.0] * 3}, a=1.0, b=1.0)])
    assert six.interval == pytest.approx((0.0, 1 - 1 / 1.21))


@pytest.mark.lab
def test_the_floor_is_the_error_of_a_right_prediction() -> None:
    """Rounds scatter; the prediction is what they scatter around."""
    random = np.random.default_rng(0)
    blocks = [
        block({n: list(np.exp(random.normal(0, 0.1, 40))) for n in "ab"}, a=1.0, b=1.0)
        for _ in range(200)
    ]
    found = ratio_errors(blocks)
    assert found.floor == pytest.approx(found.median, rel=0.2)


def test_every_block_counts_with_its_pairs() -> None:
    right = block({"a": [1.0, 1.0], "b": [2.0, 2.0], "c": [3.0, 3.0]}, a=1.0, b=2.0, c=3.0)
    wrong = block({"a": [1.0, 1.0], "b": [1.0, 1.0]}, a=2.0, b=1.0)
    found = ratio_errors([right, wrong])
    assert (found.median, found.worst) == pytest.approx((0.0, 1.0))


def test_tau_counts_pairs_and_regret_the_chosen() -> None:
    made = block({"a": [1.0], "b": [2.0], "c": [3.0]}, a=2.0, b=1.0, c=3.0)
    assert made.tau() == pytest.approx(1 / 3)
    assert made.regret() == pytest.approx(1.0)  # b was chosen, and takes twice as long as a
    assert block({"a": [1.0]}, a=2.0).tau() is None


def test_only_pairs_that_differ_by_more_than_their_runs_do_count() -> None:
    rows = [row("a", 1.0, 1.1), row("b", 2.0, 1.0), row("c", 2.1, 2.2, noise=0.2)]
    found = verdicts(rows)["simulation"]
    assert (found.pairs, found.kept) == (2, 1)  # a and b are the wrong way round, a and c not


def test_pairs_on_other_ranks_are_not_compared() -> None:
    rows = [row("a", 1.0, 1.0), row("b", 2.0, 2.0, ranks=3)]
    assert verdicts(rows)["simulation"].pairs == 0
    assert verdicts(rows)["simulation"].ratios is None


def test_the_same_prediction_for_both_is_no_order() -> None:
    found = verdicts([row("a", 1.0, 1.5), row("b", 2.0, 1.5)])["simulation"]
    assert (found.pairs, found.kept, found.tau) == (1, 0, 0.0)


def test_no_error_is_told_below_real_against_real() -> None:
    rows = [
        dataclasses.replace(row("a", 1.0, 1.0), runs=(1.2, 1.0, 1.2, 1.0)),
        dataclasses.replace(row("b", 1.1, 1.1), runs=(1.1, 1.1, 1.1, 1.1)),
    ]
    text = markdown(rows, CALIBRATION)
    floor = verdicts(rows)["simulation"].ratios
    assert floor is not None
    assert floor.median < floor.floor
    assert f"| simulation | below {floor.floor:.1%} |" in text


# Runs that others disturbed


def test_a_disturbed_run_is_made_again_and_the_quietest_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    busy = iter([0.5, 0.2, 0.04, 0.01])

    def train_run(run: Any, folder: Path, *, quiet: bool) -> RunRecord:
        share = next(busy)
        lines = [step_line(n, n * share, compute=0.1) for n in range(1, 13)]
        (folder / "steps-rank-0.jsonl").write_text("".join(lines))
        (folder / "parameters.safetensors").write_text("")
        return recorded(
            "ring", "AllReduce()", "processes", 2, 2, 0, 0, "completed", busy_with_others=share
        )

    monkeypatch.setattr("benchmarks.fidelity.runs.train_run", train_run)
    run = Case("ring", dataclasses.replace(CNN, steps=12), 2).run
    seen = observe(run, tmp_path / "kept")
    assert (seen.others, seen.attempts) == (0.04, 3)
    assert seen.step_seconds == pytest.approx(0.04)
    assert seen.computed == {0: [0.1] * 12}
    busy = iter([0.2, 0.09, 0.01])  # an emulation's network is the kernel's work
    emulated = dataclasses.replace(run.training, engine="emulation", cluster="lan_1gbit(nodes=2)")
    seen = observe(dataclasses.replace(run, training=emulated), tmp_path / "kept")
    assert (seen.others, seen.attempts) == (0.09, 2)


def test_computation_is_replayed_as_recorded(tmp_path: Path) -> None:
    """Of a rank that computes for as long as in a real run, step by step, in virtual time."""
    case = Case("ring", dataclasses.replace(CNN, steps=12), 2)
    run = dataclasses.replace(
        case.run,
        training=dataclasses.replace(
            case.run.training, engine="simulation", cluster="lan_1gbit(2)", calibration="none"
        ),
    )
    virtual = observe(run, tmp_path / "kept")
    recorded = {0: [0.5] * 6 + [0.25] * 6, 1: [1.0] * 12}
    real = dataclasses.replace(virtual, computed=recorded)
    again = observe(run, tmp_path / "kept", pace_of(real, virtual))
    for rank, seconds in recorded.items():
        assert again.computed[rank] == pytest.approx(seconds, rel=0.1)  # the median is of jitter
    assert again.step_seconds > 1.0  # every step waits for rank 1


# Observations


def test_the_distance_of_distributions() -> None:
    assert distance({0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}) == 0
    assert distance({0: 1.0}, {3: 1.0}) == 1
    assert distance({0: 0.75, 1: 0.25}, {0: 0.25, 1: 0.5, 2: 0.25}) == pytest.approx(0.5)


def test_the_mean_and_the_tail_of_a_distribution() -> None:
    assert mean_and_tail({0: 0.5, 2: 0.45, 9: 0.05}) == pytest.approx((1.35, 2))
    assert mean_and_tail({0: 0.5, 2: 0.4, 9: 0.1}) == pytest.approx((1.7, 9))
    assert mean_and_tail({}) == (0.0, 0.0)


def test_a_row_puts_all_runs_together() -> None:
    case = Case("asynchronous", CNN, 3)
    real = [
        Observation(2.0, 100, {0: 1.0}),
        Observation(9.0, 90, {0: 0.5, 1: 0.5}),
        Observation(3.0, 104, {0: 1.0}),
    ]
    virtual = Observation(2.7, 100, {1: 1.0})
    made = row_of(case, real, virtual, 1.0, 1.0, None)
    assert (made.real_seconds, scatter(made.runs)) == (3.0, 3.5)
    assert made.error("simulated") == pytest.approx(-0.1)
    assert made.bytes_difference == 0
    assert made.staleness_distance == pytest.approx(5 / 6)


def told(rank_paces: Sequence[float], steps: int = 8) -> list[dict[str, float]]:
    """Steps of ranks that take these seconds each, and whose loss falls by 1 a step."""
    return [
        {"seconds": pace * step, "loss": 10.0 - step, "samples": 4}
        for pace in rank_paces
        for step in range(1, steps + 1)
    ]


def test_the_training_loss_is_smoothed_over_samples() -> None:
    losses = losses_of(told([1.0]))
    assert losses is not None
    # A quarter of 32 samples are two steps
    assert losses.tolist() == [[float(n), 10.0 - n + 0.5] for n in range(2, 9)]
    unequal = [
        {"seconds": 1.0, "loss": 4.0, "samples": 6},
        {"seconds": 2.0, "loss": 0.0, "samples": 2},
    ]
    assert losses_of(unequal).tolist() == [[1.0, 4.0], [2.0, 0.0]]  # type: ignore[union-attr]
    assert losses_of([{"seconds": 1.0, "loss": None, "samples": 4}]) is None
    assert losses_of([{"seconds": 1.0, "loss": 1.0, "samples": 0}]) is None


def test_the_target_is_what_the_prediction_and_all_runs_reach() -> None:
    def run(*paces: float, steps: int = 8) -> Observation:
        return Observation(1.0, 0, {}, losses=losses_of(told(paces, steps)))

    case = Case("ring", CNN, 2)
    row = row_of(case, [run(2.0), run(3.0), run(4.0)], run(1.5), 1.0, 1.0, None)
    assert row.to_target == (12.0, 24.0)
    assert row.target_error == -0.5
    # The prediction ends at a loss of 5.5: after five steps of the others
    row = row_of(case, [run(2.0)], run(1.5, steps=5), 1.0, 1.0, None)
    assert row.to_target is not None
    assert row.to_target[1] == 10.0
    assert row_of(case, [Observation(1.0, 0, {})], run(1.0), 1.0, 1.0, None).to_target is None


def test_where_nothing_is_stale_there_is_no_distance() -> None:
    one = Observation(1.0, 7, {})
    made = row_of(Case("ring", CNN, 2), [one], one, 1.0, 1.0, 0.0)
    assert made.staleness_distance is None


def test_a_step_is_timed_without_the_first_ones(tmp_path: Path) -> None:
    """Two workers that have done half of the budget's steps each, the first of them slowly."""
    run = Case("ring", dataclasses.replace(CNN, steps=40), 2).run
    for rank, pace in ((0, 1.0), (1, 2.0)):
        lines = []
        for step in range(1, 21):
            seconds = 50.0 * min(step, 5) + pace * max(step - 5, 0)
            lines.append(step_line(step, seconds))
        (tmp_path / f"steps-rank-{rank}.jsonl").write_text("".join(lines))
    assert step_seconds(run, tmp_path) == pytest.approx(1.5 * 20 / 40)


def test_the_largest_difference_of_any_parameter(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "other"]
    save_file({"a": torch.zeros(2), "b": torch.tensor([1.0, 2.0]), "c": torch.zeros(0)}, files[0])
    save_file({"a": torch.zeros(2), "b": torch.tensor([1.0, 2.5]), "c": torch.zeros(0)}, files[1])
    assert largest_difference(*files) == 0.5
    assert largest_difference(files[0], files[0]) == 0


# The simpler predictors


def test_every_strategy_has_a_formula() -> None:
    for case in cases(tasks=[CNN]):
        assert predicted(case, calibration())[0] > 0


def test_the_constant_is_the_step_of_one_worker() -> None:
    known = calibration(1e-3)
    assert predicted(Case("ring", CNN, 2), known)[1] == pytest.approx(3e-3)
    assert predicted(Case("tree", CNN, 4), known)[1] == pytest.approx(3e-3)


def test_the_formula_of_the_ring() -> None:
    """4 ranks on 2 cores; 400 bytes, 1 us each: alpha is the time of the shortest message, 1 us."""
    compute = 2 * 3e-3
    ring = 6e-6 + 0.75 * (2 * 399e-6 + 4 * 100 * 0.5)
    formula, _ = predicted(Case("ring", CNN, 4), calibration())
    assert formula == pytest.approx(compute + ring)


def test_a_calibration_without_the_task_is_refused() -> None:
    with pytest.raises(InputError, match="does not hold digits28"):
        predicted(Case("ring", TASKS["lenet"], 2), calibration())


# Cases


def test_cases_are_those_that_can_run() -> None:
    found = cases(["ring", "pipeline"], [CNN], [2, 6])
    strategies = [case for case in found if case.label not in CONTROLS]
    assert [(case.label, case.ranks) for case in strategies] == [
        ("ring", 2), ("pipeline", 2), ("ring", 6), ("pipeline", 6),
    ]  # fmt: skip
    assert len(found) == len(strategies) + 2 * len(CONTROLS)
    with pytest.raises(InputError, match="none of them runs"):
        cases(["asynchronous"], [CNN], [1])


def test_on_emulated_clusters_links_and_slow_nodes_are_in_the_formula(tmp_path: Path) -> None:
    files = write_clusters(tmp_path)
    found = cases(["ring"], [CNN], clusters=[*files.values()])
    assert len(found) == len(files) * (1 + len(CONTROLS))
    times = {}
    for case in found:
        assert (case.run.training.engine, case.ranks) == ("emulation", 4)
        if case.label == "ring":
            assert case.cluster is not None
            times[case.cluster.name] = predicted(case, calibration())[0]
    assert min(times, key=times.__getitem__) == "equal"
    ring = times["equal"] - 3e-3 / 0.48 - 0.75 * 0.5 * 400 / 0.48  # but for gradients and additions
    messages = 0.75 * 2 * (399e-6 + 400 * 1.062 / 12.5e6)
    assert ring == pytest.approx(6 * (1e-6 + 5e-4) + messages, rel=0.01)


def test_clusters_have_to_be_emulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(main, ["--clusters", "a.yaml"]) == 2
    assert "add --engine emulation" in capsys.readouterr().err


def test_a_table_says_all(tmp_path: Path) -> None:
    rows = (
        dataclasses.replace(row("ring", 2e-3, 2.1e-3), to_target=(1.2, 1.0)),
        dataclasses.replace(row("gossip", 1e-3, 1e-3), ranks=3),
    )
    lines = markdown(rows, CALIBRATION).splitlines()
    assert "Time to target of the simulation: 20.0% in the median, 20.0% at worst." in lines
    assert lines[0].startswith("Measured on 2026-11-21: abacus, 2 cores, torch 2; 3 runs")
    assert "| simulation |  |  |  | 0.0% | 0.0% | 2.5% | 5.0% | 0 of 0 |" in lines
    assert (
        "| task | 2 |  | ring | 2.00 ms | ±0% | +5.0% |  | +99900% | +49900% "
        "| +20.0% (1.00 s) | 0 |  |  |  | 0 |" in lines
    )


@pytest.mark.lab
def test_predictions_beside_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_calibrate` measures for real, which takes long on a busy machine."""
    small = dataclasses.replace(CNN, steps=12)
    chosen = cases(["ring", "asynchronous beside"], [small], [2])
    asked: list[Any] = []

    def calibrate(*what: Any, emulated: None) -> Calibration:
        asked.append(what)
        return calibration()

    monkeypatch.setattr("benchmarks.fidelity.runs.calibrate", calibrate)
    monkeypatch.setattr("benchmarks.fidelity.runs.ATTEMPTS", 1)  # whatever else is running
    rows, measured = bench_fidelity(chosen, rounds=1, seconds=0.001)
    assert asked == [([small.subject, small.messages], 0.001, None)]
    assert measured == calibration()
    ring, asynchronous, *controls = rows
    assert [control.label for control in controls] == list(CONTROLS)
    assert (ring.label, ring.bytes_difference, ring.parameters_differ) == ("ring", 0, 0)
    assert asynchronous.parameters_differ is None
    assert asynchronous.staleness_distance is not None
    assert all(r.simulated > 0 and r.real_seconds > 0 for r in rows)
    assert all(r.target_error is not None for r in rows)


def test_a_stop_keeps_the_blocks_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.fidelity.runs.calibrate", lambda *_, **__: calibration())
    chosen = cases(["ring"], [CNN], [2, 3])

    def stopped(run: Any, keep: Path, pace: object = None) -> Observation:
        if run.training.ranks == 3:
            raise KeyboardInterrupt
        return Observation(1.0, 100, {})

    monkeypatch.setattr("benchmarks.fidelity.runs.observe", stopped)
    monkeypatch.setattr("benchmarks.fidelity.runs.largest_difference", lambda *_: 0.0)
    rows, _ = bench_fidelity(chosen, rounds=1)
    assert {row.ranks for row in rows} == {2}
    with pytest.raises(KeyboardInterrupt):
        bench_fidelity([case for case in chosen if case.ranks == 3], rounds=1)


def test_runs_on_an_emulated_cluster_take_some_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Predicted and real runs have the same steps: more where they are short, within bounds."""
    least, most = EMULATED_STEPS
    paces = {"ring": EMULATED_SECONDS / 100, "gossip": 1e-3, "server": 1.0}
    seen: dict[str, list[int]] = defaultdict(list)

    def observed(run: Any, keep: Path, pace: object = None) -> Observation:
        seen[run.name].append(run.training.steps)
        return Observation(paces.get(run.name, 1.0), 100, {})

    monkeypatch.setattr("benchmarks.fidelity.runs.observe", observed)
    on: list[str] = []

    def calibrate(*_: Any, emulated: Cluster) -> Calibration:
        on.append(emulated.name)
        return calibration()

    monkeypatch.setattr("benchmarks.fidelity.runs.calibrate", calibrate)
    monkeypatch.setattr("benchmarks.fidelity.runs.largest_difference", lambda *_: 0.0)
    chosen = cases(paces, [CNN], clusters=[write_clusters(tmp_path)["equal"]])
    bench_fidelity(chosen, rounds=1)
    assert on == ["equal"]  # steps are calibrated under the quota of its nodes
    assert seen["ring"] == [least, 100, 100, 100]  # short, predicted, real, replayed
    assert seen["gossip"] == [least, most, most, most]
    assert seen["server"] == [least, least, least]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "rong"], "--strategies: unknown 'rong'; did you mean 'ring'?"),
        (["--tasks", "cnm"], "--tasks: unknown 'cnm'; did you mean 'cnn'?"),
        (["--calibration", "no.json"], "there is no file no.json"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert guarded(main, arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
