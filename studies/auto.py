"""Auto beside each of its candidates: on three clusters that stay as they are, on one that changes.

    python -m studies.auto FOLDER        runs, table and picture: FOLDER/auto.md, FOLDER/auto.png

Four nodes train the task digits, with a gradient charged as 0.1 GFLOP a sample, in virtual time and
with real gradients, until an accuracy is reached. FOLDER keeps every run; repeated, the command
goes on from there.

A plan comes first, with seeds of its own: the samples that each candidate takes to the target, and
its speed on each cluster as that is at the start. `Auto` is given the former. It begins once with
the candidate that the plan has first, and once with the ring everywhere, as somebody would who did
not know the cluster. In the last cluster the bandwidth of all links falls to a twentieth after half
of the time in which the plan's choice would have reached the target.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import altair as alt
import vl_convert

import orchestra
from orchestra import Task
from orchestra.records.record import RunRecord
from orchestra.tasks.task import load_task

CANDIDATES = {
    "ring": 'AllReduce("ring")',
    "ring, BF16": 'AllReduce("ring", compression=BF16())',
    "local SGD, H=4": "LocalSGD(4)",
    "local SGD, H=16": "LocalSGD(16)",
}
PLANNED, RING_FIRST = "Auto, from the plan's choice", "Auto, from the ring"
SEEDS, PLAN_SEEDS = (0, 1, 2), (100, 101, 102)
ACCURACY = 0.94
TRAINING: dict[str, Any] = {
    "batch_size": 8, "steps": 512, "optimizer": "SGD(lr=0.03)", "snapshots": 64, "threads": 1,
    "engine": "simulation", "calibration": "none", "quiet": True,
}  # fmt: skip

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
LEARN = "fast LAN"
DROP, FACTOR = "bandwidth drops", 20


def digits() -> Task:
    """The task digits, with a gradient charged as 0.1 GFLOP a sample."""
    return replace(load_task("digits"), sample_flops=1e8)


@dataclass(frozen=True)
class Result:
    """What one run took: seconds and samples to the target, the target's metric over time."""

    seconds: float | None
    samples: float | None
    curve: Sequence[tuple[float, float]]
    changes: Sequence[Mapping[str, Any]]
    decisions: int


@dataclass(frozen=True)
class Job:
    """A run: a strategy on a cluster with a seed."""

    cluster: str
    name: str
    strategy: str
    seed: int
    steps: int | None = None

    def run(self, folder: Path) -> Result:
        """Train, or read what `folder` has of it."""
        place = folder / plain(self.cluster) / plain(self.name) / f"seed-{self.seed}"
        options = TRAINING if self.steps is None else {**TRAINING, "steps": self.steps}
        record = orchestra.train(
            "studies.auto:digits", self.strategy, ranks=4, seed=self.seed, out=place,
            cluster=str(folder / f"{plain(self.cluster)}.yaml"), **options,
        )  # fmt: skip
        return result_of(record, place)


def plain(name: str) -> str:
    """`name` as that of a file."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def result_of(record: RunRecord, folder: Path) -> Result:
    """The target is reached between two snapshots, at a time in proportion."""
    lines = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    points = [(p["seconds"], p["samples"], p["metrics"]["accuracy"]) for p in lines]
    before = (0.0, 0.0, 0.0)
    at = None
    for point in points:
        if point[2] >= ACCURACY:
            part = (ACCURACY - before[2]) / (point[2] - before[2])
            at = [old + part * (new - old) for old, new in zip(before, point, strict=True)]
            break
        before = point
    changes = [each for each in record.decisions if each["then"] != each["under"]]
    curve = [(seconds, accuracy) for seconds, _, accuracy in points]
    seconds, samples = (None, None) if at is None else (at[0], at[1])
    return Result(seconds, samples, curve, changes, len(record.decisions))


def auto(samples: Mapping[str, float], first: str) -> str:
    """Of all candidates, from `first` on."""
    names = [first, *(name for name in CANDIDATES if name != first)]
    notations = ", ".join(CANDIDATES[name] for name in names)
    return f"Auto([{notations}], samples={[round(samples[name]) for name in names]})"


def carried_out(jobs: Sequence[Job], folder: Path) -> dict[tuple[str, str], list[Result]]:
    """What each strategy did on each cluster, by seed."""
    alike = {(job.cluster, job.strategy, job.seed): job for job in jobs}
    with ThreadPoolExecutor(2) as pool:
        results = dict(
            zip(alike, pool.map(lambda job: job.run(folder), alike.values()), strict=True)
        )
    found: dict[tuple[str, str], list[Result]] = {}
    for job in jobs:
        result = results[job.cluster, job.strategy, job.seed]
        found.setdefault((job.cluster, job.name), []).append(result)
    return found


def mean(results: Sequence[Result], of: Callable[[Result], float | None]) -> float | None:
    """Over the seeds; None where one of them missed the target."""
    values = [of(result) for result in results]
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


Times = Mapping[tuple[str, str], float]


def planned(folder: Path) -> tuple[dict[str, float], dict[str, str], Times]:
    """The samples that each candidate takes to the target, the first one on each cluster, and the
    seconds of each candidate on each.

    Candidates learn the same on every cluster, as their workers step together: they are trained on
    one, and their speeds are measured on all.
    """
    seeds = [Job(LEARN, n, s, seed) for n, s in CANDIDATES.items() for seed in PLAN_SEEDS]
    learnt = carried_out(seeds, folder / "plan")
    samples = {name: mean(learnt[LEARN, name], lambda r: r.samples) or 1e9 for name in CANDIDATES}
    short = [Job(c, n, s, PLAN_SEEDS[0], steps=64) for c in CLUSTERS for n, s in CANDIDATES.items()]
    speeds = carried_out(short, folder / "speeds")
    part = {name: samples[name] / (64 * 32) for name in CANDIDATES}
    times = {key: part[key[1]] * results[0].curve[-1][0] for key, results in speeds.items()}
    first = {c: min(CANDIDATES, key=lambda name: times[c, name]) for c in CLUSTERS}
    print("planned samples:", {name: round(value) for name, value in samples.items()})
    for cluster in CLUSTERS:
        own = {name: round(times[cluster, name], 1) for name in CANDIDATES}
        print(f"planned seconds, {cluster}: {own}", flush=True)
    return samples, first, times


def on_clusters(
    samples: Mapping[str, float], first: Mapping[str, str], folder: Path
) -> dict[tuple[str, str], list[Result]]:
    """Every candidate alone, and both `Auto`s, on every cluster."""
    jobs = []
    for cluster in (*CLUSTERS, DROP):
        begin = first[LEARN if cluster == DROP else cluster]
        strategies = {
            **CANDIDATES,
            PLANNED: auto(samples, begin),
            RING_FIRST: auto(samples, "ring"),
        }
        jobs += [Job(cluster, n, s, seed) for n, s in strategies.items() for seed in SEEDS]
    return carried_out(jobs, folder)


def table(found: Mapping[tuple[str, str], Sequence[Result]]) -> list[str]:
    """Seconds to the target, the mean over the seeds; of `Auto` over the best candidate, too."""
    clusters = (*CLUSTERS, DROP)
    lines = [f"| strategy | {' | '.join(clusters)} |", "| --- |" + " --- |" * len(clusters)]
    best = {
        cluster: min(_seconds(found[cluster, name]) for name in CANDIDATES) for cluster in clusters
    }
    for name in (*CANDIDATES, PLANNED, RING_FIRST):
        cells = []
        for cluster in clusters:
            results = found[cluster, name]
            seconds = _seconds(results)
            text = f"{seconds:.1f}" if seconds < float("inf") else "not reached"
            if name not in CANDIDATES:
                changes = ", ".join(str(len(result.changes)) for result in results)
                text += f" ({seconds / best[cluster] - 1:+.1%}; changes: {changes})"
            cells.append(f"**{text}**" if seconds == best[cluster] else text)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _seconds(results: Sequence[Result]) -> float:
    seconds = mean(results, lambda result: result.seconds)
    return float("inf") if seconds is None else seconds


def picture(found: Mapping[tuple[str, str], Sequence[Result]], at: float, path: Path) -> None:
    """The error of the first seed over time where the bandwidth drops, and when `Auto` changed."""
    names = (*CANDIDATES, PLANNED)
    values = [
        {"strategy": name, "seconds": seconds, "error": 1 - accuracy}
        for name in names
        for seconds, accuracy in found[DROP, name][0].curve
    ]
    reached = [
        {"strategy": name, "seconds": found[DROP, name][0].seconds, "error": 1 - ACCURACY}
        for name in names
    ]
    longest = max(each["seconds"] or 0.0 for each in reached) * 1.05  # type: ignore[type-var]
    colour = alt.Color("strategy:N", sort=list(names), scale=alt.Scale(scheme="tableau10"))
    x = alt.X("seconds:Q", scale=alt.Scale(domain=[0, longest]), title="virtual seconds")
    y = alt.Y("error:Q", scale=alt.Scale(type="log", domain=[0.02, 1]), title="test error")
    lines = alt.Chart(alt.Data(values=values)).mark_line(clip=True).encode(x, y, colour)
    dots = alt.Chart(alt.Data(values=reached)).mark_point(filled=True, size=70)
    drop = alt.Chart(alt.Data(values=[{"seconds": at}])).mark_rule(strokeDash=[4, 4]).encode(x)
    title = "Digits on four nodes; dashed: all links become 20 times slower. Dots: the target"
    chart = (lines + dots.encode(x, y, colour) + drop).properties(
        width=620, height=340, title=title, background="white"
    )
    path.write_bytes(vl_convert.vegalite_to_png(chart.to_dict(), scale=2))


def main() -> None:
    """Plan, train, and write down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for part in ("plan", "speeds", "runs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for name, text in CLUSTERS.items():
            (folder / part / f"{plain(name)}.yaml").write_text(text)
    samples, first, times = planned(folder)
    at = round(times[LEARN, first[LEARN]] / 2, 1)
    faults = "".join(
        f"  - LinkSlow: {{of: node-{number}, factor: {FACTOR}, at: {at} s}}\n"
        for number in range(4)
    )
    dropping = f"{CLUSTERS[LEARN]}faults:\n{faults}"
    (folder / "runs" / f"{plain(DROP)}.yaml").write_text(dropping)
    found = on_clusters(samples, first, folder / "runs")
    lines = table(found)
    (folder / "auto.md").write_text("\n".join(lines) + "\n")
    print(f"the bandwidth drops at {at} s", *lines, sep="\n")
    for name in (PLANNED, RING_FIRST):
        for cluster in (*CLUSTERS, DROP):
            for each in found[cluster, name][0].changes:
                print(f"{cluster}, {name}: after step {each['step']} to {each['then']}")
    picture(found, at, folder / "auto.png")


if __name__ == "__main__":
    main()
