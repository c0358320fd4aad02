"""Auto beside each of its candidates: on three clusters that stay as they are, on one that changes.

    python -m studies.auto FOLDER        runs, tables and picture: FOLDER/auto.md, FOLDER/auto.png

Four nodes train, in virtual time with real gradients, until a target is reached: `CASES` says what.
What a candidate alone learns depends on its seed only, so it is computed once, and re-timed on the
other clusters. FOLDER keeps every run; repeated, the command goes on from there.

A plan comes first, with seeds of its own: the samples that each candidate takes to the target, and
its speed on each cluster as that is at the start. `Auto` is given the former. It begins once with
the candidate that the plan has first, and once with the ring everywhere, as somebody would who did
not know the cluster. In the last cluster the bandwidth of all links falls to a twentieth after half
of the time in which the plan's choice would have reached the target.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import altair as alt
import vl_convert
from studies.pool import Job, Pool

from orchestra import Task
from orchestra.data import IID, Dirichlet
from orchestra.experiments.experiment import Experiment
from orchestra.optimizers.settings import Optimizer
from orchestra.records.record import RunRecord
from orchestra.records.report import changes_in
from orchestra.records.store import RunFolder
from orchestra.strategies.registry import strategy_of
from orchestra.tasks.task import load_task
from orchestra.trainer.settings import Run, Target, Training

CANDIDATES = {
    "ring": 'AllReduce("ring")',
    "ring, BF16": 'AllReduce("ring", compression=BF16())',
    "ring, top 1 %": 'AllReduce("ring", compression=TopK(0.01))',
    "ring, signs": 'AllReduce("ring", compression=SignSGD())',
    "local SGD, H=4": "LocalSGD(4)",
    "local SGD, H=16": "LocalSGD(16)",
}
PLANNED, RING_FIRST = "Auto, from the plan's choice", "Auto, from the ring"
AUTOS = (PLANNED, RING_FIRST)
SEEDS, PLAN_SEEDS = (0, 1, 2), (100, 101)
NEVER = 1e9
"""Samples to the target of a candidate that the plan has not seen there."""
TRAINING = Training(
    ranks=4, batch_size=8, equal="worker_batch", steps=480, snapshots=80, threads=1, trace_steps=0,
    optimizer=Optimizer.parse("SGD(lr=0.05)", where="optimizer"),
    engine="simulation", calibration="none",
)  # fmt: skip


def charged(name: str, flops: float) -> Task:
    """The task of this name, with so many operations charged for the gradient of a sample."""
    return replace(load_task(name), sample_flops=flops)


@dataclass(frozen=True)
class Case:
    """What is trained, as changes of `TRAINING`, and until when."""

    name: str
    task: str
    target: Target
    changes: Mapping[str, Any]

    @property
    def training(self) -> Training:
        return replace(TRAINING, **self.changes)


def optimizer(text: str) -> Optimizer:
    return Optimizer.parse(text, where="optimizer")


DIGITS = 'studies.auto:charged("digits", 100e6)'
# Digits on shards of few labels, the hardest for those who exchange little; the same on shards that
# are alike; and two more tasks, whose data all share, as with DistributedSampler, with the rate and
# the batch of studies/tasks. A ring takes the same part of a step everywhere. Targets lie before
# the plateau of a rate that stays; they and the steps were set by seeds of the plan.
CASES = (
    Case(
        "digits, few labels", DIGITS, Target("accuracy", at_least=0.94),
        {"sharding": Dirichlet(0.1)},
    ),
    Case(
        "digits, shards alike", DIGITS, Target("accuracy", at_least=0.94), {"sharding": IID()}
    ),
    Case(
        "digits28", 'studies.auto:charged("digits28", 21.5e6)', Target("accuracy", at_least=0.85),
        {"optimizer": optimizer("SGD(lr=0.05, momentum=0.9)"), "batch_size": 32},
    ),
    Case(
        "regression", 'studies.auto:charged("regression", 15.9e6)',
        Target("r2_pooled", at_least=0.95),
        {"optimizer": optimizer("Adam(lr=0.01)"), "batch_size": 16, "steps": 800},
    ),
)  # fmt: skip

CLUSTER = """
all_nodes:
  cores: 1
  flops: 10 GFLOP/s
  jitter: LogNormal(0.03)
  loopback: {{bandwidth: 3 GB/s, latency: 15 us}}
  link: {{bandwidth: {bandwidth}, latency: {latency}}}
nodes:
{nodes}
ranks: spread
"""
FOUR = "".join(f"  node-{number}: {{}}\n" for number in range(4))
UNLIKE = FOUR.replace("node-3: {}", "node-3: {flops: 4 GFLOP/s}")
CLUSTERS = {
    "fast LAN": CLUSTER.format(bandwidth="250 Mbit/s", latency="50 us", nodes=FOUR),
    "slow links": CLUSTER.format(bandwidth="12.5 Mbit/s", latency="2 ms", nodes=FOUR),
    "unlike nodes": CLUSTER.format(bandwidth="250 Mbit/s", latency="50 us", nodes=UNLIKE),
}
LEARN, DROP, FACTOR = "fast LAN", "bandwidth drops", 20
EVERYWHERE = (*CLUSTERS, DROP)


@dataclass(frozen=True)
class Result:
    """When a run reached the target: seconds and samples, infinite where it did not."""

    record: RunRecord
    curve: Sequence[tuple[float, float]]
    seconds: float = float("inf")
    samples: float = float("inf")


def result_of(record: RunRecord, target: Target) -> Result:
    """The target is reached between two snapshots, in proportion; by the mean of the replicas."""
    curve = RunFolder(record.folder).curve
    points = [(point.seconds, point.samples, point.metrics[target.metric]) for point in curve]
    found = Result(record, [(seconds, value) for seconds, _, value in points])
    before = (0.0, 0.0, 0.0)
    for point in points:
        if target.reached(point[2]):
            part = (target.bound - before[2]) / (point[2] - before[2])
            seconds, samples = (before[n] + part * (point[n] - before[n]) for n in (0, 1))
            return replace(found, seconds=seconds, samples=samples)
        before = point
    return found


class Study:
    """Runs of a case in `folder`, two at a time."""

    def __init__(self, case: Case, folder: Path, pool: Pool) -> None:
        self._case, self._folder, self._pool = case, folder, pool
        for name, text in CLUSTERS.items():
            self.describe(name, text)

    def describe(self, cluster: str, text: str) -> None:
        """Write down what a cluster is."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file(cluster).write_text(text)

    def alone(self, clusters: Sequence[str], seeds: Sequence[int]) -> dict[tuple[str, str], Any]:
        """Every candidate by itself, on each of the clusters: its results, by seed."""
        first = [self._job(LEARN, n, s, seed) for n, s in CANDIDATES.items() for seed in seeds]
        self._pool.make(first)
        jobs = [
            self._job(c, n, s, seed, retimed=c != LEARN)
            for c in clusters
            for n, s in CANDIDATES.items()
            for seed in seeds
        ]
        return self._results(jobs)

    def chosen(self, strategies: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], Any]:
        """`Auto` by cluster and name, with the seeds of the study: its results."""
        return self._results(
            [self._job(c, n, s, seed) for (c, n), s in strategies.items() for seed in SEEDS]
        )

    def _file(self, cluster: str) -> Path:
        return (self._folder / f"{_plain(cluster)}.yaml").absolute()

    def _job(self, cluster: str, name: str, text: str, seed: int, retimed: bool = False) -> Job:
        task = self._case.task
        training = replace(self._case.training, cluster=str(self._file(cluster)))
        run = Run(name, task, strategy_of(text), seed, training)
        experiment = Experiment(
            name="auto", task=task, strategies={name: run.strategy}, seeds=(seed,),
            training=training,
        )  # fmt: skip
        folders = [self._folder / _plain(c) / _plain(name) / str(seed) for c in (cluster, LEARN)]
        source = folders[1] if retimed else None
        return Job(run, experiment, folders[0], f"{cluster}; {name}, seed {seed}", source=source)

    def _results(self, jobs: Sequence[Job]) -> dict[tuple[str, str], Any]:
        found: dict[tuple[str, str], list[Result]] = {}
        for job, record in zip(jobs, self._pool.make(jobs), strict=True):
            cluster = job.what.split(";")[0]
            result = result_of(replace(record, folder=job.folder), self._case.target)
            found.setdefault((cluster, job.run.name), []).append(result)
        return found


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def mean(results: Sequence[Result], what: str = "seconds") -> float:
    """Over the seeds; infinite where one of them missed the target."""
    return fmean(getattr(result, what) for result in results)


def auto(samples: Mapping[str, float], first: str) -> str:
    """Of all candidates, from `first` on."""
    names = [first, *(name for name in CANDIDATES if name != first)]
    notations = ", ".join(CANDIDATES[name] for name in names)
    counts = [round(min(samples[name], NEVER)) for name in names]
    return f"Auto([{notations}], samples={counts})"


def rows(case: Case, found: Mapping[tuple[str, str], Sequence[Result]]) -> list[str]:
    """Seconds to the target, the mean over the seeds; of `Auto` over the best candidate, too."""
    lines = []
    for cluster in EVERYWHERE:
        cells = [case.name, cluster]
        best = min(mean(found[cluster, name]) for name in CANDIDATES)
        for name in (*CANDIDATES, *AUTOS):
            seconds = mean(found[cluster, name])
            text = f"{seconds:.1f}" if seconds < float("inf") else "-"
            text = f"**{text}**" if seconds == best else text
            if name in AUTOS:
                changes = (
                    str(len(changes_in(r.record.switching.decisions))) for r in found[cluster, name]
                )
                text += f" ({seconds / best - 1:+.1%}; {', '.join(changes)})"
            cells.append(text)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def picture(results: Mapping[str, tuple[Any, float]], path: Path) -> None:
    """How far the first seed of each case is from its target over time, where bandwidth drops."""
    names = (*CANDIDATES, PLANNED)
    colour = alt.Color(
        "strategy:N", sort=list(names), scale=alt.Scale(scheme="tableau10"), title=None
    )
    charts = []
    for case in CASES:
        found, at = results[case.name]
        runs = {name: found[DROP, name][0] for name in names}
        target, metric = case.target.bound, case.target.metric
        longest = 1.05 * max(r.seconds for r in runs.values() if r.seconds < float("inf"))
        curves = [(name, *point) for name, run in runs.items() for point in run.curve]
        dots = [(name, run.seconds, target) for name, run in runs.items() if run.seconds < longest]
        lines, points = (
            alt.Chart(
                alt.Data(values=[{"strategy": n, "seconds": s, "error": 1 - v} for n, s, v in rows])
            )
            for rows in (curves, dots)
        )
        x = alt.X("seconds:Q", scale=alt.Scale(domain=[0, longest]), title="virtual seconds")
        scale = alt.Scale(type="log", domain=[(1 - target) / 2, 1])
        y = alt.Y("error:Q", scale=scale, title=f"1 - {metric}")
        drop = alt.Chart(alt.Data(values=[{"seconds": at}])).mark_rule(strokeDash=[4, 4])
        layers = (
            lines.mark_line(clip=True).encode(x, y, colour)
            + points.mark_point(filled=True, size=80).encode(x, y, colour)
            + drop.encode(x)
        )
        charts.append(layers.properties(width=420, height=260, title=case.name))
    title = "Four nodes; dashed: all links become 20 times slower. Dots: the target"
    chart = alt.concat(*charts, columns=2).properties(title=title, background="white")
    path.write_bytes(vl_convert.vegalite_to_png(chart.to_dict(), scale=1.5))


def studied(case: Case, folder: Path, pool: Pool) -> tuple[dict[tuple[str, str], Any], float]:
    """Plan and train: the results by cluster and name, and when the bandwidth drops."""
    study = Study(case, folder, pool)
    plan = study.alone(tuple(CLUSTERS), PLAN_SEEDS)
    samples = {name: mean(plan[LEARN, name], "samples") for name in CANDIDATES}
    print(f"{case.name}: planned samples: {samples}")
    first = {c: min(CANDIDATES, key=lambda name: mean(plan[c, name])) for c in CLUSTERS}
    for cluster in CLUSTERS:
        seconds = {name: round(mean(plan[cluster, name]), 1) for name in CANDIDATES}
        print(f"{case.name}: planned seconds, {cluster}: {seconds}", flush=True)
    at = round(mean(plan[LEARN, first[LEARN]]) / 2, 1)
    faults = "".join(
        f"  - LinkSlow: {{of: node-{number}, factor: {FACTOR}, at: {at} s}}\n"
        for number in range(4)
    )
    study.describe(DROP, f"{CLUSTERS[LEARN]}faults:\n{faults}")
    found = study.alone(EVERYWHERE, SEEDS)
    begins = {c: first[LEARN if c == DROP else c] for c in EVERYWHERE}
    found |= study.chosen({(c, PLANNED): auto(samples, name) for c, name in begins.items()})
    found |= study.chosen({(c, RING_FIRST): auto(samples, "ring") for c in EVERYWHERE})
    for (cluster, name), runs in found.items():
        for text in changes_in(runs[0].record.decisions):
            print(f"{case.name}, {cluster}, {name}, seed {SEEDS[0]}: {text}")
    return found, at


def main() -> None:
    """Plan, train, and write down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    with Pool(2, 0) as pool:
        results = {case.name: studied(case, folder / _plain(case.name), pool) for case in CASES}
    heads = ["task", "cluster", *CANDIDATES, *AUTOS]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for case in CASES:
        found, at = results[case.name]
        lines += rows(case, found)
        print(f"{case.name}: the bandwidth drops at {at} s")
    (folder / "auto.md").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")
    picture(results, folder / "auto.png")


if __name__ == "__main__":
    main()
