"""What became of runs: where they switched, what failed, and what they had to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestra.report.collect import RunData
from orchestra.report.numbers import percent
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
        if row.strategy.startswith("Switch(")
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
