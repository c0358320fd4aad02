"""Records with given figures, each under its key of `summary.json`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestra.records.record import RunRecord, by_topic
from orchestra.settings.base import from_plain, to_plain


def recorded(
    name: str = "ring",
    strategy: str = "AllReduce('ring')",
    engine: str = "processes",
    ranks: int = 2,
    workers: int = 2,
    servers: int = 0,
    seed: int = 0,
    status: str = "completed",
    **figures: Any,
) -> RunRecord:
    asked = {"name": name, "strategy": strategy, "engine": engine, "ranks": ranks,
             "workers": workers, "servers": servers, "seed": seed, "status": status}  # fmt: skip
    return _record({**asked, **figures}, Path())


def changed(record: RunRecord, **figures: Any) -> RunRecord:
    return _record({**record.summary(), **figures}, record.folder)


def _record(figures: dict[str, Any], folder: Path) -> RunRecord:
    folder = figures.pop("folder", folder)
    # Without the checks of a file: figures may be NaN
    found: RunRecord = from_plain(RunRecord, by_topic(to_plain(figures)))
    return replace(found, folder=folder)
