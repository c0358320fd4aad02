"""A small comparison for tests, and what one left in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestra.experiments.comparison import Comparison, carry_out
from orchestra.experiments.experiment import Experiment
from orchestra.experiments.file import load
from orchestra.settings.reading import Entry

TASK = "tests.support.comparison_tasks:guarded"
SMALL: dict[str, Any] = {
    "name": "small",
    "task": TASK,
    "ranks": 2,
    "batch_size": 8,
    "steps": 6,
    "snapshots": 1,
    "optimizer": "SGD(lr=0.1)",
    "strategies": {"one": "Single", "ring": "AllReduce('ring')"},
}


def experiment(**changes: Any) -> Experiment:
    keys = {key: value for key, value in {**SMALL, **changes}.items() if value is not None}
    return load(None, (), {key: Entry(value, f"{key}=") for key, value in keys.items()})


def compared(folder: Path, *, retry: bool = False, **changes: Any) -> Comparison:
    """`SMALL` with `changes`, into `folder`, in this process."""
    return carry_out(experiment(**changes), folder, retry=retry, report=False, quiet=True)


def summary(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return value


def rows(folder: Path) -> list[tuple[str, int, int, str]]:
    """Label, ranks, seed and status of each row of the summary."""
    return [(r["name"], r["ranks"], r["seed"], r["status"]) for r in summary(folder)["runs"]]


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """When each file below `folder` was written, and what stands in it."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
