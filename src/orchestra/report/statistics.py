"""Means, spreads, and differences of runs that share a seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences over `n` pairs, with its confidence interval.

    `low` and `high` are None where there is one pair: nothing is known of the spread then.
    `below` and `above`: so much less or more it may be, since the figures are read at snapshots;
    the interval has that in it.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    below: float = 0.0
    above: float = 0.0

    @property
    def too_coarse(self) -> bool:
        """Whether the snapshots are too far apart to say which figure is the larger."""
        return -self.above < self.mean < self.below

    @property
    def certain(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.low is not None and self.high is not None and self.low * self.high > 0

    def widened(self, below: float, above: float) -> Difference:
        """The same, of figures that may be smaller than they were read: by as much as `below` in
        the mean of the first ones, and as `above` in that of those taken off."""
        low = None if self.low is None else self.low - below
        high = None if self.high is None else self.high + above
        return Difference(self.mean, low, high, self.n, below, above)


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return statistics.fmean(values) if values else None


def spread(values: Sequence[float]) -> float | None:
    """The sample standard deviation (n - 1); None below two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """`ours` - `theirs`, paired by seed; None where they share no seed.

    The interval is Student's t over the differences, at 95 %. It assumes that they are about
    normal, and takes nothing as known of the two spreads.
    """
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not differences:
        return None
    n = len(differences)
    middle = statistics.fmean(differences)
    if n == 1:
        return Difference(middle, None, None, 1)
    half = _quantile(n - 1) * statistics.stdev(differences) / math.sqrt(n)
    return Difference(middle, middle - half, middle + half, n)


def _quantile(freedom: int) -> float:
    from scipy.special import stdtrit  # 0.1 s, which a page without seeds need not pay

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
