"""`orchestra compare`, `orchestra simulate` and `orchestra report`: strategies side by side."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from orchestra.cli.terminal import RUN_SETTINGS, Parser, entries, numbers
from orchestra.cli.train import check_task
from orchestra.engines.processes.environment import detect
from orchestra.errors import InputError
from orchestra.experiments.comparison import SEARCH_SECONDS, Comparison, carry_out
from orchestra.experiments.file import load
from orchestra.records.terminal import Terminal
from orchestra.report.answer import answer
from orchestra.report.fairness import conditions, doubts, fairness
from orchestra.report.numbers import (
    SENT,
    TIME_TO_TARGET,
    TRAIN,
    Measure,
    count,
    significant,
    uncertain,
)
from orchestra.report.page import TABLES, write_report
from orchestra.report.rows import Row, collect
from orchestra.report.study import Study

DESCRIPTION = """\
Train one task under every strategy of an experiment file, with every seed, and report on them side
by side. All begin with the same parameters, take the same samples, and have the same number of
ranks; one process with all cores and the same global batch is always among them.

With `tune:` in the file every strategy first gets the same trials; the best settings on the
validation data are those it is compared with. Settings of a strategy (strategy.outer.rate) are
tried with those that have them. `orchestra list experiment` shows all keys.

The same command with the same --out goes on with a comparison that was stopped or killed. A run
that fails does not end the others. Exit status: 0 all runs were completed, 1 one of them failed or
the comparison was stopped, 2 bad input.
"""

EPILOG = """\
examples:
  orchestra compare examples/quickstart.yaml
      into a new folder runs/quickstart-1; open its report.html in a browser

  orchestra compare experiment.yaml --seeds 0,1,2 --ranks 1,2,4 --out runs/scaling
      three seeds, each strategy on one, two and four ranks

  orchestra compare experiment.yaml --out runs/scaling --retry
      the failed runs of a comparison again; what was completed stays as it is

  orchestra compare experiment.yaml --set 'tune={settings: {optimizer.lr: [0.01, 0.1]}}'
      the better of two learning rates for each strategy
"""

SIMULATE = """\
Compare strategies in virtual time, on a cluster that is described: `orchestra compare` with
`--engine simulation`. Every rank runs in one process, with real gradients, so that parameters and
losses are those of real processes; seconds are those of the cluster. `orchestra list clusters`
shows the clusters that have a name.
"""

SIMULATE_EPILOG = """\
examples:
  orchestra simulate examples/quickstart.yaml --cluster 'lan_1gbit(nodes=8)' --ranks 8

  orchestra simulate examples/quickstart.yaml --cluster examples/cluster.yaml
      on machines that a file describes

  orchestra simulate experiment.yaml --cluster 'stragglers(nodes=256)' --ranks 1,2,4,...,256
      how far each strategy scales where some machines are slow
"""


def main(arguments: Sequence[str]) -> int:
    return _compare(_parser("compare", DESCRIPTION, EPILOG).read(arguments))


def simulate(arguments: Sequence[str]) -> int:
    options = _parser("simulate", SIMULATE, SIMULATE_EPILOG).read(arguments)
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


def _parser(command: str, description: str, epilog: str) -> Parser:
    parser = Parser(command, description, epilog)
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT", help="a YAML file")
    ranks = "processes, servers included; 1,2,4,...,256 stands for all powers of two between"
    parser.option("--ranks", "N[,N...]", ranks, type=numbers)
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, nargs="+", dest="seeds", metavar="N", help="seeds")
    seeds.add_argument("--seeds", type=numbers, metavar="N[,N...]", help="the same")
    out = "the comparison's folder (default: a new one in runs/); one of the same goes on"
    parser.add_run_options(out)
    parser.option("--baseline", "LABEL", "the strategy that the report's differences refer to")
    search = "of a simulation: for each technique, at most so long to find the bandwidth at which "
    search += "it begins to pay; 0: do not (default: 30)"
    parser.option("--search-seconds", "S", search, type=float, default=SEARCH_SECONDS)
    parser.flag("--retry", "make failed runs again")
    parser.flag("--no-report", "write no report.html", action="store_false", dest="report")
    return parser


FAIR = (
    "Fair: same initial parameters, same samples in one order by seed, same budget of ranks; "
    "set-up and evaluation off the stopwatch"
)

SETTINGS = ("ranks", "batch", "steps")  # columns that are left out if all rows agree

LABEL_COLUMNS = 24  # longer cells, and those with a spread, are broken if the terminal is narrow


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
        console.print(table)
        console.print(answer(study).headline, style="bold")
        for doubt in doubts(study):
            console.print(doubt, style="yellow")
    for record in comparison.records:
        if record.failure is not None:
            what = f"{record.name}, {count('rank', record.ranks)}, seed {record.seed}"
            console.print(f"failed: {what}: {record.failure.splitlines()[0]}")
    for row in comparison.not_run:
        console.print(f"not run: {row['name']}, {count('rank', row['ranks'])}: {row['reason']}")
    if comparison.stopped:
        done = f"{len(comparison.records)} of {comparison.planned} runs"
        console.print(f"stopped after {done}; the same command with --out {folder} goes on")
    console.print(f"record: {folder}", soft_wrap=True)
    if comparison.report is not None:
        console.print(f"report: {comparison.report}", soft_wrap=True)


def _table(study: Study) -> tuple[str, Table]:
    """Return what all rows have in common, and a table of what differs.

    Columns of a single value would take the room of the others on a terminal of 80 columns.
    """
    filled = [(heading, [cell(row) for row in study.ranked]) for heading, cell in _columns(study)]
    common = {
        heading: cells[0]
        for heading, cells in filled
        if heading in SETTINGS and len(cells) > 1 and len(set(cells)) == 1
    }
    filled = [(heading, cells) for heading, cells in filled if heading not in common]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, cells in filled:
        whole = all(len(cell) <= LABEL_COLUMNS and "±" not in cell for cell in cells)
        justify: Literal["left", "right"] = "left" if heading == "strategy" else "right"
        # Folded, since a name that is cut off could be another's
        table.add_column(heading, justify=justify, no_wrap=whole, overflow="fold")
    for row in zip(*(cells for _, cells in filled), strict=True):
        table.add_row(*map(Text, row))
    return ", ".join(f"{heading} {value}" for heading, value in common.items()), table


def _columns(study: Study) -> Iterator[tuple[str, Callable[[Row], str]]]:
    """Yield headings, and the cells below them."""
    rows, primary = study.ranked, study.primary

    def to_target(row: Row) -> str:
        reached = study.reached(row)
        share = f" ({reached} of {len(row.runs)})" if 0 < reached < len(row.runs) else ""
        return _figure(row, TIME_TO_TARGET) + share

    def switched(row: Row) -> str:
        # Runs of one row may switch at different steps, by their losses
        steps = {run.record.switched_at_step for run in row.completed}
        known = sorted(step for step in steps if step is not None)
        texts = [f"{known[0]} to {known[-1]}"] if len(known) > 1 else list(map(str, known))
        return ", ".join(texts + ["never"] * (None in steps))

    yield "strategy", lambda row: row.label
    yield "ranks", lambda row: str(row.ranks)
    yield "batch", lambda row: str(row.global_batch)
    if len({row.record.steps for row in study.completed}) > 1:
        yield "steps", lambda row: str(row.record.steps)
    if any(len(row.completed) < len(row.runs) for row in rows):
        yield "runs", lambda row: f"{len(row.completed)} of {len(row.runs)}"
    if study.target is not None:
        yield "s to target", to_target
    yield primary.title.removeprefix("final "), lambda row: _figure(row, primary)
    yield "seconds", lambda row: _figure(row, TRAIN)
    yield "MB sent", lambda row: _figure(row, SENT).partition(" ")[0]
    if any(row.record.switches for row in rows):
        yield "switched", lambda row: switched(row) if row.record.switches else ""


def _figure(row: Row, measure: Measure) -> str:
    """Return the mean over the seeds with its spread or uncertainty, where there is one."""
    mean, spread = row.mean(measure.read), row.spread(measure.read)
    if mean is None:
        return "-"
    if (known := row.known_to(measure)) is not None:
        return uncertain(mean, known)
    text = significant(mean, measure.digits)
    return text if spread is None else f"{text} ±{significant(spread, 2)}"


REPORT = """\
Make a report of past runs: report.html, one file that needs nothing else, and each figure as PNG
and SVG. Its first sentence says which strategy was first, and whether distributing paid.

A folder is that of a comparison or of a training; several are shown side by side. Where they
differ in more than their strategy, ranks and seed, the report says so first.
"""

REPORT_EPILOG = """\
examples:
  orchestra report runs/quickstart-1
      into that folder, as orchestra compare did; again after an interruption

  orchestra report runs/ring runs/servers --out both --baseline ring
      two trainings on one page, with differences to the first

  orchestra report runs/quickstart-1 --csv --latex
      the table as table.csv and table.tex, too
"""


def report(arguments: Sequence[str]) -> int:
    parser = Parser("report", REPORT, REPORT_EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder")
    out_folder = "where to (default: the folder itself if there is one, else report)"
    parser.option("--out", "DIR", out_folder, type=Path)
    baseline = "the row that differences refer to (default: one process with all cores)"
    parser.option("--baseline", "LABEL", baseline)
    parser.flag("--csv", "write the table as table.csv, too")
    parser.flag("--latex", "write it as table.tex, for booktabs")
    options = parser.read(arguments)
    folders: list[Path] = options.runs
    out: Path = options.out or (folders[0] if len(folders) == 1 else Path("report"))
    kinds = [kind for kind in TABLES if getattr(options, kind)]
    print(write_report(folders, out, options.baseline, kinds))
    for kind in kinds:
        print(out / TABLES[kind][0])
    return 0
