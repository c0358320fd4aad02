"""The verdicts of `orchestra bench fidelity`, and the result as Markdown, for docs/fidelity.md."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from orchestra.bench.fidelity import Fidelity
from orchestra.bench.fidelity.measure import FidelityRow
from orchestra.cluster.calibration import Calibration

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


def verdicts(rows: Sequence[FidelityRow]) -> list[Verdict]:
    """One of each predictor."""
    return [_verdict(rows, predictor) for predictor in PREDICTORS]


def _verdict(rows: Sequence[FidelityRow], predictor: str) -> Verdict:
    errors = [abs(row.error(predictor)) for row in rows]
    pairs = kept = 0
    for one, other in combinations(rows, 2):
        difference = one.real_seconds - other.real_seconds
        comparable = (one.task, one.ranks) == (other.task, other.ranks)
        if comparable and abs(difference) > one.noise + other.noise:
            pairs += 1
            kept += (getattr(one, predictor) - getattr(other, predictor)) * difference > 0
    return Verdict(predictor, statistics.median(errors), max(errors), pairs, kept)


NAMES = {"simulated": "simulation", "formula": "closed formula", "constant": "constant"}


def markdown(result: Fidelity) -> str:
    """When and where, then two tables: the predictors, and every case."""
    rows, calibration = result.rows, result.calibration
    machine = calibration.machine
    lines = [
        f"Measured on {calibration.measured_at[:10]}: {machine.get('processor')}, "
        f"{calibration.cores} cores, torch {machine.get('packages', {}).get('torch')}; "
        f"{len(rows[0].runs)} runs of each row. While calibrating, other programs took at most "
        f"{calibration.busy_with_others:.0%} of the processor time that was wanted.",
        "",
        *_doubts(calibration),
        *_table(*_summary(verdicts(rows))),
        "",
        *_table(*_cases(rows)),
    ]
    return "\n".join(lines) + "\n"


def _doubts(calibration: Calibration) -> list[str]:
    """What makes the predictions doubtful from the beginning; nothing on a quiet machine."""
    reasons = (calibration.quality_of(task).doubts for task in calibration.tasks)
    found = dict.fromkeys(itertools.chain(*reasons))
    text = f"**The calibration is not to be trusted**, nor are these figures: {'; '.join(found)}."
    return [text, ""] if found else []


def _summary(found: Sequence[Verdict]) -> tuple[list[str], list[list[str]]]:
    headings = ["predictor", "median error", "worst error", "pairs in the right order"]
    lines = [
        [NAMES[v.predictor], f"{v.median:.1%}", f"{v.worst:.1%}", f"{v.kept} of {v.pairs}"]
        for v in found
    ]
    return headings, lines


def _cases(rows: Sequence[FidelityRow]) -> tuple[list[str], list[list[str]]]:
    headings = [
        "task", "ranks", "strategy", "real", "runs", "simulation", "formula", "constant",
        "bytes", "staleness", "parameters",
    ]  # fmt: skip
    lines = [
        [
            row.task,
            str(row.ranks),
            row.label,
            f"{row.real_seconds * 1e3:.2f} ms",
            f"±{row.noise / row.real_seconds:.0%}",
            f"{row.error('simulated'):+.1%}",
            f"{row.error('formula'):+.0%}",
            f"{row.error('constant'):+.0%}",
            f"{row.bytes_difference:+d}" if row.bytes_difference else "0",
            "" if row.staleness_distance is None else f"{row.staleness_distance:.2f}",
            "" if row.parameters_differ is None else f"{row.parameters_differ:.3g}",
        ]
        for row in rows
    ]
    return headings, lines


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] * len(headings)
    return ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *lines)]
