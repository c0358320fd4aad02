"""The parsers of `orchestra plan` and `map`."""

from __future__ import annotations

from pathlib import Path

from orchestra.cli.numbers import amount, numbers
from orchestra.cli.parser import Parser

PLAN = """\
Which strategy trains your model soonest on your machines, and what does it gain? Candidates are
strategies with their settings, numbers of nodes, batches and learning rates. They are simulated on
the cluster that you describe: without values, for the speed of each, and with real gradients those
that may still win. The simulation that is worth most for its time is always next, until one
candidate is confirmed or the time is over. The answer is a table, one sentence, and one command
that trains the recommended candidate. Where one machine is as fast, that is the answer.

The experiment file needs a task and a length, epochs or steps; its strategies are candidates too.
Its global batch and learning rate are those that others are multiples of. Without a calibration of
this machine for the task a fifth of the time goes into one (--set calibration=none: none is made).

Ctrl-C ends the search with the answer so far. Exit status: 0 there is an answer, 1 none was found
or the search was stopped, 2 bad input.
"""

PLAN_EPILOG = """\
examples:
  orchestra plan examples/quickstart.yaml --cluster 'lan_1gbit(nodes=8)' --minutes 3

  cd examples && orchestra plan --task own_task:spam --cluster clusters/four.yaml \\
      --target 'accuracy>=0.9' --set epochs=5 --set batch_size=96
      a task of your own, in own_task.py beside you, on machines that a file of ten lines describes

  torchrun --nnodes 4 ... -m orchestra plan experiment.yaml --cluster machines.yaml --measure
  orchestra plan experiment.yaml --cluster machines.yaml
      on each of four machines: measure them, and write the file; then on the first one: plan on it
"""


PLAN_MINUTES = 10.0


def plan() -> Parser:
    parser = planning_parser("plan", PLAN, PLAN_EPILOG, "the machines", PLAN_MINUTES)
    measure = "in all processes of a launcher, one or more a machine: write the file --cluster of "
    parser.flag("--measure", measure + "the machines that they are on, and end")
    verify = "train the first candidates for real afterwards, on nodes that Linux emulates here (a "
    verify += "cluster of one node: on this machine): predicted beside measured"
    parser.flag("--verify", verify)
    parser.flag("--no-report", "write no plan.html", action="store_false", dest="report")
    return parser


MAP_MINUTES, POINTS = 15.0, 8

MAP = """\
Which strategy trains your model first, depending on the cluster? Two quantities of the cluster
vary, and a figure shows the region in which each strategy reaches the target first, lines of equal
time, and where one machine beats all. What each strategy learns is simulated once with real
gradients; its speed is simulated at each point without values.

Two of these quantities vary.

    bandwidth      of the slowest link; all others change in proportion
    latency        of the longest link, one way; all others change in proportion
    slowest_node   speed of the slowest node, in parts of the fastest
    nodes          how many there are: the first of the file; beyond its last one they repeat

Others are numbers of the cluster's file, by their place: nodes.old.cores,
switches.site.link.bandwidth. A range FIRST..LAST is divided in equal ratios; A,B,C are values
themselves.

Ctrl-C ends it. Exit status: 0 a map was drawn, 1 none was or it was stopped, 2 bad input.
"""

MAP_EPILOG = """\
examples:
  orchestra map examples/quickstart.yaml --cluster 'lan_1gbit(nodes=8)' \\
      --x bandwidth --y slowest_node
  orchestra map examples/quickstart.yaml --cluster 'lan_1gbit(nodes=4)' \\
      --x 'bandwidth=10 Mbit/s..10 Gbit/s' --y nodes=2,4,8,16 --points 6 --minutes 5
"""


def map_() -> Parser:
    parser = planning_parser("map", MAP, MAP_EPILOG, "that varies", MAP_MINUTES)
    parser.option("--x", "KEY[=VALUES]", "what varies from left to right", required=True)
    parser.option("--y", "KEY[=VALUES]", "what varies upwards", required=True)
    points = f"values of a side that has a range (default: {POINTS})"
    parser.option("--points", "N", points, type=int, default=POINTS)
    verify = "then train the first two strategies of N points on emulated nodes (Linux, as root)"
    parser.option("--verify", "N", verify, type=int, default=0)
    return parser


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
    parser.option("--minutes", "M", limit, type=amount("minutes", "3, or 0.5"), default=minutes)
    seeds = "of the runs that decide (default: the file's, else 0,1,2)"
    parser.option("--seeds", "N[,N...]", seeds, type=numbers)
    changes = "change any setting of the experiment: epochs=5, optimizer.lr=0.1; repeatable"
    parser.option("--set", "KEY=VALUE", changes, action="append", default=[])
    out = f"the {command}'s folder (default: a new one in runs/)"
    parser.option("--out", "DIR", out, type=Path)
    return parser
