"""The registry of measures: each figure of a run, with its unit, which is better, and how it is
computed from the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestra.errors import InputError
from orchestra.records.record import RunRecord
from orchestra.records.report import is_rising
from orchestra.trainer.settings import Target

METRIC = "metrics."  # the prefix of the keys of measures that are metrics of the final parameters
Read = Callable[[RunRecord], float | None]  # a figure of a record; None where the run has none


HEADINGS = {
    "time_to_target_seconds": "s to target",
    "train_seconds": "seconds",
    "samples_per_second": "samples/s",
    "bytes_sent": "MB sent",
}  # fmt: skip


@dataclass(frozen=True)
class Measure:
    """A figure of a run."""

    key: str
    title: str
    unit: str
    read: Read
    rising: bool | None = None  # more is better; False: less is; None: neither
    digits: int = 3
    resolution: Read | None = None  # how much earlier the true one may be, if read at snapshots

    @property
    def heading(self) -> str:
        """The title of a narrow column, which has no room for name and unit."""
        return HEADINGS.get(self.key, self.title.removeprefix("final "))

    def order(self, value: float) -> float:
        """Return `value` so that the smallest is the best."""
        return -value if self.rising else value


def _spacing(record: RunRecord) -> float | None:
    after, reached = record.to_target.after, record.to_target.seconds
    # The target was reached somewhere between two snapshots, and is read at the later one
    return None if after is None or reached is None else reached - after


def _until_target(read: Read) -> Read:
    """Return the resolution of what was spent until the target."""

    def resolution(record: RunRecord) -> float | None:
        value, spacing, reached = read(record), _spacing(record), record.to_target.seconds
        if value is None or spacing is None or not reached:
            return None
        # As if it were spent at a constant rate until the target
        return value * spacing / reached

    return resolution


def _of_unlike(read: Read) -> Read:
    """Return an efficiency in per cent where nodes are unlike; with equal nodes it would be that
    which the table has as speed."""

    def part(record: RunRecord) -> float | None:
        value = read(record)
        return 100 * value if value is not None and record.machine.mixed else None

    return part


def _staleness(which: str) -> Read:
    def read(record: RunRecord) -> float | None:
        stale = record.updates.staleness
        return None if stale is None else stale[which]

    return read


def _energy(record: RunRecord) -> float | None:
    return _kilo(record.spending.joules)


def _energy_to_target(record: RunRecord) -> float | None:
    return _kilo(record.spending.joules_to_target)


def _kilo(joules: float | None) -> float | None:
    return None if joules is None else joules / 1e3


TIME_TO_TARGET = Measure(
    "time_to_target_seconds", "time to target", "s", lambda r: r.to_target.seconds, False,
    resolution=_spacing,
)  # fmt: skip
TRAIN = Measure("train_seconds", "training", "s", lambda r: r.time.training, False)
PACE = Measure(
    "samples_per_second", "speed", "samples/s", lambda r: r.time.samples_per_second, True
)
SETUP = Measure("setup_seconds", "set-up", "s", lambda r: r.time.setup, False)
SENT = Measure("bytes_sent", "sent", "MB", lambda r: r.traffic.sent / 1e6, False)
STALENESS = Measure("staleness_mean", "staleness, mean", "updates", _staleness("mean"), False)
STALEST = Measure("staleness_max", "largest", "updates", _staleness("max"), False)
FINAL_LOSS = Measure("final_loss", "final loss", "", lambda r: r.learned.loss, False, 4)
HETEROGENEOUS = Measure(
    "heterogeneous_efficiency", "heterogeneous efficiency", "%",
    _of_unlike(lambda r: r.machine.heterogeneous_efficiency), True,
)  # fmt: skip
CONVERGENCE = Measure(
    "convergence_efficiency", "convergence efficiency", "%",
    _of_unlike(lambda r: r.machine.convergence_efficiency), True,
)  # fmt: skip
ENERGY = Measure("energy_joules", "energy", "kJ", _energy, False)
ENERGY_TO_TARGET = Measure(
    "energy_to_target_joules", "energy to target", "kJ", _energy_to_target, False,
    resolution=_until_target(_energy_to_target),
)  # fmt: skip
OF_RUNS = (TRAIN, PACE, SETUP, SENT)
OF_STALENESS = (STALENESS, STALEST)
OF_UNLIKE_NODES = (HETEROGENEOUS, CONVERGENCE)
OF_ENERGY = (ENERGY_TO_TARGET, ENERGY)


def costs_in(currency: str) -> tuple[Measure, Measure]:
    """Return the measures of the costs in `currency`: until the target, and of the whole run."""

    def to_target(record: RunRecord) -> float | None:
        return record.spending.cost_to_target

    return (
        Measure("cost_to_target", "cost to target", currency, to_target, False,
                resolution=_until_target(to_target)),
        Measure("cost", "cost", currency, lambda r: r.spending.cost, False),
    )  # fmt: skip


def target_of(experiment: Mapping[str, Any]) -> Target | None:
    """Return the target of an experiment; None where it has none."""
    target = experiment.get("target")
    try:
        return Target(**target) if isinstance(target, Mapping) else None
    except (InputError, TypeError):
        return None


def target_text(target: Target) -> str:
    """Return a target as part of a sentence: "accuracy 0.9", "loss ≤ 0.3"."""
    return f"{target.metric} {'' if target.rising else '≤ '}{target.bound:g}"


def final_metric(name: str, target: Target | None) -> Measure:
    """Return the metric `name` of the final parameters."""
    rising = target.rising if target is not None and target.metric == name else is_rising(name)
    return Measure(
        f"{METRIC}{name}", f"final {name}", "", lambda r: r.learned.metrics.get(name), rising, 4
    )
