"""Measurements within a time: each once, then those again that other programs disturbed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestra.bench.turns import Progress
from orchestra.cluster.quality import MOST_WAITED
from orchestra.errors import RunFailed

FIRST = 0.7
"""Part of the time that measuring everything once may take: the rest is for repeats."""


@dataclass(frozen=True)
class Attempt:
    """What a measurement found: its value, the part of the processor time that others took from
    it, and what there was no time for."""

    value: Any
    waited: float
    left_out: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class Result:
    """The best attempt at a measurement, the seconds that the last one took, and how often it was
    repeated."""

    attempt: Attempt
    seconds: float
    repeats: int = 0


def measure_all(
    measurements: Sequence[Measurement],
    limit: float,
    on_progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Result]:
    """The best attempt at each of `measurements`, all within `limit` seconds.

    Each is made once. What was disturbed is made again while there is time, by turns, and the
    attempt that was disturbed least is kept.

    Raises:
        RunFailed: the time was over before each was made once.
    """
    began = clock()
    end = began + limit
    course = _Course(clock, end, on_progress or (lambda what, part: None))
    kept: list[Result] = []
    whole = sum(measurement.weight for measurement in measurements)
    done = 0.0
    for measurement in measurements:
        share = measurement.weight / (whole - done)
        until = clock() + (began + FIRST * limit - clock()) * share
        first = course.attempt(measurement, until, done / whole, measurement.weight / whole)
        if first is None:
            raise RunFailed(
                f"the calibration was not done within {limit:.0f} s: {measurement.name} took "
                "longer; give it more with --limit, a smaller batch, or a quiet machine"
            )
        kept.append(first)
        done += measurement.weight
    while (place := _most_in_need(kept, end - clock())) is not None:
        again = course.attempt(measurements[place], end, 0.0, 1.0, " again")
        kept[place] = _better(kept[place], again)
    return kept


def _most_in_need(kept: Sequence[Result], left: float) -> int | None:
    """Which disturbed measurement comes next, of those that `left` seconds suffice for."""
    places = [
        place
        for place, one in enumerate(kept)
        if one.attempt.waited > MOST_WAITED and one.seconds < left
    ]
    return min(places, key=lambda p: (kept[p].repeats, -kept[p].attempt.waited), default=None)


def _better(one: Result, again: Result | None) -> Result:
    """The attempt that was disturbed less; of `again` None, which was cut off, only that it was."""
    if again is None:
        return replace(one, repeats=one.repeats + 1, seconds=float("inf"))
    best = min(one.attempt, again.attempt, key=lambda attempt: attempt.waited)
    return Result(best, again.seconds, one.repeats + 1)


@dataclass
class _Course:
    """Attempts one after the other, and what the user is told of them."""

    clock: Callable[[], float]
    end: float
    tell: Progress

    def attempt(
        self, measurement: Measurement, until: float, done: float, part: float, again: str = ""
    ) -> Result | None:
        """`done` of everything is done, and `part` of it will be this."""
        what = measurement.name + again
        self.tell(what, done)
        began = self.clock()
        found = measurement.measure(until, self.end, lambda own: self.tell(what, done + own * part))
        return None if found is None else Result(found, self.clock() - began)
