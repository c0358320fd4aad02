"""The store of runs: the one reader of what trainings and comparisons leave in their folders.

`RunStore` has the contents of a folder, `RunFolder` those of one run. Both read each file on its
first use, strictly and as plain data: what is damaged raises `InputError`, and nothing that a
folder names is imported. `RunFolder.follow` reads a run that is still under way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from orchestra.errors import InputError
from orchestra.records.files import (
    CLUSTER,
    CURVE,
    ENVIRONMENT,
    EXPERIMENT,
    LINKS,
    RUNS,
    SUMMARY,
    TECHNIQUES,
    TRACE,
    TUNING,
    run_folder,
    steps_files,
    write_atomically,
)
from orchestra.records.following import Line, LiveRun, is_step
from orchestra.records.links import Links
from orchestra.records.record import RunRecord, records_of
from orchestra.records.report import Point
from orchestra.records.trace import TraceFile, read_trace
from orchestra.settings.base import to_plain
from orchestra.settings.reading import json_value, plain_value, read_bytes, read_json, read_yaml

SCHEMA = 1
T = TypeVar("T")


class RunFolder:
    """What one run left in the folder `path`. `record` is given where it is known already."""

    def __init__(self, path: Path, record: RunRecord | None = None) -> None:
        self.path = path
        self._record = record

    @cached_property
    def record(self) -> RunRecord:
        """The record; raises `InputError` until the run has written one."""
        record = self._record or self.ended()
        if record is None:
            raise InputError(f"{self.path}: holds no run that has ended: it has no {SUMMARY}")
        return record

    def ended(self) -> RunRecord | None:
        """Return the record as it is now in the file; None as long as the run has not ended."""
        with suppress(FileNotFoundError):
            return next(iter(_records(self.path)), None)
        return None

    @cached_property
    def experiment(self) -> Mapping[str, Any]:
        """The experiment that was asked for, as its file has it."""
        return _experiment(self.path)

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """The machine, system and versions; empty where they are not known."""
        return _mapping(self.path / ENVIRONMENT)

    @cached_property
    def curve(self) -> list[Point]:
        """The figures of the snapshots, in order; none for a run that failed."""
        return [*_lines(self.path / CURVE, Point)]

    @cached_property
    def steps(self) -> dict[int, list[Line]]:
        """The recorded steps of each rank that computed any, which follow one another."""
        by_rank = {rank: _steps(path) for rank, path in steps_files(self.path).items()}
        # A rank that only served leaves an empty file
        return {rank: lines for rank, lines in by_rank.items() if lines}

    @cached_property
    def links(self) -> Links | None:
        """The traffic of the links; None if it was not counted."""
        with suppress(FileNotFoundError):
            links: Links = read_json(self.path / LINKS, Links)
            return links
        return None

    @property
    def cluster(self) -> Path | None:
        """The file of the described cluster; None for a run of real processes."""
        return _existing(self.path / CLUSTER)

    @property
    def trace(self) -> Path | None:
        """The file of the timeline, if the run left one."""
        return _existing(self.path / TRACE)

    @cached_property
    def timeline(self) -> TraceFile | None:
        """The timeline; None if the run kept none."""
        return None if self.trace is None else read_trace(self.trace)

    def follow(self) -> LiveRun:
        """Return the run to be read again and again while it goes on."""
        return LiveRun(self)


class RunStore:
    """What a training or a comparison left in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def experiment(self) -> Mapping[str, Any]:
        """The experiment that was asked for, as its file has it."""
        return _experiment(self.folder)

    @property
    def name(self) -> str:
        """The name of the experiment, or else of the folder."""
        return str(self.experiment.get("name", self.folder.name))

    @cached_property
    def runs(self) -> Sequence[RunFolder]:
        """The runs that have ended, in the order of the summary."""
        try:
            records = _records(self.folder)
        except FileNotFoundError:
            raise _is_none(self.folder, SUMMARY) from None
        runs = []
        for record in records:
            # The folder of a comparison's run lies further down; that of a training is this one
            inner = run_folder(
                self.folder, record.asked.name, record.asked.ranks, record.asked.seed
            )
            place = inner if inner.is_dir() else self.folder
            runs.append(RunFolder(place, replace(record, folder=place)))
        return runs

    @cached_property
    def not_run(self) -> Sequence[Mapping[str, Any]]:
        """The rows that could not be run: name, ranks and reason of each."""
        found = _mapping(self.folder / SUMMARY).get("not_run", [])
        rows: list[Mapping[str, Any]] = plain_value(
            list[dict[str, Any]], found, str(self.folder / SUMMARY)
        )
        return rows

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """The machine, system and versions of the first run that has them."""
        return next((run.environment for run in self.runs if run.environment), {})

    @cached_property
    def tuning(self) -> Mapping[str, Any]:
        """What the trials were, and what was chosen; empty where nothing was tuned."""
        value = _mapping(self.folder / TUNING)
        if value and not {"trials", "metric", "better", "seed", "choices"} <= value.keys():
            raise InputError(f"{self.folder / TUNING}: is damaged: it lacks what was tried")
        return value

    @cached_property
    def techniques(self) -> Sequence[Mapping[str, Any]]:
        """The rows that differ in one setting, and at which bandwidth each pays."""
        found: Sequence[Mapping[str, Any]] = _mapping(self.folder / TECHNIQUES).get(
            "techniques", ()
        )
        return found

    @property
    def is_comparison(self) -> bool:
        """True where several runs are to be, or have been, made below this folder."""
        # An older comparison has no list of its runs.
        return (self.folder / RUNS).exists() or (self.folder / "runs").is_dir()

    @property
    def planned(self) -> list[tuple[RunFolder, str]]:
        """Each trial and run of a comparison with its name, in their order; of an older comparison
        those that are there."""
        path = self.folder / RUNS
        try:
            names = read_json(path, dict[str, str])
        except FileNotFoundError:
            there = (at.relative_to(self.folder) for at in self.folder.glob("runs/*/*/*"))
            names = {str(inner): str(inner) for inner in sorted(there)}
        if any(Path(inner).is_absolute() or ".." in Path(inner).parts for inner in names):
            raise InputError(f"{path}: is damaged: it names a folder outside of this one")
        return [(RunFolder(self.folder / inner), name) for inner, name in names.items()]


def collect(folders: Sequence[Path]) -> list[RunStore]:
    """Return the stores in `folders`, in the given order; raise `InputError` for a folder that is
    none of a run, and if none holds a run that has ended."""
    stores = [RunStore(folder) for folder in folders]
    contents = [(store.experiment, store.runs) for store in stores]
    if not any(runs for _, runs in contents):
        names = ", ".join(str(folder) for folder in folders) or "no folder given"
        raise InputError(f"{names}: there is no run to report on yet")
    return stores


def finished(folder: Path, *, failed: bool = False) -> list[RunRecord]:
    """Return the completed runs in the summary of `folder`, with `failed` the failed ones, too;
    none where there is no summary. Raises `InputError` if it is damaged."""
    wanted = ("completed", "failed") if failed else ("completed",)
    with suppress(FileNotFoundError):
        return [record for record in _records(folder) if record.ending.status in wanted]
    return []


def newest(parent: Path) -> Path | None:
    """Return the folder in `parent` in which a run or comparison was begun last, if any was."""
    found = list(parent.glob(f"*/{EXPERIMENT}"))
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else None


# Writing


def write_summary(
    folder: Path,
    experiment: str,
    runs: Sequence[RunRecord],
    not_run: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write `summary.json` into `folder`, whole or not at all, and return its path.

    `not_run` has the name, ranks and reason of each row that could not be there.
    """
    entries = [run.summary() for run in runs]
    about = {"schema": SCHEMA, "experiment": experiment, "runs": entries, "not_run": list(not_run)}
    write_atomically(folder / SUMMARY, json.dumps(about, indent=2) + "\n")
    return folder / SUMMARY


def write_planned(comparison: Path, runs: Mapping[Path, str]) -> None:
    """Write down the folder of each trial and run of a comparison, with its name."""
    names = {str(folder.relative_to(comparison)): name for folder, name in runs.items()}
    write_atomically(comparison / RUNS, json.dumps(names, indent=2) + "\n")


def write_curve(folder: Path, points: Sequence[Point]) -> None:
    """Write the figures of the snapshots into `curve.jsonl`, one JSON line each."""
    lines = (json.dumps(to_plain(point, finite=True)) + "\n" for point in points)
    write_atomically(folder / CURVE, "".join(lines))


def write_links(folder: Path, links: Links) -> None:
    """Write `links.json` into `folder`, whole or not at all."""
    write_atomically(folder / LINKS, json.dumps(to_plain(links), indent=1) + "\n")


# Reading


def _experiment(folder: Path) -> Mapping[str, Any]:
    try:
        return read_yaml(folder / EXPERIMENT)
    except FileNotFoundError:
        raise _is_none(folder, EXPERIMENT) from None


def _is_none(folder: Path, lacks: str) -> InputError:
    if not folder.exists():
        return InputError(f"{folder}: there is no such folder")
    return InputError(f"{folder}: is not the folder of a run or comparison: it has no {lacks}")


def _records(folder: Path) -> list[RunRecord]:
    path = folder / SUMMARY
    return records_of(read_json(path, dict[str, Any]).get("runs"), path)


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None


def _mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a file; an empty one where there is no file."""
    value: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        value = read_json(path, dict[str, Any])
    return value


def _steps(path: Path) -> list[Line]:
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
