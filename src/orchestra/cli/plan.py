"""`orchestra plan` and `orchestra map`: the strategy for a model on machines that are described,
and which one is first at each point as two quantities of a cluster vary.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import string
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from orchestra.cli.terminal import progress_line
from orchestra.cli.train import check_task, entries
from orchestra.cluster.file import cluster_text
from orchestra.engines.processes.environment import Launched, detect
from orchestra.errors import InputError
from orchestra.experiments.experiment import Experiment
from orchestra.planning.answer import PlanAnswer, target_text
from orchestra.planning.api import carry_out, planned
from orchestra.planning.map import Check, Map, Plane, loaded, read_axis
from orchestra.planning.map_survey import draw_map
from orchestra.planning.table import ON_TERMINALS, candidates_sheet
from orchestra.records.files import write_atomically
from orchestra.records.terminal import Terminal
from orchestra.report.numbers import significant
from orchestra.report.sheet import Cell, Column, Sheet, terminal
from orchestra.settings.reading import Entry

SHOWN = 12  # the most rows of the table; plan.json has all


def main(options: argparse.Namespace) -> int:
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
    from orchestra.calibration.machines import as_cluster, measure_here

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


def print_plan(plan: PlanAnswer) -> None:
    """Print the table, the answer, the notes, what was verified, and the command."""
    console = Terminal()
    # Those without a speed were refused, or there was no time; plan.json says which
    rows = [row for row in plan.rows if row.speed][:SHOWN]
    if rows:
        if plan.target is not None:
            console.print(f"target: {target_text(plan.target)}")
        console.print(f"costs: {plan.costs}")
        if plan.operations:
            console.print(f"operations: {plan.operations}")
        shown = candidates_sheet(replace(plan, rows=rows))
        brief = shown.only(lambda column, _: column.key in ON_TERMINALS)
        console.print(terminal(brief, console.width))
        if len(plan.rows) > len(rows):
            console.print(f"and {len(plan.rows) - len(rows)} more candidates in plan.json")
    console.print(plan.headline, style="bold")
    console.print(f"the search: {plan.ending}")
    if plan.knee is not None:
        where = f"{plan.knee} of {max(plan.scaling)} {plan.places}"
        more = f"more {plan.places} cost more than they gain"
        console.print(f"{plan.scaled}: beyond {where}, {more}.")
    for text in plan.notes:
        console.print(f"note: {text}", style="yellow")
    for each in plan.verified:
        predicted = f"predicted {significant(each.mean_predicted)} s"
        console.print(f"{each.name}: {predicted}, {each.outcome}")
    console.print(f"record: {plan.folder}", soft_wrap=True)
    if plan.report is not None:
        console.print(f"report: {plan.report}", soft_wrap=True)
    if plan.command is not None:
        console.print(f"train it, {plan.where}:" if plan.where else "train it:")
        console.print(plan.command, soft_wrap=True)
    if plan.adaptive is not None:
        console.print("where links or nodes may change meanwhile, the same with:")
        console.print(f"--strategy {shlex.quote(plan.adaptive)}", soft_wrap=True)


def draw(options: argparse.Namespace) -> int:
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
        grid = terminal(_grid(drawn, letters), console.width)
        grid.title = f"{drawn.plane.x.title} →, {drawn.plane.y.title} ↑"
        grid.title_justify = "left"
        console.print(grid)
        for name, letter in letters.items():
            console.print(f"  {letter}  {name}: {drawn.strategies[name]}", soft_wrap=True)
    for text in drawn.left_out:
        console.print(f"left out: {text}", style="yellow")
    for check in drawn.checks:
        console.print(_check_text(drawn, check), soft_wrap=True)
    console.print(f"record: {drawn.folder / 'map.json'}", soft_wrap=True)
    if drawn.points:
        console.print(f"figure: {drawn.folder / 'map.png'}", soft_wrap=True)


def _grid(drawn: Map, letters: dict[str, str]) -> Sheet:
    """Return a table with the first strategy and its seconds in each cell; y goes upwards."""
    x, y = drawn.plane.x, drawn.plane.y
    known = {(point.x, point.y): point for point in drawn.points}
    lines = []
    for row in reversed(y.values):
        points = [known.get((value, row)) for value in x.values]
        texts = [
            f"{letters.get(p.winner, '?')} {significant(p.seconds[p.winner])}" if p else "-"
            for p in points
        ]
        lines.append([Cell(text) for text in (y.text(row), *texts)])
    return Sheet([Column(title, title) for title in ("", *map(x.text, x.values))], lines)


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
