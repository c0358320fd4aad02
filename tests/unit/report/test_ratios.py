"""Ratios: the interval of the median covers it often enough, and is no wider than it has to be."""

from __future__ import annotations

import itertools

import pytest
from benchmarks.ratios import CONFIDENCE, Ratio, median_interval


def test_a_ratio_stays_within_its_pair() -> None:
    """Pairs of a machine that is ten times slower count like the others."""
    assert Ratio.of([2.0, 20.0, 3.0], [1.0, 10.0, 30.0]).median == 2.0


@pytest.mark.parametrize("count", [6, 9, 12])
def test_the_interval_has_the_median_in_it_and_a_narrower_one_too_seldom(count: int) -> None:
    """Each of the equally likely choices of values above and below a median of 0, once."""
    missed = narrower_missed = 0
    for signs in itertools.product((-1.0, 1.0), repeat=count):
        values = [sign * (1 + place) for place, sign in enumerate(signs)]
        interval = median_interval(values)
        assert interval is not None
        low, high = interval
        missed += not low < 0 < high
        ordered = sorted(values)
        inside = ordered.index(low) + 1
        narrower_missed += not ordered[inside] < 0 < ordered[-1 - inside]
    assert missed <= (1 - CONFIDENCE) * 2**count < narrower_missed


def test_sixty_pairs_have_an_interval_from_the_22nd_to_the_39th() -> None:
    ratio = Ratio.of_pairs([float(number) for number in range(60, 0, -1)])
    assert ratio == Ratio(30.5, 22.0, 39.0, 60)


def test_fewer_than_six_pairs_have_no_interval() -> None:
    assert Ratio.of_pairs([1.0] * 5) == Ratio(1.0, None, None, 5)
    assert Ratio.of_pairs([1.0] * 6) == Ratio(1.0, 1.0, 1.0, 6)


def test_small_ratios_show_a_digit_more() -> None:
    assert str(Ratio(0.9, 0.85, 1.0, 9)) == "0.90 (0.85-1.00)"
    assert str(Ratio(0.0213, 0.0204, 0.5, 9)) == "0.021 (0.020-0.500)"
    assert str(Ratio(1.0, None, None, 5)) == "1.00"
