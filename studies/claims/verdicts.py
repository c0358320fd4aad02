"""Published claims against the comparisons of this folder: what docs/claims.md shows of them.

    python studies/claims/verdicts.py runs/claims

Reads each comparison that is finished in runs/claims/NAME, and prints Markdown: its rows, and for
each claimed difference of two rows the mean of the differences between runs of one seed, its 95 %
interval (Student's t), the smallest effect that such a test sees in four cases of five, and a
verdict.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from orchestra.records.record import RunRecord
from orchestra.report.collect import RunData, collect
from orchestra.report.measures import STALENESS, TIME_TO_TARGET
from orchestra.report.numbers import count
from orchestra.report.rows import Read, Row, rows_of
from orchestra.report.statistics import CONFIDENCE, Difference, paired_difference

POWER = 0.8


@dataclass(frozen=True)
class Pair:
    """`ours` is claimed to have more than `theirs`; with a margin, to differ by no more than that.

    Each is (comparison, label, ranks).
    """

    ours: tuple[str, str, int]
    theirs: tuple[str, str, int]
    margin: float | None = None


@dataclass(frozen=True)
class Claim:
    """What is claimed, the comparison that shows it, and of which figure it speaks."""

    text: str
    comparison: str
    pairs: tuple[Pair, ...]
    figure: str = "accuracy"


def accuracy(record: RunRecord) -> float | None:
    """In per cent, on the test data."""
    value = record.metrics.get("accuracy")
    return None if value is None else 100 * value


def samples_to_target(record: RunRecord) -> float | None:
    """At the first snapshot whose accuracy on the validation data reaches `TARGET`."""
    points = (point for point in RunData(record).curve if point.metrics["accuracy"] >= TARGET)
    return next((float(point.samples) for point in points), None)


TARGET = 0.95  # as in rounds.yaml
FIGURES: dict[str, tuple[Read, int]] = {
    "accuracy": (accuracy, 2),
    "samples to 0.95": (samples_to_target, 0),
    "seconds to 0.95": (TIME_TO_TARGET.read, 2),
}


def _pairs(comparison: str, *pairs: tuple[str, str], ranks: int) -> tuple[Pair, ...]:
    return tuple(Pair((comparison, a, ranks), (comparison, b, ranks)) for a, b in pairs)


ONE_WORKER = ("asynchronous", "asynchronous", 2)
LATER = "synchronous {0} %, asynchronous"
EARLIER = "asynchronous, synchronous {0} %"
ROUNDS = ("every 4 steps", "every 16 steps", "every 64 steps", "once, at the end")

CLAIMS = (
    Claim(
        "asynchronous SGD loses accuracy as workers are added, each row with its own rate",
        "asynchronous",
        tuple(Pair(ONE_WORKER, ("asynchronous", "asynchronous", ranks)) for ranks in (3, 5, 9)),
    ),
    Claim(
        "asynchronous SGD loses accuracy as workers are added, with the rate of one worker",
        "same_rate",
        tuple(
            Pair(ONE_WORKER, ("same_rate", label, ranks))
            for label in ("rate kept", "rate divided")
            for ranks in (5, 9)
        ),
    ),
    Claim(
        "dividing that rate by the workers, and delay compensation, win some of it back",
        "same_rate",
        tuple(
            Pair(("same_rate", label, ranks), ("same_rate", "rate kept", ranks))
            for label in ("rate divided", "compensated, constant", "compensated, adaptive")
            for ranks in (5, 9)
        ),
    ),
    Claim(
        "delay compensation wins some of it back, without momentum, each row with its own rate",
        "plain_sgd",
        _pairs(
            "plain_sgd", ("one worker", "asynchronous"), ("compensated", "asynchronous"), ranks=9
        ),
    ),
    Claim(
        "synchronous first, then asynchronous, beats the reverse",
        "switch_order",
        _pairs(
            "switch_order",
            *((LATER.format(share), EARLIER.format(share)) for share in (25, 50)),
            ranks=5,
        ),
    ),
    Claim(
        "keeping the momentum across the switch beats resetting it",
        "switch_order",
        _pairs(
            "switch_order",
            ("synchronous 50 %, asynchronous, kept", "synchronous 50 %, asynchronous"),
            ("synchronous 50 %, local, kept", "synchronous 50 %, local"),
            ranks=5,
        ),
    ),
    Claim(
        "stochastic gradient push ends within about a point of all-reduce",
        "push_sum",
        (Pair(("push_sum", "push", 4), ("push_sum", "all-reduce", 4), margin=1.2),),
    ),
    Claim(
        "outer Nesterov momentum beats plain averaging where workers average seldom",
        "outer_nesterov",
        _pairs("outer_nesterov", ("outer Nesterov", "plain average"), ranks=4),
    ),
    Claim(
        "averaging once, at the end, costs accuracy (digits28)",
        "averaged_once",
        (Pair(("push_sum", "all-reduce", 4), ("averaged_once", "averaged once", 4)),),
    ),
    Claim(
        "averaging seldom, or once, at the end, costs accuracy (digits)",
        "rounds",
        _pairs("rounds", *(("every step", label) for label in ROUNDS), ranks=4),
    ),
    Claim(
        "averaging seldom costs samples (digits)",
        "rounds",
        _pairs("rounds", *((label, "every step") for label in ROUNDS), ranks=4),
        "samples to 0.95",
    ),
    Claim(
        "averaging at every step costs time (digits)",
        "rounds",
        _pairs("rounds", *(("every step", label) for label in ROUNDS), ranks=4),
        "seconds to 0.95",
    ),
)


def smallest_effect(difference: Difference) -> float | None:
    """The mean difference that a two-sided paired t test finds with probability `POWER`, given the
    spread of these differences; None of a single pair."""
    from scipy.special import nctdtrinc, stdtrit

    if difference.low is None or difference.high is None:
        return None
    freedom = difference.n - 1
    critical = stdtrit(freedom, (1 + CONFIDENCE) / 2)
    standard_error = (difference.high - difference.low) / 2 / critical
    return float(nctdtrinc(freedom, 1 - POWER, critical) * standard_error)


def verdict(difference: Difference, margin: float | None) -> str:
    """What the interval says of the claim."""
    low, high = difference.low, difference.high
    if low is None or high is None:
        return "cannot tell at this scale"
    if margin is None:
        holds, fails = low > 0, high < 0
    else:
        holds, fails = -margin < low and high < margin, low > margin or high < -margin
    return "holds" if holds else "does not hold" if fails else "cannot tell at this scale"


def rows_table(rows: list[Row]) -> list[str]:
    """Every row of one comparison."""
    targets = any(row.source.experiment.get("snapshots") for row in rows)
    figures = list(FIGURES) if targets else ["accuracy"]
    stale = any(row.values(STALENESS.read) for row in rows)
    heads = ["row", "ranks", "workers", "rate", *figures, *(["mean staleness"] if stale else [])]
    lines = _head(heads)
    for row in rows:
        cells = [row.label, str(row.ranks), str(row.workers), _rate(row)]
        cells += [_figure(row, *FIGURES[figure]) for figure in figures]
        cells += [_figure(row, STALENESS.read, 2)] if stale else []
        lines.append(_line(cells))
    return lines


def pairs_table(claim: Claim, rows: dict[tuple[str, str, int], Row]) -> list[str]:
    """Every difference that the claim speaks of, and whose two rows are there."""
    read, decimals = FIGURES[claim.figure]
    lines = _head(["difference", "mean", "95 % interval", "smallest effect seen", "verdict"])
    for pair in claim.pairs:
        if pair.ours not in rows or pair.theirs not in rows:
            continue
        ours, theirs = rows[pair.ours], rows[pair.theirs]
        found = paired_difference(ours.values(read), theirs.values(read))
        name = f"{_name(ours)} - {_name(theirs)}"
        if found is None:
            lines.append(_line([name, "no pair of runs has it", "", "", "cannot tell"]))
            continue
        interval, effect = "", smallest_effect(found)
        if found.low is not None and found.high is not None:
            interval = f"{found.low:+.{decimals}f} to {found.high:+.{decimals}f}"
        cells = [f"{name} (n = {found.n})", f"{found.mean:+.{decimals}f}", interval]
        cells += ["" if effect is None else f"{effect:.{decimals}f}", verdict(found, pair.margin)]
        lines.append(_line(cells))
    return lines


def _name(row: Row) -> str:
    """Its label, with its workers where the comparison has several numbers of them."""
    ranks = row.source.experiment.get("ranks", 1)
    several = isinstance(ranks, list) and len(ranks) > 1
    return f"{row.label}, {count('worker', row.workers)}" if several else row.label


def _rate(row: Row) -> str:
    tuned = {run.record.tuned.get("optimizer.lr") for run in row.runs}
    return ", ".join(sorted(str(rate) for rate in tuned if rate is not None)) or "not tuned"


def _figure(row: Row, read: Read, decimals: int) -> str:
    mean, spread, n = row.mean(read), row.spread(read), len(row.values(read))
    if mean is None:
        return "none" if row.completed else "failed"
    text = f"{mean:.{decimals}f}" + ("" if spread is None else f" ± {spread:.{decimals}f}")
    return text if n == len(row.runs) else f"{text}, in {n} of {len(row.runs)} runs"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _head(cells: list[str]) -> list[str]:
    return [_line(cells), _line(["---"] * len(cells))]


def read_rows(folder: Path) -> dict[str, list[Row]]:
    """By comparison, the rows of those in `folder` that have begun."""
    names = dict.fromkeys(claim.comparison for claim in CLAIMS)
    there = [name for name in names if (folder / name / "summary.json").exists()]
    return {name: rows_of(collect([folder / name])) for name in there}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the comparisons: runs/claims")
    comparisons = read_rows(parser.parse_args().folder)
    rows = {
        (name, row.label, row.ranks): row for name, found in comparisons.items() for row in found
    }
    for name, found in comparisons.items():
        print(f"\n### {name}\n", *rows_table(found), sep="\n")
        for claim in CLAIMS:
            if name == claim.comparison:
                print(f"\nClaimed: {claim.text}. Figure: {claim.figure}.\n")
                print(*pairs_table(claim, rows), sep="\n")


if __name__ == "__main__":
    main()
