"""`orchestra plan` and `orchestra map`: the strategy for a model on machines that are described,
and which one is first at each point as two quantities of a cluster vary.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import string
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from orchestra.cli.terminal import Parser, entries, numbers, progress_line
from orchestra.cli.train import check_task
from orchestra.cluster.file import cluster_text
from orchestra.engines.processes.environment import Launched, detect
from orchestra.errors import InputError
from orchestra.experiments.experiment import Experiment
from orchestra.planning.answer import Plan, Row, target_text, time_text
from orchestra.planning.api import MINUTES, carry_out, planned
from orchestra.planning.map import Check, Map, Plane, loaded, read_axis
from orchestra.planning.map_survey import draw_map
from orchestra.records.record import write_atomically
from orchestra.records.terminal import Terminal
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

SHOWN = 12  # the most rows of the table; plan.json has all


def main(arguments: Sequence[str]) -> int:
    parser = planning_parser("plan", DESCRIPTION, EPILOG, "the machines", MINUTES)
    measure = "in all processes of a launcher, one or more a machine: write the file --cluster of "
    parser.flag("--measure", measure + "the machines that they are on, and end")
    verify = "train the first candidates for real afterwards, on nodes that Linux emulates here (a "
    verify += "cluster of one node: on this machine): predicted beside measured"
    parser.flag("--verify", verify)
    parser.flag("--no-report", "write no plan.html", action="store_false", dest="report")
    options = parser.read(arguments)
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
    file = "a YAML file"
    parser.add_argument("experiment", nargs="?", type=Path, metavar="EXPERIMENT", help=file)
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
    out = f"the {command}'s folder (default: a new one in runs/)"
    parser.option("--out", "DIR", out, type=Path)
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
    console = Terminal()
    # Those without a speed were refused, or there was no time; plan.json says which
    rows = [row for row in plan.rows if row.speed][:SHOWN]
    if rows:
        if plan.target is not None:
            console.print(f"target: {target_text(plan.target)}")
        console.print(f"costs: {plan.costs}")
        console.print(_plan_table(plan, rows))
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


def _plan_table(plan: Plan, rows: Sequence[Row]) -> Table:
    metric = "best" if plan.target is None else plan.target.metric
    lines = textwrap.wrap(metric.replace("_", "_ "), 12)  # long names of metrics, between words
    heading = "\n".join(line.replace(" ", "") for line in lines)
    priced = next((row.currency for row in rows if row.cost is not None), None)
    # With a price, a terminal of 80 columns is full
    gap = 1 if priced else 2
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    table.add_column("candidate", min_width=16, overflow="fold")
    for name in ("nodes", "batch", "samples/s", "s to target", heading, *filter(None, [priced])):
        table.add_column(name, justify="right", no_wrap=True, overflow="fold")
    table.add_column("bottleneck", no_wrap=True, overflow="fold")
    for row in rows:
        cells = [row.name, str(len(row.nodes)), str(row.batch), or_dash(row.speed), time_text(row)]
        cells.append("-" if row.best is None else f"{row.best:.4g}")
        cells += [or_dash(row.cost)] * (priced is not None)
        # Without its percentage, which would make the column as wide as the names
        table.add_row(*cells, row.bottleneck.rstrip("0123456789 %"))
    return table


MAP_MINUTES, POINTS = 15.0, 8

MAP = """\
Which strategy trains your model first, depending on the cluster? Two quantities of the cluster
vary, and a figure shows the region in which each strategy reaches the target first, lines of equal
time, and where one machine beats all. What each strategy learns is simulated once with real
gradients; its speed is simulated at each point without values.

A quantity is one of
  bandwidth      of the slowest link; all others change in proportion
  latency        of the longest link, one way; all others change in proportion
  slowest_node   speed of the slowest node, in parts of the fastest
  nodes          how many there are: the first of the file; beyond its last one they repeat
or a place in the cluster's file, such as nodes.old.cores or switches.site.link.bandwidth. A range
FIRST..LAST is divided in equal ratios; A,B,C are values themselves.

Ctrl-C ends it. Exit status: 0 a map was drawn, 1 none was or it was stopped, 2 bad input.
"""

MAP_EPILOG = """\
examples:
  orchestra map examples/quickstart.yaml --cluster 'lan_1gbit(nodes=8)' \\
      --x bandwidth --y slowest_node
  orchestra map examples/quickstart.yaml --cluster 'lan_1gbit(nodes=4)' \\
      --x 'bandwidth=10 Mbit/s..10 Gbit/s' --y nodes=2,4,8,16 --points 6 --minutes 5
"""


def draw(arguments: Sequence[str]) -> int:
    parser = planning_parser("map", MAP, MAP_EPILOG, "that varies", MAP_MINUTES)
    parser.option("--x", "KEY[=VALUES]", "what varies from left to right", required=True)
    parser.option("--y", "KEY[=VALUES]", "what varies upwards", required=True)
    points = f"values of a side that has a range (default: {POINTS})"
    parser.option("--points", "N", points, type=int, default=POINTS)
    verify = "then train the first two strategies of N points on emulated nodes (Linux, as root)"
    parser.option("--verify", "N", verify, type=int, default=0)
    options = parser.read(arguments)
    experiment = experiment_of(options)
    if not 2 <= options.points <= 64:
        raise InputError(f"--points: {options.points} is not 2 to 64")
    cluster = loaded(options.cluster)
    x = read_axis(options.x, cluster, options.points, where="--x")
    y = read_axis(options.y, cluster, options.points, where="--y")
    if x.key == y.key:
        raise InputError(f"--y: {y.key} is on the other side already; choose another quantity")
    with progress_line() as tell:
        drawn = draw_map(
            experiment, Plane(options.cluster, x, y), options.out, options.minutes, tell,
            checks=options.verify,
        )  # fmt: skip
    print_map(drawn)
    return 0 if drawn.points and not drawn.stopped else 1


def print_map(drawn: Map) -> None:
    """Print the map in letters, the strategies, what was left out, and where the figure is."""
    console = Terminal()
    if drawn.target is not None:
        console.print(f"target: {target_text(drawn.target)}")
    console.print(f"costs: {drawn.costs}")
    if drawn.points:
        letters = dict(zip(drawn.winners, string.ascii_uppercase, strict=False))
        console.print(_grid(drawn, letters))
        for name, letter in letters.items():
            console.print(f"  {letter}  {name}: {drawn.strategies[name]}", soft_wrap=True)
    for text in drawn.left_out:
        console.print(f"left out: {text}", style="yellow")
    for check in drawn.checks:
        console.print(_check_text(drawn, check), soft_wrap=True)
    console.print(f"record: {drawn.folder / 'map.json'}", soft_wrap=True)
    if drawn.points:
        console.print(f"figure: {drawn.folder / 'map.png'}", soft_wrap=True)


def _grid(drawn: Map, letters: dict[str, str]) -> Table:
    """Return a table with the first strategy and its seconds in each cell; y goes upwards."""
    x, y = drawn.plane.x, drawn.plane.y
    table = Table(box=None, pad_edge=False, title=f"{x.title} →, {y.title} ↑", title_justify="left")
    known = {(point.x, point.y): point for point in drawn.points}
    table.add_column("", justify="right")
    for value in x.values:
        table.add_column(x.text(value), justify="right")
    for row in reversed(y.values):
        points = [known.get((value, row)) for value in x.values]
        cells = [
            f"{letters.get(p.winner, '?')} {significant(p.seconds[p.winner])}" if p else "-"
            for p in points
        ]
        table.add_row(y.text(row), *cells)
    return table


def _check_text(drawn: Map, check: Check) -> str:
    where = f"{drawn.plane.x.text(check.x)}, {drawn.plane.y.text(check.y)}"
    if check.failure is not None:
        return f"{where}: not emulated: {check.failure}"
    real = {name: f"{significant(s)} s" for name, s in check.measured.items() if s is not None}
    times = (
        f"{name} predicted {significant(seconds)} s, measured {real.get(name, 'not reached')}"
        for name, seconds in check.predicted.items()
    )
    verdict = {True: "right", False: "wrong", None: "undecided"}[check.agrees]
    return f"{where}: {'; '.join(times)}: {verdict}"
