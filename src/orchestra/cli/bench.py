"""`orchestra bench`: speed on this machine, as ratios to peers measured in the same run."""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich import progress
from rich.console import Console
from rich.table import Table

from orchestra.cli.arguments import Parser, choose, counts
from orchestra.errors import InputError, nearest

if TYPE_CHECKING:
    from orchestra.bench.step import StepRow
    from orchestra.bench.timing import Progress

T = TypeVar("T")

HELP = """\
usage: orchestra bench BENCHMARK [ARGUMENT ...]

Measure speed on this machine. Every figure comes with that of a peer, measured in turn in the
same run, and with their ratio: only the ratio means something on another machine.

benchmarks:
  step        a step of AllReduce beside torch's DistributedDataParallel, and beside one process
  fidelity    how well a simulation predicts: step times, bytes, staleness and parameters of every
              family of strategies, beside the same runs on processes

  orchestra bench BENCHMARK --help says more about each.

examples:
  orchestra bench step --ranks 2 --model lenet
      half a minute: a small model on two processes

  orchestra bench step --json step.json
      the figures as a table, and with the machine's description as JSON
"""

STEP = """\
Time a step of AllReduce and of DistributedDataParallel at several bucket sizes, in turn, in the
same processes; and of one process with all cores and the batch of all ranks.
"""

FIDELITY = """\
Calibrate with one worker and a link between two; predict the step time, bytes, staleness and final
parameters of many strategies on 2 to 4 ranks by simulating one_host with this machine's cores; then
run the same on processes, in turn, and print how far the predictions are off, beside two simpler
predictors: a closed formula with the same calibrated figures, and the step of one worker.

The machine has to be quiet: what other programs take, no prediction knows of.
"""


def main(arguments: Sequence[str]) -> int:
    return choose(arguments, {"step": _step, "fidelity": _fidelity}, HELP, "unknown benchmark {!r}")


def _step(arguments: Sequence[str]) -> int:
    parser = bench_parser("orchestra bench step", STEP, rounds=7)
    parser.option("--ranks", "N,...", "numbers of processes (default: 2,4)", default="2,4")
    parser.option("--model", "NAME", "lenet, mlp25m or all (default: all)", default="all")
    options = read_options(parser, arguments)
    ranks = rank_counts(options.ranks)
    from orchestra.bench.step import SUBJECTS, bench_step

    model = None if options.model == "all" else options.model
    subjects = listed("--model", model, SUBJECTS)
    with progress_line() as tell:
        rows = bench_step(ranks, options.rounds, list(subjects.values()), tell)
    _print_steps(rows)
    write_figures(options.json, "step", rows)
    return 0


def _fidelity(arguments: Sequence[str]) -> int:
    parser = bench_parser("orchestra bench fidelity", FIDELITY, rounds=4)
    parser.option("--ranks", "N,...", "in place of each task's own numbers")
    parser.option("--strategies", "LABEL,...", "some of those that it prints")
    parser.option("--tasks", "NAME,...", "some of cnn, lenet and mlp")
    parser.option("--calibration", "FILE", "of orchestra calibrate; measures no more", type=Path)
    parser.option(
        "--engine",
        "NAME",
        "processes of this machine, or an emulation of clusters (default: processes)",
        choices=("processes", "emulation"),
        default="processes",
    )
    parser.option("--clusters", "FILE,...", "emulated in place of four of its own, a rank a node")
    parser.option("--markdown", "FILE", "write the tables to a file", type=Path)
    options = read_options(parser, arguments)
    ranks = rank_counts(options.ranks) if options.ranks is not None else None
    from orchestra.bench.cases import STRATEGIES, TASKS, cases, write_clusters
    from orchestra.bench.fidelity import bench_fidelity
    from orchestra.bench.verdicts import markdown

    tasks = listed("--tasks", options.tasks, TASKS).values()
    if options.clusters is not None and options.engine == "processes":
        raise InputError("--clusters: they are emulated: add --engine emulation")
    strategies = listed("--strategies", options.strategies, STRATEGIES)
    with tempfile.TemporaryDirectory(prefix="orchestra-clusters-") as folder:
        clusters: list[Path | None] = [None]
        if options.clusters is not None:
            clusters = [Path(name.strip()) for name in options.clusters.split(",")]
        elif options.engine == "emulation":
            clusters = [*write_clusters(Path(folder)).values()]
        chosen = cases(strategies, tasks, ranks, clusters)
        with progress_line() as tell:
            rows, calibration = bench_fidelity(
                chosen, options.rounds, calibration=options.calibration, on_progress=tell
            )
    text = markdown(rows, calibration)
    print(text, end="")
    if options.markdown is not None:
        options.markdown.write_text(text)
    write_figures(options.json, "fidelity", rows)
    # Ctrl-C ends the measurement, and what was measured is printed; 130 is a shell's status for it.
    if len(rows) < len(chosen):
        print(f"orchestra: stopped after {len(rows)} of {len(chosen)} rows", file=sys.stderr)
        return 130
    return 0


def listed(option: str, text: str | None, known: Mapping[str, T]) -> dict[str, T]:
    """Return those of `known` that `text`, the value of `option`, names (ring,server); None: all.

    Raises:
        InputError: an unknown name.
    """
    names = list(known) if text is None else [word.strip() for word in text.split(",")]
    for name in names:
        if name not in known:
            raise InputError(f"{option}: unknown {name!r}; {nearest(name, known)}")
    return {name: known[name] for name in names}


def bench_parser(program: str, description: str, *, rounds: int | None = None) -> Parser:
    """Return a parser with the options of every benchmark; `rounds` is the default."""
    parser = Parser("bench", description)
    parser.prog = program
    if rounds is not None:
        meaning = f"how often all take turns (default: {rounds})"
        parser.option("--rounds", "N", meaning, type=int, default=rounds)
    parser.option("--json", "FILE", "write the figures to a new file", type=Path)
    return parser


def read_options(parser: Parser, arguments: Sequence[str]) -> Namespace:
    """Return the options, checked before minutes are spent."""
    options = parser.read(arguments)
    if getattr(options, "rounds", 1) < 1:
        raise InputError(f"--rounds: {options.rounds} is below 1")
    if options.json is not None and options.json.exists():
        raise InputError(f"--json: {options.json} exists; name a new file")
    if options.json is not None and not options.json.parent.is_dir():
        raise InputError(f"--json: there is no folder {options.json.parent}; make it first")
    return options


def rank_counts(text: str) -> list[int]:
    """Return numbers of ranks, such as 2,4; each at least 2."""
    return counts("--ranks", text, low=2, why=": nothing would be exchanged")


def write_figures(path: Path | None, name: str, rows: Sequence[Any]) -> None:
    """Write the rows (dataclasses) and a description of the machine as JSON, if a path is given."""
    if path is None:
        return
    from orchestra.records.record import environment

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
    """Show progress on standard error: a bar on a terminal, elsewhere a line now and then."""
    if not sys.stderr.isatty():
        from orchestra.engines.live import Lines

        yield Lines()
        return
    text, bar = progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=24)
    columns = (text, bar, progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task("starting", total=1.0)

        def tell(what: str, part: float) -> None:
            line.update(task, description=what, completed=part)

        yield tell


def _print_steps(rows: Iterable[StepRow]) -> None:
    for (model, ranks), group in groupby(rows, lambda row: (row.model, row.ranks)):
        lines = [
            (
                row.contestant,
                f"{row.step_seconds * 1e3:.2f}",
                f"{row.samples_per_second:,.0f}",
                f"{row.ratio:.2f}" + " (best)" * row.best_peer,
            )
            for row in group
        ]
        headings = ("", "ms a step", "samples/s", "step / best DDP's")
        print_table(f"{model}, {ranks} ranks", headings, lines)
    print_remarks("Ratios below 1: faster than DistributedDataParallel at its best bucket size.")


def print_table(title: str, headings: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print a table; its first column is of names, the others of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    # Without markup: names such as AllReduce[...] have brackets.
    console = Console(highlight=False, markup=False)
    console.print(title, style="bold", soft_wrap=True)
    console.print(table, end="\n\n")


def print_remarks(text: str) -> None:
    """Print a sentence below a table, and which machine the figures are of."""
    from orchestra.records.record import environment

    about = environment()
    machine = f"{about['cores']} cores, {about['processor']}, torch {about['packages']['torch']}"
    print(f"{text}\n{machine}.")
