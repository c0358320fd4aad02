"""The record of a run, and the files that it stands in.

    DIR/experiment.yaml, summary.json, tuning.json, techniques.json, report.html, figures/
    DIR/runs/LABEL/N-ranks/seed-S/       the folder of a run, as that of a training
    DIR/tuning/LABEL/N-ranks/trial-T/    the same for a trial, judged on the validation data

The folder of a training is that of its one run.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from orchestra.errors import InputError
from orchestra.records.report import (
    NOTABLE,
    Membership,
    Point,
    RankReport,
    Regrouping,
    StragglerFinding,
    Usage,
    busy_with_others,
)
from orchestra.settings.base import from_plain, to_plain
from orchestra.settings.reading import plain_value, read_json

SCHEMA = 1
RUNS = "runs.json"  # of a comparison: the folders and names of its trials and runs
EXPERIMENT = "experiment.yaml"  # a file in the folder of a run or comparison: what was asked for
SUMMARY = "summary.json"
CLUSTER = "cluster.yaml"  # a file in the folder of a run on a described cluster: the whole cluster
EMULATION = "emulation.json"
"""A file in the folder of an emulated run: the counts of the transports and of the cables."""
TECHNIQUES = "techniques.json"
"""A file in a comparison's folder: the rows that differ in one setting, and where each pays."""
LINKS = "links.json"
MAX_LINKS = 32  # the most links that are listed; the others are only counted in `tenths`
TENTHS = 10
PACKAGES = ("neural-orchestra", "torch", "numpy", "safetensors", "scikit-learn")


@dataclass(frozen=True)
class RankTotals:
    """What a rank reported: an entry of `by_rank`."""

    rank: int
    role: str
    seconds: Mapping[str, float]
    steps: int = 0
    samples: int = 0
    bytes_sent: int = 0
    dropped: int = 0
    threads: int = 1
    memory: Mapping[str, int] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class Restart:
    """A restart of a run that had lost a rank: an entry of `restarts`."""

    cause: str  # of the end of the run before it, in one line
    at: float  # when that run had ended, in seconds since 1970
    checkpoint: int | None  # from which the run went on; None: from its beginning
    step: int  # of the first worker in that checkpoint
    steps_again: int  # steps that were done before and were then repeated, the most of any rank


@dataclass(frozen=True)
class RunRecord:
    """One run, summed up over its ranks: an entry of `summary.json`, whose fields docs/records.md
    defines; None where a figure cannot be, or was not known to the version that wrote it.

    Beside these, `judged_on` is the split of the data that `metrics` are of, `tuned` the settings
    that trials chose for it, `by_rank` what each rank reported, and `folder` where all else lies.
    """

    name: str
    strategy: str
    engine: str
    ranks: int
    workers: int
    servers: int
    seed: int
    status: str
    setup_seconds: float | None = None
    setup: Mapping[str, float] = field(default_factory=dict)
    train_seconds: float | None = None
    steps: int = 0
    samples: int = 0
    samples_per_second: float | None = None
    final_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    judged_on: str = "test"
    tuned: Mapping[str, Any] = field(default_factory=dict)
    nodes: Mapping[str, Any] | None = None
    time_to_target_seconds: float | None = None
    time_to_target_after_seconds: float | None = None
    time_to_target_worst_node_seconds: float | None = None
    time_to_target_average_seconds: float | None = None
    bytes_sent: int = 0
    bytes_estimated: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    staleness: Mapping[str, float] | None = None
    staleness_histogram: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0
    switched_at_step: int | None = None
    switched_at_sample: int | None = None
    decisions: Sequence[Mapping[str, Any]] = ()
    parameters_sha256: str | None = None
    peak_buffer_bytes: int = 0
    global_batch: int = 0
    worker_batches: Sequence[int] = ()
    distributed: bool | None = None
    switches: bool | None = None
    synchronous: bool | None = None
    steps_together: bool | None = None
    work: str | None = None
    shares: Sequence[float] = ()
    batches: Sequence[Sequence[int]] = ()
    threads: int = 1
    by_rank: Sequence[Mapping[str, Any]] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    restarts: Sequence[Mapping[str, Any]] = ()
    ranks_history: Sequence[Mapping[str, Any]] = ()
    regroupings: Sequence[Mapping[str, Any]] = ()
    notices: Sequence[str] = ()
    failure: str | None = None
    stopped_by: str | None = None
    cluster: str | None = None
    wall_seconds: float | None = None
    costs: str | None = None
    node: str | None = None
    costs_doubts: Sequence[str] = ()
    busy_with_others: float | None = None
    stragglers: Sequence[Mapping[str, Any]] = ()
    alone: Mapping[str, float] = field(default_factory=dict)
    heterogeneous_efficiency: float | None = None
    convergence_efficiency: float | None = None
    cost: float | None = None
    cost_to_target: float | None = None
    currency: str | None = None
    energy_joules: float | None = None
    energy_to_target_joules: float | None = None
    folder: Path = Path()

    @property
    def threads_by_rank(self) -> list[int]:
        """The threads that each rank computed with; for a rank that was lost, the most of any."""
        # Old records have one number for all
        known = {part["rank"]: part.get("threads", self.threads) for part in self.by_rank}
        ranks = max((*known, *map(int, self.left_out)), default=-1) + 1
        return [known.get(rank, self.threads) for rank in range(ranks)]

    @property
    def figures(self) -> dict[str, float]:
        """The final loss and the metrics, as far as they are known."""
        figures = {"loss": self.final_loss, **self.metrics}
        return {name: value for name, value in figures.items() if value is not None}

    @property
    def slow_ranks(self) -> list[StragglerFinding]:
        """The stragglers, those first that cost most."""
        found: list[StragglerFinding] = from_plain(list[StragglerFinding], list(self.stragglers))
        return found

    @property
    def mixed(self) -> bool:
        """True if its nodes are known to be unlike in what they do alone."""
        # To three digits: measured speeds of equal nodes differ in the further ones
        return len({float(f"{speed:.3g}") for speed in self.alone.values()}) > 1

    def summary(self) -> dict[str, Any]:
        """Return this run's entry of `summary.json`: all but the folder, figures finite or null."""
        entry: dict[str, Any] = to_plain(self, finite=True)
        del entry["folder"]
        return entry

    @property
    def disturbed(self) -> bool:
        """True if other programs took a notable part of the machine: its seconds are too long."""
        return self.busy_with_others is not None and self.busy_with_others > NOTABLE


def combine(reports: Sequence[RankReport], **about: Any) -> RunRecord:
    """Return the record of a run from its ranks' reports; `about` has what they do not know."""
    # A rank that a switch made a server has computed samples, too.
    workers = [report for report in reports if report.role == "worker" or report.samples]
    # One rank alone evaluates
    leader = next(report.leader for report in reports if report.leader is not None)
    # A run is over when its last rank is
    seconds = max(report.train_seconds for report in reports)
    samples = sum(report.samples for report in workers)
    # A part that has begun after another one, and not from a checkpoint: ranks came or were lost.
    if any(part.checkpoint is None for part in workers[0].history[1:]):
        samples = workers[0].consumed  # all know what those that were lost have read
    switches = [report for report in workers if report.switched_at_step is not None]
    busy = busy_with_others(report.usage for report in reports)
    stale: Counter[int] = Counter()
    for report in reports:
        stale.update({int(value): count for value, count in report.staleness.items()})
    of_rank = [field.name for field in fields(RankTotals)]
    return RunRecord(
        status="stopped" if any(report.stopped for report in reports) else "completed",
        train_seconds=seconds,
        steps=max(report.steps for report in workers),
        samples=samples,
        samples_per_second=samples / seconds if seconds > 0 else None,
        final_loss=leader.final_loss,
        metrics=leader.metrics,
        nodes=_nodes(leader.curve[-1]) if leader.curve else None,
        bytes_sent=sum(report.bytes_sent for report in reports),
        bytes_estimated=any(report.bytes_estimated for report in reports),
        seconds={
            # Of workers alone: a server waits whenever nobody asks it
            part: sum(report.seconds[part] for report in workers) / len(workers)
            for part in ("compute", "communicate", "wait")
        },
        staleness={"mean": fmean(stale, stale.values()), "max": max(stale)} if stale else None,
        staleness_histogram={str(value): stale[value] for value in sorted(stale)},
        dropped=sum(report.dropped for report in reports),
        switched_at_step=switches[0].switched_at_step if switches else None,
        switched_at_sample=switches[0].switched_at_sample if switches else None,
        decisions=workers[0].decisions,
        ranks_history=to_plain(reports[0].history),
        regroupings=to_plain(workers[0].regroupings),
        parameters_sha256=leader.parameters_sha256,
        peak_buffer_bytes=max(report.peak_buffer_bytes for report in reports),
        threads=max(report.threads for report in reports),
        by_rank=[{name: getattr(report, name) for name in of_rank} for report in reports],
        busy_with_others=None if busy is None else round(busy, 3),
        **about,
    )


def _nodes(last: Point) -> dict[str, Any] | None:
    """Return the figures of the replicas at the last snapshot."""
    if not last.nodes:
        return None
    figures = {"mean": last.metrics, "worst": last.worst_nodes()}
    return {"replicas": last.replicas, "judged": len(last.nodes), **figures}


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


def read_summary(path: Path) -> list[RunRecord]:
    """Return the runs in the `summary.json` at `path`; the folder of each is that of `path`.

    Raises `FileNotFoundError` if there is none, `InputError` if it is damaged.
    """
    runs = read_json(path, dict[str, Any]).get("runs")
    entries = plain_value(list[dict[str, Any]], runs, str(path))
    for entry in entries:  # an old one has these in the notation of the strategy alone
        name = str(entry.get("strategy")).partition("(")[0]
        entry.setdefault("distributed", name != "Single")
        entry.setdefault("switches", name == "Switch")
    records: list[RunRecord] = plain_value(list[RunRecord], entries, str(path))
    for record in records:
        plain_value(list[StragglerFinding], list(record.stragglers), str(path))
        plain_value(list[RankTotals], list(record.by_rank), str(path))
        plain_value(list[Restart], list(record.restarts), str(path))
        plain_value(list[Membership], list(record.ranks_history), str(path))
        plain_value(list[Regrouping], list(record.regroupings), str(path))
    return [replace(record, folder=path.parent) for record in records]


def write_planned(comparison: Path, runs: Mapping[Path, str]) -> None:
    """Write down the folder of each trial and run of a comparison, with its name."""
    names = {str(folder.relative_to(comparison)): name for folder, name in runs.items()}
    write_atomically(comparison / RUNS, json.dumps(names, indent=2) + "\n")


def read_planned(comparison: Path) -> list[tuple[Path, str]]:
    """Return the folder of each trial and run of a comparison, with its name, in their order.
    Raises `InputError` if the file is damaged."""
    path = comparison / RUNS
    try:
        names = read_json(path, dict[str, str])
    except FileNotFoundError:  # an older comparison, or one that begins: the runs that are there
        there = sorted(comparison.glob("runs/*/*/*"))
        names = {str(inner): str(inner) for inner in (at.relative_to(comparison) for at in there)}
    if any(Path(inner).is_absolute() or ".." in Path(inner).parts for inner in names):
        raise InputError(f"{path}: is damaged: it names a folder outside of this one")
    return [(comparison / inner, name) for inner, name in names.items()]


def read_not_run(path: Path) -> list[Mapping[str, Any]]:
    """Return the rows that could not be run, from the `summary.json` at `path`; none without it."""
    rows: list[Mapping[str, Any]] = []
    with suppress(FileNotFoundError):
        found = read_json(path, dict[str, Any]).get("not_run", [])
        rows = plain_value(list[dict[str, Any]], found, str(path))
    return rows


def write_curve(folder: Path, points: Sequence[Point]) -> None:
    """Write the figures of the snapshots into `curve.jsonl`, one JSON line each."""
    lines = (json.dumps(to_plain(point, finite=True)) + "\n" for point in points)
    write_atomically(folder / "curve.jsonl", "".join(lines))


@dataclass(frozen=True)
class Link:
    """One direction of a cable, the loopback of a node, or what a switch shares."""

    name: str
    bandwidth: float  # bytes/s
    bytes: int  # of the messages that crossed it, payload and headers
    share: float  # of what it could have carried, what the wire adds to messages included


@dataclass(frozen=True)
class Links:
    """All links that ranks could use, while the stopwatch ran: `seconds`.

    `tenths` counts those that carried less than a tenth of what they could have, from one to two
    tenths, and so on. The last includes a share of 1, and more: what was sent before the stopwatch
    stopped may have crossed later. `busiest` are at most `MAX_LINKS`.
    """

    seconds: float
    count: int
    unused: int
    tenths: Sequence[int]
    busiest: Sequence[Link]

    @classmethod
    def of(cls, seconds: float, links: Sequence[Link]) -> Self:
        """Sum up what each of `links` carried in `seconds`."""
        tenths = [0] * TENTHS
        for link in links:
            tenths[min(int(link.share * TENTHS), TENTHS - 1)] += 1
        # sorted() is stable: links of equal load stay in the order of the cluster
        busiest = sorted((link for link in links if link.bytes), key=lambda link: -link.share)
        unused = sum(not link.bytes for link in links)
        return cls(seconds, len(links), unused, tenths, busiest[:MAX_LINKS])


def write_links(folder: Path, links: Links) -> None:
    """Write `links.json` into `folder`, whole or not at all."""
    write_atomically(folder / LINKS, json.dumps(to_plain(links), indent=1) + "\n")


def read_links(folder: Path) -> Links | None:
    """Return the content of `links.json` of a run's folder; None where there is none. Raises
    `InputError` if it is damaged."""
    try:
        links: Links = read_json(folder / LINKS, Links)
    except FileNotFoundError:
        return None
    return links


def run_folder(comparison: Path, label: str, ranks: int, seed: int) -> Path:
    """Return the folder of one run of the comparison in `comparison`."""
    return comparison / "runs" / label / f"{ranks}-ranks" / f"seed-{seed}"


def trial_folder(comparison: Path, label: str, ranks: int, trial: int) -> Path:
    """Return the folder of one trial of its tuning."""
    return comparison / "tuning" / label / f"{ranks}-ranks" / f"trial-{trial}"


def cache_folder() -> Path:
    """Return `ORCHESTRA_CACHE`, else `orchestra` in `XDG_CACHE_HOME`, else in `~/.cache`; raise
    `RuntimeError` if none of these is set and the user has no home."""
    if own := os.environ.get("ORCHESTRA_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "orchestra"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there whole, or as it was before."""
    partial = partial_of(path)
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
        with partial.open("rb") as file:
            # Otherwise the rename may reach the disk before the content does.
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)  # a full disk names no file
        raise


def partial_of(path: Path) -> Path:
    """Return the file that `write_atomically` writes first, and leaves if killed meanwhile."""
    return path.with_name(f".{path.name}.partial")


def environment() -> dict[str, Any]:
    """Return machine, system and versions, as far as they can bear on a result."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "command": sys.argv,
        # Where a replay finds the module of the task (decision 66).
        "modules": [p for p in sys.path if p and not p.startswith((sys.prefix, sys.base_prefix))],
    }


def _version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def _processor() -> str:
    # On Linux `platform.processor()` is empty, or names the architecture alone.
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
