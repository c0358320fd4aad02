"""One row of a report: a strategy at one number of ranks, over its seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestra.records.record import RunRecord
from orchestra.report.collect import RunData, Source
from orchestra.report.numbers import count
from orchestra.report.statistics import mean, spread

Read = Callable[[RunRecord], float | None]
"""A figure of a record; None where the run has none."""

_OF_ROWS = ("name", "strategies", "seeds", "ranks")


@dataclass(frozen=True)
class Row:
    """A strategy at one rank count, over its seeds.

    `name` is what a reader sees: the label, with the ranks and the source where the label alone
    would stand for several rows of a report. What stands between `ranks` and `runs` is that of a
    completed run, where there is one; `synchronous` and `steps_together` are None where a record
    does not say.
    """

    name: str
    label: str
    strategy: str
    ranks: int
    workers: int
    servers: int
    global_batch: int
    worker_batches: tuple[int, ...]
    steps: int
    synchronous: bool | None
    steps_together: bool | None
    shares: tuple[float, ...]
    runs: tuple[RunData, ...]
    source: Source

    @property
    def completed(self) -> tuple[RunData, ...]:
        """The runs that came to their end."""
        return tuple(run for run in self.runs if run.record.status == "completed")

    @property
    def single(self) -> bool:
        """Whether nothing is distributed: one process with all cores."""
        return self.strategy.partition("(")[0] == "Single"

    def values(self, read: Read) -> dict[int, float]:
        """By seed, a figure of the completed runs that have it."""
        found = {run.record.seed: read(run.record) for run in self.completed}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, read: Read) -> float | None:
        """The mean over the seeds; None where no run has the figure."""
        return mean(list(self.values(read).values()))

    def spread(self, read: Read) -> float | None:
        """The sample standard deviation over the seeds; None below two of them."""
        return spread(list(self.values(read).values()))


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
    return _named([_row(members) for members in groups.values()])


def common_settings(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be equal in two experiments whose runs are compared."""
    return {key: value for key, value in experiment.items() if key not in _OF_ROWS}


def _row(members: Sequence[tuple[Source, RunData]]) -> Row:
    records = [run.record for _, run in members]
    told = next((record for record in records if record.status == "completed"), records[0])
    return Row(
        name=told.name,
        label=told.name,
        strategy=told.strategy,
        ranks=told.ranks,
        workers=told.workers,
        servers=told.servers,
        global_batch=told.global_batch,
        worker_batches=tuple(told.worker_batches),
        steps=told.steps,
        synchronous=told.synchronous,
        steps_together=told.steps_together,
        shares=tuple(told.shares),
        runs=tuple(run for _, run in members),
        source=members[0][0],
    )


def _named(rows: Sequence[Row]) -> list[Row]:
    """`rows` with names that tell them apart, as short as that allows."""
    several = len({row.ranks for row in rows}) > 1
    names = [f"{row.label} ({count('rank', row.ranks)})" if several else row.label for row in rows]
    for place in (_folder, _whole_folder):
        twice = {name for name, times in Counter(names).items() if times > 1}
        names = [
            f"{name} [{place(row)}]" if name in twice else name
            for name, row in zip(names, rows, strict=True)
        ]
    return [replace(row, name=name) for row, name in zip(rows, _numbered(names), strict=True)]


def _folder(row: Row) -> str:
    return Path(row.source.folder).resolve().name


def _whole_folder(row: Row) -> str:
    return str(row.source.folder)


def _numbered(names: Sequence[str]) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for name in names:
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name} #{counts[name]}"
