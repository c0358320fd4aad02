"""How good the predictions are: errors, and whether the order of strategies is kept."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from orchestra.bench.fidelity.measure import Row

PREDICTORS = ("simulated", "formula", "constant")


@dataclass(frozen=True)
class Verdict:
    """Of one predictor: absolute errors of step times, and pairs of strategies in the right order.

    `pairs` are those on the same task and ranks that differ by more than the runs of both do.
    """

    predictor: str
    median: float
    worst: float
    pairs: int
    kept: int


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """One of each predictor."""
    return [_verdict(rows, predictor) for predictor in PREDICTORS]


def _verdict(rows: Sequence[Row], predictor: str) -> Verdict:
    errors = [abs(row.error(predictor)) for row in rows]
    pairs = kept = 0
    for one, other in combinations(rows, 2):
        difference = one.real_seconds - other.real_seconds
        comparable = (one.task, one.ranks) == (other.task, other.ranks)
        if comparable and abs(difference) > one.noise + other.noise:
            pairs += 1
            kept += (getattr(one, predictor) - getattr(other, predictor)) * difference > 0
    return Verdict(predictor, statistics.median(errors), max(errors), pairs, kept)
