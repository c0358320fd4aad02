"""How runs ended, where they switched, and what their tuning tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestra.report.collect import RunData, Source
from orchestra.report.numbers import percent, significant
from orchestra.report.study import Study


@dataclass(frozen=True)
class Switched:
    """One run of a switching strategy; `step` is None where its rule never fired.

    `share` is the part of all samples that was consumed by then, None where it is not known.
    """

    name: str
    seed: int
    step: int | None
    share: float | None

    @property
    def text(self) -> str:
        """In words."""
        if self.step is None:
            return "never switched"
        part = "" if self.share is None else f", after {percent(self.share)} of the samples"
        return f"switched after step {self.step}{part}"


@dataclass(frozen=True)
class Trouble:
    """Something that did not go as it was meant to: its first line, and all of it."""

    name: str
    seed: int | None
    what: str
    line: str
    whole: str = ""


def switched(study: Study) -> list[Switched]:
    """Each completed run of a strategy that may switch."""
    return [
        Switched(row.name, run.record.seed, run.record.switched_at_step, _share(run))
        for row in study.rows
        if row.switches
        for run in row.completed
    ]


def troubles(study: Study) -> list[Trouble]:
    """All of it: first what failed or was stopped, then what was told on the way."""
    ends: list[Trouble] = []
    told: list[Trouble] = []
    for row in study.rows:
        for run in row.runs:
            record = run.record
            if record.status == "failed":
                ends.append(_trouble(row.name, record.seed, "failed", record.failure or "unknown"))
            elif record.status != "completed":
                ends.append(Trouble(row.name, record.seed, record.status, "before its end"))
            for rank, reason in record.left_out.items():
                told.append(_trouble(row.name, record.seed, f"went on without rank {rank}", reason))
            for notice in record.notices:
                told.append(_trouble(row.name, record.seed, "notice", notice))
    return [*ends, *_not_run(study), *told]


def _not_run(study: Study) -> Sequence[Trouble]:
    entries: list[Any] = [entry for source in study.sources for entry in source.not_run]
    return [
        _trouble(f"{entry['name']} ({entry['ranks']} ranks)", None, "not run", entry["reason"])
        for entry in entries
    ]


def _trouble(name: str, seed: int | None, what: str, text: str) -> Trouble:
    line, _, rest = text.strip().partition("\n")
    return Trouble(name, seed, what, line, text.strip() if rest else "")


def _share(run: RunData) -> float | None:
    """The part of the samples that the first phase consumed."""
    consumed = run.record.switched_at_sample
    return consumed / run.record.samples if consumed and run.record.samples else None


@dataclass(frozen=True)
class TunedTrial:
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
    lines: Sequence[TunedTrial]


def tuning_tables(sources: Sequence[Source]) -> list[Trials]:
    """One table for each source whose settings were tuned."""
    return [_table(source) for source in sources if source.tuning]


def _table(source: Source) -> Trials:
    tuning = source.tuning
    lines = [_trial(choice, trial) for choice in tuning["choices"] for trial in choice["trials"]]
    return Trials(source.folder.name, tuning["metric"], tuning["better"], tuning["seed"], lines)


def _trial(choice: Mapping[str, Any], trial: Mapping[str, Any]) -> TunedTrial:
    score, loss = trial["score"], trial["loss"]
    return TunedTrial(
        name=choice["name"],
        ranks=choice["ranks"],
        settings=", ".join(f"{key} {value}" for key, value in trial["settings"].items()),
        score=trial["status"] if score is None else significant(score, 4),
        value=score,
        loss="–" if loss is None else significant(loss, 4),
        chosen=trial["trial"] == choice["chosen"],
    )
