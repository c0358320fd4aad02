"""Which strategies are best on which task: the table behind the marks of `orchestra list`.

    python studies/standing.py --out runs/standing

Compares all strategies of examples/strategies.yaml on each task that comes with Orchestra and
needs no files, and writes src/orchestra/strategies/standing.json: the median over the seeds of the
seconds to the target. The machine has to be idle. The same command goes on where it was stopped.

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
from pathlib import Path
from typing import Any

import torch

from orchestra.experiments import load
from orchestra.settings import write
from orchestra.strategies.registry import STRATEGIES

ROOT = Path(__file__).parents[1]
EXPERIMENT = "examples/strategies.yaml"
TABLE = ROOT / "src" / "orchestra" / "strategies" / "standing.json"
TASKS: dict[str, list[str]] = {
    "digits": [
        "task=digits", "batch_size=16", "steps=150", "optimizer=Adam(lr=0.004)",
        "snapshots=30", "target={metric: accuracy, at_least: 0.95}",
    ],
    "regression": [
        "task=regression", "batch_size=16", "steps=300", "optimizer=Adam(lr=0.01)",
        "snapshots=30", "target={metric: r2_pooled, at_least: 0.9}",
    ],
    "digits28": [],  # what the file says
    "characters": [
        "task=characters(layers=1, width=32)", "batch_size=8", "steps=120",
        "optimizer=AdamW(lr=0.02)", "clip_norm=1.0",
        "target={metric: bits_per_character, at_most: 3.8}",
    ],
    "images": [
        "task=images", "batch_size=16", "steps=250", "seeds=[0]", "patience=300",
        "optimizer=SGD(lr=0.2, momentum=0.9, weight_decay=0.0001)",
        "target={metric: accuracy, at_least: 0.4}",
    ],
}  # fmt: skip


def command(task: str, seeds: list[int] | None, out: Path) -> list[str]:
    """The comparison on `task`."""
    words = ["orchestra", "compare", EXPERIMENT, "--no-report", "--out", str(out / task)]
    for setting in TASKS[task]:
        words += ["--set", setting]
    return words + (["--seeds", ",".join(map(str, seeds))] if seeds else [])


def measured(task: str, seeds: list[int] | None, out: Path) -> dict[str, Any]:
    """Make the comparison on `task`; what the table holds of it."""
    words = [sys.executable, "-m", *command(task, seeds, out)]
    done = subprocess.run(words, cwd=ROOT, check=False)
    if done.returncode not in (0, 1):  # 1: a run failed, which then has no seconds
        sys.exit(done.returncode)
    runs = json.loads((out / task / "summary.json").read_text())["runs"]
    return {
        "command": shlex.join(command(task, seeds, Path("runs/standing"))),
        "seeds": sorted({run["seed"] for run in runs}),
        "seconds": seconds_to_target(runs),
    }


def seconds_to_target(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """Of each strategy the median over its runs; None where half of them did not get there."""
    seconds: dict[str, float | None] = {}
    for label, strategy in load(ROOT / EXPERIMENT, [], {}).strategies.items():
        times = [run["time_to_target_seconds"] for run in runs if run["name"] == label]
        median = statistics.median(math.inf if time is None else time for time in times)
        seconds[write(strategy, STRATEGIES)] = round(median, 3) if median < math.inf else None
    return seconds


def main() -> None:
    """Make the comparisons, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/standing"), help="of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of three, or of one")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS)[:-1])
    parser.add_argument("--table", type=Path, default=TABLE, help="what is written")
    parser.add_argument("--remark", default="on an idle machine", help="how it was measured")
    given = parser.parse_args()
    tasks = {task: measured(task, given.seeds, given.out.resolve()) for task in given.tasks}
    machine = f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
    remark = f"{datetime.date.today()}, {machine}, {given.remark}"
    table = {"command": "python studies/standing.py", "remark": remark, "tasks": tasks}
    given.table.write_text(json.dumps(table, indent=1) + "\n")
    print(f"wrote {given.table}")


if __name__ == "__main__":
    main()
