"""Published claims against the comparisons of this folder: what docs/claims.md shows of them.

    python studies/claims/verdicts.py runs/claims

Reads each comparison that is finished in runs/claims/NAME, and prints Markdown: its rows, and for
each claimed difference of two rows the mean of the differences between runs of one seed, its 95 %
interval (Student's t), the smallest effect that such a test sees in four cases of five, and a
verdict.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

from orchestra.records.record import RunRecord
from orchestra.report.collect import RunData, collect
from orchestra.report.measures import STALENESS, TIME_TO_TARGET, Target, target_of
from orchestra.report.numbers import count
from orchestra.report.rows import Read, Row, rows_of
from orchestra.report.statistics import CONFIDENCE, Difference, paired_difference

POWER = 0.8
ACCURACY, SAMPLES, SECONDS = "accuracy", "samples", "seconds"
Rows = Mapping[tuple[str, str, int], Row]


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
    """What is claimed, the comparison that shows it, and of which of the `figures` it speaks."""

    text: str
    comparison: str
    pairs: tuple[Pair, ...]
    figure: str = ACCURACY


def accuracy(record: RunRecord) -> float | None:
    """In per cent, on the test data."""
    value = record.metrics.get("accuracy")
    return None if value is None else 100 * value


def samples_to(target: Target, record: RunRecord) -> float | None:
    """At the first snapshot that reaches `target` on the validation data."""
    points = (p for p in RunData(record).curve if p.metrics[target.metric] >= target.bound)
    return next((float(point.samples) for point in points), None)


def figures(row: Row) -> dict[str, tuple[str, Read, int]]:
    """Title, reader and decimals of what claims speak of; to a target where snapshots show it."""
    found: dict[str, tuple[str, Read, int]] = {ACCURACY: (ACCURACY, accuracy, 2)}
    target = target_of(row.source.experiment)
    if target is not None and row.source.experiment.get("snapshots"):
        bound = f"{target.bound:g}"
        found[SAMPLES] = (f"samples to {bound}", partial(samples_to, target), 0)
        found[SECONDS] = (f"seconds to {bound}", TIME_TO_TARGET.read, 2)
    return found


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
        SAMPLES,
    ),
    Claim(
        "averaging at every step costs time (digits)",
        "rounds",
        _pairs("rounds", *(("every step", label) for label in ROUNDS), ranks=4),
        SECONDS,
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


def rows_table(rows: Sequence[Row]) -> list[str]:
    """Every row of one comparison."""
    titles = [title for title, _, _ in figures(rows[0]).values()]
    stale = any(row.values(STALENESS.read) for row in rows)
    heads = ["row", "ranks", "workers", "rate", *titles, *(["mean staleness"] if stale else [])]
    lines = head(heads)
    for row in rows:
        cells = [row.label, str(row.ranks), str(row.workers), _rate(row)]
        cells += [_figure(row, read, decimals) for _, read, decimals in figures(row).values()]
        cells += [_figure(row, STALENESS.read, 2)] if stale else []
        lines.append(line(cells))
    return lines


@dataclass(frozen=True)
class Found:
    """A difference of two rows, in words: its name, mean, interval, smallest effect and verdict."""

    name: str
    mean: str
    interval: str
    effect: str
    verdict: str


def found(pair: Pair, figure: str, rows: Rows) -> Found | None:
    """What the runs show of `pair`; None where a row is not there."""
    if pair.ours not in rows or pair.theirs not in rows:
        return None
    ours, theirs = rows[pair.ours], rows[pair.theirs]
    _, read, decimals = figures(ours)[figure]
    difference = paired_difference(ours.values(read), theirs.values(read))
    name = f"{_name(ours)} - {_name(theirs)}"
    if difference is None:
        return Found(name, "no pair of runs has it", "", "", "cannot tell")
    interval, effect = "", smallest_effect(difference)
    if difference.low is not None and difference.high is not None:
        interval = f"{difference.low:+.{decimals}f} to {difference.high:+.{decimals}f}"
    return Found(
        f"{name} (n = {difference.n})",
        f"{difference.mean:+.{decimals}f}",
        interval,
        "" if effect is None else f"{effect:.{decimals}f}",
        verdict(difference, pair.margin),
    )


def pairs_table(claim: Claim, rows: Rows) -> list[str]:
    """Every difference that the claim speaks of, and whose two rows are there."""
    lines = head(["difference", "mean", "95 % interval", "smallest effect seen", "verdict"])
    each = (found(pair, claim.figure, rows) for pair in claim.pairs)
    return lines + [line(list(astuple(it))) for it in each if it is not None]


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


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def head(cells: Sequence[str]) -> list[str]:
    """Its heading."""
    return [line(cells), line(["---"] * len(cells))]


def keyed(comparisons: Mapping[str, Sequence[Row]]) -> Rows:
    """The rows by comparison, label and ranks."""
    return {(name, row.label, row.ranks): row for name, some in comparisons.items() for row in some}


def read_rows(folder: Path, claims: Iterable[Claim]) -> dict[str, list[Row]]:
    """By comparison of the `claims`, the rows of those in `folder` that have begun."""
    names = dict.fromkeys(claim.comparison for claim in claims)
    there = [name for name in names if (folder / name / "summary.json").exists()]
    return {name: rows_of(collect([folder / name])) for name in there}


def print_verdicts(comparisons: Mapping[str, Sequence[Row]], claims: Iterable[Claim]) -> None:
    """Of each comparison its rows, and the differences that the `claims` on it speak of."""
    rows = keyed(comparisons)
    for name, some in comparisons.items():
        print(f"\n### {name}\n", *rows_table(some), sep="\n")
        for claim in claims:
            if name == claim.comparison and claim.pairs:
                print(f"\nClaimed: {claim.text}. Figure: {claim.figure}.\n")
                print(*pairs_table(claim, rows), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the comparisons: runs/claims")
    folder = parser.parse_args().folder
    print_verdicts(read_rows(folder, CLAIMS), CLAIMS)


if __name__ == "__main__":
    main()
