"""Dynamic batches with a backup worker, beside each alone: docs/results/studies/balanced_backup.md.

    python -m studies.balanced_backup --out runs/balanced-backup

In virtual time, with real gradients. Makes the trials of the learning rate, then the runs of the
ten seeds, and prints the tables; Ctrl-C stops it, and the same command goes on. --tune makes the
trials alone; --draw FILE.svg draws the comparison.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy

import orchestra
from orchestra.errors import RunFailed

FOLDER = Path(__file__).parent / "clusters"
CLUSTERS = ("equal", "one_slow", "two_racks")
BALANCED = "LBBSP(every=10)"
BOTH, PARTS = "both", ("dynamic batches", "backup worker")
ROWS: Mapping[str, tuple[str, str | None]] = {
    "all-reduce": ('AllReduce("ring")', None),
    "dynamic batches": ('AllReduce("ring")', BALANCED),
    "backup worker": ('AllReduce("ring", backup=1)', None),
    BOTH: ('AllReduce("ring", backup=1)', BALANCED),
}
"""Strategy, and rule of the batches. The first is there for orientation."""
RATES = (0.025, 0.05, 0.1, 0.2)
TRIAL_SEEDS, SEEDS = range(1000, 1004), range(10)
STEPS, BATCH, RANKS, TARGET = 160, 8, 8, 0.95
RESAMPLES, CONFIDENCE = 10_000, 0.95


@dataclass(frozen=True)
class Job:
    """One run, of a row on a cluster with a rate and a seed."""

    out: Path
    cluster: str
    row: str
    rate: float
    seed: int


@dataclass(frozen=True)
class Made:
    """What is read of a run: the time to the target, or that of the whole where it `missed` it.

    `dropped` are the gradients of each rank that came too late.
    """

    seconds: float
    missed: bool
    train_seconds: float = math.inf
    accuracy: float = math.nan
    dropped: tuple[int, ...] = ()


def make(job: Job) -> Made:
    """Make the run, or read what is there of it; one that diverged has never reached the target."""
    strategy, shares = ROWS[job.row]
    settings: dict[str, Any] = {"shares": shares} if shares else {}
    place = job.out / job.cluster / job.row / f"{job.rate:g}" / str(job.seed)
    try:
        run = orchestra.train(
            "studies.load_balancing:heavy_digits", strategy, ranks=RANKS, steps=STEPS,
            batch_size=BATCH, threads=1, seeds=[job.seed], engine="simulation",
            optimizer=f"SGD(lr={job.rate}, momentum=0.9)", calibration="none",
            cluster=str(FOLDER / f"{job.cluster}.yaml"), snapshots=STEPS // 2, trace_steps=0,
            target={"metric": "accuracy", "at_least": TARGET}, out=place, quiet=True, **settings,
        )  # fmt: skip
    except RunFailed:
        return Made(math.inf, missed=True)
    if run.ending.status == "stopped":
        raise KeyboardInterrupt
    reached, whole = run.to_target.seconds, run.time.training or math.inf
    seconds = whole if reached is None else reached
    dropped = tuple(rank.dropped for rank in run.machine.by_rank)
    return Made(seconds, reached is None, whole, run.learned.metrics["accuracy"], dropped)


Runs = Mapping[tuple[str, str], Sequence[Made]]
"""By cluster and row, those of the ten seeds."""


def tuned(out: Path, pool: ProcessPoolExecutor) -> dict[str, float]:
    """By row the rate with the least geometric mean of the trials' times, over all clusters."""
    trials = [(cluster, seed) for cluster in CLUSTERS for seed in TRIAL_SEEDS]
    jobs = [Job(out, cluster, row, rate, seed)
            for row in ROWS for rate in RATES for cluster, seed in trials]  # fmt: skip
    made, found = pool.map(make, jobs), {}
    for row in ROWS:
        logs = {rate: fmean(math.log(next(made).seconds) for _ in trials) for rate in RATES}
        best = found[row] = min(RATES, key=lambda rate: logs[rate])
        means = ", ".join(f"{rate:g}: {math.exp(log):.2f} s" for rate, log in logs.items())
        edge = ", at the edge of the grid" if best in (RATES[0], RATES[-1]) else ""
        print(f"{row}: rate {best:g} of {means}{edge}", file=sys.stderr, flush=True)
    return found


def interval(logs: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of ratios with its bootstrap interval, from their logarithms."""
    drawn = numpy.random.default_rng(0).choice(logs, (RESAMPLES, len(logs))).mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(drawn, [tail, 1 - tail])
    return math.exp(fmean(logs)), math.exp(low), math.exp(high)


def ratios(runs: Runs, cluster: str, row: str) -> list[float]:
    """By seed the logarithm of the time of both over that of `row`."""
    pairs = zip(runs[cluster, BOTH], runs[cluster, row], strict=True)
    return [math.log(ours.seconds / theirs.seconds) for ours, theirs in pairs]


def better_part(runs: Runs, cluster: str) -> str:
    """The part with the smaller geometric mean of the times of the ten seeds."""
    return max(PARTS, key=lambda row: fmean(ratios(runs, cluster, row)))


def table(runs: Runs, rates: Mapping[str, float]) -> Iterator[str]:
    """The lines of what was measured: every row, then the differences by seed."""
    yield (
        f"| cluster | row | rate | seconds to {TARGET:g} | missed | both / it | seconds a step | "
        "accuracy at the end | dropped | most of one rank |"
    )
    yield "| --- |" + " --- |" * 9
    for (cluster, row), made in runs.items():
        times = [each.seconds for each in made]
        step = fmean(each.train_seconds for each in made) / STEPS
        mean, low, high = interval(ratios(runs, cluster, row))
        ratio = "" if row == BOTH else f"{mean:.2f} ({low:.2f} to {high:.2f})"
        dropped = [sum(ranks) for ranks in zip(*(each.dropped for each in made), strict=True)]
        most = f"{max(dropped) / sum(dropped):.0%}" if sum(dropped) else ""
        yield (
            f"| {cluster} | {row} | {rates[row]:g} | {fmean(times):.2f} "
            f"({min(times):.2f} to {max(times):.2f}) | {sum(each.missed for each in made)} | "
            f"{ratio} | {step:.3f} | {fmean(each.accuracy for each in made):.3f} | "
            f"{sum(dropped)} | {most} |"
        )
    yield ""
    yield "| cluster | better part | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " |"
    yield "| --- | --- |" + " --- |" * len(SEEDS)
    for cluster in CLUSTERS:
        part = better_part(runs, cluster)
        pairs = zip(runs[cluster, BOTH], runs[cluster, part], strict=True)
        cells = [f"{ours.seconds - theirs.seconds:+.2f}" for ours, theirs in pairs]
        yield f"| {cluster} | {part} | " + " | ".join(cells) + " |"


def draw(runs: Runs, path: Path) -> None:
    """The ratios of each seed as points, and their means with intervals, to the file `path`."""
    import altair

    x = altair.X("ratio:Q", title="time to the target: both together / one of them")
    x = x.scale(type="log", nice=False, padding=12)
    y = altair.Y("part:N", title=None)
    charts = []
    for cluster in CLUSTERS:
        points, means = [], []
        for row in PARTS:
            logs = ratios(runs, cluster, row)
            points += [{"part": row, "ratio": math.exp(each)} for each in logs]
            mean, low, high = interval(logs)
            means.append({"part": row, "ratio": mean, "low": low, "high": high})
        seeds = altair.Chart(altair.InlineData(values=points))
        mean_of = altair.Chart(altair.InlineData(values=means)).encode(y=y)
        equal = altair.Chart(altair.InlineData(values=[{"ratio": 1.0}]))
        layers = (
            equal.mark_rule(color="#888", strokeDash=[4, 3]).encode(x=x),
            seeds.mark_circle(size=36, opacity=0.4).encode(x=x, y=y),
            mean_of.mark_rule(size=2).encode(x=altair.X("low:Q"), x2="high:Q"),
            mean_of.mark_tick(size=18, thickness=3, color="black").encode(x=x),
        )
        title = cluster.replace("_", " ")
        charts.append(altair.layer(*layers).properties(width=480, height=70, title=title))
    altair.vconcat(*charts).resolve_scale(x="shared").save(str(path), scale_factor=2)


def main() -> None:
    """Make what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/balanced-backup"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each takes one core")
    parser.add_argument("--tune", action="store_true", help="make the trials alone")
    parser.add_argument("--draw", type=Path, help="a file for the picture, .svg or .png")
    given = parser.parse_args()
    try:
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            rates = tuned(given.out.resolve(), pool)
            if given.tune:
                return
            rows = [(cluster, row) for cluster in CLUSTERS for row in ROWS]
            jobs = [Job(given.out.resolve(), *row, rates[row[1]], seed)
                    for row in rows for seed in SEEDS]  # fmt: skip
            made = pool.map(make, jobs)
            runs = {row: [next(made) for _ in SEEDS] for row in rows}
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
    for text in table(runs, rates):
        print(text)
    if given.draw:
        draw(runs, given.draw)


if __name__ == "__main__":
    main()
