"""Repeated measurements: medians, their spread, and whether the machine was quiet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestra.cluster.calibration import Curve

LEAST, MOST = 9, 400
"""Repeats of a measurement."""
WARM_UP = 3
"""Repeats before those that count."""


@dataclass
class Kept:
    """Seconds that the measuring thread ran, and seconds that passed meanwhile."""

    ran: float = 0.0
    passed: float = 0.0

    @property
    def waiting(self) -> float:
        """The part of the time in which the thread was kept from a processor."""
        return max(0.0, 1 - self.ran / self.passed) if self.passed else 0.0


def repeat(function: Callable[[], object], seconds: float, kept: Kept) -> list[float]:
    """Processor seconds of each call of `function`, for about `seconds`, after a warm-up.

    Of this thread alone: other work on the machine does not count, nor do threads that torch has.
    """
    for _ in range(WARM_UP):
        function()
    times: list[float] = []
    began, ran = time.perf_counter(), time.thread_time()
    while len(times) < LEAST or (time.perf_counter() - began < seconds and len(times) < MOST):
        started = time.thread_time()
        function()
        times.append(time.thread_time() - started)
    kept.ran += time.thread_time() - ran
    kept.passed += time.perf_counter() - began
    return times


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
