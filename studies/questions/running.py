"""The runs of a question: trials that choose learning rates, then every strategy with every seed.

Where parameters do not depend on time, gradients are computed on the first cluster of a comparison
only, and the runs are timed again on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from studies.pool import Job, Pool
from studies.questions.declaration import Comparison, Place, Question

from orchestra.experiments.experiment import (
    Choice,
    Experiment,
    choose,
    on_ranks,
    runs,
    trials,
    write_tuning,
)
from orchestra.experiments.run import claim
from orchestra.records.files import run_folder
from orchestra.records.record import RunRecord
from orchestra.records.store import write_summary
from orchestra.trainer.settings import Run

Choices = Mapping[tuple[str, int], Choice]


def folder_of(out: Path, question: Question, comparison: str, cluster: str, ranks: int) -> Path:
    """Return the folder of a comparison's runs on a cluster of so many ranks."""
    names = (f"question-{question.number}", comparison, f"{cluster}, {ranks} ranks")
    return out.joinpath(*(name.replace("/", " per ") for name in names))


def size(question: Question) -> int:
    """Return how many trials and runs a question has."""
    return sum(
        len(trials(experiment)) * (cluster == next(iter(comparison.clusters)))
        + len(runs(experiment))
        for comparison in question.comparisons
        for cluster in comparison.clusters
        for ranks in comparison.ranks
        for experiment in [comparison.experiment(cluster, ranks)]
    )


def carry_out(question: Question, out: Path, pool: Pool) -> dict[Place, list[RunRecord]]:
    """Make the runs of a question that are missing below `out`; return the records of each row."""
    found: dict[Place, list[RunRecord]] = {}
    for comparison in question.comparisons:
        for ranks in comparison.ranks:
            choices = _tuned(question, comparison, ranks, out, pool)
            for cluster in comparison.clusters:
                records = _made(question, comparison, cluster, ranks, choices, out, pool)
                for record in records:
                    place = Place(comparison.name, cluster, ranks, record.asked.name)
                    found.setdefault(place, []).append(record)
    return found


def _tuned(
    question: Question, comparison: Comparison, ranks: int, out: Path, pool: Pool
) -> Choices:
    """Return what the trials of each row chose, on the first cluster; nothing without tuning."""
    first = next(iter(comparison.clusters))
    experiment = comparison.experiment(first, ranks)
    if experiment.tune is None:
        return {}
    folder = folder_of(out, question, comparison.name, first, ranks)
    claim(folder, experiment)
    tried = trials(experiment)
    jobs = [
        Job(trial.run, experiment, trial.folder(folder), f"question {question.number}, {trial}")
        for trial in tried
    ]
    outcomes = list(zip(tried, pool.make(jobs), strict=True))
    choices = choose(experiment.tune, experiment.training, outcomes)
    write_tuning(folder, experiment.tune, experiment.training, choices)
    return choices


def _made(
    question: Question,
    comparison: Comparison,
    cluster: str,
    ranks: int,
    choices: Choices,
    out: Path,
    pool: Pool,
) -> list[RunRecord]:
    experiment = comparison.experiment(cluster, ranks)
    folder = folder_of(out, question, comparison.name, cluster, ranks)
    claim(folder, experiment)
    first = next(iter(comparison.clusters))
    source = None
    if cluster != first and _has_values(experiment):
        source = folder_of(out, question, comparison.name, first, ranks)
    records = pool.make(list(_jobs(question, experiment, cluster, folder, source, choices)))
    write_summary(folder, experiment.name, records)
    return records


def _jobs(
    question: Question,
    experiment: Experiment,
    cluster: str,
    folder: Path,
    source: Path | None,
    choices: Choices,
) -> Iterator[Job]:
    for run in runs(experiment):
        settings: Mapping[str, object] = {}
        if (choice := choices.get((run.name, run.training.ranks))) is not None:
            if choice.best is None:
                continue  # every trial of this row failed
            best, settings = choice.best.run, choice.best.settings
            training = replace(best.training, cluster=experiment.training.cluster)
            run = replace(run, training=training, strategy=best.strategy)
        place = run_folder(folder, run.name, run.training.ranks, run.seed)
        known = None
        if source is not None and not _depends_on_time(run):
            known = source / place.relative_to(folder)
        what = f"question {question.number}, {cluster}: {on_ranks(run)}, seed {run.seed}"
        yield Job(run, experiment, place, what, settings, known)


def _has_values(experiment: Experiment) -> bool:
    training = experiment.training
    return training.engine == "simulation" and training.tensors == "real"


def _depends_on_time(run: Run) -> bool:
    balanced = run.measures_shares or run.balancing is not None
    return run.strategy.traits().depends_on_speed or balanced
