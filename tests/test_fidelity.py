"""The arithmetic of fidelity, on made-up measurements; and that a small one goes through."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.test_calibrate import CALIBRATION, COSTS, flat

from orchestra.bench.cases import TASKS, Case, cases, predicted
from orchestra.bench.fidelity import (
    FidelityRow,
    Observation,
    bench_fidelity,
    distance,
    largest_difference,
    markdown,
    row_of,
    step_seconds,
    verdicts,
)
from orchestra.cli.main import main
from orchestra.cluster.calibration import Calibration, Parameter, Timing
from orchestra.engines.simulation.figures import key_of
from orchestra.errors import InputError

CNN = TASKS["cnn"]


def row(
    label: str, real: float, simulated: float, *, noise: float = 0.0, ranks: int = 2
) -> FidelityRow:
    runs = (real - noise, real, real + noise)
    return FidelityRow("task", ranks, label, real, runs, simulated, 2.0, 1.0, 0, None, None)


def calibration(seconds: float = 1e-3) -> Calibration:
    """A gradient, update and step of `seconds` each, and messages that take 1 us a byte."""
    subject = CNN.subject
    task, optimizer, precision = key_of(subject.task, subject.optimizer, "float32")
    one = Timing(1, flat(seconds / 16), flat(seconds / 100), flat(seconds / 16))
    costs = dataclasses.replace(
        COSTS,
        task=task,
        optimizer=optimizer,
        precision=precision,
        timings=(one,),
        parameters=(Parameter("all", 100, 0.3, 1.0),),
    )
    messages = dataclasses.replace(CALIBRATION.messages, one_way=flat(1e-6))
    return dataclasses.replace(CALIBRATION, tasks=(costs,), messages=messages)


# Errors and order


def test_errors_have_a_sign_and_verdicts_take_their_size() -> None:
    rows = [row("a", 2.0, 1.8), row("b", 1.0, 1.2), row("c", 4.0, 4.0)]
    assert [r.error("simulated") for r in rows] == pytest.approx([-0.1, 0.2, 0.0])
    simulated, formula, same = verdicts(rows)
    assert (simulated.median, simulated.worst) == pytest.approx((0.1, 0.2))
    assert (formula.median, formula.worst) == pytest.approx((0.5, 1.0))
    assert same.worst == pytest.approx(0.75)


def test_only_pairs_that_differ_by_more_than_their_runs_do_count() -> None:
    rows = [row("a", 1.0, 1.1), row("b", 2.0, 1.0), row("c", 2.1, 2.2, noise=0.2)]
    verdict = verdicts(rows)[0]
    assert (verdict.pairs, verdict.kept) == (2, 1)  # a and b are the wrong way round, a and c not


def test_pairs_on_other_ranks_are_not_compared() -> None:
    assert verdicts([row("a", 1.0, 1.0), row("b", 2.0, 2.0, ranks=3)])[0].pairs == 0


def test_the_same_prediction_for_both_is_no_order() -> None:
    verdict = verdicts([row("a", 1.0, 1.5), row("b", 2.0, 1.5)])[0]
    assert (verdict.pairs, verdict.kept) == (1, 0)


# Observations


def test_the_distance_of_distributions() -> None:
    assert distance({0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}) == 0
    assert distance({0: 1.0}, {3: 1.0}) == 1
    assert distance({0: 0.75, 1: 0.25}, {0: 0.25, 1: 0.5, 2: 0.25}) == pytest.approx(0.5)


def test_a_row_puts_all_runs_together() -> None:
    case = Case("asynchronous", CNN, 3)
    real = [
        Observation(2.0, 100, {0: 1.0}),
        Observation(9.0, 90, {0: 0.5, 1: 0.5}),
        Observation(3.0, 104, {0: 1.0}),
    ]
    virtual = Observation(2.7, 100, {1: 1.0})
    made = row_of(case, real, virtual, 1.0, 1.0, None)
    assert (made.real_seconds, made.noise) == (3.0, 3.5)
    assert made.error("simulated") == pytest.approx(-0.1)
    assert made.bytes_difference == 0
    assert made.staleness_distance == pytest.approx(5 / 6)


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
            lines.append(json.dumps({"step": step, "seconds": seconds}) + "\n")
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
    assert [(case.label, case.ranks) for case in found] == [
        ("ring", 2), ("pipeline", 2), ("ring", 6), ("pipeline", 6),
    ]  # fmt: skip
    with pytest.raises(InputError, match="none of them runs"):
        cases(["asynchronous"], [CNN], [1])


def test_a_table_says_all(tmp_path: Path) -> None:
    rows = (row("ring", 2e-3, 2.1e-3), dataclasses.replace(row("gossip", 1e-3, 1e-3), ranks=3))
    lines = markdown(rows, CALIBRATION).splitlines()
    assert lines[0].startswith("Measured on 2026-11-21: abacus, 2 cores, torch 2; 3 runs")
    assert "| simulation | 2.5% | 5.0% | 0 of 0 |" in lines
    assert "| task | 2 | ring | 2.00 ms | ±0% | +5.0% | +99900% | +49900% | 0 |  |  |" in lines


def test_predictions_beside_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_calibrate` measures for real, which takes long on a busy machine."""
    small = dataclasses.replace(CNN, steps=12)
    chosen = cases(["ring", "asynchronous beside"], [small], [2])
    asked: list[Any] = []

    def calibrate(*what: Any) -> Calibration:
        asked.append(what)
        return calibration()

    monkeypatch.setattr("orchestra.bench.fidelity.calibrate", calibrate)
    rows, measured = bench_fidelity(chosen, rounds=1, seconds=0.001)
    assert asked == [([small.subject], 0.001, None)]
    assert measured == calibration()
    ring, asynchronous = rows
    assert (ring.label, ring.bytes_difference, ring.parameters_differ) == ("ring", 0, 0)
    assert asynchronous.parameters_differ is None
    assert asynchronous.staleness_distance is not None
    assert all(r.simulated > 0 and r.real_seconds > 0 for r in rows)


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
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["bench", "fidelity", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
