"""The trials before a comparison, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestra.report.collect import Source
from orchestra.report.numbers import significant


@dataclass(frozen=True)
class Trial:
    """One combination of settings, tried with one strategy on one number of ranks."""

    name: str
    ranks: int
    settings: str
    score: str
    value: float | None
    loss: str
    chosen: bool


@dataclass(frozen=True)
class Trials:
    """All trials of a comparison; `metric` is what they were chosen by."""

    folder: str
    metric: str
    better: str
    seed: int
    lines: Sequence[Trial]


def trials(sources: Sequence[Source]) -> list[Trials]:
    """One table for each source whose settings were tuned."""
    return [_table(source) for source in sources if source.tuning]


def _table(source: Source) -> Trials:
    tuning = source.tuning
    lines = [_trial(choice, trial) for choice in tuning["choices"] for trial in choice["trials"]]
    return Trials(source.folder.name, tuning["metric"], tuning["better"], tuning["seed"], lines)


def _trial(choice: Mapping[str, Any], trial: Mapping[str, Any]) -> Trial:
    score, loss = trial["score"], trial["loss"]
    return Trial(
        name=choice["name"],
        ranks=choice["ranks"],
        settings=", ".join(f"{key} {value}" for key, value in trial["settings"].items()),
        score=trial["status"] if score is None else significant(score, 4),
        value=score,
        loss="–" if loss is None else significant(loss, 4),
        chosen=trial["trial"] == choice["chosen"],
    )
