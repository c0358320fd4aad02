"""The rows of a report: a strategy on a number of ranks, over seeds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from orchestra.records.record import RunRecord
from orchestra.records.store import RunFolder, RunStore
from orchestra.report import numbers
from orchestra.report.measures import Measure, Read
from orchestra.report.numbers import count

T = TypeVar("T")
K = TypeVar("K")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return `items` by their key, in the order of the first of each."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True)
class Row:
    """A strategy at one rank count, over its seeds.

    `name` is what a reader sees: the label, with the ranks and the source where the label alone
    would stand for several rows of a report.
    """

    name: str
    runs: tuple[RunFolder, ...]
    source: RunStore

    @cached_property
    def completed(self) -> tuple[RunFolder, ...]:
        """The runs that were completed."""
        return tuple(run for run in self.runs if run.record.ending.status == "completed")

    @cached_property
    def record(self) -> RunRecord:
        """The record of a completed run, if there is one: for what all runs of the row share."""
        return (self.completed or self.runs)[0].record

    @property
    def label(self) -> str:
        """The strategy's name in the experiment."""
        return self.record.asked.name

    @property
    def ranks(self) -> int:
        """The number of ranks of its runs, dedicated servers included."""
        return self.record.asked.ranks

    @property
    def global_batch(self) -> int:
        """The samples of one step of all workers together."""
        return self.record.batching.global_batch

    @property
    def single(self) -> bool:
        """True if nothing is distributed: one process with all cores."""
        return self.record.pacing.distributed is False

    def values(self, read: Read) -> dict[int, float]:
        """Return a figure of those completed runs that have it, by seed."""
        found = {run.record.asked.seed: read(run.record) for run in self.completed}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, read: Read) -> float | None:
        """Return the mean over the seeds; None where no run has the figure."""
        values = self.values(read).values()
        return statistics.fmean(values) if values else None

    def spread(self, read: Read) -> float | None:
        """Return the sample standard deviation (n - 1) over the seeds; None below two of them."""
        values = self.values(read).values()
        return statistics.stdev(values) if len(values) > 1 else None

    def known_to(self, measure: Measure) -> float | None:
        """Return the uncertainty of the mean of a figure that is read at snapshots: their mean
        spacing, or the spread over the seeds if that is larger. None for other figures."""
        spacing = None if measure.resolution is None else self.mean(measure.resolution)
        return None if spacing is None else max(spacing, self.spread(measure.read) or 0.0)

    def text(self, measure: Measure) -> str:
        """Return the mean with its unit, and its uncertainty or the spread over the seeds; some
        run of the row has the figure."""
        mean = statistics.fmean(self.values(measure.read).values())
        spread = self.spread(measure.read)
        if (known := self.known_to(measure)) is not None:
            return numbers.uncertain(mean, known, measure.unit)
        # A figure read at snapshots has no spread worth showing without a spacing (old records)
        if spread is None or measure.resolution is not None:
            return numbers.figure_text(mean, measure.unit, measure.digits)
        places = numbers.decimals_for([mean], measure.digits)
        both = " ± ".join(numbers.fixed(value, places) for value in (mean, spread))
        return numbers.with_unit(both, measure.unit)


def rows_of(sources: Sequence[RunStore]) -> list[Row]:
    """Return the rows of all `sources`, in the order of their runs, under names that differ.

    Runs of several sources share a row where everything but the seed is equal.
    """
    rows: dict[tuple[object, ...], Row] = {}
    for source in sources:
        # As a text, since lists and dicts cannot be part of a key
        setting = repr(common_settings(source.experiment))
        for run in source.runs:
            record = run.record
            key: tuple[object, ...] = (
                record.asked.name,
                record.asked.strategy,
                record.asked.ranks,
                setting,
            )
            # One seed has one run in a row: differences are paired by it
            while key in rows and record.asked.seed in (
                each.record.asked.seed for each in rows[key].runs
            ):
                key = (*key, "again")  # the same run a second time: in a row of its own
            row = rows.get(key) or Row("", (), source)
            rows[key] = replace(row, runs=(*row.runs, run))
    return _named([*rows.values()])


def common_settings(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that have to be equal in two experiments whose runs are compared."""
    own = ("name", "strategies", "seeds", "ranks")
    return {key: value for key, value in experiment.items() if key not in own}


def _named(rows: Sequence[Row]) -> list[Row]:
    """Return `rows` with names that are as short as possible and differ."""
    several = len({row.ranks for row in rows}) > 1
    names = [f"{row.label} ({count('rank', row.ranks)})" if several else row.label for row in rows]
    folders = [row.source.folder for row in rows]
    # The folder's own name mostly tells them apart; else its path as the user gave it
    for places in ([folder.resolve().name for folder in folders], folders):
        counts = Counter(names)
        names = [
            f"{name} [{place}]" if counts[name] > 1 else name
            for name, place in zip(names, places, strict=True)
        ]
    return [replace(row, name=name) for row, name in zip(rows, numbered(names, " #"), strict=True)]


def numbered(names: Sequence[str], mark: str) -> Iterator[str]:
    """Yield `names`; a repeated one is followed by `mark` and its number."""
    counts: Counter[str] = Counter()
    for name in names:
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name}{mark}{counts[name]}"
