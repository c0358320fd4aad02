"""`orchestra report` and `orchestra replay`: what is done with past runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestra.cli.arguments import Parser

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
    """Report as the command line says."""
    parser = Parser("report", REPORT, REPORT_EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to (default: the folder itself if there is one, else report)",
    )
    parser.add_argument(
        "--baseline",
        metavar="LABEL",
        help="the row that differences refer to (default: one process with all cores)",
    )
    parser.add_argument("--csv", action="store_true", help="write the table as table.csv, too")
    parser.add_argument("--latex", action="store_true", help="write it as table.tex, for booktabs")
    options = parser.read(arguments)
    folders: list[Path] = options.runs
    out: Path = options.out or (folders[0] if len(folders) == 1 else Path("report"))
    from orchestra.report.page import TABLES, write_report

    kinds = [kind for kind in TABLES if getattr(options, kind)]
    print(write_report(folders, out, options.baseline, kinds))
    for kind in kinds:
        print(out / TABLES[kind][0])
    return 0


REPLAY = """\
Repeat a run that was made with --record-order, in virtual time, in one process: every message that
a receive from any source took comes from the same rank again, so that an asynchronous training
goes the same way and ends with the same parameters, bit for bit. What was recorded holds no
parameter and no gradient: they are computed again.

With --until the state of each worker after so many steps of its own is written, and that of the
servers when the last worker is there: parameters, gradient, optimizer, random streams.

Exit status: 0 the parameters are those of the run (or it was stopped where you said), 1 they are
not, 2 bad input.
"""

REPLAY_EPILOG = """\
examples:
  orchestra train experiment.yaml --record-order --out runs/recorded
  orchestra replay runs/recorded
  orchestra replay runs/recorded --until 40 --out runs/step-40

  in Python: states = orchestra.replay("runs/recorded", until=40).states
      states[2]["parameters"] is the flat vector of rank 2
"""


def replay(arguments: Sequence[str]) -> int:
    """Replay as the command line says."""
    parser = Parser("replay", REPLAY, REPLAY_EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a recorded run")
    parser.add_argument("--until", type=int, metavar="STEP", help="stop each worker there")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder")
    options = parser.read(arguments)
    from orchestra.experiments.api import replay as repeat

    done = repeat(options.run, options.until, out=options.out)
    steps = ", ".join(f"rank {rank}: {count}" for rank, count in done.steps.items())
    print(f"steps done: {steps}")
    if done.states:
        print(f"the state of every rank: {done.folder}")
        return 0
    if options.until is not None:
        print(f"the run ended before step {options.until} of every worker")
    if done.equal is None:
        print("the run has no final parameters to compare with")
        return 0
    print("the parameters are those of the run, bit for bit" if done.equal else
          "the parameters differ from those of the run")  # fmt: skip
    return 0 if done.equal else 1
