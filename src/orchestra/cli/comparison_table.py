"""What a comparison came to, for a terminal: the figures are those of its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestra.experiments.comparison import Comparison
from orchestra.experiments.experiment import ranks_text
from orchestra.report.answer import answer
from orchestra.report.collect import collect
from orchestra.report.fairness import conditions, doubts, fairness
from orchestra.report.numbers import significant, uncertain
from orchestra.report.rows import SENT, TIME_TO_TARGET, TRAIN, Measure, Row
from orchestra.report.study import Study

FAIR = (
    "Fair: same initial parameters, same samples in one order by seed, same budget of ranks; "
    "set-up and evaluation off the stopwatch"
)


def print_comparison(comparison: Comparison, baseline: str | None = None) -> None:
    """The fairness rule, the rows best first, the answer, what failed, and where the rest lies."""
    console = Console(highlight=False)
    folder = comparison.folder
    if comparison.records:
        study = Study(collect([folder]), baseline)
        for line in (FAIR, *fairness(study).tuning):
            console.print(f"{line}.", markup=False)
        for condition in conditions(study):
            if condition.name != "machine":
                console.print(f"{condition.name}: {condition.text}", markup=False)
        console.print(_table(study))
        console.print(answer(study).headline, style="bold", markup=False)
        for doubt in doubts(study):
            console.print(doubt, style="yellow", markup=False)
    for line in _missing(comparison):
        console.print(line, markup=False)
    if comparison.stopped:
        console.print(
            f"stopped after {len(comparison.records)} of {comparison.planned} runs; the same "
            f"command with --out {folder} goes on",
            markup=False,
        )
    console.print(f"record: {folder}", soft_wrap=True, markup=False)
    if comparison.report is not None:
        console.print(f"report: {comparison.report}", soft_wrap=True, markup=False)


def _table(study: Study) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = dict(_columns(study))
    for heading in columns:
        word = max(map(len, heading.split()))  # headings break between words only
        table.add_column(
            heading,
            justify="left" if heading == "strategy" else "right",
            min_width=word,
            overflow="fold",  # a name that is cut off could be another's
        )
    for row in study.ranked:
        table.add_row(*(Text(cell(row)) for cell in columns.values()))
    return table


def _columns(study: Study) -> Iterator[tuple[str, Callable[[Row], str]]]:
    """Headings, and what stands below them in a row."""
    rows, primary = study.ranked, study.primary
    yield "strategy", lambda row: row.label
    yield "ranks", lambda row: str(row.ranks)
    yield "batch", lambda row: str(row.global_batch)
    if len({row.record.steps for row in study.completed}) > 1:
        yield "steps", lambda row: str(row.record.steps)
    if any(len(row.completed) < len(row.runs) for row in rows):
        yield "runs", lambda row: f"{len(row.completed)} of {len(row.runs)}"
    if study.target is not None:
        yield "s to target", lambda row: _figure(row, TIME_TO_TARGET) + _share(study, row)
    yield primary.title.removeprefix("final "), lambda row: _figure(row, primary)
    yield "seconds", lambda row: _figure(row, TRAIN)
    yield "MB sent", lambda row: _figure(row, SENT).partition(" ")[0]
    if any(row.switches for row in rows):
        yield "switched", lambda row: _switched(row) if row.switches else ""


def _figure(row: Row, measure: Measure) -> str:
    """The mean over the seeds, and the spread where there are several, or how well it is known."""
    mean, spread = row.mean(measure.read), row.spread(measure.read)
    if mean is None:
        return "-"
    if (known := row.known_to(measure)) is not None:
        return uncertain(mean, known)
    text = significant(mean, measure.digits)
    return text if spread is None else f"{text} ±{significant(spread, 2)}"


def _share(study: Study, row: Row) -> str:
    """In how many of its runs a row reached the target, where not in all."""
    reached = study.reached(row)
    return f" ({reached} of {len(row.runs)})" if 0 < reached < len(row.runs) else ""


def _switched(row: Row) -> str:
    """At which steps its runs did."""
    steps = dict.fromkeys(run.record.switched_at_step for run in row.completed)
    return ", ".join("never" if step is None else str(step) for step in steps)


def _missing(comparison: Comparison) -> Iterator[str]:
    """What failed, and what could not be there at all."""
    for record in comparison.records:
        if record.failure is not None:
            what = f"{record.name}, {ranks_text(record.ranks)}, seed {record.seed}"
            yield f"failed: {what}: {record.failure.splitlines()[0]}"
    for row in comparison.not_run:
        yield f"not run: {row['name']}, {ranks_text(row['ranks'])}: {row['reason']}"
