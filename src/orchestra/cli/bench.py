"""`orchestra bench` and `orchestra calibrate`: speed on this machine, as ratios to peers measured
in the same run; and what a simulation needs to know of it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from orchestra.cli.terminal import Parser, choose, counts, print_table, progress_line
from orchestra.cluster.calibration import Calibration, Curve, TaskCosts, read_calibration
from orchestra.engines.processes.environment import detect
from orchestra.engines.processes.system import now
from orchestra.engines.simulation.costs import own_calibration
from orchestra.errors import InputError, RunFailed, nearest
from orchestra.experiments.file import load
from orchestra.optimizers.settings import Optimizer
from orchestra.records.record import environment, write_atomically
from orchestra.tasks import task_text

if TYPE_CHECKING:
    from orchestra.bench.calibrate import Workload
    from orchestra.bench.step import StepRow

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

  orchestra bench step --rounds 60 --model gpt --json step.json
      60 pairs for a narrow interval; the figures also as JSON, with the machine's description
"""

STEP = """\
Time a step of AllReduce beside DistributedDataParallel (DDP), and of one process with all cores and
the batch of all ranks beside it, in pairs of blocks, in turn, in the same processes.

DDP has the bucket size that is fastest here, of 1, 5, 25 and 100 MB. It is chosen in rounds of its
own, which nobody is judged by. Sizes that cut a model's gradient in the same way run once.

Each ratio is the median over the pairs, with a 95 % interval in brackets: the sign-based interval
of a median, from the k-th smallest ratio of all pairs to the k-th largest one. It assumes nothing
of how times are distributed, draws nothing at random, and takes 6 pairs at least.
"""

FIDELITY = """\
Calibrate with one worker and a link between two; predict the step time, bytes, staleness and final
parameters of many strategies on 2 to 4 ranks by simulating one_host with this machine's cores; then
run the same on processes, in turn, and print how far the predictions are off, beside two simpler
predictors: a closed formula with the same calibrated figures, and the step of one worker.

The machine has to be quiet: what other programs take, no prediction knows of.
"""


def bench(arguments: Sequence[str]) -> int:
    return choose(arguments, {"step": _step, "fidelity": _fidelity}, HELP, "unknown benchmark {!r}")


def _step(arguments: Sequence[str]) -> int:
    parser = bench_parser("orchestra bench step", STEP, rounds=12, rounds_of="pairs of blocks")
    parser.option("--ranks", "N,...", "numbers of processes (default: 2,4)", default="2,4")
    parser.option(
        "--model", "NAME", "lenet, mlp25m, resnet20, gpt or all (default: all)", default="all"
    )
    options = read_options(parser, arguments)
    ranks = rank_counts(options.ranks)
    from orchestra.bench.step import SUBJECTS, bench_step

    model = None if options.model == "all" else options.model
    subjects = listed("--model", model, SUBJECTS)
    rows: list[StepRow] = []
    try:
        with progress_line() as tell:
            for row in bench_step(ranks, options.rounds, list(subjects.values()), tell):
                rows.append(row)
    finally:
        # Also what was measured before Ctrl-C
        if rows:
            _print_steps(rows)
            write_figures(options.json, "step", rows)
    return 0


def _fidelity(arguments: Sequence[str]) -> int:
    parser = bench_parser("orchestra bench fidelity", FIDELITY, rounds=4)
    parser.option("--ranks", "N,...", "in place of each task's own numbers")
    parser.option("--strategies", "LABEL,...", "some of those that it prints")
    parser.option("--tasks", "NAME,...", "some of cnn, lenet and mlp")
    parser.option("--calibration", "FILE", "of orchestra calibrate; measures no more", type=Path)
    engine = "processes of this machine, or an emulation of clusters (default: processes)"
    engines = {"choices": ("processes", "emulation"), "default": "processes"}
    parser.option("--engine", "NAME", engine, **engines)
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


def bench_parser(
    program: str, description: str, *, rounds: int | None = None, rounds_of: str = ""
) -> Parser:
    """Return a parser with the options of every benchmark; `rounds` is the default."""
    parser = Parser("bench", description)
    parser.prog = program
    if rounds is not None:
        meaning = f"{rounds_of or 'how often all take turns'} (default: {rounds})"
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
    rows = [asdict(row) for row in rows]
    document = {"benchmark": name, "environment": environment(), "rows": rows}
    try:
        path.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"--json: {path} cannot be written: {error.strerror}") from None


def _print_steps(rows: Iterable[StepRow]) -> None:
    headings = ("", "ms a step", "samples/s", "step / DDP's", "processor / DDP's")
    for (model, ranks), group in groupby(rows, lambda row: (row.model, row.ranks)):
        lines = []
        for row in group:
            figures = f"{row.step_seconds * 1e3:.2f}", f"{row.samples_per_second:,.0f}"
            ratios = (str(ratio or "") for ratio in (row.ratio, row.processor_ratio))
            lines.append((row.contestant, *figures, *ratios))
        print_table(f"{model}, {ranks} ranks", headings, lines)
    print_remarks(
        "Ratios below 1: faster than DistributedDataParallel at its best bucket size; in brackets "
        "the 95 % interval. Processor: the time of all ranks together."
    )


def print_remarks(text: str) -> None:
    """Print a sentence below a table, and which machine the figures are of."""
    about = environment()
    machine = f"{about['cores']} cores, {about['processor']}, torch {about['packages']['torch']}"
    print(f"{text}\n{machine}.")


CALIBRATE = """\
Measure what a simulation needs to know of this machine: seconds of a gradient of a task, with
1, 2, 4 threads and so on up to all cores, and when in it each tensor's gradient is ready; of the
optimizer's update and of the rest of a step; of copying and adding; of a message between two
processes, at both ends; and how much slower a core is while all of them compute.

The figures go into a file that reads well. From then on `orchestra simulate`, on this machine,
goes by them for the tasks in the file, and says so in its records ("costs"). Calibrating another
task adds it; the rest is measured anew.

It ends within 120 s (--limit), or some seconds more where even starting and ending Python takes
them, and sooner on a quiet machine with a small model. Let the machine do nothing else meanwhile.
What other programs disturb is measured again while there is time. If they still took more than
10 % of the processor time from a measurement, or repeats differ by more than 30 %, nothing is kept.

Exit status: 0 kept, 1 not kept, 2 bad input.
"""

CALIBRATE_EPILOG = """\
examples:
  orchestra calibrate examples/quickstart.yaml
      the task, batch, optimizer and precision of an experiment

  orchestra calibrate --task 'digits(channels=8)' --optimizer 'Adam(lr=0.01)' --batch-size 8,64
      without a file

  orchestra calibrate experiment.yaml --out laptop.json
  orchestra simulate experiment.yaml --set calibration=laptop.json --cluster 'lan_1gbit(nodes=8)'
      a cluster of eight such laptops, simulated anywhere

  torchrun --nnodes 4 ... -m orchestra calibrate --links
      what a message takes between each two ranks, and the order of a ring over them
"""

TASK, OPTIMIZER, BATCH = "digits()", "SGD(lr=0.1)", (32,)


def calibrate(arguments: Sequence[str]) -> int:
    began = now()
    options = _calibrate_parser().read(arguments)
    if options.links:
        return _links(options)
    path: Path = options.out or own_calibration()
    before = read_calibration(path) if path.exists() else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # before minutes are spent
    except OSError as error:
        raise InputError(f"--out: {path.parent} cannot be made: {error.strerror}") from None
    subject = _subject(options)
    from orchestra.bench.calibrate import LIMIT
    from orchestra.bench.calibrate import calibrate as measure

    limit = options.limit or LIMIT
    with progress_line() as tell:
        # The limit counts from the command's beginning, the import of torch included (decision 40)
        measured = measure([subject], options.seconds, tell, limit - (now() - began))
    # Before it is refused: the user sees what was disturbed
    print_calibration(measured)
    quality = measured.quality_of(measured.tasks[0])
    # Simulations would go by them from then on (decision 40)
    if (doubts := quality.doubts) and not options.keep_anyway:
        raise RunFailed(
            f"not kept, since not to be trusted: {'; '.join(doubts)}; calibrate again when the "
            "machine is quiet, or keep it with --keep-anyway"
        )
    kept = measured.marked() if doubts else measured
    # Tasks that were calibrated on another machine, or with other versions, would not fit the rest.
    if before is not None and before.machine == measured.machine:
        kept = replace(kept, tasks=before.tasks).with_task(kept.tasks[0])
    try:
        write_atomically(path, kept.to_json())
    except OSError as error:
        raise InputError(f"--out: {path} cannot be written: {error.strerror}") from None
    print(f"quality: {quality}")
    if quality.left_out:
        print(f"left out, for there was no time: {', '.join(quality.left_out)}; see --limit")
    print(f"kept in {path}, with {len(kept.tasks)} task{'s' * (len(kept.tasks) > 1)}")
    return 0


def _calibrate_parser() -> Parser:
    parser = Parser("calibrate", CALIBRATE, CALIBRATE_EPILOG)
    parser.add_argument("experiment", nargs="?", type=Path, metavar="EXPERIMENT")
    parser.option("--task", "TASK", f"in place of the file's ({TASK})")
    parser.option("--optimizer", "CALL", f"in place of the file's ({OPTIMIZER})")
    parser.option("--batch-size", "N[,N...]", "of one worker; others around it are measured, too")
    each = "for each figure, where there is time (default: 0.5)"
    parser.option("--seconds", "S", each, type=float, default=0.5)
    limit = "for everything; what it leaves no time for is left out, and said (default: 120)"
    parser.option("--limit", "SECONDS", limit, type=float)
    parser.flag("--keep-anyway", "also figures that are not to be trusted")
    parser.option("--out", "FILE", "default: calibration.json in ~/.cache/orchestra", type=Path)
    links = "nothing but the links between ranks: those that a launcher started, or local ones"
    parser.flag("--links", links)
    parser.option("--ranks", "N", "local ranks, with --links (default: 4)", type=int, default=4)
    parser.option("--bytes", "N", "of a message, with --links", type=int, default=1_000_000)
    return parser


def _subject(options: Namespace) -> Workload:
    from orchestra.bench.calibrate import Workload

    task, optimizer, precision = TASK, None, "float32"
    sizes: tuple[int, ...] = BATCH
    if options.experiment is not None:
        experiment = load(options.experiment)
        training = experiment.training
        task, optimizer, precision = experiment.task, training.optimizer, training.precision
        # A gradient is of a whole batch, or of a micro-batch where it is accumulated.
        sizes = (training.batch_size, -(-training.batch_size // training.accumulation))
    if options.task is not None:
        task = task_text(options.task, where="--task")
    if options.optimizer is not None or optimizer is None:
        optimizer = Optimizer.parse(options.optimizer or OPTIMIZER, where="--optimizer")
    if options.batch_size is not None:
        sizes = tuple(counts("--batch-size", options.batch_size, low=1))
    for name, value in (("--seconds", options.seconds), ("--limit", options.limit)):
        if value is not None and not value > 0:
            raise InputError(f"{name}: {value} is not above 0")
    return Workload(task, optimizer, precision, sizes)


def _links(options: Namespace) -> int:
    launched = detect(os.environ)
    ranks = options.ranks if launched is None else launched.ranks
    for name, value, least in (("--ranks", ranks, 2), ("--bytes", options.bytes, 1)):
        if value < least:
            raise InputError(f"{name}: {value} is below {least}")
    from orchestra.bench.calibrate.machines import calibrate_links

    with progress_line() as tell:
        matrix = calibrate_links(ranks, options.bytes, launched, tell)
    if matrix is None:
        return 0
    from orchestra.schedules import ring_order

    order = ring_order(matrix)
    print_links(matrix, options.bytes, order)
    if options.out is not None:
        options.out.write_text(json.dumps({"seconds": matrix, "order": order}, indent=1) + "\n")
    return 0


Row = tuple[str, ...]


def print_calibration(calibration: Calibration) -> None:
    """Print the figures: medians, and how far the repeats lie apart."""
    for task in calibration.tasks:
        more = [f"{timing.threads} threads" for timing in task.timings[1:]]
        headings = ("", "amount", "1 thread", "spread", *more)
        print_table(f"a step of {', '.join(task.key)}", headings, _task_rows(task))
    messages, near = calibration.messages, calibration.near
    rows = [
        *_rows("send", "bytes", messages.send),
        *_rows("receive", "bytes", messages.receive),
        *(_rows("send in memory", "bytes", near.send) if near else ()),
        *(_rows("receive in memory", "bytes", near.receive) if near else ()),
        *_rows("to itself", "bytes", messages.local),
        ("around a message", "", _seconds(messages.handling), ""),
        ("an all-reduce itself", "", _seconds(messages.collective), ""),
    ]
    if calibration.in_memory is not None:
        costs = calibration.in_memory
        rows += [
            ("a collective in shared memory", "", _seconds(costs.collective), ""),
            ("its barriers, for each other rank", "", _seconds(costs.barrier), ""),
            ("until a rank wakes up", "", _seconds(costs.wake), ""),
            ("a pass over a vector", "1 MB", _seconds(1e6 * costs.copy), ""),
        ]
    for kind, curve in calibration.work.items():
        rows += _rows(kind, "elements", curve)
    print_table("a message, and work on float32", ("", "amount", "seconds", "spread"), rows)
    print(
        f"A thread keeps a core for {_seconds(calibration.time_slice)} if another one waits. "
        f"A send over sockets of up to {messages.buffer_bytes / 1e6:.1f} MB is over at once."
    )
    print(f"This machine as a cluster: {calibration.cluster}")


def print_links(matrix: Sequence[Sequence[float]], size: int, order: Sequence[int]) -> None:
    """Print the costs between ranks, and the order of a ring over them."""
    headings = ("us", *(f"to {rank}" for rank in range(len(matrix))))
    rows = [
        (f"from {source}", *("-" if s == source else f"{x * 1e6:.0f}" for s, x in enumerate(row)))
        for source, row in enumerate(matrix)
    ]
    print_table(f"a message of {size} bytes, one way", headings, rows)
    print(f'AllReduce("ring", order={tuple(order)})')


def _task_rows(task: TaskCosts) -> Iterable[Row]:
    for kind, unit in (("gradient", "samples"), ("update", "elements"), ("step", "samples")):
        one, *others = (getattr(timing, kind) for timing in task.timings)
        more = [dict(curve.points) for curve in others]
        for row, (amount, _) in zip(_rows(kind, unit, one), one.points, strict=True):
            yield *row, *(_seconds(known[amount]) if amount in known else "" for known in more)
    yield "in turn with an exchange", "", f"+{_seconds(task.cold)}"
    yield "on all cores at once", "", f"{1 / task.shared_speed:.2f} times as long"
    yield "on another's core", "", f"+{_seconds(task.refill)}"


def _rows(name: str, unit: str, curve: Curve) -> Iterable[Row]:
    for index, (amount, seconds) in enumerate(curve.points):
        spread = f"{curve.spread[index]:.0%}" if curve.spread else ""
        yield name if index == 0 else "", f"{amount:.0f} {unit}", _seconds(seconds), spread


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
