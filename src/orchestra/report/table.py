"""The table of a report: one line for each row, best first."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestra.report.conditions import worker_batch
from orchestra.report.numbers import (
    MINUS,
    THIN,
    count,
    decimals_for,
    fixed,
    listed,
    pairs_of,
    places_of,
    uncertain,
)
from orchestra.report.rows import (
    SENT,
    STALENESS,
    STALEST,
    TIME_TO_TARGET,
    TRAIN,
    Difference,
    Measure,
    Row,
    known_to,
)
from orchestra.report.study import Study

NONE = "–"


@dataclass(frozen=True)
class Column:
    """A column; a click on its title sorts by the values of its cells, the best first.

    `rising`: the largest first.
    """

    key: str
    title: str
    unit: str = ""
    rising: bool = False
    number: bool = True


@dataclass(frozen=True)
class Cell:
    """What stands in the table: `text`, smaller below it `details`; `value` is what it sorts by.

    `verdict` is "better" or "worse" than the rival where the spread over seeds cannot explain it.
    """

    text: str
    details: Sequence[str] = ()
    value: float | None = None
    spread: float | None = None
    difference: Difference | None = None
    verdict: str = ""


@dataclass(frozen=True)
class TableRow:
    """A row with its cells, one for each column after the strategy's."""

    row: Row
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Table:
    """Columns in which something stands.

    `beside` says what the differences are from, `pairs` over how many seeds most are; `runs` is how
    many each row has, all completed: 0 where that differs and a column says it.
    """

    columns: Sequence[Column]
    lines: Sequence[TableRow]
    beside: str
    pairs: int
    runs: int


def table(study: Study) -> Table:
    """All figures of `study`."""
    shown = [m for m in study.measures if m is not STALEST]
    decimals = {measure.key: _decimals(study.rows, measure) for measure in study.measures}
    pairs, runs = _pairs(study), _runs_of_each(study)
    columns = [
        Column("ranks", "ranks"),
        Column("global_batch", "global batch", "samples"),
        Column("completed", "seeds completed", rising=True),
        *(Column(m.key, _title(m), m.unit, bool(m.rising)) for m in shown),
        Column("switched_at_step", "switched", "step"),
    ]
    steps = len({row.steps for row in study.ranked if row.completed}) > 1
    lines = []
    for row in study.ranked:
        cells = [_ranks(row), _batch(row, steps), _completed(row)]
        cells += [_measured(study, row, measure, decimals[measure.key], pairs) for measure in shown]
        lines.append([*cells, _switched(row)])
    kept = [
        place
        for place, column in enumerate(columns)
        if any(cells[place].text != NONE for cells in lines)
        and not (column.key == "completed" and runs)
    ]
    return Table(
        [columns[place] for place in kept],
        [
            TableRow(row, [cells[place] for place in kept])
            for row, cells in zip(study.ranked, lines, strict=True)
        ],
        _beside(study),
        pairs,
        runs,
    )


def plain_figures(study: Study, row: Row) -> dict[str, Any]:
    """The same figures for machines: mean, spread, number of seeds, and difference of each."""
    figures = {}
    for measure in study.measures:
        difference = study.difference(row, measure)
        figures[measure.key] = {
            "mean": row.mean(measure.read),
            "spread": row.spread(measure.read),
            "n": len(row.values(measure.read)),
            "unit": measure.unit,
            "known_to": known_to(row, measure),
            "difference": None if difference is None else vars(difference),
        }
    return figures


def _runs_of_each(study: Study) -> int:
    """How many runs each row has, where all have as many and completed them; else 0."""
    counts = {len(row.runs) for row in study.rows}
    whole = all(len(row.completed) == len(row.runs) for row in study.rows)
    return counts.pop() if whole and len(counts) == 1 else 0


def _title(measure: Measure) -> str:
    return "staleness" if measure is STALENESS else measure.title


def _ranks(row: Row) -> Cell:
    workers = f"{row.workers}{THIN}worker{'s' * (row.workers != 1)}"
    servers = f"{row.servers}{THIN}server{'s' * (row.servers != 1)}"
    return Cell(str(row.ranks), [workers, *([servers] if row.servers else [])], row.ranks)


def _batch(row: Row, steps: bool) -> Cell:
    """With the part of each worker, and `steps` where rows differ in them."""
    details = [worker_batch(row.worker_batches), count("step", row.steps) if steps else ""]
    return Cell(str(row.global_batch), [text for text in details if text], row.global_batch)


def _completed(row: Row) -> Cell:
    done = len(row.completed)
    return Cell(f"{done} of {len(row.runs)}", value=done)


def _measured(study: Study, row: Row, measure: Measure, places: int, pairs: int) -> Cell:
    mean = row.mean(measure.read)
    if mean is None:
        missed = measure is TIME_TO_TARGET and bool(row.completed)
        return Cell("not reached" if missed else NONE)
    spread = row.spread(measure.read)
    text = fixed(mean, places)
    if (known := known_to(row, measure)) is not None:
        text, places = uncertain(mean, known), max(0, places_of(known))
    elif spread is not None:
        text += f" ± {fixed(round(spread, places), places)}"
    difference = study.difference(row, measure) if measure in _compared(study) else None
    details = [*_notes(study, row, measure), *_difference(difference, places, pairs)]
    verdict = _verdict(measure, difference)
    return Cell(text, details, mean, spread, difference, verdict)


def _compared(study: Study) -> list[Measure]:
    """Of what the table shows differences."""
    return [TIME_TO_TARGET, TRAIN, *study.finals]


def _notes(study: Study, row: Row, measure: Measure) -> Iterator[str]:
    if measure is TIME_TO_TARGET and study.reached(row) < len(row.runs):
        yield f"in {study.reached(row)} of {len(row.runs)} runs"
    if measure is SENT and any(run.record.bytes_estimated for run in row.completed):
        yield "estimated"
    if measure is STALENESS:
        largest = max(row.values(STALEST.read).values())
        yield f"at most {largest:g}"


def _difference(difference: Difference | None, places: int, pairs: int) -> Iterator[str]:
    if difference is None:
        return
    mean = fixed(difference.mean, places, sign=True)
    yield mean if difference.n == pairs else f"{mean}, {pairs_of(difference.n)}"
    if difference.low is not None and difference.high is not None:
        low, high = (fixed(end, places, sign=True) for end in (difference.low, difference.high))
        yield f"[{low}, {high}]"


def _pairs(study: Study) -> int:
    """Over how many seeds the most differences of the table are."""
    counts = Counter(
        difference.n
        for row in study.rows
        for measure in _compared(study)
        if (difference := study.difference(row, measure))
    )
    return counts.most_common(1)[0][0] if counts else 0


def _verdict(measure: Measure, difference: Difference | None) -> str:
    if difference is None or not difference.certain or measure.rising is None:
        return ""
    return "better" if (difference.mean > 0) is measure.rising else "worse"


def _switched(row: Row) -> Cell:
    if not row.switches or not row.completed:
        return Cell(NONE)
    steps = [run.record.switched_at_step for run in row.completed]
    fired = [step for step in steps if step is not None]
    if not fired:
        return Cell("never switched")
    never = ["never in the others"] if len(fired) < len(steps) else []
    return Cell(listed([str(step) for step in fired]), never, sum(fired) / len(fired))


def _decimals(rows: Sequence[Row], measure: Measure) -> int:
    """Enough for the smallest mean, though one more than the largest needs at most."""
    means = [mean for row in rows if (mean := row.mean(measure.read))]
    if not means:
        return 0
    most = decimals_for(means, measure.digits) + 1
    return min(most, decimals_for([min(means, key=abs)], measure.digits))


def _beside(study: Study) -> str:
    if study.baseline is not None:
        return f"the row {study.baseline} of the same seed"
    pairs = [(row, rival) for row in study.rows if (rival := study.rival(row))]
    if not pairs:
        return ""
    if all(row.global_batch == rival.global_batch for row, rival in pairs):
        return "one process with all cores, the same global batch and the same seed"
    return "one process with all cores and the same seed, though not every row has its global batch"


_CSV_HEAD = ("name", "strategy", "ranks", "workers", "servers", "global_batch", "runs", "completed")
_TEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "²": "$^2$",
    "≤": r"$\leq$",
    MINUS: "$-$",
    NONE: "--",
    THIN: r"\,",
}


def csv_text(study: Study) -> str:
    """A line for each row, best first; of every figure the mean over the seeds, the sample standard
    deviation (_sd), the number of seeds (_n), and the paired difference from the rival with its
    95 % interval (_difference, _low, _high). A field is empty where nothing is known."""
    file = io.StringIO()
    keys = [measure.key for measure in study.measures]
    parts = ("", "_sd", "_n", "_difference", "_low", "_high")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*_CSV_HEAD, *(f"{key}{part}" for key in keys for part in parts)])
    for row in study.ranked:
        known = [row.name, row.strategy, row.ranks, row.workers, row.servers, row.global_batch]
        values: list[object] = [*known, len(row.runs), len(row.completed)]
        for figure in plain_figures(study, row).values():
            difference = figure["difference"] or {}
            values += [figure["mean"], figure["spread"], figure["n"]]
            values += [difference.get(part) for part in ("mean", "low", "high")]
        writer.writerow(values)
    return file.getvalue()


def latex_text(study: Study) -> str:
    """The table as a `tabular`, best first, for the package booktabs."""
    found = table(study)
    lines = [" & ".join(["strategy", *map(_latex_title, found.columns)])]
    for line in found.lines:
        texts = [line.row.name, *(cell.text for cell in line.cells)]
        lines.append(" & ".join(map(_tex, texts)))
    head, *body = (f"{line} \\\\" for line in lines)
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            rf"\begin{{tabular}}{{l{'r' * len(found.columns)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _latex_title(column: Column) -> str:
    return _tex(f"{column.title} ({column.unit})" if column.unit else column.title)


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)
