"""Read what runs have left: everything that a report shows comes from here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from orchestra.cluster import Cluster
from orchestra.cluster.file import read_cluster
from orchestra.errors import InputError
from orchestra.records.record import (
    CLUSTER,
    TECHNIQUES,
    Links,
    RunRecord,
    read_links,
    read_summary,
    run_folder,
)
from orchestra.records.report import Point
from orchestra.settings.reading import yaml_value


@dataclass(frozen=True)
class RunData:
    """One run: its record, and what lies beside it, read when first asked for."""

    record: RunRecord

    @cached_property
    def curve(self) -> list[Point]:
        """The figures of its snapshots, in order; none for a run that failed."""
        return [Point(**line) for line in _lines(self.record.folder / "curve.jsonl")]

    @cached_property
    def steps(self) -> dict[int, list[dict[str, Any]]]:
        """For each rank that computed steps, what it wrote down of each.

        Raises:
            InputError: a line is damaged, or the steps do not follow one another.
        """
        paths = self.record.folder.glob("steps-rank-*.jsonl")
        by_rank = {int(path.stem.rpartition("-")[2]): _steps(path) for path in paths}
        return {rank: by_rank[rank] for rank in sorted(by_rank) if by_rank[rank]}

    @cached_property
    def links(self) -> Links | None:
        """What the links carried; None where nobody counted."""
        return read_links(self.record.folder)

    @cached_property
    def cluster(self) -> Cluster | None:
        """What was simulated; None for a run of real processes."""
        path = self.record.folder / CLUSTER
        return read_cluster(path) if path.exists() else None

    @property
    def trace(self) -> Path | None:
        """Its timeline, where it left one."""
        path = self.record.folder / "trace.json.gz"
        return path if path.exists() else None


@dataclass(frozen=True)
class Source:
    """A folder that was given: a comparison's or a training's.

    `experiment` is its file as plain data, `environment` that of its first run, `tuning` what
    `tuning.json` says, and `not_run` the name, ranks and reason of each row that could not be; each
    empty where there is none. `techniques` are the rows that differ in one setting, as
    `techniques.json` has them.
    """

    folder: Path
    experiment: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)
    runs: Sequence[RunData] = ()
    not_run: Sequence[Mapping[str, Any]] = ()
    techniques: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        """The experiment's, else the folder's."""
        return str(self.experiment.get("name", self.folder.name))


def collect(folders: Sequence[Path]) -> list[Source]:
    """What the folders of trainings and comparisons hold, in the order given.

    Raises:
        InputError: a folder that is none of a run, or that holds no finished run yet.
    """
    sources = [_source(folder) for folder in folders]
    if not any(source.runs for source in sources):
        names = ", ".join(str(folder) for folder in folders) or "no folder given"
        raise InputError(f"{names}: there is no run to report on yet")
    return sources


def _source(folder: Path) -> Source:
    try:
        experiment = yaml_value((folder / "experiment.yaml").read_text(encoding="utf-8"))
        records = read_summary(folder / "summary.json")
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise InputError(
            f"{folder}: is not the folder of a run or comparison: it has no {name}"
        ) from None
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from None
    runs = []
    for record in records:  # that of a comparison lies further down
        inner = run_folder(folder, record.name, record.ranks, record.seed)
        runs.append(RunData(replace(record, folder=inner) if inner.is_dir() else record))
    environments = [_json(run.record.folder / "environment.json") for run in runs]
    return Source(
        folder,
        experiment if isinstance(experiment, dict) else {},
        next(filter(None, environments), {}),
        _json(folder / "tuning.json"),
        runs,
        _json(folder / "summary.json").get("not_run", ()),
        _json(folder / TECHNIQUES).get("techniques", ()),
    )


def _json(path: Path) -> dict[str, Any]:
    """Return the mapping in a file; an empty one where there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: is damaged: {error}") from None
    return value if isinstance(value, dict) else {}


def _steps(path: Path) -> list[dict[str, Any]]:
    lines = list(_lines(path, grows=True))
    for number, (before, line) in enumerate(pairwise(lines), start=2):
        if line["step"] <= before["step"]:
            raise InputError(
                f"{path}:{number}: step {line['step']} stands after step {before['step']}: two "
                "runs have written into this folder; repeat the run in one of its own"
            )
    return lines


def _lines(path: Path, *, grows: bool = False) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(True), start=1):
        try:
            yield json.loads(line)
        except ValueError:
            if grows and not line.endswith("\n"):
                return  # the last one: whoever wrote it was killed meanwhile
            raise InputError(f"{path}:{number}: is damaged: not JSON") from None
