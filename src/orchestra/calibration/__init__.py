"""`orchestra calibrate`: measure what computation and messages take on this machine."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestra.calibration.contention import (
    CASES,
    TURNS,
    measure_memory,
    measure_slices,
    measure_speeds,
    memory_costs,
    ranks_wanted,
)
from orchestra.calibration.messages import (
    SIZES,
    mean_times,
    measure_messages,
    measure_near,
    messages_of,
    transfers_of,
)
from orchestra.calibration.timing import Progress, run_ranks, spread, trimmed_mean, waited
from orchestra.calibration.training import (
    OTHERS,
    ROUNDS,
    Workload,
    measure_gradient,
    measure_task,
)
from orchestra.cluster import Cluster
from orchestra.cluster.calibration import MAX_WAITED, Calibration, Quality, TaskCosts
from orchestra.engines.emulation.nodes import EmulatedCluster, share_of
from orchestra.engines.emulation.training import on_best_node
from orchestra.engines.processes.system import RankPlace
from orchestra.errors import RunFailed
from orchestra.records.files import environment
from orchestra.worker.runtime import usable_cores

__all__ = ["LIMIT", "Workload", "calibrate"]

LIMIT = 120.0  # the seconds that a calibration with one task may take by default
FIRST = 0.7  # the part of the time for measuring everything once; the rest is for repeats


@dataclass(frozen=True)
class Attempt:
    """The result of a measurement."""

    value: Any  # the figures
    waited: float  # the part of the processor time that other programs took
    left_out: tuple[str, ...] = ()  # figures that there was no time for
    seconds: float = 0.0  # the time of the last attempt
    repeats: int = 0


@dataclass(frozen=True)
class Measurement:
    """One of the measurements of a calibration.

    `measure` is given the moments by which it should and by which it must be done (by the clock),
    and a function to report its progress to; it returns None if it was not done in time.
    """

    name: str
    weight: float  # its part of the time, relative to the others
    measure: Callable[[float, float, Callable[[float], None]], Attempt | None]
    needed: bool = True  # for a calibration; others only refine it


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on, and the number of cores."""
    # Between two counts, costs are interpolated linearly over 1 / threads.
    return tuple(sorted({2**k for k in range(cores.bit_length()) if 2**k < cores} | {cores}))


class CalibrationUnfinished(RunFailed):
    """The time was over before all was measured; `reason` says so without a remedy."""

    def __init__(self, reason: str) -> None:
        remedy = "give it more with --limit, a smaller batch, or a quiet machine"
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


def calibrate(
    subjects: Sequence[Workload],
    seconds: float = 0.5,
    on_progress: Progress | None = None,
    limit: float | None = None,
    emulated: Cluster | None = None,
) -> Calibration:
    """Measure this machine, and a step of each of `subjects`, which is at least one.

    Args:
        seconds: for each figure, where there is so much time.
        limit: seconds for everything; `LIMIT` for each of the subjects by default.
        emulated: measure steps under the quota of the fastest node of this cluster, which makes
            caches cold: for runs on its emulated nodes. Figures remain those of a core of speed 1.

    Raises:
        RunFailed: what is needed could not be measured within `limit`.
        InputError: this machine cannot emulate the node.
        KeyboardInterrupt: the user stopped it.
    """
    limit = LIMIT * len(subjects) if limit is None else limit
    with tempfile.TemporaryDirectory(prefix="orchestra-calibrate-") as folder:
        ordered = _measurements(subjects, seconds, folder, emulated)
        kept = measure_all(ordered, limit, on_progress)
    messages, near_messages, memory, slices = kept[:4]
    # The two ranks that sent each other messages
    first, second = messages.value
    near = mean_times(*near_messages.value)
    time_slice = statistics.median(itertools.chain(*slices.value))
    machine = environment()
    # How the calibration was started is no property of the machine
    del machine["command"], machine["modules"]
    scattered = statistics.median((*first.times.send.spread, *first.times.receive.spread))
    quality = _quality([messages, near_messages, memory, slices], scattered)
    between = messages_of(first, second, near, len(usable_cores()))
    return Calibration(
        measured_at=quality.measured_at,
        machine=machine,
        cores=len(usable_cores()),
        busy_with_others=max(one.waited for one in kept),
        time_slice=time_slice,
        work=first.work,
        messages=between,
        near=near,
        transfers=transfers_of(first, second, between.collective),
        in_memory=memory_costs(memory.value),
        tasks=tuple(
            _costs(steps, others, speeds, time_slice)
            # Four general measurements come first, then three of each task
            for steps, others, speeds in zip(kept[4::3], kept[5::3], kept[6::3], strict=True)
        ),
        quality=quality,
    )


def _measurements(
    subjects: Sequence[Workload], seconds: float, folder: str, emulated: Cluster | None
) -> list[Measurement]:
    """Return the measurements that are the same for every task, then three for each of `subjects`:
    its steps, a gradient in further processes, and steps on all cores at once.
    """
    cores = len(usable_cores())
    threads, share = thread_counts(cores), 1.0
    if emulated is not None:
        node = on_best_node(emulated, 1).nodes_of(1)[0]
        threads, share = thread_counts(min(cores, node.cores)), min(share_of(node), 1.0)

    def general(until: float) -> tuple[float, float]:
        return seconds, until

    def with_folder(until: float) -> tuple[float, float, str]:
        return seconds, until, folder

    turns = 3 * len(SIZES)
    found = [
        _measurement(
            "messages", 4.0, measure_messages, with_folder, 2, 2 * turns, shared_memory=False
        ),
        _measurement("messages in memory", 1.5, measure_near, general, 2, turns),
        _measurement("shared memory", 1.5, measure_memory, general, ranks_wanted(cores), CASES),
        # One more than there are cores, so that somebody has to wait
        _measurement("one thread more", 0.5, measure_slices, general, cores + 1, 1),
    ]
    for subject in subjects:
        order = replace(subject, seconds=seconds, folder=folder, threads=threads, share=share)
        figures = ROUNDS * len(order.threads) * len(order.sizes) + 1
        found += [
            _measurement(subject.task, 4.0, measure_task, order.due, 2, figures, emulated=emulated),
            _measurement(
                "other processes",
                2.0,
                measure_gradient,
                order.due,
                1,
                1,
                OTHERS,
                emulated=emulated,
                needed=False,
            ),
            _measurement(
                "cores at once", 2.5, measure_speeds, order.due, cores + 1, TURNS, needed=False
            ),
        ]
    return found


def _measurement(
    name: str,
    weight: float,
    program: Callable[..., Any],
    argument: Callable[[float], Any],
    ranks: int,
    total: int,
    times: int = 1,
    shared_memory: bool = True,
    emulated: Cluster | None = None,
    needed: bool = True,
) -> Measurement:
    """Return a measurement that runs `program`, which counts up to `total`, on `ranks` ranks, on
    nodes that are `emulated` if given, and does so `times` times. Each rank that measures returns a
    value and its conditions (`Conditions`), the others None.
    """

    def launch(until: float, end: float, tell: Callable[[float], None]) -> Sequence[Any]:
        with contextlib.ExitStack() as stack:
            places: Sequence[RankPlace] = ()
            if emulated is not None:
                # All of them: one measures, the others mostly wait
                on_one = EmulatedCluster(on_best_node(emulated, ranks), ranks, 1)
                places = stack.enter_context(on_one).places()
            return run_ranks(
                program,
                argument(until),
                ranks,
                steps=total,
                on_progress=lambda _, part: tell(part),
                # A single call may take longer than everything may: the launcher kills the ranks
                limit=max(end - time.monotonic(), 0.0),
                shared_memory=shared_memory,
                places=places,
            )

    def measure(until: float, end: float, tell: Callable[[float], None]) -> Attempt | None:
        results: list[Any] = []
        for turn in range(times):
            now = time.monotonic()
            results += launch(
                now + (until - now) / (times - turn),
                end,
                lambda part, turn=turn: tell((turn + part) / times),  # type: ignore[misc]
            )
        found = [result for result in results if result is not None]
        # Of a task only the first of two ranks measures; elsewhere one that is missing was killed
        if not found or (len(found) < len(results) and program is not measure_task):
            return None
        conditions = [own for _, own in found]
        left_out = tuple(itertools.chain(*(own.left_out for own in conditions)))
        return Attempt([value for value, _ in found], waited(conditions), left_out)

    return Measurement(name, weight, measure, needed)


def _costs(steps: Attempt, others: Attempt, speeds: Attempt, time_slice: float) -> TaskCosts:
    """Return a task's costs, from the measurements of its steps, of a gradient in other processes,
    and of steps on all cores; of the latter two, those that there was time for.
    """
    costs: TaskCosts = steps.value[0]
    shared, turns = speeds.value[0] if speeds.value else (costs.shared_speed, 0.0)
    own = costs.one.gradient.at(costs.batch_size)
    gradients = [own, *map(trimmed_mean, others.value or ())]
    # The machine may have been slow just then, or fast: the middle one stands for them all.
    factor = statistics.median(gradients) / own
    scattered = max(t.gradient.spread_at(costs.batch_size) for t in (costs.one, costs.all))
    return replace(
        costs,
        timings=tuple(timing.scaled(factor) for timing in costs.timings),
        shared_speed=shared,
        # Measured as a part of a step; what a thread loses each time that it gets a core back is
        # that part of the time that it keeps one.
        refill=turns * time_slice,
        quality=_quality([steps, others, speeds], max(scattered, spread(gradients))),
    )


def _quality(kept: Sequence[Attempt], spread: float) -> Quality:
    return Quality(
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        waited=round(max(one.waited for one in kept), 3),
        spread=round(spread, 3),
        repeats=sum(one.repeats for one in kept),
        left_out=tuple(dict.fromkeys(itertools.chain(*(one.left_out for one in kept)))),
    )


def measure_all(
    measurements: Sequence[Measurement],
    limit: float,
    on_progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Attempt]:
    """Return the best attempt at each of `measurements`, all within `limit` seconds.

    Each is made once. Those that were disturbed are repeated in turns while there is time, and
    the least disturbed attempt is kept. One that there was no time for has no value.

    Raises:
        RunFailed: the time was over before each that is needed was made once.
    """
    began = clock()
    end = began + limit
    tell = on_progress or (lambda what, part: None)

    def attempt(
        what: str, measurement: Measurement, until: float, done: float = 0.0, part: float = 1.0
    ) -> Attempt | None:
        """Make an attempt. `done` is the part of everything that is done already, `part` that of
        this attempt.
        """
        started = clock()
        tell(what, done)
        found = measurement.measure(until, end, lambda own: tell(what, done + own * part))
        return found and replace(found, seconds=clock() - started)

    kept: list[Attempt] = []
    whole, done = sum(measurement.weight for measurement in measurements), 0.0
    for measurement in measurements:
        name, weight = measurement.name, measurement.weight
        # What an earlier one has left over, or taken too much, is shared by all that follow
        until = clock() + (began + FIRST * limit - clock()) * weight / (whole - done)
        first = attempt(name, measurement, until, done / whole, weight / whole)
        if first is None and measurement.needed:
            raise CalibrationUnfinished(
                f"the calibration was not done within {limit:.0f} s: {name} took longer"
            )
        kept.append(first or Attempt(None, 0.0, (name,)))
        done += weight
    # A repetition follows all other measurements: one right away would more likely meet the same
    # disturbance.
    while (place := _most_in_need(kept, end - clock())) is not None:
        again = attempt(f"{measurements[place].name} again", measurements[place], end)
        kept[place] = _better(kept[place], again)
    return kept


def _most_in_need(kept: Sequence[Attempt], left: float) -> int | None:
    """Return the disturbed measurement to repeat next, if `left` seconds suffice for any."""
    # By turns: those repeated least often come first, and of these the one disturbed most
    disturbed = [p for p, one in enumerate(kept) if one.waited > MAX_WAITED and one.seconds < left]
    return min(disturbed, key=lambda p: (kept[p].repeats, -kept[p].waited), default=None)


def _better(one: Attempt, again: Attempt | None) -> Attempt:
    """Return the less disturbed attempt. If `again` is None it was cut off, and is not tried
    again.
    """
    if again is None:
        # Not tried again: it took longer than there was time
        return replace(one, repeats=one.repeats + 1, seconds=math.inf)
    # The best attempt counts: the average of disturbed repeats would be a figure that nobody
    # measured.
    best = min(one, again, key=lambda attempt: attempt.waited)
    return replace(best, seconds=again.seconds, repeats=one.repeats + 1)
