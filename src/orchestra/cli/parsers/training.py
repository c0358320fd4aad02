"""The parsers of `orchestra train`, `join` and `replay`."""

from __future__ import annotations

from pathlib import Path

from orchestra.cli.parser import Parser

TRAIN = """\
Train one task under one strategy, and write the record of the run into a folder.

The experiment is a YAML file, or - for standard input; its keys are those of `orchestra list
experiment`. It may be left out where --task and --strategy are given.

With --hosts the ranks run on other machines, and this command shows what they print. The first
host has rank 0 and the record. Checked first, on each host: ssh, the versions of Orchestra and
torch, the clock, the files of your own modules in the same folder, and a port of each other host.
"""

TRAIN_EPILOG = """\
examples:
  orchestra train --task digits --strategy 'ParameterServer(consistency="asynchronous")'
  orchestra train --task my_package.tasks:speech --strategy Single --set batch_size=64
  orchestra train experiment.yaml --strategy ring
  orchestra train experiment.yaml --engine simulation --cluster 'lan_1gbit(nodes=16)' --ranks 16
  orchestra train experiment.yaml --set strategies.ring.algorithm=parallel --out runs/parallel
  orchestra train experiment.yaml --strategy ring --hosts a,b:2,c --out runs/hosts
"""


def train() -> Parser:
    parser = Parser("train", TRAIN, TRAIN_EPILOG)
    parser.add_argument("experiment", nargs="?", type=Path, metavar="EXPERIMENT")
    parser.option("--task", "TASK", "digits, or package.module:function")
    strategy = "one of the file's, by its label, or another: 'AllReduce(\"ring\")'"
    parser.option("--strategy", "STRATEGY", strategy)
    parser.option("--ranks", "N", "processes, servers included", type=int)
    parser.option("--seed", "N", "in place of the file's first one", type=int)
    out = (
        "the record's folder (default: a new one in runs/); one of the same run is resumed, also "
        "with another --ranks"
    )
    parser.add_run_options(out)
    restarts = "restart a run that lost a rank, from its newest checkpoint (default: 0 times)"
    parser.option("--max-restarts", "N", restarts, type=int, default=0)
    status = "exit status of a run that SIGTERM has stopped (default: 0); 143 makes Kubernetes "
    status += "start its pods again"
    parser.option("--stopped-status", "N", status, type=int, default=0)
    hosts = "start the ranks on these hosts by ssh, such as a,b:2 (two on b); localhost needs none"
    parser.option("--hosts", "HOST[:N],...", hosts)
    python = "of the hosts (default: the path of the one here)"
    parser.option("--remote-python", "PATH", python)
    return parser


JOIN = """\
Join a run under way, as one rank more, or as one in the place of a rank that is lost.

The run has been started by `orchestra train` with min_ranks. This process loads the same task, gets
ready, and tells the run. Then all ranks go on with one rank more, from a state that they can have
together. That is the last step or average, or a checkpoint for which they come to rest. Ctrl-C or
SIGTERM leaves the run, which goes on.

RUN is the folder of the run, if this machine has it. Elsewhere it is the address that its join.json
names, with a copy of that file as --secret. Every holder of that file can join. For other machines
the run has to listen on an address that they reach: ORCHESTRA_HOST=ADDRESS orchestra train ...
"""

JOIN_EPILOG = """\
examples:
  orchestra join runs/first
      one rank more for the run with that folder

  orchestra join runs/first --spare
      a rank that is ready, and is taken in once another one is lost

  orchestra join 10.0.0.1:40123 --secret join.json
      from another machine; records of this rank go into a new folder in runs/

docs/how-to/failures.md says which runs can be joined, and what it costs them.
"""


def join() -> Parser:
    parser = Parser("join", JOIN, JOIN_EPILOG)
    parser.add_argument("run", metavar="RUN", help="the run's folder, or HOST:PORT")
    parser.option("--secret", "FILE", "a copy of the run's join.json, with HOST:PORT", type=Path)
    out = "for this rank's records, if the run's folder is not here (default: a new one in runs/)"
    parser.option("--out", "DIR", out, type=Path)
    parser.flag("--spare", "wait until a rank is lost, and take its place")
    return parser


REPLAY = """\
Repeat a run that was made with --record-order, in virtual time, in one process. Every message that
a receive from any source took comes from the same rank again. So an asynchronous training takes the
same course, and ends with the same parameters, bit for bit. The recording holds no parameter and no
gradient: they are computed again.

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


def replay() -> Parser:
    parser = Parser("replay", REPLAY, REPLAY_EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a recorded run")
    parser.option("--until", "STEP", "stop each worker there", type=int)
    parser.option("--out", "DIR", "a new folder", type=Path)
    return parser
