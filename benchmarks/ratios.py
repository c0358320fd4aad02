"""Ratios of paired measurements, each with a 95 % interval of its median."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of `pairs` pairs, and an interval that has the true median in it
    with a probability of at least 95 %.

    `low` and `high` are None for fewer than 6 pairs, which cannot give so certain an interval.
    """

    median: float
    low: float | None
    high: float | None
    pairs: int

    @classmethod
    def of(cls, numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
        """Return the ratio of two contestants; element i of both comes from pair i."""
        # A ratio of two medians would compare moments at which the machine was not alike
        return cls.of_pairs([a / b for a, b in zip(numerator, denominator, strict=True)])

    @classmethod
    def of_pairs(cls, ratios: Sequence[float]) -> Ratio:
        low, high = median_interval(ratios) or (None, None)
        return cls(statistics.median(ratios), low, high, len(ratios))

    def __str__(self) -> str:
        """Return the median, and the interval in brackets."""
        digits = 2 if self.median >= 0.1 else 3
        text = f"{self.median:.{digits}f}"
        if self.low is None or self.high is None:
            return text
        return f"{text} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def median_interval(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """Return the sign-based interval of the median: from the k-th smallest value to the k-th
    largest one; None if there are too few values for this confidence.

    The true median lies below the k-th smallest of n independent values only if fewer than k of n
    fair coins show heads. k is the largest number for which that is improbable enough. Nothing is
    assumed of the distribution, and nothing is drawn at random.
    """
    count, tail, rank = len(values), 0.0, 0
    for heads in range(count // 2):
        tail += math.comb(count, heads) / 2**count
        if 2 * tail > 1 - confidence:
            break
        rank = heads + 1
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]
