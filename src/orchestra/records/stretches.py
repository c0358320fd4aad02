"""When a rank was slow, and whether that is certain: ratios over the windows of a run."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

Cause = Literal["compute", "link", "input"]

LEAST_WINDOWS = 3
MATERIAL = 0.05
"""Part of the time that the excess has to make up."""
CERTAIN = 7.0
"""Standard errors that the mean logarithm of the ratio has to be above 0."""
CLEAR = math.log(4.0)
"""Logarithms of ratios count as this at most: what varies beyond is no doubt."""


class Found(NamedTuple):
    """A straggler, and the seconds of excess in each window from `first` to `last`."""

    ranks: tuple[int, ...]
    cause: Cause
    factor: float
    first: int
    last: int
    excess: Mapping[int, float]


def others(values: Sequence[float]) -> list[float]:
    """For each of two or more values the median of the others."""
    order = sorted(range(len(values)), key=values.__getitem__)
    place = {index: k for k, index in enumerate(order)}
    rest = len(values) - 1
    low, high = (rest - 1) // 2, rest // 2

    def nth(k: int, without: int) -> float:
        return values[order[k + (k >= without)]]

    return [(nth(low, place[i]) + nth(high, place[i])) / 2 for i in range(len(values))]


def noise_of(logarithms: Collection[Sequence[float]]) -> float:
    """The standard deviation of a window, from the differences between one and the next."""
    steps = [abs(b - a) for row in logarithms for a, b in itertools.pairwise(_clipped(row))]
    return sum(steps) / len(steps) * math.sqrt(math.pi) / 2 if steps else 0.0


def _clipped(logs: Sequence[float]) -> list[float]:
    return [max(-CLEAR, min(CLEAR, value)) for value in logs]


def stretches(
    logs: Sequence[float], least: float, noise: float, begin: int = 0
) -> Iterator[tuple[int, int]]:
    """From where to where the logarithms of ratios are at least `least` in the mean, for certain.

    A stretch has the largest sum of what exceeds the half of `least`, where each window counts as
    much as another at most.
    """
    logs = _clipped(logs)
    half, best, total, first, span = least / 2, 0.0, 0.0, 0, (0, 0)
    for index, value in enumerate(logs):
        if total <= 0:
            total, first = 0.0, index
        total += min(max(value - half, -half), half)
        if total > best:
            best, span = total, (first, index + 1)
    low, high = span
    clear = statistics.median(logs[low:high]) / 2 if high else 0.0
    while low < high and logs[low] < clear:  # it began in this window, or was over soon
        low += 1
    while low < high and logs[high - 1] < clear:
        high -= 1
    length = high - low
    mean = sum(logs[low:high]) / length if length else 0.0
    if length < LEAST_WINDOWS or mean < least or mean * math.sqrt(length) < CERTAIN * noise:
        return
    yield from stretches(logs[:low], least, noise, begin)
    yield begin + low, begin + high
    yield from stretches(logs[high:], least, noise, begin + high)
