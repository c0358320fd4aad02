"""`orchestra calibrate`: measure what a simulation needs to know of this machine."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.cli.numbers import counts
from orchestra.cli.parsers.machines import OPTIMIZER, TASK
from orchestra.cli.terminal import print_table, progress_line
from orchestra.cluster.calibration import Calibration, Curve, TaskCosts, read_calibration
from orchestra.engines.processes.environment import detect
from orchestra.engines.processes.system import now
from orchestra.engines.simulation.costs import own_calibration
from orchestra.errors import InputError, RunFailed
from orchestra.experiments.file import load
from orchestra.optimizers.settings import Optimizer
from orchestra.records.files import write_atomically
from orchestra.tasks import task_text

if TYPE_CHECKING:
    from orchestra.calibration import Workload


def main(options: Namespace) -> int:
    began = now()
    if options.links:
        return _links(options)
    path: Path = options.out or own_calibration()
    before = read_calibration(path) if path.exists() else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # before minutes are spent
    except OSError as error:
        raise InputError(f"--out: {path.parent} cannot be made: {error.strerror}") from None
    subject = _subject(options)
    from orchestra.calibration import LIMIT, calibrate

    limit = options.limit or LIMIT
    with progress_line() as tell:
        # The limit counts from the start of the command, including the import of torch.
        measured = calibrate([subject], options.seconds, tell, limit - (now() - began))
    # Before it is refused: the user sees what was disturbed
    print_calibration(measured)
    quality = measured.quality_of(measured.tasks[0])
    # A calibration that is kept is used by every later simulation.
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


def _subject(options: Namespace) -> Workload:
    from orchestra.calibration import Workload

    task, optimizer, precision = TASK, None, "float32"
    sizes: tuple[int, ...] = (32,)
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
    from orchestra.calibration.machines import calibrate_links

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


def _task_rows(task: TaskCosts) -> Iterable[tuple[str, ...]]:
    for kind, unit in (("gradient", "samples"), ("update", "elements"), ("step", "samples")):
        one, *others = (getattr(timing, kind) for timing in task.timings)
        more = [dict(curve.points) for curve in others]
        for row, (amount, _) in zip(_rows(kind, unit, one), one.points, strict=True):
            yield *row, *(_seconds(known[amount]) if amount in known else "" for known in more)
    yield "in turn with an exchange", "", f"+{_seconds(task.cold)}"
    yield "on all cores at once", "", f"{1 / task.shared_speed:.2f} times as long"
    yield "on another's core", "", f"+{_seconds(task.refill)}"


def _rows(name: str, unit: str, curve: Curve) -> Iterable[tuple[str, ...]]:
    for index, (amount, seconds) in enumerate(curve.points):
        spread = f"{curve.spread[index]:.0%}" if curve.spread else ""
        yield name if index == 0 else "", f"{amount:.0f} {unit}", _seconds(seconds), spread


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
