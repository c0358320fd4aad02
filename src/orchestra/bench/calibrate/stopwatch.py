"""Repeated measurements within their time: which next, medians, spread, and who was in the way."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from orchestra.bench.turns import Progress
from orchestra.cluster.calibration import Curve
from orchestra.cluster.costs import MOST_WAITED
from orchestra.collectives import Group, all_reduce
from orchestra.engines.processes.system import UsageMeter
from orchestra.errors import RunFailed
from orchestra.records.report import taken_by_others
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag

LEAST, MOST = 9, 400
"""Repeats of a measurement, where there is time for them."""
WARM_UP = 3
"""Repeats before those that count."""


@dataclass
class Budget:
    """The time of a measurement, divided evenly over the figures that are still to come.

    Attributes:
        until: when all of them have to be there, by `clock`, which is one for all processes of a
            machine.
        figures: how many are still to come.
    """

    until: float = math.inf
    figures: int = 1
    clock: Callable[[], float] = time.monotonic

    @property
    def over(self) -> bool:
        """Whether the time has passed: what can be left out is left out."""
        return self.clock() >= self.until

    def share(self) -> float:
        """Seconds for the next figure, 0 where the time has passed."""
        seconds = max(self.until - self.clock(), 0.0) / max(self.figures, 1)
        self.figures -= 1
        return seconds


@dataclass
class Kept:
    """Under what conditions a process measured.

    Attributes:
        ran: seconds that the measuring thread ran, where it was never to wait for anything.
        passed: seconds that passed meanwhile.
        meters: by how many cores all ranks of the measurement wanted: what was used meanwhile.
        left_out: what there was no time for.
    """

    ran: float = 0.0
    passed: float = 0.0
    meters: dict[int, UsageMeter] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def waiting(self) -> float:
        """The part of the time in which the thread was kept from a processor."""
        return max(0.0, 1 - self.ran / self.passed) if self.passed else 0.0

    @contextmanager
    def watched(self, cores: int) -> Iterator[None]:
        """Notes what others take while this rank and its like want so many `cores`."""
        meter = self.meters.setdefault(cores, UsageMeter())
        meter.running(True)
        try:
            yield
        finally:
            meter.running(False)


def waited(ranks: Sequence[Kept]) -> float:
    """The part of the processor time that a measurement wanted and other programs took, where that
    was worst; from what all of its `ranks` noted."""
    parts = [kept.waiting for kept in ranks]
    for wanted in {wanted for kept in ranks for wanted in kept.meters}:
        usages = [kept.meters[wanted].usage() for kept in ranks if wanted in kept.meters]
        cores, taken = usages[0].cores, taken_by_others(usages)
        if taken is not None:
            parts.append(max(0.0, 1 - (cores - taken) / min(wanted, cores)))
    return max(parts, default=0.0)


def repeat(
    function: Callable[[], object], seconds: float, kept: Kept, most: float = math.inf
) -> list[float]:
    """Processor seconds of each call of `function`, for about `seconds`, after a warm-up.

    Of this thread alone: other work on the machine does not count, nor do threads that torch has.
    A slow function is called less often than `LEAST` times, so that it all takes `most` seconds.
    """
    started = time.perf_counter()
    for _ in range(WARM_UP):
        function()
        if time.perf_counter() - started > most / 3:
            break
    times: list[float] = []
    began, ran = time.perf_counter(), time.thread_time()
    for _ in rounds(seconds, most):
        called = time.thread_time()
        function()
        times.append(time.thread_time() - called)
    kept.ran += time.thread_time() - ran
    kept.passed += time.perf_counter() - began
    return times


def rounds(
    seconds: float,
    most: float = math.inf,
    least: int = LEAST,
    limit: float = MOST,
    agreed: Callable[[bool], bool] = bool,
) -> Iterator[float]:
    """Yield the seconds that have passed, once for each repeat of a measurement.

    There is at least one. There are `least` of them within `most` seconds, and up to `limit` within
    `seconds`.

    Args:
        agreed: makes of this rank's wish to end that of all.
    """
    began, passed, count = time.perf_counter(), 0.0, 0
    enough = False
    while not enough:
        yield passed
        count += 1
        passed = time.perf_counter() - began
        enough = agreed(
            passed >= most or (count >= least and (passed >= seconds or count >= limit))
        )


def total(transport: Transport, own: float = 0.0, ranks: Sequence[int] | None = None) -> float:
    """Return the sum of what each of `ranks` gives, all by default; each waits for the others."""
    values = torch.tensor([own], dtype=torch.float64)
    group = Group(tuple(range(transport.size) if ranks is None else ranks))
    all_reduce(transport, values, "ring", group, Tag.AGREE)
    return values.item()


def curve_of(times: Mapping[int, Sequence[float]]) -> Curve:
    """The curve through the medians of repeated measurements, by amount."""
    amounts = sorted(times)
    points = tuple((float(n), max(statistics.median(times[n]), 1e-9)) for n in amounts)
    return Curve(points, tuple(spread(times[n]) for n in amounts))


def spread(times: Sequence[float]) -> float:
    """Half of the interquartile range over the median; 0 where there is only one."""
    if len(times) < 2:
        return 0.0
    lower, median, upper = statistics.quantiles(times, n=4)
    return (upper - lower) / 2 / median if median > 0 else 0.0


FIRST = 0.7
"""Part of the time that measuring everything once may take: the rest is for repeats."""


@dataclass(frozen=True)
class Attempt:
    """What a measurement found.

    Attributes:
        value: the figures.
        waited: the part of the processor time that others took from it.
        left_out: what there was no time for.
        seconds: that the last attempt took.
        repeats: how often it was made again.
    """

    value: Any
    waited: float
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    repeats: int = 0


@dataclass(frozen=True)
class Measurement:
    """One of those that make up a calibration.

    Attributes:
        name: for the user.
        weight: how much of the time it may have, beside the others.
        measure: is told until when it should be done and when it has to be (by the clock), and
            whom to tell which part is done; None where it was not done in time.
    """

    name: str
    weight: float
    measure: Callable[[float, float, Callable[[float], None]], Attempt | None]


def measure_all(
    measurements: Sequence[Measurement],
    limit: float,
    on_progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Attempt]:
    """The best attempt at each of `measurements`, all within `limit` seconds.

    Each is made once. What was disturbed is made again while there is time, by turns, and the
    attempt that was disturbed least is kept.

    Raises:
        RunFailed: the time was over before each was made once.
    """
    began = clock()
    end = began + limit
    tell = on_progress or (lambda what, part: None)

    def attempt(
        measurement: Measurement, until: float, done: float, part: float, again: str = ""
    ) -> Attempt | None:
        """`done` of everything is done, and `part` of it will be this."""
        what, started = measurement.name + again, clock()
        tell(what, done)
        found = measurement.measure(until, end, lambda own: tell(what, done + own * part))
        return None if found is None else replace(found, seconds=clock() - started)

    kept: list[Attempt] = []
    whole = sum(measurement.weight for measurement in measurements)
    done = 0.0
    for measurement in measurements:
        share = measurement.weight / (whole - done)
        until = clock() + (began + FIRST * limit - clock()) * share
        first = attempt(measurement, until, done / whole, measurement.weight / whole)
        if first is None:
            raise RunFailed(
                f"the calibration was not done within {limit:.0f} s: {measurement.name} took "
                "longer; give it more with --limit, a smaller batch, or a quiet machine"
            )
        kept.append(first)
        done += measurement.weight
    while (place := _most_in_need(kept, end - clock())) is not None:
        again = attempt(measurements[place], end, 0.0, 1.0, " again")
        kept[place] = _better(kept[place], again)
    return kept


def _most_in_need(kept: Sequence[Attempt], left: float) -> int | None:
    """Return which disturbed measurement comes next, of those that `left` seconds suffice for."""
    disturbed = [p for p, one in enumerate(kept) if one.waited > MOST_WAITED and one.seconds < left]
    return min(disturbed, key=lambda p: (kept[p].repeats, -kept[p].waited), default=None)


def _better(one: Attempt, again: Attempt | None) -> Attempt:
    """Return the attempt that was disturbed less; None was cut off, and is not tried once more."""
    if again is None:
        return replace(one, repeats=one.repeats + 1, seconds=math.inf)
    best = min(one, again, key=lambda attempt: attempt.waited)
    return replace(best, seconds=again.seconds, repeats=one.repeats + 1)
