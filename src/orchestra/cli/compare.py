"""`orchestra compare`, `orchestra simulate` and `orchestra report`: strategies side by side."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestra.cli.train import RUN_SETTINGS, check_task, entries
from orchestra.engines.processes.environment import detect
from orchestra.errors import InputError
from orchestra.experiments.comparison import Comparison, carry_out
from orchestra.experiments.file import load
from orchestra.records.store import collect
from orchestra.records.terminal import Terminal
from orchestra.report.answer import answer
from orchestra.report.fairness import conditions, doubts, fairness
from orchestra.report.measures import SENT, TIME_TO_TARGET, TRAIN, Measure
from orchestra.report.numbers import count, significant, uncertain
from orchestra.report.page import TABLES, write_report
from orchestra.report.rows import Row
from orchestra.report.sheet import Column, Sheet, terminal
from orchestra.report.study import Study


def main(options: Namespace) -> int:
    return _compare(options)


def simulate(options: Namespace) -> int:
    if (engine := options.engine) not in (None, "simulation"):
        raise InputError(f"orchestra simulate has one engine; for {engine}: orchestra compare")
    options.engine = "simulation"
    return _compare(options)


def _compare(options: Namespace) -> int:
    launched = detect(os.environ)
    # Each rank of a launcher would start all runs of the comparison.
    if launched is not None and launched.ranks > 1:
        raise InputError(
            f"orchestra compare starts the processes of its runs itself: call it without "
            f"{launched.launcher}, or train one strategy with orchestra train"
        )
    if not options.search_seconds >= 0:
        raise InputError(f"--search-seconds: {options.search_seconds:g} is not 0 or more")
    given = entries(options, *RUN_SETTINGS, "ranks", "seeds")
    experiment = load(options.experiment, options.set, given)
    check_task(experiment.task)
    comparison = carry_out(
        experiment, options.out, retry=options.retry, report=options.report,
        baseline=options.baseline, search_seconds=options.search_seconds,
    )  # fmt: skip
    print_comparison(comparison, options.baseline)
    return 0 if comparison.well else 1


FAIR = (
    "Fair: same initial parameters, same samples in one order by seed, same budget of ranks; "
    "set-up and evaluation off the stopwatch"
)

SETTINGS = ("ranks", "batch", "steps")  # columns that are left out if all rows agree


def print_comparison(comparison: Comparison, baseline: str | None = None) -> None:
    """Print the fairness rule, rows best first, answer, failures, and where the rest lies."""
    console = Terminal()
    folder = comparison.folder
    if comparison.records:
        study = Study(collect([folder]), baseline)
        for line in (FAIR, *fairness(study).tuning):
            console.print(f"{line}.")
        for condition in conditions(study):
            # Whoever reads a terminal knows the machine; the report names it
            if condition.name != "machine":
                console.print(f"{condition.name}: {condition.text}")
        common, table = _table(study)
        if common:
            console.print(f"In every row: {common}.")
        console.print(terminal(table, console.width))
        console.print(answer(study).headline, style="bold")
        for doubt in doubts(study):
            console.print(doubt, style="yellow")
    for record in comparison.records:
        if record.ending.failure is not None:
            asked = record.asked
            what = f"{asked.name}, {count('rank', asked.ranks)}, seed {asked.seed}"
            console.print(f"failed: {what}: {record.ending.failure.splitlines()[0]}")
    for row in comparison.not_run:
        console.print(f"not run: {row['name']}, {count('rank', row['ranks'])}: {row['reason']}")
    if comparison.stopped:
        done = f"{len(comparison.records)} of {comparison.planned} runs"
        console.print(f"stopped after {done}; the same command with --out {folder} goes on")
    console.print(f"record: {folder}", soft_wrap=True)
    if comparison.report is not None:
        console.print(f"report: {comparison.report}", soft_wrap=True)


def _table(study: Study) -> tuple[str, Sheet]:
    """Return what all rows have in common, and a table of what differs.

    Columns of a single value would take the room of the others on a terminal of 80 columns.
    """
    whole = Sheet.of(_columns(study), study.ranked)
    common = {}
    for place, column in enumerate(whole.columns):
        texts = [line[place].text for line in whole.lines]
        if column.key in SETTINGS and len(texts) > 1 and len(set(texts)) == 1:
            common[column.key] = texts[0]
    differing = whole.only(lambda column, _: column.key not in common)
    return ", ".join(f"{key} {value}" for key, value in common.items()), differing


def _columns(study: Study) -> Iterator[tuple[Column, Callable[[Row], str]]]:
    """Yield the columns, and the cells below them."""
    rows, primary = study.ranked, study.primary

    def to_target(row: Row) -> str:
        reached = study.reached(row)
        share = f" ({reached} of {len(row.runs)})" if 0 < reached < len(row.runs) else ""
        return _figure(row, TIME_TO_TARGET) + share

    def switched(row: Row) -> str:
        # Runs of one row may switch at different steps, by their losses
        steps = {run.record.switching.at_step for run in row.completed}
        known = sorted(step for step in steps if step is not None)
        texts = [f"{known[0]} to {known[-1]}"] if len(known) > 1 else list(map(str, known))
        return ", ".join(texts + ["never"] * (None in steps))

    yield Column("strategy", "strategy", words=True), lambda row: row.label
    yield Column("ranks", "ranks"), lambda row: str(row.ranks)
    yield Column("batch", "batch"), lambda row: str(row.global_batch)
    if len({row.record.learned.steps for row in study.completed}) > 1:
        yield Column("steps", "steps"), lambda row: str(row.record.learned.steps)
    if any(len(row.completed) < len(row.runs) for row in rows):
        yield Column("runs", "runs"), lambda row: f"{len(row.completed)} of {len(row.runs)}"
    if study.target is not None:
        yield Column(TIME_TO_TARGET.key, TIME_TO_TARGET.heading), to_target
    yield Column(primary.key, primary.heading), lambda row: _figure(row, primary)
    yield Column(TRAIN.key, TRAIN.heading), lambda row: _figure(row, TRAIN)
    yield Column(SENT.key, SENT.heading), lambda row: _figure(row, SENT).partition(" ")[0]
    if any(row.record.pacing.switches for row in rows):
        column = Column("switched", "switched")
        yield column, lambda row: switched(row) if row.record.pacing.switches else ""


def _figure(row: Row, measure: Measure) -> str:
    """Return the mean over the seeds with its spread or uncertainty, where there is one."""
    mean, spread = row.mean(measure.read), row.spread(measure.read)
    if mean is None:
        return "-"
    if (known := row.known_to(measure)) is not None:
        return uncertain(mean, known)
    text = significant(mean, measure.digits)
    return text if spread is None else f"{text} ±{significant(spread, 2)}"


def report(options: Namespace) -> int:
    folders: list[Path] = options.runs
    out: Path = options.out or (folders[0] if len(folders) == 1 else Path("report"))
    kinds = [kind for kind in TABLES if getattr(options, kind)]
    print(write_report(folders, out, options.baseline, kinds))
    for kind in kinds:
        print(out / TABLES[kind][0])
    return 0
