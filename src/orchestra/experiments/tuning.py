"""The trials before a comparison, and the choice by them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestra.experiments.experiment import Experiment, Tune, grid, on_ranks, runs, tuned
from orchestra.records.record import RunRecord, trial_folder, write_atomically
from orchestra.report.rows import grouped
from orchestra.settings.base import to_plain
from orchestra.trainer.settings import Run, Target, Training

TUNING = "tuning.json"


@dataclass(frozen=True)
class Trial:
    """One combination of settings, tried with one strategy on one number of ranks.

    `run` has them, and is judged on the validation data.
    """

    number: int
    settings: Mapping[str, Any]
    run: Run

    @property
    def row(self) -> tuple[str, int]:
        """The label and the number of ranks."""
        return self.run.name, self.run.training.ranks

    def folder(self, comparison: Path) -> Path:
        """Return the folder of the trial in that of the comparison."""
        return trial_folder(comparison, *self.row, self.number)

    def __str__(self) -> str:
        settings = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        return f"{on_ranks(self.run)}, trial with {settings}"


@dataclass(frozen=True)
class Criterion:
    """What trials are judged by: a metric or "loss", for which `by`, and if higher is better."""

    by: str
    metric: str
    higher: bool

    @classmethod
    def of(cls, tune: Tune, target: Target | None) -> Criterion:
        """Return the target's metric in its direction, or the loss, as `tune` asks."""
        # Without a target no metric has a direction that the user has asked for
        if target is None or tune.by == "loss":
            return cls("loss", "loss", higher=False)
        return cls("target", target.metric, higher=target.rising)

    def score(self, record: RunRecord) -> float | None:
        """Return the figure of a trial; None where it failed or diverged."""
        if record.status != "completed":
            return None
        loss = record.final_loss if self.metric == "loss" else None
        # The loss is a field of the record; a task may also have a metric of that name
        value = record.metrics.get(self.metric, loss)
        return value if value is not None and math.isfinite(value) else None

    def cost(self, record: RunRecord) -> tuple[float, float]:
        """Return a key to sort trials by, smaller is better; of equal ones the loss decides."""
        score, loss = self.score(record), record.final_loss
        if score is None:
            return math.inf, math.inf
        equal = loss if loss is not None and math.isfinite(loss) else math.inf
        # Accuracies on few validation samples are often equal
        return -score if self.higher else score, equal


@dataclass(frozen=True)
class Choice:
    """The trials of one strategy on one number of ranks, in order, with their records."""

    criterion: Criterion
    outcomes: Sequence[tuple[Trial, RunRecord]]

    @property
    def best(self) -> Trial | None:
        """The best trial, the earlier of equals; None where all failed or diverged."""
        # min() keeps the first of equals
        trial, record = min(self.outcomes, key=lambda outcome: self.criterion.cost(outcome[1]))
        return None if self.criterion.score(record) is None else trial

    @property
    def reason(self) -> str:
        """Why there is no best trial."""
        _, first = self.outcomes[0]
        cause = first.failure or f"its {self.criterion.metric} is not a finite number"
        return f"every trial of its tuning failed; the first: {cause}"

    def plain(self) -> dict[str, Any]:
        """Return the entry of the choice in `tuning.json`."""
        name, ranks = self.outcomes[0][0].row
        best = self.best
        entry = {
            "name": name,
            "ranks": ranks,
            "chosen": None if best is None else best.number,
            "settings": None if best is None else dict(best.settings),
            "trials": [
                {
                    "trial": trial.number,
                    "settings": dict(trial.settings),
                    "status": record.status,
                    "score": self.criterion.score(record),
                    "loss": record.final_loss,
                    "failure": record.failure,
                }
                for trial, record in self.outcomes
            ],
        }
        plain: dict[str, Any] = to_plain(entry, finite=True)
        return plain


def trials(experiment: Experiment) -> list[Trial]:
    """Return the trials of every strategy and number of ranks, in the order of their runs."""
    tune = experiment.tune
    if tune is None:
        return []
    # One seed for all trials: the seeds of the comparison are looked at once, afterwards
    once = runs(replace(experiment, seeds=(tune.seed,), tune=None))
    every = [
        # The test data stays unseen until the settings are chosen
        Trial(number, settings, replace(tuned(run, settings), judged_on="validation"))
        for run in once
        for number, settings in enumerate(grid(tune, run))
    ]
    # First all rows with the first combination, then all with the second: see `runs`.
    return sorted(every, key=lambda trial: trial.number)


def choose(
    tune: Tune, training: Training, outcomes: Sequence[tuple[Trial, RunRecord]]
) -> dict[tuple[str, int], Choice]:
    """Return the choice of each strategy and number of ranks, by its trials."""
    criterion = Criterion.of(tune, training.target)
    by_row = grouped(outcomes, lambda outcome: outcome[0].row)
    return {row: Choice(criterion, of_row) for row, of_row in by_row.items()}


def write_tuning(
    folder: Path, tune: Tune, training: Training, choices: Mapping[tuple[str, int], Choice]
) -> None:
    """Write `tuning.json`: the criterion, every trial, and the choices."""
    criterion = Criterion.of(tune, training.target)
    document = {
        "trials": max((len(choice.outcomes) for choice in choices.values()), default=0),
        "by": criterion.by,
        "metric": criterion.metric,
        "better": "higher" if criterion.higher else "lower",
        "seed": tune.seed,
        "choices": [choice.plain() for choice in choices.values()],
    }
    write_atomically(folder / TUNING, json.dumps(document, indent=2) + "\n")
