"""`orchestra replay`: a recorded run once more, to the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestra.cli.arguments import Parser

DESCRIPTION = """\
Repeat a run that was made with --record-order, in virtual time, in one process: every message that
a receive from any source took comes from the same rank again, so that an asynchronous training
goes the same way and ends with the same parameters, bit for bit. What was recorded holds no
parameter and no gradient: they are computed again.

With --until the state of each worker after so many steps of its own is written, and that of the
servers when the last worker is there: parameters, gradient, optimizer, random streams.

Exit status: 0 the parameters are those of the run (or it was stopped where you said), 1 they are
not, 2 bad input.
"""

EPILOG = """\
examples:
  orchestra train experiment.yaml --record-order --out runs/recorded
  orchestra replay runs/recorded
  orchestra replay runs/recorded --until 40 --out runs/step-40

  in Python: states = orchestra.replay("runs/recorded", until=40).states
      states[2]["parameters"] is the flat vector of rank 2
"""


def main(arguments: Sequence[str]) -> int:
    """Replay as the command line says."""
    parser = Parser("replay", DESCRIPTION, EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a recorded run")
    parser.add_argument("--until", type=int, metavar="STEP", help="stop each worker there")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder")
    options = parser.read(arguments)
    from orchestra.experiments.replay import replay

    done = replay(options.run, options.until, out=options.out)
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
