"""What a rank did until when, and between two moments: sums of its time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

MAX_POINTS = 60
MAX_SOURCES = 128
"""Ranks with messages from more sources than this do not report how fast these arrived."""


class Counters(NamedTuple):
    """What a rank has done until the moment `seconds` on the stopwatch, summed up from its start.

    `compute`, `input` (reading batches) and `blocked` (in the transport) are seconds of the main
    flow. `arrived` has for each rank that sent large messages their bytes, and the seconds for
    which this rank was ready to read while one was arriving.
    """

    seconds: float
    steps: int = 0
    samples: int = 0
    compute: float = 0.0
    input: float = 0.0
    blocked: float = 0.0
    arrived: tuple[tuple[int, float, float], ...] = ()


class CounterSeries:
    """A rank's sums at up to `MAX_POINTS` moments, spread evenly over the time until now."""

    def __init__(self) -> None:
        self.points: list[Counters] = []
        self._apart = self._next = 0.0

    def due(self, seconds: float) -> bool:
        """Whether a point at this moment would be kept."""
        return seconds >= self._next

    def add(self, counters: Counters) -> None:
        """Keep `counters`, the latest so far."""
        points = self.points
        if points and points[-1].seconds >= counters.seconds:
            points.pop()
        points.append(counters)
        apart = 2 * (counters.seconds - points[0].seconds) / MAX_POINTS
        if len(points) > MAX_POINTS:
            kept = points[:1]
            for point in points[1:-1]:
                if point.seconds - kept[-1].seconds >= apart:
                    kept.append(point)
            self.points = [*kept, points[-1]]
            self._apart = apart
        self._next = counters.seconds + self._apart


class Window(NamedTuple):
    """What one rank did in a window: see `Counters`."""

    steps: float
    samples: float
    compute: float
    input: float
    blocked: float
    arrived: Mapping[int, tuple[float, float]]

    @property
    def work(self) -> float:
        return self.compute + self.input


def at(series: Sequence[Counters], seconds: float) -> Counters:
    """The sums at a moment between two points."""
    return next(_along(series, [seconds]))


def _along(series: Sequence[Counters], edges: Iterable[float]) -> Iterator[Counters]:
    """The sums at rising moments, linear between points."""
    place = 1
    for edge in edges:
        while place < len(series) - 1 and series[place].seconds < edge:
            place += 1
        before, after = series[place - 1], series[place]
        span = after.seconds - before.seconds
        part = min(max((edge - before.seconds) / span, 0.0), 1.0) if span > 0 else 1.0
        earlier = {source: numbers for source, *numbers in before.arrived}
        arrived = tuple(
            (source, _between(first, size, part), _between(second, seconds, part))
            for source, size, seconds in after.arrived
            for first, second in [earlier.get(source, (0.0, 0.0))]
        )
        numbers = [_between(a, b, part) for a, b in zip(before[:6], after[:6], strict=True)]
        yield Counters._make([*numbers, arrived])


def _between(first: float, then: float, part: float) -> float:
    return first + (then - first) * part


def windows_of(series: Sequence[Counters], edges: Sequence[float]) -> list[Window]:
    found, counters = [], list(_along(series, edges))
    for before, after in itertools.pairwise(counters):
        earlier = {source: (size, seconds) for source, size, seconds in before.arrived}
        arrived = {}
        for source, size, seconds in after.arrived:
            first, second = earlier.get(source, (0.0, 0.0))
            if size > first:
                arrived[source] = size - first, seconds - second
        numbers = [b - a for a, b in zip(before[1:6], after[1:6], strict=True)]
        found.append(Window._make([*numbers, arrived]))
    return found
