"""Comparisons that were never run: folders as they leave them, with figures known beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.recorded import changed, recorded

from orchestra.records.files import run_folder
from orchestra.records.record import RunRecord
from orchestra.records.report import MessageKey, Point, RankReport, Timeline, TimelineSlice
from orchestra.records.store import RunStore, collect, write_curve, write_summary
from orchestra.records.trace import write_trace
from orchestra.report.figures import figures
from orchestra.report.figures.frame import Figure
from orchestra.report.rows import Row
from orchestra.report.study import Study

EXPERIMENT = "{name: sample, target: {metric: accuracy, at_least: 0.8, at_most: null}}"
STRATEGIES = {
    "one process": "Single()",
    "ring": "AllReduce('ring')",
    "server": "ParameterServer(consistency='asynchronous')",
    "switch": "Switch(AllReduce('ring'), ParameterServer(), when=AfterSteps(5))",
}
STEPS = 20
BATCH = 8


@dataclass(frozen=True)
class Drawn:
    """A comparison's folder, read and drawn."""

    sources: Sequence[RunStore]
    rows: Sequence[Row]
    figures: Mapping[str, Figure]

    def values(self, name: str, *fields: str) -> list[dict[str, Any]]:
        """The data of a figure that has all of `fields`."""
        sets = self.figures[name].spec["datasets"].values()
        return [value for values in sets for value in values if {*fields} <= value.keys()]


def drawn(folder: Path, baseline: str | None = None) -> Drawn:
    study = Study(collect([folder]), baseline)
    found = figures(study)
    assert len({figure.name for figure in found}) == len(found)
    return Drawn(study.sources, study.rows, {figure.name: figure for figure in found})


def drawn_alone(folder: Path, family: Callable[[Study], Iterable[Figure]]) -> Drawn:
    """With the figures of one family, which is quicker."""
    study = Study(collect([folder]))
    return Drawn(study.sources, study.rows, {figure.name: figure for figure in family(study)})


def record(label: str, ranks: int = 4, seed: int = 0, **changes: Any) -> RunRecord:
    """A run whose every figure differs from those of the others."""
    number = [*STRATEGIES].index(label) if label in STRATEGIES else 0
    seconds = (1 + number) * (1 + seed / 10) * (1 + ranks / 100)
    serving, switching = label in ("server", "switch"), label == "switch"
    workers = 1 if label == "one process" else ranks - (label == "server")
    return changed(
        recorded(
            name=label,
            strategy=STRATEGIES.get(label, "AllReduce('ring')"),
            engine="processes",
            ranks=ranks,
            workers=workers,
            servers=int(label == "server"),
            seed=seed,
            status="completed",
            setup_seconds=0.7,
            setup={"processes": 0.4, "group": 0.1, "first_step": 0.2},
            train_seconds=seconds,
            steps=STEPS,
            samples=STEPS * BATCH,
            samples_per_second=STEPS * BATCH / seconds,
            final_loss=0.2,
            metrics={"accuracy": 0.9 + number / 100 + seed / 1000},
            time_to_target_seconds=seconds / 2 + seed / 7,
            bytes_sent=0 if label == "one process" else 1_000_000 * (number + 1) + seed,
            bytes_estimated=label == "ring",
            seconds={"compute": seconds / 2, "communicate": seconds / 4, "wait": seconds / 8},
            staleness={"mean": 1.0, "max": 2} if serving else None,
            staleness_histogram={"0": 5, "2": 15} if serving else {},
            distributed=label != "one process",
            switches=switching,
            switched_at_step=5 if switching else None,
            switched_at_sample=5 * BATCH if switching else None,
            global_batch=BATCH,
            by_rank=_by_rank(label, workers, ranks, seconds),
        ),
        **changes,
    )


def _by_rank(label: str, workers: int, ranks: int, seconds: float) -> list[dict[str, Any]]:
    told = 1 if label == "one process" else ranks
    return [
        {
            "rank": rank,
            "role": "worker" if rank < workers else "server",
            "seconds": {"compute": seconds / (2 + rank), "communicate": 0.1, "wait": 0.0},
        }
        for rank in range(told)
    ]


def keep(folder: Path, runs: Sequence[RunRecord], *, trace: bool = True) -> Path:
    """Lay out what `runs` left, as a comparison does."""
    for run in runs:
        inner = run_folder(folder, run.asked.name, run.asked.ranks, run.asked.seed)
        inner.mkdir(parents=True)
        if run.ending.status != "completed":
            continue
        assert run.time.training is not None
        write_curve(inner, _points(run.time.training, run.asked.seed))
        for rank in range(run.asked.workers):
            _write_steps(inner / f"steps-rank-{rank}.jsonl", run, rank)
        if trace and run.asked.workers > 1:
            write_trace(inner, traced_reports(run.asked.ranks))
    (folder / "experiment.yaml").write_text(EXPERIMENT)
    write_summary(folder, "sample", runs)
    return folder


def _points(seconds: float, seed: int) -> list[Point]:
    return [
        Point(
            samples=STEPS * BATCH * part // 4,
            seconds=seconds * part / 4,
            metrics={"loss": 3.0 / part**3 + seed / 100, "accuracy": 0.2 * part + seed / 100},
        )
        for part in range(1, 5)
    ]


def _write_steps(path: Path, run: RunRecord, rank: int) -> None:
    assert run.time.training is not None
    lines = [
        {
            "step": step,
            "seconds": run.time.training * step / STEPS,
            "samples": BATCH // run.asked.workers,
            "consumed": step * BATCH,
            "loss": 2.0 / step + run.asked.seed / 100 + rank / 1000,
        }
        for step in range(1, STEPS + 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def traced_reports(ranks: int, steps: int = 7) -> list[RankReport]:
    """Each rank computes for 1 ms, sends to the next, and receives from the one before."""
    slices: list[list[TimelineSlice]] = [[] for _ in range(ranks)]
    for step in range(1, steps + 1):
        at, args = step * 0.003, {"step": step}
        for rank in range(ranks):
            there, back = (rank + 1) % ranks, (rank - 1) % ranks
            out, into = MessageKey(rank, there, 1, step), MessageKey(back, rank, 1, step)
            slices[rank] += [
                TimelineSlice(0, "step", f"step {step}", at, at + 0.003, args),
                TimelineSlice(1, "compute", "gradient", at, at + 0.001, args),
                TimelineSlice(
                    1, "send", f"send 1 kB to rank {there}", at + 0.001, at + 0.0012, args, out
                ),
                TimelineSlice(1, "wait", f"wait for rank {back}", at + 0.0012, at + 0.002, args),
                TimelineSlice(
                    1, "receive", f"from rank {back}", at + 0.002, at + 0.0022, args, into
                ),
            ]
    return [
        RankReport(
            rank=rank, role="worker", steps=0, samples=1, setup={}, train_seconds=1.0, seconds={},
            bytes_sent=0, bytes_estimated=False, staleness={}, peak_buffer_bytes=0,
            switched_at_step=None, stopped=False, threads=1,
            timeline=Timeline("clock", 0.0, ("steps", "main"), slices[rank]),
        )
        for rank in range(ranks)
    ]  # fmt: skip


def all_runs(ranks: Sequence[int] = (4,), seeds: Sequence[int] = (0, 1, 2)) -> list[RunRecord]:
    return [record(label, n, seed) for n in ranks for label in STRATEGIES for seed in seeds]
