"""`orchestra calibrate`: measure computation and messages on this machine."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.cli.arguments import Parser, counts
from orchestra.cli.bench import print_table, progress_line
from orchestra.cluster.calibration import Calibration, Curve, TaskCosts, read_calibration
from orchestra.engines.processes.environment import detect
from orchestra.engines.processes.system import now
from orchestra.engines.simulation.costs import own_calibration
from orchestra.errors import InputError, RunFailed
from orchestra.experiments.file import load
from orchestra.optimizers.settings import Optimizer
from orchestra.records.record import write_atomically
from orchestra.tasks.settings import task_text

if TYPE_CHECKING:
    from orchestra.bench.calibrate import Workload

DESCRIPTION = """\
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

EPILOG = """\
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


def main(arguments: Sequence[str]) -> int:
    """Measure, keep the figures, and show them."""
    began = now()
    options = _parser().read(arguments)
    if options.links:
        return _links(options)
    path: Path = options.out or own_calibration()
    before = read_calibration(path) if path.exists() else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # before minutes are spent
    except OSError as error:
        raise InputError(f"--out: {path.parent} cannot be made: {error.strerror}") from None
    subject = _subject(options)
    from orchestra.bench.calibrate import LIMIT, calibrate

    limit = options.limit or LIMIT
    with progress_line() as tell:
        # The limit counts from the command's beginning, the import of torch included (decision 40)
        measured = calibrate([subject], options.seconds, tell, limit - (now() - began))
    # Before it is refused: the user sees what was disturbed
    print_calibration(measured)
    quality = measured.quality_of(measured.tasks[0])
    doubts = quality.doubts
    # Simulations would go by them from then on (decision 40)
    if doubts and not options.keep_anyway:
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


def _parser() -> Parser:
    parser = Parser("calibrate", DESCRIPTION, EPILOG)
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
    parser.flag(
        "--links",
        "nothing but the links between ranks: those that a launcher started, or local ones",
    )
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
        print_table(
            f"a step of {', '.join(task.key)}",
            ("", "amount", "1 thread", "spread", *more),
            _task_rows(task),
        )
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
        more = [dict(getattr(timing, kind).points) for timing in task.timings[1:]]
        for row, (amount, _) in zip(
            _rows(kind, unit, getattr(task.one, kind)), getattr(task.one, kind).points, strict=True
        ):
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
