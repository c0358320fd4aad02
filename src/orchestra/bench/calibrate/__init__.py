"""`orchestra calibrate`: what computation and messages take on this machine."""

from __future__ import annotations

import datetime
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from orchestra.bench.calibrate.messages import measure_messages, messages_of
from orchestra.bench.calibrate.sharing import measure_slices, measure_speeds
from orchestra.bench.calibrate.stopwatch import Kept
from orchestra.bench.calibrate.training import Order, measure_task
from orchestra.bench.turns import Progress, check_stopped, teller
from orchestra.cluster.calibration import Calibration, TaskCosts
from orchestra.engines.processes.launch import launch
from orchestra.engines.simulation.figures import key_of
from orchestra.optimizers.settings import Optimizer
from orchestra.records.environment import environment
from orchestra.worker.threads import usable_cores

__all__ = ["Subject", "calibrate"]


@dataclass(frozen=True)
class Subject:
    """A task to be calibrated, with batches around `batch_sizes`, of one worker."""

    task: str
    optimizer: Optimizer
    precision: str = "float32"
    batch_sizes: tuple[int, ...] = (32,)

    def order(self, seconds: float) -> Order:
        """What the rank that measures is told."""
        return Order(
            self.task,
            self.optimizer,
            self.precision,
            self.batch_sizes[0],
            sizes_around(self.batch_sizes),
            seconds,
            thread_counts(len(usable_cores())),
            key_of(self.task, self.optimizer, self.precision),
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
    subjects: Sequence[Subject],
    seconds: float = 0.5,
    on_progress: Progress | None = None,
) -> Calibration:
    """Measure this machine, and a step of each of `subjects`, which is at least one.

    `seconds` is the time for each figure. Raises KeyboardInterrupt where the user stopped it.
    """
    cores = len(usable_cores())
    orders = [subject.order(seconds) for subject in subjects]
    kept = Kept()
    first, second = _measure(measure_messages, seconds, 2, "messages", 24, on_progress)
    kept = _sum(kept, first.kept)
    several = _measure(measure_slices, seconds, cores + 1, "one thread more", 1, on_progress)
    time_slice = statistics.median(itertools.chain(*several))
    tasks = []
    for order in orders:
        total = len(order.threads) * len(order.sizes) + 1
        measured, _ = _measure(measure_task, order, 2, order.task, total, on_progress)
        costs, own = cast("tuple[TaskCosts, Kept]", measured)
        speeds, *_ = _measure(measure_speeds, order, cores + 1, "cores at once", 1, on_progress)
        tasks.append(
            replace(
                costs,
                shared_speed=speeds.shared,
                refill=speeds.turns * time_slice,
            )
        )
        kept = _sum(kept, own)
    machine = environment()
    del machine["command"]
    return Calibration(
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=machine,
        cores=cores,
        busy_with_others=kept.waiting,
        time_slice=time_slice,
        work=first.work,
        messages=messages_of(first, second, cores),
        tasks=tuple(tasks),
    )


def _measure(
    program: Callable[..., Any],
    argument: Any,
    ranks: int,
    what: str,
    total: int,
    on_progress: Progress | None,
) -> tuple[Any, ...]:
    outcome = launch(program, argument, ranks, on_event=teller(on_progress, what, total))
    check_stopped(outcome)
    return outcome.results


def _sum(one: Kept, other: Kept) -> Kept:
    return Kept(one.ran + other.ran, one.passed + other.passed)
