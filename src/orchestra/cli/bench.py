"""`orchestra bench`: speed on this machine, as ratios to peers measured in the same run."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra.cli.arguments import Parser
from orchestra.errors import InputError, nearest

if TYPE_CHECKING:
    from orchestra.bench.turns import Progress

HELP = """\
usage: orchestra bench BENCHMARK [ARGUMENT ...]

Measure speed on this machine. Every figure comes with that of a peer, measured in turn in the
same run, and with their ratio: only the ratio means something on another machine.

benchmarks:
  step        a step of AllReduce beside torch's DistributedDataParallel, and beside one process
  server      pushes and pulls of an asynchronous ParameterServer beside gloo's send and receive;
              with --suspend the pace of its workers while one of them is suspended
  fidelity    how well a simulation predicts: step times, bytes, staleness and parameters of every
              family of strategies, beside the same runs on processes
  simulation  a simulated training with real gradients beside the plain steps that it consists of;
              and how long simulations of time alone take, with 1,024 workers

  orchestra bench BENCHMARK --help says more about each.

examples:
  orchestra bench step --ranks 2 --model lenet
      half a minute: a small model on two processes

  orchestra bench server --suspend --json suspend.json
      the figures as a table, and with the machine's description as JSON
"""

STEP = """\
Time a step of AllReduce and of DistributedDataParallel at several bucket sizes, in turn, in the
same processes; and of one process with all cores and the batch of all ranks.
"""

SERVER = """\
Count the pushes and pulls a second of an asynchronous ParameterServer with a model of 4 MB and
1 to 3 workers, and of the same messages by gloo's send and receive, in turn, in the same
processes.

With --suspend: four workers and a dedicated server. Count the steps a second of three workers
while the fourth runs, and while it is stopped by SIGSTOP.
"""

FIDELITY = """\
Calibrate with one worker and a link between two; predict the step time, bytes, staleness and final
parameters of many strategies on 2 to 4 ranks by simulating one_host with this machine's cores; then
run the same on processes, in turn, and print how far the predictions are off, beside two simpler
predictors: a closed formula with the same calibrated figures, and the step of one worker.

The machine has to be quiet: what other programs take, no prediction knows of.
"""

SIMULATION = """\
Time a simulated training of LeNet-5 under AllReduce("ring"), every worker with gradients of its
own, and after each of its steps as many plain steps of one model in a loop, in the same process.

Then simulate time alone (tensors: shapes): 1,024 workers, 100 steps, 100 million parameters, under
strategies of every family, each in a process of its own, of which the memory is told, too.
"""

GRADIENTS = "gradients"
"""Among the strategies of `simulation`: the training with gradients."""

BENCHMARKS = {
    "step": "_step",
    "server": "_server",
    "fidelity": "_fidelity",
    "simulation": "_simulation",
}


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark, and print its figures."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    name, *rest = arguments
    if name not in BENCHMARKS:
        raise InputError(f"unknown benchmark {name!r}; {nearest(name, BENCHMARKS)}")
    status: int = globals()[BENCHMARKS[name]](rest)
    return status


def _step(arguments: Sequence[str]) -> int:
    parser = _parser("step", STEP, rounds="7")
    parser.add_argument(
        "--ranks", default="2,4", metavar="N,...", help="numbers of processes (default: 2,4)"
    )
    parser.add_argument(
        "--model", default="all", metavar="NAME", help="lenet, mlp25m or all (default: all)"
    )
    options = _read(parser, arguments)
    ranks = _numbers(options.ranks)
    from orchestra.bench.models import subjects_named
    from orchestra.bench.step import bench_step
    from orchestra.cli.bench_tables import print_steps

    subjects = subjects_named(options.model)
    with progress_line() as tell:
        rows = bench_step(ranks, options.rounds or 7, subjects, tell)
    print_steps(rows)
    _write(options.json, "step", rows)
    return 0


def _server(arguments: Sequence[str]) -> int:
    parser = _parser("server", SERVER, rounds="7; with --suspend 5")
    parser.add_argument(
        "--suspend", action="store_true", help="the pace of three workers while one is suspended"
    )
    options = _read(parser, arguments)
    return _suspend(options) if options.suspend else _rates(options)


def _rates(options: Namespace) -> int:
    from orchestra.bench.server import bench_server
    from orchestra.cli.bench_tables import print_rates

    with progress_line() as tell:
        rows = bench_server(rounds=options.rounds or 7, on_progress=tell)
    print_rates(rows)
    _write(options.json, "server", rows)
    return 0


def _suspend(options: Namespace) -> int:
    from orchestra.bench.suspend import bench_suspend
    from orchestra.cli.bench_tables import print_paces

    with progress_line() as tell:
        rows = bench_suspend(options.rounds or 5, on_progress=tell)
    print_paces(rows)
    _write(options.json, "server --suspend", rows)
    return 0


def _fidelity(arguments: Sequence[str]) -> int:
    parser = _parser("fidelity", FIDELITY, rounds="3")
    parser.add_argument("--ranks", metavar="N,...", help="in place of each task's own numbers")
    parser.add_argument("--strategies", metavar="LABEL,...", help="some of those that it prints")
    parser.add_argument("--tasks", metavar="NAME,...", help="some of cnn, lenet and mlp")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="of orchestra calibrate; measures no more"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to a file")
    options = _read(parser, arguments)
    ranks = _numbers(options.ranks) if options.ranks is not None else None
    from orchestra.bench.fidelity import bench_fidelity
    from orchestra.bench.fidelity.cases import cases, tasks_named
    from orchestra.bench.fidelity.markdown import markdown

    tasks = tasks_named(_words(options.tasks))
    chosen = cases(_words(options.strategies), tasks, ranks)
    with progress_line() as tell:
        result = bench_fidelity(
            chosen, tasks, options.rounds or 3, calibration=options.calibration, on_progress=tell
        )
    text = markdown(result)
    print(text, end="")
    if options.markdown is not None:
        options.markdown.write_text(text)
    _write(options.json, "fidelity", result.rows)
    return 0


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",")]


def _simulation(arguments: Sequence[str]) -> int:
    parser = _parser("simulation", SIMULATION, rounds="40")
    parser.add_argument(
        "--ranks", default="64", metavar="N,...", help="workers with gradients (default: 64)"
    )
    parser.add_argument(
        "--strategies",
        metavar="LABEL,...",
        help="some of those that it prints; gradients: the first table",
    )
    parser.add_argument(
        "--workers", type=int, default=1024, metavar="N", help="without gradients (default: 1024)"
    )
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS",
        help="for each simulation of time alone (default: 600)",
    )  # fmt: skip
    options = _read(parser, arguments)
    ranks, words = _numbers(options.ranks), _words(options.strategies)
    if options.workers < 32:
        raise InputError(f"--workers: {options.workers} is below 32: some strategies need as many")
    if not options.limit > 0:
        raise InputError(f"--limit: {options.limit:g} seconds leave no time; give more")
    from orchestra.bench.scale import Scale, bench_scale, labels_named
    from orchestra.bench.simulation import ROUNDS, bench_simulation
    from orchestra.cli.bench_tables import print_scales, print_simulations

    gradients = words is None or GRADIENTS in words
    labels = labels_named(None if words is None else [w for w in words if w != GRADIENTS])
    rows: list[Any] = []
    with progress_line() as tell:
        if gradients:
            rows += bench_simulation(ranks, options.rounds or ROUNDS, tell)
    if gradients:
        print_simulations(rows)
    scales: list[Any] = []
    try:
        with progress_line() as tell:
            for row in bench_scale(labels, Scale(options.workers), options.limit, tell):
                scales.append(row)
    finally:  # those that were finished, if the user has stopped it
        if scales:
            print_scales(scales, options.limit)
        if rows + scales:
            _write(options.json, "simulation", rows + scales)
    return 0


def _parser(name: str, description: str, *, rounds: str) -> Parser:
    parser = Parser(f"bench {name}", description)
    parser.add_argument(
        "--rounds", type=int, metavar="N", help=f"how often all take turns (default: {rounds})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a new file")
    return parser


def _read(parser: Parser, arguments: Sequence[str]) -> Namespace:
    """The options, checked before minutes are spent."""
    options = parser.read(arguments)
    if options.rounds is not None and options.rounds < 1:
        raise InputError(f"--rounds: {options.rounds} is below 1")
    if options.json is not None and options.json.exists():
        raise InputError(f"--json: {options.json} exists; name a new file")
    if options.json is not None and not options.json.parent.is_dir():
        raise InputError(f"--json: there is no folder {options.json.parent}; make it first")
    return options


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--ranks: {text!r} is not a list of numbers such as 2,4") from None
    if min(numbers) < 2:
        raise InputError(f"--ranks: {min(numbers)} is below 2: nothing would be exchanged")
    return numbers


def _write(path: Path | None, name: str, rows: Sequence[Any]) -> None:
    if path is None:
        return
    from orchestra.records.environment import environment

    document = {
        "benchmark": name,
        "environment": environment(),
        "rows": [asdict(row) for row in rows],
    }
    try:
        path.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"--json: {path} cannot be written: {error.strerror}") from None


@contextmanager
def progress_line() -> Iterator[Progress]:
    """What shows progress on standard error: a bar on a terminal, elsewhere a line now and then."""
    if not sys.stderr.isatty():
        from orchestra.engines.processes.display import Lines

        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task("starting", total=1.0)

        def tell(what: str, part: float) -> None:
            line.update(task, description=what, completed=part)

        yield tell
