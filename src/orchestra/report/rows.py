"""A strategy over its seeds: means, spreads, differences, and the figures runs are measured by."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from orchestra.records.record import RunRecord
from orchestra.records.report import is_rising
from orchestra.report.collect import RunData, Source
from orchestra.report.numbers import (
    count,
    decimals_for,
    figure_text,
    fixed,
    places_of,
    uncertain,
    with_unit,
)

CONFIDENCE = 0.95
T = TypeVar("T")
K = TypeVar("K")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """`items` by their key, in the order of the first of each."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences over `n` pairs, with its confidence interval.

    `low` and `high` are None where there is one pair: nothing is known of the spread then.
    `below` and `above`: so much less or more it may be, since the figures are read at snapshots;
    the interval has that in it.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    below: float = 0.0
    above: float = 0.0

    @property
    def too_coarse(self) -> bool:
        """Whether the snapshots are too far apart to say which figure is the larger."""
        return -self.above < self.mean < self.below

    @property
    def certain(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.low is not None and self.high is not None and self.low * self.high > 0

    def texts(self, places: int | None = None) -> list[str]:
        """The mean and the ends of the interval, if there is one, with so many decimals; by default
        with three significant digits of the largest, though no more than the snapshots allow."""
        values = [value for value in (self.mean, self.low, self.high) if value is not None]
        if places is None:
            coarse = max(self.below, self.above)
            places = max(0, places_of(coarse)) if coarse else decimals_for(values, 3)
        return [fixed(value, places, sign=True) for value in values]

    def widened(self, below: float, above: float) -> Difference:
        """The same, of figures that may be smaller than they were read: by as much as `below` in
        the mean of the first ones, and as `above` in that of those taken off."""
        low = None if self.low is None else self.low - below
        high = None if self.high is None else self.high + above
        return replace(self, low=low, high=high, below=below, above=above)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """`ours` - `theirs`, paired by seed; None where they share no seed.

    The interval is Student's t over the differences, at 95 %. It assumes that they are about
    normal, and takes nothing as known of the two spreads.
    """
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not differences:
        return None
    n = len(differences)
    middle = statistics.fmean(differences)
    if n == 1:
        return Difference(middle, None, None, 1)
    from scipy.special import stdtrit  # 0.1 s, which a page without seeds need not pay

    quantile = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))
    half = quantile * statistics.stdev(differences) / math.sqrt(n)
    return Difference(middle, middle - half, middle + half, n)


Read = Callable[[RunRecord], float | None]
"""A figure of a record; None where the run has none."""


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


def _staleness(which: str) -> Read:
    return lambda record: None if record.staleness is None else record.staleness[which]


TIME_TO_TARGET = Measure(
    "time_to_target_seconds", "time to target", "s", lambda r: r.time_to_target_seconds, False,
    resolution=_spacing,
)  # fmt: skip
TRAIN = Measure("train_seconds", "training", "s", lambda r: r.train_seconds, False)
PACE = Measure("samples_per_second", "speed", "samples/s", lambda r: r.samples_per_second, True)
SETUP = Measure("setup_seconds", "set-up", "s", lambda r: r.setup_seconds, False)
SENT = Measure("bytes_sent", "sent", "MB", lambda r: r.bytes_sent / 1e6, False)
STALENESS = Measure("staleness_mean", "staleness, mean", "updates", _staleness("mean"), False)
STALEST = Measure("staleness_max", "largest", "updates", _staleness("max"), False)
FINAL_LOSS = Measure("final_loss", "final loss", "", lambda r: r.final_loss, False, 4)
HETEROGENEOUS = Measure(
    "heterogeneous_efficiency", "heterogeneous efficiency", "%",
    lambda r: _percent(r.heterogeneous_efficiency) if r.mixed else None, True,
)  # fmt: skip
CONVERGENCE = Measure(
    "convergence_efficiency", "convergence efficiency", "%",
    lambda r: _percent(r.convergence_efficiency) if r.mixed else None, True,
)  # fmt: skip
ENERGY = Measure(
    "energy_joules", "energy", "kJ", lambda r: _thousands(r.energy_joules), False
)  # fmt: skip
ENERGY_TO_TARGET = Measure(
    "energy_to_target_joules", "energy to target", "kJ",
    lambda r: _thousands(r.energy_to_target_joules), False,
    resolution=lambda r: _spacing_of(_thousands(r.energy_to_target_joules), r),
)  # fmt: skip


def costs_in(currency: str) -> tuple[Measure, Measure]:
    """The costs of runs whose nodes are paid for in `currency`: to the target, and of the whole."""
    return (
        Measure(
            "cost_to_target", "cost to target", currency, lambda r: r.cost_to_target, False,
            resolution=lambda r: _spacing_of(r.cost_to_target, r),
        ),
        Measure("cost", "cost", currency, lambda r: r.cost, False),
    )  # fmt: skip


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def _thousands(value: float | None) -> float | None:
    return None if value is None else value / 1e3


def _spacing_of(value: float | None, record: RunRecord) -> float | None:
    """Return how far below `value` the true one may lie, which is in proportion to the time to
    target."""
    spacing, reached = _spacing(record), record.time_to_target_seconds
    return None if value is None or spacing is None or not reached else value * spacing / reached


METRIC = "metrics."
"""Begins the keys of the measures that are metrics of the final parameters."""


@dataclass(frozen=True)
class ReportTarget:
    """The bound that the runs were to reach."""

    metric: str
    bound: float
    rising: bool

    def __str__(self) -> str:
        return f"{self.metric} {'' if self.rising else '≤ '}{self.bound:g}"


def target_of(experiment: Mapping[str, Any]) -> ReportTarget | None:
    """The target of an experiment; None where it has none."""
    target = experiment.get("target")
    if not isinstance(target, Mapping) or "metric" not in target:
        return None
    rising = target.get("at_least") is not None
    bound = target.get("at_least") if rising else target.get("at_most")
    return ReportTarget(str(target["metric"]), float(bound), rising) if bound is not None else None


def final_metric(name: str, target: ReportTarget | None) -> Measure:
    """The metric `name` of the final parameters."""
    rising = target.rising if target is not None and target.metric == name else is_rising(name)
    return Measure(f"{METRIC}{name}", f"final {name}", "", lambda r: r.metrics.get(name), rising, 4)


@dataclass(frozen=True)
class Row:
    """A strategy at one rank count, over its seeds.

    `name` is what a reader sees: the label, with the ranks and the source where the label alone
    would stand for several rows of a report.
    """

    name: str
    runs: tuple[RunData, ...]
    source: Source

    @cached_property
    def completed(self) -> tuple[RunData, ...]:
        """The runs that came to their end."""
        return tuple(run for run in self.runs if run.record.status == "completed")

    @cached_property
    def record(self) -> RunRecord:
        """That of a completed run, where there is one, for what is equal in all of them."""
        return (self.completed or self.runs)[0].record

    @property
    def label(self) -> str:
        """The strategy's name in the experiment."""
        return self.record.name

    @property
    def ranks(self) -> int:
        """The budget of its runs."""
        return self.record.ranks

    @property
    def global_batch(self) -> int:
        """The samples of a step of all workers."""
        return self.record.global_batch

    @property
    def single(self) -> bool:
        """Whether nothing is distributed: one process with all cores."""
        return self.record.distributed is False

    @property
    def switches(self) -> bool:
        """Whether a rule could end a phase and begin another one."""
        return self.record.switches is True

    def values(self, read: Read) -> dict[int, float]:
        """By seed, a figure of the completed runs that have it."""
        found = {run.record.seed: read(run.record) for run in self.completed}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, read: Read) -> float | None:
        """The mean over the seeds; None where no run has the figure."""
        values = self.values(read).values()
        return statistics.fmean(values) if values else None

    def spread(self, read: Read) -> float | None:
        """The sample standard deviation (n - 1) over the seeds; None below two of them."""
        values = self.values(read).values()
        return statistics.stdev(values) if len(values) > 1 else None

    def known_to(self, measure: Measure) -> float | None:
        """How well the mean of a figure that is read at snapshots is known: to the mean spacing of
        the snapshots, or the spread over the seeds where that is larger. None of other figures."""
        spacing = None if measure.resolution is None else self.mean(measure.resolution)
        return None if spacing is None else max(spacing, self.spread(measure.read) or 0.0)

    def text(self, measure: Measure) -> str:
        """The mean with its unit, and how well it is known or how far the seeds spread."""
        mean, spread = self.mean(measure.read), self.spread(measure.read)
        assert mean is not None
        if (known := self.known_to(measure)) is not None:
            return uncertain(mean, known, measure.unit)
        if spread is None or measure.resolution is not None:
            return figure_text(mean, measure.unit, measure.digits)
        places = decimals_for([mean], measure.digits)
        return with_unit(f"{fixed(mean, places)} ± {fixed(spread, places)}", measure.unit)


def rows_of(sources: Sequence[Source]) -> list[Row]:
    """The rows of all `sources`, in the order of their runs, under names that differ.

    Runs of several sources share a row where everything but the seed is equal.
    """
    groups: dict[tuple[object, ...], list[tuple[Source, RunData]]] = {}
    for source in sources:
        setting = repr(common_settings(source.experiment))
        for run in source.runs:
            record = run.record
            key: tuple[object, ...] = (record.name, record.strategy, record.ranks, setting)
            while record.seed in (other.record.seed for _, other in groups.get(key, ())):
                key = (*key, "again")  # the same run a second time: in a row of its own
            groups.setdefault(key, []).append((source, run))
    return _named(
        [Row("", tuple(run for _, run in group), group[0][0]) for group in groups.values()]
    )


def common_settings(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be equal in two experiments whose runs are compared."""
    own = ("name", "strategies", "seeds", "ranks")
    return {key: value for key, value in experiment.items() if key not in own}


def _named(rows: Sequence[Row]) -> list[Row]:
    """Return `rows` with names that tell them apart, as short as that allows."""
    several = len({row.ranks for row in rows}) > 1
    names = [f"{row.label} ({count('rank', row.ranks)})" if several else row.label for row in rows]
    folders = [row.source.folder for row in rows]
    for places in ([folder.resolve().name for folder in folders], folders):
        counts = Counter(names)
        names = [
            f"{name} [{place}]" if counts[name] > 1 else name
            for name, place in zip(names, places, strict=True)
        ]
    return [replace(row, name=name) for row, name in zip(rows, numbered(names, " #"), strict=True)]


def numbered(names: Sequence[str], mark: str) -> Iterator[str]:
    """`names`, with `mark` and a number behind each that was there before."""
    counts: Counter[str] = Counter()
    for name in names:
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name}{mark}{counts[name]}"
