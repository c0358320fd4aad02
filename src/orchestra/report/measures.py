"""What a report measures runs by: where each figure stands in a record, and which way is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestra.records.record import RunRecord
from orchestra.records.report import is_rising
from orchestra.report.rows import Read, Row


@dataclass(frozen=True)
class Target:
    """The bound that the runs were to reach."""

    metric: str
    bound: float
    rising: bool

    def __str__(self) -> str:
        return f"{self.metric} {'' if self.rising else '≤ '}{self.bound:g}"


@dataclass(frozen=True)
class Measure:
    """A figure of a run. `rising`: more is better; False: less is; None: neither.

    `resolution`: of a figure that is read at snapshots, how far before it the true one may lie.
    """

    key: str
    title: str
    unit: str
    read: Read
    rising: bool | None = None
    digits: int = 3
    resolution: Read | None = None

    def order(self, value: float) -> float:
        """`value` so that the smallest is the best."""
        return -value if self.rising else value


def _spacing(record: RunRecord) -> float | None:
    after, reached = record.time_to_target_after_seconds, record.time_to_target_seconds
    return None if after is None or reached is None else reached - after


TIME_TO_TARGET = Measure(
    "time_to_target_seconds", "time to target", "s", lambda r: r.time_to_target_seconds, False,
    resolution=_spacing,
)  # fmt: skip
TRAIN = Measure("train_seconds", "training", "s", lambda r: r.train_seconds, False)
PACE = Measure("samples_per_second", "speed", "samples/s", lambda r: r.samples_per_second, True)
SETUP = Measure("setup_seconds", "set-up", "s", lambda r: r.setup_seconds, False)
SENT = Measure("bytes_sent", "sent", "MB", lambda r: r.bytes_sent / 1e6, False)
STALENESS = Measure(
    "staleness_mean", "staleness, mean", "updates", lambda r: _staleness(r, "mean"), False
)
STALEST = Measure("staleness_max", "largest", "updates", lambda r: _staleness(r, "max"), False)
FINAL_LOSS = Measure("final_loss", "final loss", "", lambda r: r.final_loss, False, 4)


def known_to(row: Row, measure: Measure) -> float | None:
    """How well the mean of a figure that is read at snapshots is known: to the mean spacing of
    the snapshots, or the spread over the seeds where that is larger. None of other figures."""
    spacing = None if measure.resolution is None else row.mean(measure.resolution)
    return None if spacing is None else max(spacing, row.spread(measure.read) or 0.0)


def target_of(experiment: Mapping[str, Any]) -> Target | None:
    """The target of an experiment; None where it has none."""
    target = experiment.get("target")
    if not isinstance(target, Mapping) or "metric" not in target:
        return None
    rising = target.get("at_least") is not None
    bound = target.get("at_least") if rising else target.get("at_most")
    return Target(str(target["metric"]), float(bound), rising) if bound is not None else None


def final_measures(rows: Sequence[Row], target: Target | None) -> list[Measure]:
    """The figures of the final parameters: the target's metric first, then the others, the loss."""
    names = list(dict.fromkeys(name for row in rows for run in row.completed
                               for name in run.record.metrics))  # fmt: skip
    if target is not None and target.metric in names:
        names.remove(target.metric)
        names.insert(0, target.metric)
    measures = [_metric(name, target) for name in names if name != "loss"]
    return [*measures, FINAL_LOSS]


def _metric(name: str, target: Target | None) -> Measure:
    def read(record: RunRecord) -> float | None:
        return record.metrics.get(name)

    rising = target.rising if target is not None and target.metric == name else is_rising(name)
    return Measure(f"metrics.{name}", f"final {name}", "", read, rising, 4)


def _staleness(record: RunRecord, which: str) -> float | None:
    return None if record.staleness is None else record.staleness[which]
