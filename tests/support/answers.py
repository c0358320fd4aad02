"""Studies that were never run, and what a report says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.drawn import record

from orchestra.records.record import RunRecord
from orchestra.records.store import RunFolder, RunStore
from orchestra.report.answer import ComparisonAnswer, answer
from orchestra.report.fairness import Fairness, fairness
from orchestra.report.numbers import MINUS, THIN
from orchestra.report.study import Study

TARGET = {"metric": "accuracy", "at_least": 0.95, "at_most": None}
EXPERIMENT = {"name": "sample", "task": "digits", "ranks": 4, "epochs": 2, "target": TARGET}


def source(runs: Sequence[RunRecord], name: str = "here", **changes: Any) -> RunStore:
    experiment = {**EXPERIMENT, **changes}
    return known(name, experiment, runs, {"cores": 2, "processor": "one"})


def known(
    name: str,
    experiment: Mapping[str, Any],
    runs: Sequence[RunRecord],
    environment: Mapping[str, Any] | None = None,
    tuning: Mapping[str, Any] | None = None,
) -> RunStore:
    """A store whose contents are known, so that no folder is read."""
    store = RunStore(Path(name))
    store.experiment, store.environment = experiment, environment or {}
    store.runs = [RunFolder(store.folder, run) for run in runs]
    store.tuning, store.not_run, store.techniques = tuning or {}, [], []
    return store


def timed(
    times: Mapping[str, Sequence[float | None]], ranks: int = 4, **changes: Any
) -> list[RunRecord]:
    """For each strategy and seed a run that reached the target after that time."""
    return [
        record(label, ranks, seed, time_to_target_seconds=time, **changes)
        for label, of_seeds in times.items()
        for seed, time in enumerate(of_seeds)
    ]


def study(*sources: RunStore, baseline: str | None = None) -> Study:
    return Study(sources, baseline)


def told(*sources: RunStore) -> ComparisonAnswer:
    return answer(study(*sources))


def plain(text: str) -> str:
    return text.replace(THIN, " ").replace(MINUS, "-")


def headline(*sources: RunStore) -> str:
    return plain(told(*sources).headline)


def fair(runs: Sequence[RunRecord], **changes: Any) -> Fairness:
    return fairness(study(source(runs, **changes)))
