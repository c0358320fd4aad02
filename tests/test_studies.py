"""The studies of one process on each task, and those of published claims."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from scipy.stats import ttest_1samp
from studies.claims.verdicts import CLAIMS, main, smallest_effect, verdict
from tests.drawn import keep, record

from orchestra.experiments.experiment import refusal
from orchestra.experiments.file import load
from orchestra.report.statistics import Difference, paired_difference
from orchestra.strategies.single import Single

STUDIES = Path(__file__).parent.parent / "studies"
FILES = sorted((STUDIES / "tasks").glob("*.yaml"))
COMPARISONS = {file.stem: file for file in sorted((STUDIES / "claims").glob("*.yaml"))}
UNTUNED = {"same_rate"}  # its rate is the one that another study chose


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


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_claim_is_studied_with_five_seeds_and_rates_tuned_alike(name: str) -> None:
    study = load(COMPARISONS[name])
    assert len(set(study.seeds)) == 5
    assert (study.tune is None) == (name in UNTUNED)
    command = f"orchestra compare studies/claims/{name}.yaml --out runs/claims/{name}\n"
    assert command in COMPARISONS[name].read_text()


def test_every_difference_is_of_two_rows_that_are_studied() -> None:
    studies = {name: load(file) for name, file in COMPARISONS.items()}
    assert {claim.comparison for claim in CLAIMS} == studies.keys()
    for name, label, ranks in (
        row for claim in CLAIMS for pair in claim.pairs for row in (pair.ours, pair.theirs)
    ):
        assert ranks in studies[name].ranks
        assert refusal(studies[name].strategies[label], ranks) is None
    for claim in CLAIMS:
        assert claim.figure == "accuracy" or studies[claim.comparison].training.snapshots


def test_the_smallest_effect_is_found_in_four_cases_of_five() -> None:
    values = dict(enumerate((-3.0, 3.0, 0.0, 0.0, 0.0)))
    deviation = 3 / 2**0.5  # of these
    difference = paired_difference(values, dict.fromkeys(values, 0.0))
    assert difference is not None
    effect = smallest_effect(difference)
    assert effect is not None
    samples = numpy.random.default_rng(0).normal(effect, deviation, (20_000, 5))
    found = ttest_1samp(samples, 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.01)


def test_a_single_pair_shows_no_effect_and_no_verdict() -> None:
    alone = Difference(5.0, None, None, 1)
    assert smallest_effect(alone) is None
    assert verdict(alone, None) == "cannot tell at this scale"


@pytest.mark.parametrize(
    ("low", "high", "margin", "expected"),
    [
        (0.1, 2.0, None, "holds"),
        (-2.0, -0.1, None, "does not hold"),
        (-0.1, 2.0, None, "cannot tell at this scale"),
        (-1.1, 0.9, 1.2, "holds"),
        (-1.3, 0.9, 1.2, "cannot tell at this scale"),
        (-3.0, -1.3, 1.2, "does not hold"),
        (1.3, 3.0, 1.2, "does not hold"),
    ],
)
def test_the_verdict_follows_from_the_interval(
    low: float, high: float, margin: float | None, expected: str
) -> None:
    assert verdict(Difference((low + high) / 2, low, high, 5), margin) == expected


def test_the_verdicts_are_printed_of_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Push stays 1 point below all-reduce, to a hundredth; no other comparison is there."""
    runs = [
        replace(record(label, ranks=4, seed=seed), metrics={"accuracy": accuracy + noise})
        for label, accuracy, noises in (
            ("all-reduce", 0.9, (0.0, 0.0, 0.0)),
            ("push", 0.89, (0.0, 0.0001, -0.0001)),
        )
        for seed, noise in enumerate(noises)
    ]
    keep(tmp_path / "push_sum", runs)
    monkeypatch.setattr("sys.argv", ["verdicts.py", str(tmp_path)])
    main()
    printed = capsys.readouterr().out
    assert "| push | 4 | 4 | not tuned | 89.00 ± 0.01 |" in printed
    assert "| push - all-reduce (n = 3) | -1.00 | -1.02 to -0.98 |" in printed
    assert "| holds |" in printed
    assert "rounds" not in printed
