"""Differences of rows, and what they say of a claim; printed as Markdown.

Of two rows the mean of the differences between runs of one seed, its 95 % interval (Student's t),
and the smallest effect that such a test sees in four cases of five. Where runs fail: how many of
how many, and for the seeds of which neither failed the median difference with its bootstrap
interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from orchestra.records.record import RunRecord
from orchestra.records.store import collect
from orchestra.report.measures import STALENESS, TIME_TO_TARGET, TRAIN, Read, target_of
from orchestra.report.numbers import CONFIDENCE, Difference, paired_difference
from orchestra.report.rows import Row, rows_of

POWER = 0.8
ACCURACY, TRAINING, SECONDS = "accuracy", "training seconds", "seconds to the target"
FAILED = 50.0
"""A run whose accuracy is below it, in per cent, has failed; chance are 10 per cent."""
RESAMPLES = 10_000
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
    """What is claimed, the comparison that shows it, and of which of the `figures` it speaks.

    `published` is the figure. `differs` says how the conditions here differ from the published
    ones: then there is a finding, and no verdict. It is empty where no conditions were published.
    """

    text: str
    comparison: str
    pairs: tuple[Pair, ...]
    figure: str = ACCURACY
    published: str = "no figure"
    differs: str = ""


def accuracy(record: RunRecord) -> float | None:
    """In per cent, on the test data."""
    value = record.learned.metrics.get("accuracy")
    return None if value is None else 100 * value


def figures(row: Row) -> dict[str, tuple[str, Read, int]]:
    """Title, reader and decimals of what claims speak of; to a target where snapshots show it."""
    found: dict[str, tuple[str, Read, int]] = {
        ACCURACY: (ACCURACY, accuracy, 2),
        TRAINING: (TRAINING, TRAIN.read, 2),
    }
    target = target_of(row.source.experiment)
    if target is not None and row.source.experiment.get("snapshots"):
        found[SECONDS] = (f"seconds to {target.bound:g}", TIME_TO_TARGET.read, 2)
    return found


def failed(row: Row) -> set[int]:
    """The seeds whose runs did not end, diverged, or ended below `FAILED`."""
    good = {seed for seed, value in row.values(accuracy).items() if value >= FAILED}
    return {run.record.asked.seed for run in row.runs} - good


def smallest_effect(difference: Difference) -> float | None:
    """The mean difference that a two-sided paired t test finds with probability `POWER`, given the
    spread of these differences; None of a single pair."""
    from scipy.special import nctdtrinc, stdtrit

    if difference.low is None or difference.high is None:
        return None
    freedom = difference.n - 1
    critical = stdtrit(freedom, (1 + CONFIDENCE) / 2)
    width = difference.high - difference.low - difference.below - difference.above
    standard_error = width / 2 / critical
    return float(nctdtrinc(freedom, 1 - POWER, critical) * standard_error)


def median_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """The median of `ours` - `theirs`, paired by seed, with its percentile bootstrap interval."""
    import numpy

    values = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not values:
        return None
    middle = statistics.median(values)
    if len(values) == 1:
        return Difference(middle, None, None, 1)
    drawn = numpy.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(numpy.median(drawn, axis=1), [tail, 1 - tail])
    return Difference(middle, float(low), float(high), len(values))


def failing_more(ours: set[int], theirs: set[int]) -> int:
    """1 where theirs fail more often, -1 where ours do, 0 where chance may be why: the exact sign
    test at 5 %, two-sided, over the seeds of which one failed and the other did not."""
    only_ours, only_theirs = len(ours - theirs), len(theirs - ours)
    n = only_ours + only_theirs
    more = max(only_ours, only_theirs)
    chance = 2 * sum(math.comb(n, k) for k in range(more, n + 1)) / 2**n
    if chance > 1 - CONFIDENCE:
        return 0
    return 1 if only_theirs > only_ours else -1


AS_CLAIMED, REVERSE, NOTHING = "as claimed", "not as claimed", "nothing found"


def finding(difference: Difference | None, margin: float | None, failing: int = 0) -> str:
    """What the interval and the failures say of the claim; nothing where they disagree."""
    signs = {failing} - {0}
    if difference is not None and difference.low is not None and difference.high is not None:
        low, high = difference.low, difference.high
        if margin is None:
            signs |= {1} if low > 0 else {-1} if high < 0 else set()
        elif -margin < low and high < margin:
            signs |= {1}
        elif low > margin or high < -margin:
            signs |= {-1}
    if len(signs) != 1:
        return NOTHING
    return AS_CLAIMED if signs == {1} else REVERSE


def verdict(found: str, differs: str) -> str:
    """Of a claim whose conditions are those here, or were never published; else none."""
    if differs or found == NOTHING:
        return "cannot tell here"
    return "holds here" if found == AS_CLAIMED else "does not hold here"


def rows_table(rows: Sequence[Row]) -> list[str]:
    """Every row of one comparison."""
    titles = [title for title, _, _ in figures(rows[0]).values()]
    stale = any(row.values(STALENESS.read) for row in rows)
    switched = any("Switch(" in row.record.asked.strategy for row in rows)
    more = [*(["staleness"] if stale else []), *(["switched after step"] if switched else [])]
    lines = head(["row", "workers", "chosen", "failed", *titles, *more])
    for row in rows:
        cells = [row.label, str(row.record.asked.workers), _chosen(row), _share(failed(row), row)]
        cells += [_figure(row, read, decimals) for _, read, decimals in figures(row).values()]
        cells += [_figure(row, STALENESS.read, 2)] if stale else []
        cells += [_switched(row)] if switched else []
        lines.append(line(cells))
    return lines


@dataclass(frozen=True)
class Found:
    """A difference of two rows, in words; `failed` of how many, ours and theirs, where any did."""

    name: str
    failed: str
    middle: str
    interval: str
    effect: str
    finding: str
    verdict: str


def found(pair: Pair, claim: Claim, rows: Rows) -> Found | None:
    """What the runs show of `pair`; None where a row is not there."""
    if pair.ours not in rows or pair.theirs not in rows:
        return None
    ours, theirs = rows[pair.ours], rows[pair.theirs]
    _, read, decimals = figures(ours)[claim.figure]
    bad, worse = failed(ours), failed(theirs)
    good = [{s: v for s, v in row.values(read).items() if s not in bad | worse}
            for row in (ours, theirs)]  # fmt: skip
    any_failed = bool(bad | worse)
    difference = (median_difference if any_failed else paired_difference)(*good)
    if difference is not None and claim.figure == SECONDS and TIME_TO_TARGET.resolution:
        spacing = [row.mean(TIME_TO_TARGET.resolution) or 0.0 for row in (ours, theirs)]
        difference = difference.widened(*spacing)
    said = finding(difference, pair.margin, failing_more(bad, worse))
    interval = effect = ""
    if difference is not None and difference.low is not None and difference.high is not None:
        interval = f"{difference.low:+.{decimals}f} to {difference.high:+.{decimals}f}"
        if not any_failed and (seen := smallest_effect(difference)) is not None:
            effect = f"{seen:.{decimals}f}"
    middle = "no pair of runs has it" if difference is None else f"{difference.mean:+.{decimals}f}"
    return Found(
        f"{ours.label} - {theirs.label} (n = {0 if difference is None else difference.n})",
        f"{_share(bad, ours)}; {_share(worse, theirs)}" if any_failed else "",
        f"median {middle}" if any_failed and difference is not None else middle,
        interval,
        effect,
        said,
        verdict(said, claim.differs),
    )


def pairs_table(claim: Claim, rows: Rows) -> list[str]:
    """Every difference that the claim speaks of, and whose two rows are there."""
    lines = head(["difference", "failed", "mean", "95 % interval", "smallest effect seen",
                  "found", "verdict"])  # fmt: skip
    each = (found(pair, claim, rows) for pair in claim.pairs)
    return lines + [line(list(astuple(it))) for it in each if it is not None]


def _share(seeds: set[int], row: Row) -> str:
    return f"{len(seeds)} of {len(row.runs)}"


def _chosen(row: Row) -> str:
    """The settings that its trials chose, without their paths."""
    tuned = row.runs[0].record.asked.tuned
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in tuned.items()) or "none"


def _switched(row: Row) -> str:
    """After which steps, and in how many of its runs."""
    steps = [run.record.switching.at_step for run in row.runs]
    at = sorted(step for step in steps if step is not None)
    return f"{at[0]} to {at[-1]}, in {len(at)} of {len(steps)}" if at else "never"


def _figure(row: Row, read: Read, decimals: int) -> str:
    """Mean and spread, or median and range, of the runs that did not fail."""
    bad = failed(row)
    values = [value for seed, value in row.values(read).items() if seed not in bad]
    if not values:
        return "none"
    if bad:
        text = f"median {statistics.median(values):.{decimals}f}"
        text += f" ({min(values):.{decimals}f} to {max(values):.{decimals}f})"
    else:
        text = f"{statistics.fmean(values):.{decimals}f}"
        text += f" ± {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else ""
    missing = len(row.runs) - len(bad) - len(values)
    return f"{text}, not in {missing}" if missing else text


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


def print_verdicts(
    comparisons: Mapping[str, Sequence[Row]], claims: Iterable[Claim], beside: Rows | None = None
) -> None:
    """Of each comparison its rows, and the differences that the `claims` on it speak of: to rows of
    these comparisons, or those `beside`."""
    rows = {**keyed(comparisons), **(beside or {})}
    for name, some in comparisons.items():
        print(f"\n### {name}\n", *rows_table(some), sep="\n")
        for claim in claims:
            if name == claim.comparison and claim.pairs:
                print(f"\nClaimed: {claim.text}. Figure: {claim.figure}.\n")
                print(*pairs_table(claim, rows), sep="\n")
