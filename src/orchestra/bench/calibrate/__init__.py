"""`orchestra calibrate`: what computation and messages take on this machine."""

from __future__ import annotations

import datetime
import functools
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestra.bench.calibrate.messages import SIZES, measure_messages, messages_of
from orchestra.bench.calibrate.sharing import TURNS, Speeds, measure_slices, measure_speeds
from orchestra.bench.calibrate.stopwatch import (
    Allowed,
    Attempt,
    Measurement,
    Result,
    measure_all,
    waited,
)
from orchestra.bench.calibrate.training import TrainingTask, measure_task
from orchestra.bench.turns import Progress, check_stopped, teller
from orchestra.cluster.calibration import Calibration, Curve, TaskCosts
from orchestra.cluster.quality import Quality
from orchestra.engines.processes.launch import launch
from orchestra.engines.simulation.figures import key_of
from orchestra.optimizers.settings import Optimizer
from orchestra.records.record import environment
from orchestra.worker.threads import usable_cores

__all__ = ["LIMIT", "Workload", "calibrate"]

LIMIT = 120.0
"""Seconds that a calibration with one task may take by default."""


@dataclass(frozen=True)
class Workload:
    """A task to be calibrated, with batches around `batch_sizes`, of one worker."""

    task: str
    optimizer: Optimizer
    precision: str = "float32"
    batch_sizes: tuple[int, ...] = (32,)

    def order(
        self, seconds: float, until: float = math.inf, folder: str | None = None
    ) -> TrainingTask:
        """What the rank that measures is told."""
        return TrainingTask(
            self.task,
            self.optimizer,
            self.precision,
            self.batch_sizes[0],
            sizes_around(self.batch_sizes),
            seconds,
            thread_counts(len(usable_cores())),
            key_of(self.task, self.optimizer, self.precision),
            until,
            folder,
        )


def sizes_around(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """A quarter and half of the smallest, double and four times the largest, and those between.

    A quarter is a micro-batch of four; four times as many is what one process takes for four.
    """
    least, most = min(batch_sizes), max(batch_sizes)
    wanted = {*batch_sizes, least // 4, least // 2, 2 * most, 4 * most}
    return tuple(sorted(size for size in wanted if size > 0))


def thread_counts(cores: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, and as many as there are cores."""
    return tuple(sorted({2**k for k in range(cores.bit_length()) if 2**k < cores} | {cores}))


def calibrate(
    subjects: Sequence[Workload],
    seconds: float = 0.5,
    on_progress: Progress | None = None,
    limit: float | None = None,
) -> Calibration:
    """Measure this machine, and a step of each of `subjects`, which is at least one.

    Args:
        seconds: for each figure, where there is so much time.
        limit: seconds for everything; `LIMIT` for each of the subjects by default.

    Raises:
        RunFailed: not everything could be measured within `limit`.
        KeyboardInterrupt: the user stopped it.
    """
    limit = LIMIT * len(subjects) if limit is None else limit
    with tempfile.TemporaryDirectory(prefix="orchestra-calibrate-") as folder:
        own = (_of_subject(subject, seconds, folder) for subject in subjects)
        kept = measure_all([*_general(seconds), *itertools.chain(*own)], limit, on_progress)
    messages, slices = kept[:2]
    first, second = messages.attempt.value
    time_slice = statistics.median(itertools.chain(*slices.attempt.value))
    machine = environment()
    del machine["command"]
    quality = _quality([messages, slices], _middle(first.send, first.receive))
    return Calibration(
        measured_at=quality.measured_at,
        machine=machine,
        cores=len(usable_cores()),
        busy_with_others=max(one.attempt.waited for one in kept),
        time_slice=time_slice,
        work=first.work,
        messages=messages_of(first, second, len(usable_cores())),
        tasks=tuple(
            _costs(steps, speeds, time_slice)
            for steps, speeds in zip(kept[2::2], kept[3::2], strict=True)
        ),
        quality=quality,
    )


def _general(seconds: float) -> list[Measurement]:
    """What is the same for every task."""
    allowed = functools.partial(Allowed, seconds)
    cores = len(usable_cores())
    return [
        _measurement("messages", 3.0, measure_messages, allowed, 2, 3 * len(SIZES)),
        _measurement("one thread more", 0.5, measure_slices, allowed, cores + 1, 1),
    ]


def _of_subject(subject: Workload, seconds: float, folder: str) -> list[Measurement]:
    """What is of one task: its steps, and these on all cores at once."""
    order = functools.partial(subject.order, seconds, folder=folder)
    cores = len(usable_cores())
    ranks = cores + 1
    total = len(thread_counts(cores)) * len(sizes_around(subject.batch_sizes)) + 1
    return [
        _measurement(subject.task, 4.0, measure_task, order, 2, total),
        _measurement("cores at once", 2.5, measure_speeds, order, ranks, TURNS),
    ]


def _measurement(
    name: str,
    weight: float,
    program: Callable[..., Any],
    argument: Callable[[float], Any],
    ranks: int,
    total: int,
) -> Measurement:
    """`program` on so many ranks, which counts up to `total`; each that measures returns a value
    and under what conditions (`stopwatch.Kept`), the others None."""

    def measure(until: float, end: float, tell: Callable[[float], None]) -> Attempt | None:
        outcome = launch(
            program,
            argument(until),
            ranks,
            on_event=teller(lambda _, part: tell(part), name, total),
            limit=max(end - time.monotonic(), 0.0),
        )
        check_stopped(outcome)
        found = [result for result in outcome.results if result is not None]
        if not found or (len(found) < ranks and program is not measure_task):
            return None
        conditions = [own for _, own in found]
        left_out = tuple(itertools.chain(*(own.left_out for own in conditions)))
        return Attempt([value for value, _ in found], waited(conditions), left_out)

    return Measurement(name, weight, measure)


def _costs(steps: Result, speeds: Result, time_slice: float) -> TaskCosts:
    """Of a task, from what was kept of its steps, and of those on all cores."""
    costs: TaskCosts = steps.attempt.value[0]
    first: Speeds = speeds.attempt.value[0]
    gradients = [timing.gradient for timing in (costs.one, costs.all)]
    spreads = [dict(zip(_amounts(g), g.spread, strict=True)) for g in gradients]
    spread = max(known[costs.batch_size] for known in spreads)
    return replace(
        costs,
        shared_speed=first.shared,
        refill=first.turns * time_slice,
        quality=_quality([steps, speeds], spread),
    )


def _quality(kept: Sequence[Result], spread: float) -> Quality:
    return Quality(
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        waited=round(max(one.attempt.waited for one in kept), 3),
        spread=round(spread, 3),
        repeats=sum(one.repeats for one in kept),
        left_out=tuple(dict.fromkeys(itertools.chain(*(one.attempt.left_out for one in kept)))),
    )


def _amounts(curve: Curve) -> list[float]:
    return [amount for amount, _ in curve.points]


def _middle(*curves: Curve) -> float:
    """The median of the spreads at all points."""
    return statistics.median(itertools.chain(*(curve.spread for curve in curves)))
