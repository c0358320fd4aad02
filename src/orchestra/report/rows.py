"""The rows of a report, from the files of runs: a strategy on a number of ranks, over seeds.

Everything that a report shows comes from the files that are read here.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from orchestra.cluster import Cluster
from orchestra.cluster.file import read_cluster
from orchestra.errors import InputError
from orchestra.records.exports import FILE as TRACE
from orchestra.records.live import is_step
from orchestra.records.record import (
    CLUSTER,
    EXPERIMENT,
    SUMMARY,
    TECHNIQUES,
    Links,
    RunRecord,
    read_links,
    read_not_run,
    read_summary,
    run_folder,
)
from orchestra.records.report import Point
from orchestra.report import numbers
from orchestra.report.numbers import Measure, Read, count
from orchestra.settings.reading import json_value, plain_value, read_bytes, read_json, read_yaml

T = TypeVar("T")
K = TypeVar("K")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return `items` by their key, in the order of the first of each."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True)
class RunData:
    """One run: its record, and the files beside it, which are read on first use."""

    record: RunRecord

    @cached_property
    def curve(self) -> list[Point]:
        """The figures of its snapshots, in order; none for a run that failed."""
        return [*_lines(self.record.folder / "curve.jsonl", Point)]

    @cached_property
    def steps(self) -> dict[int, list[dict[str, Any]]]:
        """The recorded steps of each rank that computed any; raises `InputError` if a line is
        damaged, or the steps do not follow one another."""
        paths = self.record.folder.glob("steps-rank-*.jsonl")
        by_rank = {int(path.stem.rpartition("-")[2]): _steps(path) for path in paths}
        # A rank that only served leaves an empty file
        return {rank: by_rank[rank] for rank in sorted(by_rank) if by_rank[rank]}

    @cached_property
    def links(self) -> Links | None:
        """The traffic of the links; None if it was not counted."""
        return read_links(self.record.folder)

    @cached_property
    def cluster(self) -> Cluster | None:
        """The simulated cluster; None for a run of real processes."""
        path = self.record.folder / CLUSTER
        return read_cluster(path) if path.exists() else None

    @property
    def trace(self) -> Path | None:
        """The timeline of the run, if it left one."""
        path = self.record.folder / TRACE
        return path if path.exists() else None


@dataclass(frozen=True)
class Source:
    """A folder that was given: a comparison's or a training's. What it has not is empty."""

    folder: Path
    experiment: Mapping[str, Any]  # its file, as plain data
    environment: Mapping[str, Any] = field(default_factory=dict)  # of its first run
    tuning: Mapping[str, Any] = field(default_factory=dict)  # what `tuning.json` says
    runs: Sequence[RunData] = ()
    not_run: Sequence[Mapping[str, Any]] = ()  # rows that could not be: name, ranks and reason
    techniques: Sequence[Mapping[str, Any]] = ()  # rows that differ in one setting

    @property
    def name(self) -> str:
        """The name of the experiment, or else of the folder."""
        return str(self.experiment.get("name", self.folder.name))


def collect(folders: Sequence[Path]) -> list[Source]:
    """Return the contents of the folders of trainings and comparisons, in the given order; raise
    `InputError` for a folder that is none of a run, and if none holds a finished run yet."""
    sources = [_source(folder) for folder in folders]
    if not any(source.runs for source in sources):
        names = ", ".join(str(folder) for folder in folders) or "no folder given"
        raise InputError(f"{names}: there is no run to report on yet")
    return sources


def _source(folder: Path) -> Source:
    try:
        experiment = read_yaml(folder / EXPERIMENT)
        records = read_summary(folder / SUMMARY)
    except FileNotFoundError as error:
        lacks = f"it has no {Path(error.filename).name}"
        raise InputError(f"{folder}: is not the folder of a run or comparison: {lacks}") from None
    runs = []
    for record in records:  # that of a comparison lies further down
        inner = run_folder(folder, record.name, record.ranks, record.seed)
        runs.append(RunData(replace(record, folder=inner) if inner.is_dir() else record))
    environments = [_json(run.record.folder / "environment.json") for run in runs]
    return Source(
        folder,
        experiment,
        next(filter(None, environments), {}),
        _tuning(folder / "tuning.json"),
        runs,
        read_not_run(folder / SUMMARY),
        _json(folder / TECHNIQUES).get("techniques", ()),
    )


def _json(path: Path) -> dict[str, Any]:
    """Return the mapping in a file; an empty one where there is no file."""
    value: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        value = read_json(path, dict[str, Any])
    return value


def _tuning(path: Path) -> dict[str, Any]:
    value = _json(path)
    if value and not {"trials", "metric", "better", "seed", "choices"} <= value.keys():
        raise InputError(f"{path}: is damaged: it lacks what was tried")
    return value


def _steps(path: Path) -> list[dict[str, Any]]:
    lines = [*_lines(path, dict[str, Any], grows=True)]
    for number, line in enumerate(lines, start=1):
        if not is_step(line):
            raise InputError(f"{path}:{number}: is damaged: it has not all figures of a step")
    for number, (before, line) in enumerate(pairwise(lines), start=2):
        # Nothing else would tell: the means over such a file look plausible
        if line["step"] <= before["step"]:
            raise InputError(
                f"{path}:{number}: step {line['step']} stands after step {before['step']}: two "
                "runs have written into this folder; repeat the run in one of its own"
            )
    return lines


def _lines(path: Path, hint: type[T], *, grows: bool = False) -> Iterator[T]:
    """Yield the value of each line of a file, as `hint`; none where there is no file."""
    lines: list[bytes] = []
    with suppress(FileNotFoundError):
        lines = read_bytes(path).splitlines(True)
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            value = json_value(line, where)
        except InputError:
            if grows and not line.endswith(b"\n"):
                return  # the last one: whoever wrote it was killed meanwhile
            raise
        yield plain_value(hint, value, where)


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
        """The runs that were completed."""
        return tuple(run for run in self.runs if run.record.status == "completed")

    @cached_property
    def record(self) -> RunRecord:
        """The record of a completed run, if there is one: for what all runs of the row share."""
        return (self.completed or self.runs)[0].record

    @property
    def label(self) -> str:
        """The strategy's name in the experiment."""
        return self.record.name

    @property
    def ranks(self) -> int:
        """The number of ranks of its runs, dedicated servers included."""
        return self.record.ranks

    @property
    def global_batch(self) -> int:
        """The samples of one step of all workers together."""
        return self.record.global_batch

    @property
    def single(self) -> bool:
        """True if nothing is distributed: one process with all cores."""
        return self.record.distributed is False

    def values(self, read: Read) -> dict[int, float]:
        """Return a figure of those completed runs that have it, by seed."""
        found = {run.record.seed: read(run.record) for run in self.completed}
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
        """Return the mean with its unit, and its uncertainty or the spread over the seeds."""
        mean, spread = self.mean(measure.read), self.spread(measure.read)
        assert mean is not None
        if (known := self.known_to(measure)) is not None:
            return numbers.uncertain(mean, known, measure.unit)
        # A figure read at snapshots has no spread worth showing without a spacing (old records)
        if spread is None or measure.resolution is not None:
            return numbers.figure_text(mean, measure.unit, measure.digits)
        places = numbers.decimals_for([mean], measure.digits)
        both = " ± ".join(numbers.fixed(value, places) for value in (mean, spread))
        return numbers.with_unit(both, measure.unit)


def rows_of(sources: Sequence[Source]) -> list[Row]:
    """Return the rows of all `sources`, in the order of their runs, under names that differ.

    Runs of several sources share a row where everything but the seed is equal.
    """
    rows: dict[tuple[object, ...], Row] = {}
    for source in sources:
        # As a text, since lists and dicts cannot be part of a key
        setting = repr(common_settings(source.experiment))
        for run in source.runs:
            record = run.record
            key: tuple[object, ...] = (record.name, record.strategy, record.ranks, setting)
            # One seed has one run in a row: differences are paired by it
            while key in rows and record.seed in (each.record.seed for each in rows[key].runs):
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
