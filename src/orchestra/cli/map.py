"""`orchestra map`: which strategy is first at each point, as two quantities of a cluster vary."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from orchestra.cli.arguments import Parser
from orchestra.cli.bench import progress_line
from orchestra.cli.plan import experiment_of, planning_parser
from orchestra.errors import InputError
from orchestra.planning.answer import target_text
from orchestra.planning.map import Check, Map, Plane, loaded, read_axis
from orchestra.planning.map_survey import draw_map
from orchestra.report.numbers import significant

MINUTES, POINTS = 15.0, 8

DESCRIPTION = """\
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

EPILOG = """\
examples:
  orchestra map examples/quickstart.yaml --cluster 'lan_1gbit(nodes=8)' \\
      --x bandwidth --y slowest_node
  orchestra map examples/quickstart.yaml --cluster 'lan_1gbit(nodes=4)' \\
      --x 'bandwidth=10 Mbit/s..10 Gbit/s' --y nodes=2,4,8,16 --points 6 --minutes 5
"""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def main(arguments: Sequence[str]) -> int:
    """Draw a map as the command line says; 0 if there is one."""
    options = _parser().read(arguments)
    experiment = experiment_of(options)
    if not 2 <= options.points <= 64:
        raise InputError(f"--points: {options.points} is not 2 to 64")
    cluster = loaded(options.cluster)
    x, y = (
        read_axis(text, cluster, options.points, where=f"--{side}")
        for side, text in (("x", options.x), ("y", options.y))
    )
    if x.key == y.key:
        raise InputError(f"--y: {y.key} is on the other side already; choose another quantity")
    with progress_line() as tell:
        drawn = draw_map(
            experiment, Plane(options.cluster, x, y), options.out, options.minutes, tell,
            checks=options.verify,
        )  # fmt: skip
    print_map(drawn)
    return 0 if drawn.points and not drawn.stopped else 1


def _parser() -> Parser:
    parser = planning_parser("map", DESCRIPTION, EPILOG, "that varies", MINUTES)
    parser.option("--x", "KEY[=VALUES]", "what varies from left to right", required=True)
    parser.option("--y", "KEY[=VALUES]", "what varies upwards", required=True)
    points = f"values of a side that has a range (default: {POINTS})"
    parser.option("--points", "N", points, type=int, default=POINTS)
    verify = "then train the first two strategies of N points on emulated nodes (Linux, as root)"
    parser.option("--verify", "N", verify, type=int, default=0)
    return parser


def print_map(drawn: Map) -> None:
    """Print the map in letters, the strategies, what was left out, and where the figure is."""
    console = Console(highlight=False, markup=False)
    if drawn.target is not None:
        console.print(f"target: {target_text(drawn.target)}")
    console.print(f"costs: {drawn.costs}")
    if drawn.points:
        letters = dict(zip(drawn.winners, LETTERS, strict=False))
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
