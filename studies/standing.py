"""Which strategies are best on which task: the table behind the marks of `orchestra list`.

    python -m studies.standing --out runs/standing
    python -m studies.standing --out runs/standing --clusters --jobs 2

Compares all strategies of examples/strategies.yaml on each task that comes with Orchestra and
needs no files, and writes src/orchestra/strategies/standing.json: the median over the seeds of the
seconds to the target. The machine has to be idle. The same command goes on where it was stopped.

With --clusters it does so in simulations of the clusters that come along, with eight ranks on
digits; that part of the table is replaced, and the other one stays. Where parameters do not depend
on time, gradients are computed on the first cluster only, and re-timed for the others.

Images take as long as the other tasks together, so they have to be asked for: --tasks digits
regression digits28 characters images.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from studies.pool import Job, Pool

from orchestra.cluster import CLUSTERS, Jitter
from orchestra.experiments.experiment import Experiment, runs
from orchestra.experiments.file import load
from orchestra.experiments.run import claim
from orchestra.records.files import run_folder
from orchestra.records.store import RunStore, write_summary
from orchestra.settings import write
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.settings import Run

ROOT = Path(__file__).parents[1]
EXPERIMENT = "examples/strategies.yaml"
TABLE = ROOT / "src" / "orchestra" / "strategies" / "standing.json"
SEEDS = "seeds=[0, 1, 2]"
TASKS: dict[str, list[str]] = {
    "digits": [
        SEEDS, "task=digits", "batch_size=16", "steps=150", "optimizer=Adam(lr=0.004)",
        "snapshots=30", "target={metric: accuracy, at_least: 0.95}",
    ],
    "regression": [
        SEEDS, "task=regression", "batch_size=16", "steps=300", "optimizer=Adam(lr=0.01)",
        "snapshots=30", "target={metric: r2_pooled, at_least: 0.9}",
    ],
    "digits28": [SEEDS],  # and else what the file says
    "characters": [
        SEEDS, "task=characters(layers=1, width=32)", "batch_size=8", "steps=120",
        "optimizer=AdamW(lr=0.02)", "clip_norm=1.0",
        "target={metric: bits_per_character, at_most: 3.8}",
    ],
    "images": [
        "task=images", "batch_size=16", "steps=250", "seeds=[0]", "patience=300",
        "optimizer=SGD(lr=0.2, momentum=0.9, weight_decay=0.0001)",
        "target={metric: accuracy, at_least: 0.4}",
    ],
}  # fmt: skip
SIMULATED = [
    SEEDS, "task=digits", "ranks=8", "batch_size=16", "steps=75", "optimizer=Adam(lr=0.004)",
    "snapshots=30", "target={metric: accuracy, at_least: 0.9}", "trace_steps=0",
    "engine=simulation", "calibration=none",
]  # fmt: skip
PRESETS = [
    name
    for name in CLUSTERS.names()
    if not issubclass(CLUSTERS.resolve(name, where="standing"), Jitter)
]


def changes(place: str) -> list[str]:
    """What the comparison on a task, or in a simulated cluster, changes in the file."""
    return TASKS.get(place, [*SIMULATED, f"cluster={place}"])


def command(place: str, seeds: list[int] | None, out: Path) -> list[str]:
    """The comparison on the task or cluster `place`."""
    words = ["orchestra", "compare", EXPERIMENT, "--no-report", "--out", str(out / place)]
    for setting in _with_seeds(changes(place), seeds):
        words += ["--set", setting]
    return words


def _with_seeds(settings: list[str], seeds: list[int] | None) -> list[str]:
    """`settings`, with these seeds in place of their own."""
    if not seeds:
        return settings
    return [f"seeds={seeds}", *(text for text in settings if not text.startswith("seeds="))]


def measured(place: str, seeds: list[int] | None, out: Path) -> dict[str, Any]:
    """Make the comparison on the task or cluster `place`; what the table holds of it."""
    words = [sys.executable, "-m", *command(place, seeds, out)]
    done = subprocess.run(words, cwd=ROOT, check=False)
    if done.returncode not in (0, 1):  # 1: a run failed, which then has no seconds
        sys.exit(done.returncode)
    return entry(place, seeds, out)


def entry(place: str, seeds: list[int] | None, out: Path) -> dict[str, Any]:
    """What the table holds of the comparison on `place`, which is done."""
    runs = [run.record.summary() for run in RunStore(out / place).runs]
    return {
        "command": shlex.join(command(place, seeds, Path("runs/standing"))),
        "seeds": sorted({run["seed"] for run in runs}),
        "seconds": seconds_to_target(runs),
    }


def simulated(clusters: list[str], seeds: list[int] | None, out: Path, jobs: int) -> dict[str, Any]:
    """Make the comparisons on the `clusters`; what the table holds of each."""
    per_cluster = len(runs(_on(clusters[0], seeds)))
    with Pool(jobs, len(clusters) * per_cluster) as pool:
        for cluster in clusters:
            experiment, folder = _on(cluster, seeds), out / cluster
            claim(folder, experiment)
            first = None if cluster == clusters[0] else out / clusters[0]
            records = pool.make([_job(run, experiment, folder, first) for run in runs(experiment)])
            write_summary(folder, experiment.name, records)
    return {cluster: entry(cluster, seeds, out) for cluster in clusters}


def _on(cluster: str, seeds: list[int] | None) -> Experiment:
    return load(ROOT / EXPERIMENT, _with_seeds(changes(cluster), seeds), {})


def _job(run: Run, experiment: Experiment, folder: Path, first: Path | None) -> Job:
    """A run, or a re-timing of that on the `first` cluster."""
    place = (run.name, run.training.ranks, run.seed)
    source = (
        None
        if first is None or run.strategy.traits().depends_on_speed
        else run_folder(first, *place)
    )
    what = f"{folder.name}: {run.name}, seed {run.seed}"
    return Job(run, experiment, run_folder(folder, *place), what, source=source)


def seconds_to_target(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """Of each strategy the median over its runs; None where half of them did not get there."""
    seconds: dict[str, float | None] = {}
    for label, strategy in load(ROOT / EXPERIMENT, [], {}).strategies.items():
        times = [run["time_to_target_seconds"] for run in runs if run["name"] == label]
        median = statistics.median(math.inf if time is None else time for time in times)
        seconds[write(strategy, STRATEGIES)] = float(f"{median:.4g}") if median < math.inf else None
    return seconds


def real_part(tasks: Mapping[str, Any], remark: str) -> dict[str, Any]:
    """What the table says of real runs."""
    machine = f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
    remark = f"{datetime.date.today()}, {machine}, {remark}"
    return {"command": "python -m studies.standing", "remark": remark, "tasks": tasks}


def simulated_part(clusters: Mapping[str, Any]) -> dict[str, Any]:
    """What it says of simulated ones."""
    seeds = sorted({seed for measured in clusters.values() for seed in measured["seeds"]})
    ran = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
    remark = f"{datetime.date.today()}, digits with 8 ranks, {ran}, assumed costs of computation"
    return {"simulated": {"remark": remark, "clusters": clusters}}


def main() -> None:
    """Make the comparisons, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/standing"), help="of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of three, or of one")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS)[:-1])
    parser.add_argument("--table", type=Path, default=TABLE, help="what is written")
    parser.add_argument("--remark", default="on an idle machine", help="how it was measured")
    parser.add_argument("--clusters", nargs="*", choices=PRESETS, help="simulate them, or all")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at a time")
    given = parser.parse_args()
    table = json.loads(given.table.read_text()) if given.table.exists() else {}
    out = given.out.resolve()
    if given.clusters is None:
        tasks = {task: measured(task, given.seeds, out) for task in given.tasks}
        table |= real_part(tasks, given.remark)
    else:
        clusters = given.clusters or PRESETS
        table |= simulated_part(simulated(clusters, given.seeds, out, given.jobs))
    given.table.write_text(json.dumps(table, indent=1) + "\n")
    print(f"wrote {given.table}")


if __name__ == "__main__":
    main()
