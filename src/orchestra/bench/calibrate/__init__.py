"""`orchestra calibrate`: what computation and messages take on this machine."""

from __future__ import annotations

import datetime
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from orchestra.bench.calibrate.memory import CASES, measure_memory, memory_costs, ranks_wanted
from orchestra.bench.calibrate.messages import SIZES, measure_messages, messages_of
from orchestra.bench.calibrate.sharing import TURNS, measure_slices, measure_speeds
from orchestra.bench.calibrate.stopwatch import (
    Attempt,
    Measurement,
    measure_all,
    waited,
)
from orchestra.bench.calibrate.training import Workload, measure_task
from orchestra.bench.turns import Progress, run_ranks
from orchestra.cluster.calibration import Calibration, TaskCosts
from orchestra.cluster.costs import Quality
from orchestra.records.record import environment
from orchestra.worker.threads import usable_cores

__all__ = ["LIMIT", "Workload", "calibrate"]

LIMIT = 120.0
"""Seconds that a calibration with one task may take by default."""


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
        kept = measure_all(_measurements(subjects, seconds, folder), limit, on_progress)
    messages, memory, slices = kept[:3]
    first, second = messages.value
    time_slice = statistics.median(itertools.chain(*slices.value))
    machine = environment()
    del machine["command"], machine["modules"]
    spread = statistics.median((*first.send.spread, *first.receive.spread))
    quality = _quality([messages, memory, slices], spread)
    return Calibration(
        measured_at=quality.measured_at,
        machine=machine,
        cores=len(usable_cores()),
        busy_with_others=max(one.waited for one in kept),
        time_slice=time_slice,
        work=first.work,
        messages=messages_of(first, second, len(usable_cores())),
        in_memory=memory_costs(memory.value),
        tasks=tuple(
            _costs(steps, speeds, time_slice)
            for steps, speeds in zip(kept[3::2], kept[4::2], strict=True)
        ),
        quality=quality,
    )


def _measurements(subjects: Sequence[Workload], seconds: float, folder: str) -> list[Measurement]:
    """Return those that are the same for every task, and then two of each of `subjects`: of its
    steps, and of these on all cores at once."""
    cores = len(usable_cores())

    def general(until: float) -> tuple[float, float]:
        return seconds, until

    found = [
        _measurement("messages", 3.0, measure_messages, general, 2, 3 * len(SIZES)),
        _measurement("shared memory", 1.5, measure_memory, general, ranks_wanted(cores), CASES),
        _measurement("one thread more", 0.5, measure_slices, general, cores + 1, 1),
    ]
    for subject in subjects:
        order = replace(subject, seconds=seconds, folder=folder, threads=thread_counts(cores))
        figures = len(order.threads) * len(order.sizes) + 1
        found += [
            _measurement(subject.task, 4.0, measure_task, order.due, 2, figures),
            _measurement("cores at once", 2.5, measure_speeds, order.due, cores + 1, TURNS),
        ]
    return found


def _measurement(
    name: str,
    weight: float,
    program: Callable[..., Any],
    argument: Callable[[float], Any],
    ranks: int,
    total: int,
) -> Measurement:
    """Run `program`, which counts up to `total`, on so many ranks; each that measures returns a
    value and under what conditions (`stopwatch.Kept`), the others None."""

    def measure(until: float, end: float, tell: Callable[[float], None]) -> Attempt | None:
        results = run_ranks(
            program,
            argument(until),
            ranks,
            steps=total,
            on_progress=lambda _, part: tell(part),
            limit=max(end - time.monotonic(), 0.0),
        )
        found = [result for result in results if result is not None]
        if not found or (len(found) < ranks and program is not measure_task):
            return None
        conditions = [own for _, own in found]
        left_out = tuple(itertools.chain(*(own.left_out for own in conditions)))
        return Attempt([value for value, _ in found], waited(conditions), left_out)

    return Measurement(name, weight, measure)


def _costs(steps: Attempt, speeds: Attempt, time_slice: float) -> TaskCosts:
    """Return a task's figures, from what was kept of its steps, and of those on all cores."""
    costs: TaskCosts = steps.value[0]
    shared, turns = speeds.value[0]
    spread = max(t.gradient.spread_at(costs.batch_size) for t in (costs.one, costs.all))
    return replace(
        costs,
        shared_speed=shared,
        refill=turns * time_slice,
        quality=_quality([steps, speeds], spread),
    )


def _quality(kept: Sequence[Attempt], spread: float) -> Quality:
    return Quality(
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        waited=round(max(one.waited for one in kept), 3),
        spread=round(spread, 3),
        repeats=sum(one.repeats for one in kept),
        left_out=tuple(dict.fromkeys(itertools.chain(*(one.left_out for one in kept)))),
    )
