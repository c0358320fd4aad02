"""The decisions of a plan, on plain figures: what is reached when, who is dropped, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestra.records.report import Point
from orchestra.trainer.settings import Target

SPARED = 0.02
"""Candidates whose times differ by less are taken to be equally fast; fewer nodes decide."""


@dataclass(frozen=True)
class Reached:
    """A target was reached after so many samples and seconds, each known to its spacing."""

    samples: float
    seconds: float
    spacing: float


def reached(points: Sequence[Point], target: Target) -> Reached | None:
    """When the curve first crosses the target: a straight line between two snapshots.

    None where no snapshot reaches it. `spacing` are the seconds between the two.
    """
    before: Point | None = None
    for point in points:
        value = point.metrics.get(target.metric)
        if value is not None and target.reached(value):
            if before is None:
                return Reached(point.samples, point.seconds, point.seconds)
            first, bound = before.metrics[target.metric], _bound(target)
            part = (bound - first) / (value - first)
            return Reached(
                before.samples + part * (point.samples - before.samples),
                before.seconds + part * (point.seconds - before.seconds),
                point.seconds - before.seconds,
            )
        if value is not None:
            before = point
    return None


def _bound(target: Target) -> float:
    bound = target.at_least if target.at_least is not None else target.at_most
    assert bound is not None
    return bound


def better(target: Target, first: float, second: float) -> bool:
    """Whether a value of the target's metric is better than another one."""
    return first > second if target.at_least is not None else first < second


def value_at(points: Sequence[Point], metric: str, samples: float) -> float | None:
    """The metric after so many samples, on a straight line between the snapshots around; the last
    one's beyond them, the first one's before them. None without any."""
    known = [(point.samples, point.metrics[metric]) for point in points if metric in point.metrics]
    if not known:
        return None
    if samples <= known[0][0]:
        return known[0][1]
    for (first, low), (second, high) in pairwise(known):
        if samples <= second:
            return low + (high - low) * (samples - first) / (second - first)
    return known[-1][1]


def best_value(points: Sequence[Point], target: Target) -> float | None:
    """The best that the target's metric was at any snapshot."""
    values = [p.metrics[target.metric] for p in points if target.metric in p.metrics]
    if not values:
        return None
    return max(values) if target.at_least is not None else min(values)


def cannot_win(
    samples: float, batch: float, update: float, speed: float, best: float
) -> float | None:
    """The seconds that a candidate needs at least, if these are not below the `best`; else None.

    At best one of its updates, of `update` samples, is worth as much as one of a step of `batch`
    samples, of which one process needs `samples` in all. At `speed` samples/s that takes
    samples x update / batch / speed.
    """
    least = samples * min(1.0, update / batch) / speed
    return least if least >= 0.999 * best else None


def halved(scores: Mapping[str, tuple[float, float]], least: int) -> tuple[list[str], list[str]]:
    """Who goes on to the next rung, and who does not: the better half, and at least `least`.

    Args:
        scores: of each name, smaller is better; of equal ones the first stays.
    """
    order = sorted(scores, key=lambda name: scores[name])
    keep = max(least, (len(order) + 1) // 2)
    return order[:keep], order[keep:]


def chosen(times: Mapping[str, float], nodes: Mapping[str, int]) -> str:
    """The name with the shortest time; of those within `SPARED` of it one with the fewest nodes."""
    limit = min(times.values()) * (1 + SPARED)
    near = [name for name in times if times[name] <= limit]
    return min(near, key=lambda name: (nodes[name], times[name]))


def bottleneck(seconds: Mapping[str, float]) -> str:
    """What most of a worker's time goes into: "computing", "messages" or "waiting", with its part.

    `seconds` are those of a record: compute, communicate and wait, of a worker in the mean.
    """
    words = {"compute": "computing", "communicate": "messages", "wait": "waiting"}
    whole = sum(seconds.get(part, 0.0) for part in words)
    if not whole:
        return "not known"
    most = max(words, key=lambda part: seconds.get(part, 0.0))
    return f"{words[most]} {100 * seconds[most] / whole:.0f} %"
