"""Paired tests without a normal distribution: signed ranks, exact, and Holm's correction.

Differences may be infinite: a run that missed the target comes after every run that reached it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

import numpy as np
from scipy.stats import rankdata

CONFIDENCE = 0.95
MOST_PAIRS = 16  # all 2**n signs are enumerated


def differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return `ours` - `theirs`, pair by pair; two infinite figures do not differ."""
    return [0.0 if a == b else a - b for a, b in zip(ours, theirs, strict=True)]


def chance_of_less(values: Sequence[float], bound: float = 0.0) -> float:
    """Return the one-sided p value that the `values` lie below `bound` (Wilcoxon's signed ranks).

    Values equal to the bound are left out. The distribution is exact, with ties: all assignments of
    signs to the ranks.
    """
    shifted = np.array([value - bound for value in values if value != bound])
    if not len(shifted):
        return 1.0
    ranks = rankdata(abs(shifted))
    return float(np.mean(_sums(ranks) <= ranks[shifted > 0].sum() + 1e-9))


def chance_of_difference(values: Sequence[float]) -> float:
    """Return the two-sided p value that the `values` lie on one side of zero."""
    return min(1.0, 2 * min(chance_of_less(values), chance_of_less([-value for value in values])))


def chance_of_within(values: Sequence[float], margin: float) -> float:
    """Return the p value that the `values` lie between -`margin` and `margin`: the larger of two
    one-sided tests."""
    return max(chance_of_less(values, margin), chance_of_less([-value for value in values], margin))


def estimate(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the Hodges-Lehmann estimate of the values' location and its 95 % interval.

    The ends are infinite where the pairs are too few for an interval.
    """
    pairs = combinations_with_replacement(values, 2)
    walsh = sorted(0.0 if a == -b else (a + b) / 2 for a, b in pairs)
    sums = _sums(np.arange(1.0, len(values) + 1))
    tail = (1 - CONFIDENCE) / 2
    most = [k for k in range(len(walsh)) if np.mean(sums <= k) <= tail]
    middle = float(np.median(walsh)) if np.isfinite(walsh).all() else _middle(walsh)
    if not most:
        return middle, -np.inf, np.inf
    return middle, walsh[most[-1]], walsh[-1 - most[-1]]


def holm(chances: Sequence[float]) -> list[float]:
    """Return the p values, corrected for the number of tests by Holm's method."""
    order = sorted(range(len(chances)), key=chances.__getitem__)
    corrected, largest = [0.0] * len(chances), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(chances) - place) * chances[index]))
        corrected[index] = largest
    return corrected


def _sums(ranks: np.ndarray) -> np.ndarray:
    """Return the sum of the positive ranks for each assignment of signs."""
    if len(ranks) > MOST_PAIRS:
        raise ValueError(f"{len(ranks)} pairs are more than {MOST_PAIRS}")
    signs = (np.arange(2 ** len(ranks))[:, None] >> np.arange(len(ranks))) & 1
    return np.asarray(signs @ ranks)


def _middle(ordered: Sequence[float]) -> float:
    """Return the lower middle value, which exists where the mean of two would be infinite."""
    return ordered[(len(ordered) - 1) // 2]
