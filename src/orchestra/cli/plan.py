"""`orchestra plan`: the strategy for a model on machines that are described."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from orchestra.cli.arguments import Parser, entries, numbers
from orchestra.cli.bench import progress_line
from orchestra.cli.train import check_task
from orchestra.cluster.file import cluster_text
from orchestra.engines.processes.environment import Launched, detect
from orchestra.errors import InputError
from orchestra.experiments.experiment import Experiment
from orchestra.planning.answer import Plan, Row, target_text, time_text
from orchestra.planning.api import MINUTES, carry_out, planned
from orchestra.records.record import write_atomically
from orchestra.report.numbers import or_dash, significant
from orchestra.settings.reading import Entry

DESCRIPTION = """\
Which strategy trains your model soonest on your machines, and what does it gain? Candidates
(strategies with their settings, numbers of nodes, batches and learning rates) are simulated on the
cluster that you describe: all without values first, which gives the speed of each; then with real
gradients those that may still win, in rungs after each of which the worse half is dropped. The
answer is a table, one sentence, and one command that trains the recommended candidate. Where one
machine is as fast, that is the answer.

The experiment file needs a task and a length, epochs or steps; its strategies are candidates too.
Its global batch and learning rate are those that others are multiples of. Without a calibration of
this machine for the task a fifth of the time goes into one (--set calibration=none: none is made).

Ctrl-C ends the search with the answer so far. Exit status: 0 there is an answer, 1 none was found
or the search was stopped, 2 bad input.
"""

EPILOG = """\
examples:
  orchestra plan examples/quickstart.yaml --cluster 'lan_1gbit(nodes=8)' --minutes 3

  cd examples && orchestra plan --task own_task:spam --cluster clusters/four.yaml \\
      --target 'accuracy>=0.9' --set epochs=5 --set batch_size=96
      a task of your own, in own_task.py beside you, on machines that a file of ten lines describes

  torchrun --nnodes 4 ... -m orchestra plan experiment.yaml --cluster machines.yaml --measure
  orchestra plan experiment.yaml --cluster machines.yaml
      on each of four machines: measure them, and write the file; then on the first one: plan on it
"""

SHOWN = 12
"""The most rows of the table; plan.json has all."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().read(arguments)
    # For the command that is printed after --measure
    options.given = arguments
    launched = detect(os.environ)
    if options.measure:
        return _measure(options, launched)
    if launched is not None and launched.ranks > 1:
        raise InputError(
            f"orchestra plan starts its processes itself: call it without {launched.launcher}, or "
            "add --measure to measure the machines"
        )
    experiment = experiment_of(options)
    with progress_line() as tell:
        plan = carry_out(
            experiment, options.cluster, options.out, options.minutes, tell,
            report=options.report, verified=options.verify,
        )  # fmt: skip
    print_plan(plan)
    return 0 if plan.recommended is not None and not plan.stopped else 1


def _parser() -> Parser:
    parser = planning_parser("plan", DESCRIPTION, EPILOG, "the machines", MINUTES)
    parser.flag(
        "--measure",
        "in all processes of a launcher, one or more a machine: write the file --cluster of the "
        "machines that they are on, and end",
    )
    parser.flag(
        "--verify",
        "train the first candidates for real afterwards, on nodes that Linux emulates here (a "
        "cluster of one node: on this machine): predicted beside measured",
    )
    parser.add_argument(
        "--no-report", dest="report", action="store_false", help="write no plan.html"
    )
    return parser


def _measure(options: argparse.Namespace, launched: Launched | None) -> int:
    """Write the file of the machines that a launcher has started this process and others on."""
    path, experiment = Path(options.cluster), experiment_of(options)
    if launched is None:
        raise InputError(
            "--measure: nobody has started a process on each machine; "
            "torchrun --nnodes 4 ... -m orchestra plan ... --measure"
        )
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"--cluster {path}: is the file to write, and neither .yaml nor .yml")
    # The first rank writes the file; others may share its file system and see it already.
    if launched.rank == 0 and path.exists():
        raise InputError(f"--cluster {path}: is there already; name a new file for --measure")
    from orchestra.bench.calibrate.machines import as_cluster, measure_here

    training = experiment.training
    # The whole batch: the speeds of nodes are compared, not those of ranks
    batch = training.ranks * training.batch_size
    with progress_line() as tell:
        found = measure_here(experiment.task, batch, launched, tell)
    if found is None:
        return 0
    cluster, remarks = as_cluster(path.stem, *found)
    date = datetime.now(UTC).isoformat(timespec="minutes")
    head = [
        f"Measured by orchestra plan --measure on {date}: {experiment.task}, gradients of {batch}",
        f"samples, on {len(cluster.nodes)} nodes at the same time; the speed of the first is 1.",
        *remarks,
    ]
    comment = "".join(f"# {line}\n" for line in head)
    write_atomically(path, comment + cluster_text(cluster))
    print(comment + cluster_text(cluster), end="")
    given = [word for word in options.given if word != "--measure"]
    print(f"plan on it, on {cluster.nodes[0].name}:\n{shlex.join(['orchestra', 'plan', *given])}")
    return 0


def planning_parser(
    command: str, description: str, epilog: str, cluster: str, minutes: float
) -> Parser:
    """Return a parser with the options of plan and map; `cluster` is the help text of --cluster."""
    parser = Parser(command, description, epilog)
    parser.add_argument(
        "experiment", nargs="?", type=Path, metavar="EXPERIMENT", help="a YAML file"
    )
    parser.option("--task", "TASK", "in place of the file's: digits, or package.module:function")
    parser.option("--cluster", "CLUSTER", f"{cluster}: a preset, or a file", required=True)
    target = "what is to be reached, as 'accuracy>=0.9' or 'loss<=0.3' (default: the file's; else "
    target += "the loss that one process reaches in 3/4 of the samples)"
    parser.option("--target", "TARGET", target)
    limit = f"that the search may take, a calibration included (default: {minutes:g})"
    parser.option("--minutes", "M", limit, type=float, default=minutes)
    seeds = "of the runs that decide (default: the file's, else 0,1,2)"
    parser.option("--seeds", "N[,N...]", seeds, type=numbers)
    changes = "change any setting of the experiment: epochs=5, optimizer.lr=0.1; repeatable"
    parser.option("--set", "KEY=VALUE", changes, action="append", default=[])
    parser.option(
        "--out", "DIR", f"the {command}'s folder (default: a new one in runs/)", type=Path
    )
    return parser


def experiment_of(options: argparse.Namespace) -> Experiment:
    """Return the experiment that the options of `planning_parser` describe.

    Raises:
        InputError: it, or its task, is refused.
    """
    given = entries(options, "task", "seeds")
    if options.target is not None:
        given["target"] = Entry(read_target(options.target), "--target")
    experiment = planned(options.experiment, options.set, given)
    check_task(experiment.task)
    return experiment


def read_target(text: str) -> dict[str, object]:
    """Return the target in `text`, as in an experiment file.

    Raises:
        InputError: it is no metric, >= or <=, and a number.
    """
    found = re.fullmatch(r"\s*([\w.-]+)\s*(>=|<=)\s*(\S+)\s*", text)
    try:
        if found is None:
            raise ValueError
        metric, sign, bound = found.groups()
        return {"metric": metric, "at_least" if sign == ">=" else "at_most": float(bound)}
    except ValueError:
        raise InputError(f"--target: {text!r} is no target; write 'accuracy>=0.9'") from None


def print_plan(plan: Plan) -> None:
    """Print the table, the answer, the notes, what was verified, and the command."""
    console = Console(highlight=False, markup=False)
    # Those without a speed were refused, or there was no time; plan.json says which
    rows = [row for row in plan.rows if row.speed][:SHOWN]
    if rows:
        if plan.target is not None:
            console.print(f"target: {target_text(plan.target)}")
        console.print(f"costs: {plan.costs}")
        console.print(_table(plan, rows))
        if len(plan.rows) > len(rows):
            console.print(f"and {len(plan.rows) - len(rows)} more candidates in plan.json")
    console.print(plan.headline, style="bold")
    if plan.knee is not None:
        where = f"{plan.knee} of {max(plan.scaling)} {plan.places}"
        console.print(f"{plan.scaled}: the knee of its scaling curve is at {where}.")
    for text in plan.notes:
        console.print(f"note: {text}", style="yellow")
    for each in plan.verified:
        predicted = f"predicted {significant(each.mean_predicted)} s"
        console.print(f"{each.name}: {predicted}, {each.outcome}")
    console.print(f"record: {plan.folder}", soft_wrap=True)
    if plan.report is not None:
        console.print(f"report: {plan.report}", soft_wrap=True)
    if plan.command is not None:
        console.print("train it:")
        console.print(plan.command, soft_wrap=True)
    if plan.adaptive is not None:
        console.print("where links or nodes may change meanwhile, the same with:")
        console.print(f"--strategy {shlex.quote(plan.adaptive)}", soft_wrap=True)


def _table(plan: Plan, rows: Sequence[Row]) -> Table:
    columns = ["candidate", "nodes", "batch", "samples/s", "s to target"]
    metric = "best" if plan.target is None else plan.target.metric
    lines = textwrap.wrap(metric.replace("_", "_ "), 12)  # long names of metrics, between words
    columns.append("\n".join(line.replace(" ", "") for line in lines))
    priced = next((row.currency for row in rows if row.cost is not None), None)
    columns += [*([priced] if priced else []), "bottleneck"]
    # With a price, a terminal of 80 columns is full
    gap = 1 if priced else 2
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for name in columns:
        justify: Literal["left", "right"] = (
            "left" if name in ("candidate", "bottleneck") else "right"
        )
        wraps = name == "candidate"
        table.add_column(
            name, justify=justify, min_width=16 * wraps, no_wrap=not wraps, overflow="fold"
        )
    for row in rows:
        cells = [row.name, str(len(row.nodes)), str(row.batch), or_dash(row.speed), time_text(row)]
        cells.append("-" if row.best is None else f"{row.best:.4g}")
        cells += [or_dash(row.cost)] * (priced is not None)
        # Without its percentage, which would make the column as wide as the names
        table.add_row(*cells, row.bottleneck.rstrip("0123456789 %"))
    return table
