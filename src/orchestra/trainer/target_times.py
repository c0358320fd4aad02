"""When a run reached its target, read off its curve; imports without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestra.records.report import Point
from orchestra.trainer.settings import Target


def target_times(curve: Sequence[Point], target: Target | None) -> dict[str, float | None]:
    """The fields of a record that tell when `target` was reached: seconds on the stopwatch.

    `time_to_target_seconds` is that of the first snapshot whose `metrics` reach it: those of the
    model, or the nodes' mean where replicas differ. It was reached after the snapshot before, at
    `time_to_target_after_seconds` (0 before the first), and by then. The two others are those of
    the first snapshot at which the worst node, and the average of the replicas, reach it. All are
    None where they do not.
    """
    reached = time = after = None
    if target is not None:
        reached = _first(curve, lambda point: _reaches(point.metrics, target))
    if reached is not None:
        time = curve[reached].seconds
        after = curve[reached - 1].seconds if reached else 0.0

    def seconds(reaches: Callable[[Point, Target], bool]) -> float | None:
        found = None if target is None else _first(curve, lambda point: reaches(point, target))
        return None if found is None else curve[found].seconds

    return {
        "time_to_target_seconds": time,
        "time_to_target_after_seconds": after,
        "time_to_target_worst_node_seconds": seconds(_every_node),
        "time_to_target_average_seconds": seconds(_average),
    }


def _first(curve: Sequence[Point], reaches: Callable[[Point], bool]) -> int | None:
    return next((place for place, point in enumerate(curve) if reaches(point)), None)


def _every_node(point: Point, target: Target) -> bool:
    return bool(point.nodes) and all(_reaches(own, target) for own in point.nodes.values())


def _average(point: Point, target: Target) -> bool:
    return point.average is not None and _reaches(point.average, target)


def _reaches(metrics: dict[str, float], target: Target) -> bool:
    value = metrics.get(target.metric)
    return value is not None and target.reached(value)
