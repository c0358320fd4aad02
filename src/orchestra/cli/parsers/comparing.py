"""The parsers of `orchestra compare`, `simulate` and `report`."""

from __future__ import annotations

from pathlib import Path

from orchestra.cli.numbers import amount, numbers
from orchestra.cli.parser import Parser

COMPARE = """\
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

COMPARE_EPILOG = """\
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


SEARCH_SECONDS = 30.0

ON_HOSTS = (
    "it runs on this machine; on several hosts write orchestra train FILE --hosts A,B --strategy "
    "NAME --out DIR for each strategy, with a DIR of its own, then orchestra report DIR DIR"
)
OF_HOSTS = (
    "it runs on this machine; for a simulation of hosts write orchestra doctor --hosts A,B --out "
    "machines.yaml, then --cluster machines.yaml"
)
"""For users who give these commands the hosts of `orchestra train`."""


def compare() -> Parser:
    return _comparing("compare", COMPARE, COMPARE_EPILOG, ON_HOSTS)


def simulate() -> Parser:
    return _comparing("simulate", SIMULATE, SIMULATE_EPILOG, OF_HOSTS)


def _comparing(command: str, description: str, epilog: str, hosts: str) -> Parser:
    elsewhere = dict.fromkeys(("--hosts", "--host"), hosts)
    parser = Parser(command, description, epilog, elsewhere=elsewhere)
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
    search += f"it begins to pay; 0: do not (default: {SEARCH_SECONDS:g})"
    parser.option(
        "--search-seconds", "S", search, type=amount("seconds", "20"), default=SEARCH_SECONDS
    )
    parser.flag("--retry", "make failed runs again")
    parser.flag("--no-report", "write no report.html", action="store_false", dest="report")
    return parser


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


def report() -> Parser:
    parser = Parser("report", REPORT, REPORT_EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder")
    out_folder = "where to (default: the folder itself if there is one, else report)"
    parser.option("--out", "DIR", out_folder, type=Path)
    baseline = "the row that differences refer to, or its folder's name (default: one process with "
    baseline += "all cores)"
    parser.option("--baseline", "LABEL", baseline)
    parser.flag("--csv", "write the table as table.csv, too")
    parser.flag("--latex", "write it as table.tex, for booktabs")
    return parser
