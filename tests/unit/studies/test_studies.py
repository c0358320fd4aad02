"""The studies of one process on each task, and what is said of differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from scipy.stats import ttest_1samp
from studies.claims_at_scale.verdicts import (
    AS_CLAIMED,
    NOTHING,
    REVERSE,
    Claim,
    Pair,
    failing_more,
    finding,
    found,
    keyed,
    median_difference,
    print_verdicts,
    read_rows,
    rows_table,
    smallest_effect,
    verdict,
)
from tests.support.drawn import keep, record
from tests.support.paths import ROOT
from tests.support.recorded import changed

from orchestra.experiments.file import load
from orchestra.report.numbers import Difference, paired_difference
from orchestra.strategies.single import Single

STUDIES = ROOT / "studies"
FILES = sorted((STUDIES / "tasks").glob("*.yaml"))
PUSH = Claim("push", "push_sum", (Pair(("push_sum", "push", 4), ("push_sum", "ring", 4), 1.2),))


def test_each_task_that_needs_no_files_has_its_study() -> None:
    names = {"characters", "digits", "digits28", "images", "regression"}
    assert {file.stem for file in FILES} == names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_study_is_of_one_process_with_five_seeds_and_a_tuned_rate(file: Path) -> None:
    study = load(file)
    assert study.task == f"{file.stem}()"
    assert list(study.strategies.values()) == [Single()]
    assert len(set(study.seeds)) == 5
    assert study.tune is not None
    assert list(study.tune.settings) == ["optimizer.lr"]


def test_the_smallest_effect_is_found_in_four_cases_of_five() -> None:
    values = dict(enumerate((-3.0, 3.0, 0.0, 0.0, 0.0)))
    deviation = 3 / 2**0.5  # of these
    difference = paired_difference(values, dict.fromkeys(values, 0.0))
    assert difference is not None
    effect = smallest_effect(difference)
    assert effect is not None
    assert smallest_effect(difference.widened(0.5, 0.25)) == pytest.approx(effect)
    samples = numpy.random.default_rng(0).normal(effect, deviation, (20_000, 5))
    lower = ttest_1samp(samples, 0, axis=1).pvalue < 0.05
    assert lower.mean() == pytest.approx(0.8, abs=0.01)


def test_a_single_pair_shows_no_effect_and_nothing_is_found() -> None:
    alone = Difference(5.0, None, None, 1)
    assert smallest_effect(alone) is None
    assert finding(alone, None) == NOTHING
    assert median_difference({0: 5.0}, {0: 2.0}) == Difference(3.0, None, None, 1)


@pytest.mark.parametrize(
    ("low", "high", "margin", "failing", "expected"),
    [
        (0.1, 2.0, None, 0, AS_CLAIMED),
        (-2.0, -0.1, None, 0, REVERSE),
        (-0.1, 2.0, None, 0, NOTHING),
        (-0.1, 2.0, None, 1, AS_CLAIMED),
        (0.1, 2.0, None, -1, NOTHING),
        (-1.1, 0.9, 1.2, 0, AS_CLAIMED),
        (-1.3, 0.9, 1.2, 0, NOTHING),
        (-3.0, -1.3, 1.2, 0, REVERSE),
        (1.3, 3.0, 1.2, 0, REVERSE),
    ],
)
def test_the_finding_follows_from_the_interval_and_the_failures(
    low: float, high: float, margin: float | None, failing: int, expected: str
) -> None:
    assert finding(Difference((low + high) / 2, low, high, 5), margin, failing) == expected


def test_there_is_a_verdict_only_where_conditions_are_those_published() -> None:
    assert verdict(AS_CLAIMED, "") == "holds here"
    assert verdict(REVERSE, "") == "does not hold here"
    assert verdict(NOTHING, "") == verdict(AS_CLAIMED, "on ImageNet") == "cannot tell here"


def test_who_fails_more_often_is_told_by_the_sign_test() -> None:
    assert failing_more(set(), set(range(5))) == 0  # chance 1 in 16
    assert failing_more(set(), set(range(6))) == 1  # 1 in 32
    assert failing_more({0, 1, 2, 3, 4, 5, 9}, {9}) == -1
    assert failing_more(set(range(10)), set(range(10))) == 0


def test_the_bootstrap_covers_the_median_about_as_often_as_it_says() -> None:
    generator = numpy.random.default_rng(1)
    covered = 0
    for _ in range(300):
        values = dict(enumerate(generator.standard_cauchy(10)))
        it = median_difference(values, dict.fromkeys(values, 0.0))
        assert it is not None
        assert it.low is not None
        assert it.high is not None
        covered += it.low <= 0 <= it.high
    assert 0.9 <= covered / 300 <= 0.99


def test_the_differences_are_printed_of_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Push stays 1 point below the ring, to a hundredth; no other comparison is there."""
    write(tmp_path, push=[0.89, 0.8901, 0.8899], ring=[0.9, 0.9, 0.9])
    rounds = replace(PUSH, comparison="rounds")
    print_verdicts(read_rows(tmp_path, [PUSH, rounds]), [PUSH, rounds])
    printed = capsys.readouterr().out
    assert "| push | 4 | none | 0 of 3 | 89.00 ± 0.01 |" in printed
    assert "| push - ring (n = 3) |  | -1.00 | -1.02 to -0.98 | 0.03 | as claimed |" in printed
    assert "holds here" in printed
    assert "rounds" not in printed


def test_when_a_run_switched_is_shown(tmp_path: Path) -> None:
    made = record("a", ranks=4, strategy="Switch(AllReduce('ring'), LocalSGD(8))")
    runs = [
        changed(made, seed=seed, switched_at_step=step) for seed, step in enumerate((7, 5, None))
    ]
    keep(tmp_path / "push_sum", runs)
    (rows,) = read_rows(tmp_path, [PUSH]).values()
    *_, line = rows_table(rows)
    assert line.endswith("| 5 to 7, in 2 of 3 |")


def test_seeds_that_fail_are_counted_and_left_out_of_the_median(tmp_path: Path) -> None:
    write(tmp_path, push=[0.1, 0.88, 0.87, 0.5], ring=[0.9, 0.9, 0.2, 0.9])
    rows = read_rows(tmp_path, [PUSH])
    it = found(PUSH.pairs[0], PUSH, keyed(rows))
    assert it is not None
    assert (it.failed, it.name) == ("1 of 4; 1 of 4", "push - ring (n = 2)")
    assert it.middle == "median -21.00"  # of -2 and -40
    assert it.effect == ""


def write(folder: Path, **accuracies: list[float]) -> None:
    keep(
        folder / "push_sum",
        [
            changed(record(label, ranks=4, seed=seed), metrics={"accuracy": value})
            for label, values in accuracies.items()
            for seed, value in enumerate(values)
        ],
    )
