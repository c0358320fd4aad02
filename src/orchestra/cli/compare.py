"""`orchestra compare`: every strategy of an experiment, side by side."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from orchestra.cli.arguments import Parser, numbers
from orchestra.cli.train import check_task
from orchestra.engines.processes.environment import detect
from orchestra.errors import InputError
from orchestra.experiments import Entry, load

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
    """Compare as the command line says; 0 if all runs were completed."""
    return _compare(_parser("compare", DESCRIPTION, EPILOG).read(arguments))


def simulate(arguments: Sequence[str]) -> int:
    """The same in virtual time."""
    options = _parser("simulate", SIMULATE, SIMULATE_EPILOG).read(arguments)
    if options.engine == "processes":
        raise InputError("orchestra simulate has one engine; for processes: orchestra compare")
    options.engine = "simulation"
    return _compare(options)


def _compare(options: Namespace) -> int:
    _require_no_launcher()
    experiment = load(options.experiment, options.set, _given(options))
    check_task(experiment.task)
    from orchestra.experiments.comparison import carry_out

    comparison = carry_out(
        experiment,
        options.out,
        retry=options.retry,
        report=options.report,
        baseline=options.baseline,
    )
    from orchestra.cli.comparison_table import print_comparison

    print_comparison(comparison, options.baseline)
    return 0 if comparison.well else 1


def _parser(command: str, description: str, epilog: str) -> Parser:
    parser = Parser(command, description, epilog)
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT", help="a YAML file")
    parser.add_argument(
        "--ranks",
        type=numbers,
        metavar="N[,N...]",
        help="processes, servers included; 1,2,4,...,256 stands for all powers of two between",
    )
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, nargs="+", dest="seeds", metavar="N", help="seeds")
    seeds.add_argument("--seeds", type=numbers, metavar="N[,N...]", help="the same")
    parser.add_run_options(
        out="the comparison's folder (default: a new one in runs/); one of the same goes on"
    )
    parser.add_argument(
        "--baseline", metavar="LABEL", help="the strategy that the report's differences refer to"
    )
    parser.add_argument("--retry", action="store_true", help="make failed runs again")
    parser.add_argument(
        "--no-report", action="store_false", dest="report", help="write no report.html"
    )
    return parser


def _given(options: Namespace) -> dict[str, Entry]:
    """What options say in place of the file."""
    given = {"ranks": options.ranks, "seeds": options.seeds}
    entries = {key: Entry(value, f"--{key}") for key, value in given.items() if value is not None}
    return Parser.run_settings(options) | entries


def _require_no_launcher() -> None:
    launched = detect(os.environ)
    if launched is not None and launched.ranks > 1:
        raise InputError(
            f"orchestra compare starts the processes of its runs itself: call it without "
            f"{launched.launcher}, or train one strategy with orchestra train"
        )
