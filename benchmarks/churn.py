"""Ten losses and ten joins in one run, and what they do to its accuracy.

A training of three ranks is joined by `orchestra join` again and again, and each time one rank of
those that are there is killed soon after, the first ones included. The same training undisturbed,
of several seeds, says by how much accuracies differ anyway.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.options import (
    PrintedTable,
    bench_parser,
    read_options,
    write_figures,
)
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
from orchestra.errors import RunFailed

RANKS, LEAST = 3, 2
CHANGES = 10
BATCH = 64
LIMIT_SECONDS = 300.0
STRATEGIES = {
    "ring": "AllReduce('ring')",
    "ring, PowerSGD(4)": "AllReduce('ring', compression=PowerSGD(4))",
    "local SGD": "LocalSGD(8)",
    "DiLoCo": "LocalSGD(8, outer=Nesterov(0.7, 0.9))",
    "gossip": "Gossip()",
    "push-sum": "StochasticGradientPush()",
    "synchronous server": "ParameterServer()",
    "asynchronous server": "ParameterServer(consistency='asynchronous')",
    "sharded": "AllReduce('ring', shard='parameters')",
}
CHECKPOINT_EVERY = 100  # steps, where ranks go back to a checkpoint
FROM_CHECKPOINTS = "synchronous server", "asynchronous server", "sharded"
DESCRIPTION = """\
Train the task digits with 3 ranks under several strategies: undisturbed, and with ten ranks that
join and ten that are killed on the way; compare the accuracies.
"""


@dataclass(frozen=True)
class Row:
    """What came of one strategy."""

    strategy: str
    undisturbed: list[float]  # accuracies, by seed
    disturbed: list[float]
    lost: list[int]
    joined: list[int]
    voided: list[int]  # steps that were made again
    slowest: float  # seconds of a change, the longest of all


def train(label: str, seed: int, steps: int, folder: Path, *, changes: int) -> dict[str, Any]:
    """Return the record of a training with so many joins and losses."""
    strategy = STRATEGIES[label]
    command = [sys.executable, "-m", "orchestra", "train", "--task", "digits"]
    command += ["--strategy", strategy, "--ranks", str(RANKS), "--seed", str(seed)]
    settings = [f"steps={steps}", f"batch_size={BATCH}", f"min_ranks={LEAST}", "threads=1"]
    if label in FROM_CHECKPOINTS:
        settings.append(f"checkpoint_every={CHECKPOINT_EVERY}")
    for setting in settings:
        command += ["--set", setting]
    out = folder / "run"
    with (folder / "errors").open("w") as errors:
        run = subprocess.Popen(
            [*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            if changes:
                _disturb(run, out, random.Random(f"{strategy} {seed}"), changes)
            run.wait(LIMIT_SECONDS)
        finally:
            run.kill()
            run.wait()
    if run.returncode:
        raise RunFailed(f"{strategy}, seed {seed}: {(folder / 'errors').read_text()}")
    (record,) = json.loads((out / "summary.json").read_text())["runs"]
    return dict(record)


def _disturb(run: subprocess.Popen[bytes], out: Path, draw: random.Random, changes: int) -> None:
    """Let a rank join, and kill one, again and again."""
    _wait(run, lambda: _step(out) >= 10, "the first steps")
    there = dict(enumerate(_ranks_of(run.pid)))
    newcomers: list[subprocess.Popen[bytes]] = []
    try:
        for change in range(changes):
            rank = RANKS + change
            join = [sys.executable, "-m", "orchestra", "join", str(out)]
            newcomers.append(
                subprocess.Popen(join, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            _wait(run, partial(_told, out, rank, "joins; going on with"), f"rank {rank}")
            there[rank] = newcomers[-1].pid
            victim = draw.choice(sorted(there))
            os.kill(there.pop(victim), signal.SIGKILL)
            lost = partial(_told, out, victim, "was killed by SIGKILL|is gone")
            _wait(run, lost, f"the loss of rank {victim}")
        run.wait(LIMIT_SECONDS)
    finally:
        for newcomer in newcomers:
            newcomer.kill()
            newcomer.wait()


def _wait(run: subprocess.Popen[bytes], come: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not come():
        if run.poll() is not None:
            raise RunFailed(f"the run ended before {what}: give more --steps")
        if time.monotonic() > until:
            raise RunFailed(f"waited {LIMIT_SECONDS:g} s for {what}")
        time.sleep(0.02)


def _ranks_of(launcher: int) -> list[int]:
    """Return the process ids of the ranks that `launcher` has started, by rank."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,lstart"], capture_output=True, text=True).stdout
    parents = [tuple(map(int, line.split()[:2])) for line in found.splitlines()[1:]]
    servers = {pid for pid, parent in parents if parent == launcher}
    return sorted(pid for pid, parent in parents if parent in servers)


def _step(out: Path) -> int:
    return max((_last(path) for path in out.glob("steps-rank-*.jsonl")), default=0)


def _last(path: Path) -> int:
    lines = path.read_text().splitlines()
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith("}") else 0


def _told(out: Path, rank: int, what: str) -> bool:
    """Return whether the user was told that of `rank`; `what` is a regular expression."""
    try:
        notices = json.loads((out / "live.json").read_text())["notices"]
    except FileNotFoundError:
        return False
    return any(re.match(rf"rank {rank} .*({what})", each) for each in notices)


def row(label: str, seeds: int, steps: int, tell: Callable[[str], None]) -> Row:
    accuracies: dict[int, list[float]] = {0: [], CHANGES: []}
    records = []
    for seed in range(seeds):
        for changes, found in accuracies.items():
            tell(f"{label}, seed {seed}, {changes} changes")
            with tempfile.TemporaryDirectory(prefix="orchestra-churn-") as name:
                folder = Path(name)
                record = train(label, seed, steps, folder, changes=changes)
            found.append(record["metrics"]["accuracy"])
            if changes:
                records.append(record["regroupings"])
    return Row(
        label, accuracies[0], accuracies[CHANGES],
        [sum(len(each["lost"]) for each in changes) for changes in records],
        [sum(len(each["joined"]) for each in changes) for changes in records],
        [sum(each["steps_voided"] for each in changes) for changes in records],
        max(each["seconds"] for changes in records for each in changes),
    )  # fmt: skip


def _tell(tell: Callable[[str, float], None], part: float, text: str) -> None:
    tell(text, part)


def table_of(rows: Sequence[Row]) -> PrintedTable:
    headings = [
        "strategy",
        "undisturbed",
        "disturbed",
        "lost",
        "joined",
        "steps again",
        "slowest s",
    ]
    lines = [
        [
            row.strategy, _spread(row.undisturbed), _spread(row.disturbed),
            " ".join(map(str, row.lost)), " ".join(map(str, row.joined)),
            " ".join(map(str, row.voided)), f"{row.slowest:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    return PrintedTable("accuracy: median (least to most) over the seeds", headings, lines)


def _spread(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    return f"{middle:.4f} ({min(values):.4f} to {max(values):.4f})"


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("python -m benchmarks.churn", DESCRIPTION)
    parser.option("--seeds", "N", "of each strategy (default: 3)", type=int, default=3)
    parser.option("--steps", "N", "of a run (default: 6000)", type=int, default=6000)
    parser.option("--strategy", "TEXT", "only those whose label has this", default="")
    options = read_options(parser, arguments)
    labels = [label for label in STRATEGIES if options.strategy in label]
    rows = []
    with progress_line() as tell:
        for place, label in enumerate(labels):
            told = partial(_tell, tell, place / len(labels))
            rows.append(row(label, options.seeds, options.steps, told))
    table = table_of(rows)
    table.show()
    write_figures(options.json, "churn", rows, [table], options.command)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
