"""The questions of the report: their declarations, their tests, and how an answer is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
from scipy.stats import wilcoxon
from studies.pool import Job, make
from studies.questions.answers import answer
from studies.questions.declaration import Question, questions
from studies.questions.judging import (
    chance_of_difference,
    chance_of_less,
    chance_of_within,
    differences,
    estimate,
    holm,
)
from studies.questions.running import carry_out

from orchestra.records.record import RunRecord


def test_chances_are_those_of_wilcoxon() -> None:
    drawn = numpy.random.default_rng(0).normal(0.5, 1.0, (5, 10))
    for values in drawn.tolist():
        less = wilcoxon(values, alternative="less", method="exact").pvalue
        both = wilcoxon(values, method="exact").pvalue
        assert chance_of_less(values) == pytest.approx(less)
        assert chance_of_difference(values) == pytest.approx(both)


def test_equal_values_show_no_difference() -> None:
    assert chance_of_difference([0.0] * 10) == 1.0
    assert estimate([0.0] * 10) == (0.0, 0.0, 0.0)


def test_run_that_misses_the_target_is_later_than_all_others() -> None:
    missed = [*differences([math.inf] * 6, [1.0] * 6), -9.0, -9.0, 0.0]
    assert chance_of_less([-value for value in missed]) < 0.05
    assert differences([math.inf], [math.inf]) == [0.0]
    middle, low, high = estimate(missed)
    assert middle == high == math.inf
    assert low == 0.0  # the sixth of 45 means of two


def test_equality_needs_all_values_within_the_margin() -> None:
    near = [0.1, -0.2, 0.3, 0.0, -0.1, 0.2, -0.3, 0.15, -0.15, 0.05]
    assert chance_of_within(near, 1.0) < 0.01
    assert chance_of_within(near, 0.1) > 0.05
    for shift in (-2, 2):
        assert chance_of_within([value + shift for value in near], 1.0) > 0.9


def test_interval_of_ten_pairs_leaves_out_eight_means_at_each_end() -> None:
    values = [float(2**k) for k in range(10)]
    means = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    assert estimate(values)[1:] == (means[8], means[-9])


def test_holm_multiplies_by_the_tests_that_are_left() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_each_question_declares_what_it_expects() -> None:
    all_questions = questions()
    assert [question.number for question in all_questions] == [*range(1, 12)]
    for question in all_questions:
        assert question.hypotheses
        assert bool(question.comparisons) != bool(question.missing)
        ranks = {each.name: each.ranks for each in question.comparisons}
        for claim in question.claims:
            assert claim.lower.ranks in ranks[claim.lower.comparison]
            assert claim.than.ranks in ranks[claim.than.comparison]


class InThisProcess:
    """Makes runs one after the other, as `studies.pool.Pool` does in processes of its own."""

    def make(self, jobs: Sequence[Job]) -> list[RunRecord]:
        return [make(job) for job in jobs]


@pytest.mark.lab
def test_answer_has_rows_tests_and_verdicts(tmp_path: Path) -> None:
    question = _scale()
    found = answer(question, carry_out(question, tmp_path, InThisProcess()), "command")  # type: ignore[arg-type]
    rows = {(row["cluster"], row["label"]): row["figures"] for row in found["rows"]}
    assert len(rows) == 12
    near, far = rows["one site", "ring"], rows["two continents", "ring"]
    assert far["training seconds"]["mean"] > near["training seconds"]["mean"]
    assert far["megabytes sent"] == near["megabytes sent"]
    tested = [test for test in found["tests"] if test["n"]]
    assert [(test["lower"], test["ranks"]) for test in tested] == [("local SGD, H=16", 8)] * 3
    for test in tested:
        ours, theirs = (
            rows["two continents", test[side]]["training seconds"]["mean"]
            for side in ("lower", "than")
        )
        assert test["difference"] == pytest.approx(100 * (ours / theirs - 1), rel=1e-4)
        assert test["verdict"] == "supported"
    assert found["hypotheses"] == [each["says"] for each in question.hypotheses]


def _scale() -> Question:
    return questions()[8].small()
