"""The answer to a question as plain data: rows, and tests of its hypotheses."""

from __future__ import annotations

import datetime
import json
import math
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from studies.questions.declaration import Claim, Place, Question
from studies.questions.judging import (
    CONFIDENCE,
    chance_of_difference,
    chance_of_less,
    chance_of_within,
    differences,
    estimate,
    holm,
)

from orchestra.records.record import RunRecord
from orchestra.records.store import RunFolder

Records = Mapping[Place, Sequence[RunRecord]]
MEASURED = Path(__file__).parents[2] / "docs" / "report" / "data" / "measured.json"
ROUNDING = 1e-12  # of differences of figures
SUPPORTED, CONTRADICTED, OPEN = "supported", "contradicted", "open"


def _accuracy(record: RunRecord) -> float | None:
    value = record.learned.metrics.get("accuracy")
    return None if value is None else 100 * value


def _distance(record: RunRecord) -> float | None:
    """Return the mean distance of the replicas from their mean, over the snapshots."""
    if record.folder is None or not record.learned.metrics:
        return None
    curve = RunFolder(Path(record.folder)).curve
    known = [point.consensus_distance for point in curve if point.consensus_distance is not None]
    return statistics.fmean(known) if known else None


def _staleness(record: RunRecord) -> float | None:
    return None if record.updates.staleness is None else record.updates.staleness["mean"]


FIGURES: dict[str, Callable[[RunRecord], float | None]] = {
    "accuracy": _accuracy,
    "seconds to the target": lambda record: record.to_target.seconds,
    "training seconds": lambda record: record.time.training,
    "megabytes sent": lambda record: record.traffic.sent / 1e6,
    "distance of replicas": _distance,
    "staleness": _staleness,
    "switched at step": lambda record: record.switching.at_step,
    "mse": lambda record: record.learned.metrics.get("mse"),
    "mae": lambda record: record.learned.metrics.get("mae"),
    "r2_pooled": lambda record: record.learned.metrics.get("r2_pooled"),
    "r2": lambda record: record.learned.metrics.get("r2"),
}
"""What is read of a run. Accuracy is in per cent, on the test data."""


def answer(question: Question, records: Records, command: str) -> dict[str, Any]:
    """Return what the report reads of a question; without rows where it has no runs yet."""
    return {
        "number": question.number,
        "question": question.text,
        "declared": question.declared.isoformat(),
        "because": question.because,
        "method": question.method,
        "missing": question.missing,
        "hypotheses": [each["says"] for each in question.hypotheses],
        "command": command,
        "made_on": datetime.date.today().isoformat() if records else None,
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
        "rows": [_row(place, some) for place, some in records.items()],
        "tests": _tests(question, records),
        "published": [
            {**row, "variance": row["mse"] / (1 - row["r2"])} for row in question.published
        ],
    }


def _row(place: Place, records: Sequence[RunRecord]) -> dict[str, Any]:
    first = records[0].asked
    completed = [record for record in records if record.ending.status == "completed"]
    figures = {}
    for name, read in FIGURES.items():
        known = [value for record in completed if (value := read(record)) is not None]
        if known:
            late = [math.inf] * (len(records) - len(known)) if "seconds" in name else []
            figures[name] = {
                "mean": _plain(statistics.fmean(known)),
                "deviation": _plain(statistics.stdev(known)) if len(known) > 1 else None,
                "median": _plain(statistics.median_low([*known, *late])),
                "least": _plain(min(known)),
                "most": _plain(max([*known, *late])),
                "n": len(known),
            }
    return {
        "comparison": place.comparison,
        "cluster": place.cluster,
        "ranks": place.ranks,
        "label": place.label,
        "strategy": first.strategy,
        "workers": first.workers,
        "servers": first.servers,
        "chosen": dict(first.tuned),
        "runs": len(records),
        "completed": len(completed),
        "figures": figures,
    }


def _tests(question: Question, records: Records) -> list[dict[str, Any]]:
    made = [
        _compared(claim, records) if claim.exact else _test(claim, records)
        for claim in (question.claims if records else [])
    ]
    known = [test for test in made if test["p"] is not None]
    for test, corrected in zip(known, holm([test["p"] for test in known]), strict=True):
        test["p_holm"] = _plain(corrected)
        test["verdict"] = _verdict(test)
        test["p"] = _plain(test["p"])
    return made


def _blank(claim: Claim, pairs: Sequence[object]) -> dict[str, Any]:
    return {
        "says": claim.says,
        "figure": claim.figure,
        "lower": claim.lower.label,
        "than": claim.than.label,
        "comparisons": [claim.lower.comparison, claim.than.comparison],
        "cluster": claim.lower.cluster,
        "ranks": claim.lower.ranks,
        "margin": claim.margin,
        "one_sided": claim.one_sided,
        "relative": claim.relative,
        "exact": claim.exact,
        "n": len(pairs),
        "p": None,
        "p_holm": None,
        "verdict": OPEN,
    }


def _compared(claim: Claim, records: Records) -> dict[str, Any]:
    """Return the difference of two simulated times in per cent; its ends follow from the median
    error of the simulation for a ratio."""
    pairs = _pairs(claim, records)
    test = _blank(claim, pairs) | {"relative": True}
    if not pairs:
        return test
    ((ours, theirs),) = pairs
    error = json.loads(MEASURED.read_text())["ratio_error"]["value"] / 100
    ratio = ours / theirs
    low, difference, high = (100 * (ratio * part - 1) for part in (1 - error, 1.0, 1 + error))
    margin = 0.0 if claim.margin is None else claim.margin
    least = -math.inf if claim.one_sided or claim.margin is None else -margin
    if least <= low and high <= margin:
        verdict = SUPPORTED
    elif low > margin or high < least:
        verdict = CONTRADICTED
    else:
        verdict = OPEN
    figures = {"difference": _plain(difference), "low": _plain(low), "high": _plain(high)}
    return test | figures | {"verdict": verdict}


def _test(claim: Claim, records: Records) -> dict[str, Any]:
    """Return the difference of two rows over the seeds, with its interval and p value."""
    pairs = _pairs(claim, records)
    test = _blank(claim, pairs)
    if not pairs:
        return test
    values = differences(*zip(*pairs, strict=True))
    if claim.relative:
        values = [100 * value / theirs for value, (_, theirs) in zip(values, pairs, strict=True)]
    test["p"] = _chance(claim, values)
    names = ("difference", "low", "high")
    ends = zip(names, estimate(values), strict=True)
    return test | {name: _plain(end) for name, end in ends}


def _pairs(claim: Claim, records: Records) -> list[tuple[float, float]]:
    """Return the figures of both rows, seed by seed. A run that failed or missed the target is
    infinitely late, and has no accuracy."""
    both = [_by_seed(records.get(place, ()), claim.figure) for place in (claim.lower, claim.than)]
    return [(both[0][seed], both[1][seed]) for seed in both[0] if seed in both[1]]


def _by_seed(records: Sequence[RunRecord], figure: str) -> dict[int, float]:
    late = math.inf if "seconds" in figure else -math.inf if figure == "accuracy" else None
    found = {}
    for record in records:
        known = FIGURES[figure](record) if record.ending.status == "completed" else None
        if (value := late if known is None else known) is not None:
            found[record.asked.seed] = value
    return found


def _chance(claim: Claim, values: Sequence[float]) -> float:
    if claim.margin is None:
        return chance_of_difference(values)
    if claim.one_sided:
        return chance_of_less(values, claim.margin)
    return chance_of_within(values, claim.margin)


def _verdict(test: Mapping[str, Any]) -> str:
    """Return what the corrected p value and the interval say of the hypothesis."""
    certain = test["p_holm"] < 1 - CONFIDENCE
    low, high, margin = _end(test["low"], -1), _end(test["high"], 1), test["margin"]
    if margin is None:
        if not certain:
            return OPEN
        return SUPPORTED if _end(test["difference"], 1) < 0 else CONTRADICTED
    if certain:
        return SUPPORTED
    outside = low > margin or (not test["one_sided"] and high < -margin)
    return CONTRADICTED if outside else OPEN


def _plain(value: float | None) -> float | str | None:
    """Return a number that JSON has, with seven significant digits; infinities as text.

    What is left of the difference of two equal sums is 0.
    """
    if value is None or math.isnan(value):
        return None
    if not math.isfinite(value):
        return f"{value}"
    return 0.0 if abs(value) < ROUNDING else float(f"{value:.7g}")


def _end(value: float | str | None, sign: int) -> float:
    return sign * math.inf if value is None else float(value)
