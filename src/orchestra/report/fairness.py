"""What was equal for all rows of a report, what was not, and how their settings were chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestra.records.record import RunRecord
from orchestra.report.collect import Source
from orchestra.report.conditions import doubts, unlike_batches
from orchestra.report.methods import setting_text
from orchestra.report.numbers import count, listed, some
from orchestra.report.rows import Row
from orchestra.report.study import Study

_STOPWATCH = (
    "One stopwatch: it starts when every rank has started, joined the group and warmed up on a "
    "copy of the model, which is counted as set-up; checkpoints and evaluation are outside."
)
_START = (
    "One start for each seed: the same initial parameters, and the samples in one global order "
    "that the seed fixes."
)
K = TypeVar("K", int, tuple[int, int], tuple[float, ...])
Names = Callable[[Sequence[Row]], str]

_NEARLY = 0.01
"""Numbers of samples that differ by less than this part are a matter of the last steps."""


@dataclass(frozen=True)
class Fairness:
    """The two parts: `equal` with the `doubts` about it, and the `tuning` of each strategy.

    `fair` is False where runs differ in more than their strategy, ranks and seed.
    """

    fair: bool
    equal: Sequence[str]
    doubts: Sequence[str]
    tuning: Sequence[str]


def fairness(study: Study) -> Fairness:
    """What the records say of it."""
    rows = [row for row in study.ranked if row.completed]
    several = len({row.ranks for row in rows}) > 1
    names = _names_with_ranks if several else _names
    equal = [_START, *_samples(rows), *_sequences(rows, names), *_work(rows, names)]
    equal += _batches(rows, names)
    unfair = [*_settings_differ(study), *_machines_differ(study)]
    return Fairness(
        fair=not unfair,
        equal=[*equal, *_budgets(rows), *_threads(rows, names), *_nodes(rows, names), _STOPWATCH],
        doubts=[*unfair, *unlike_batches(rows), *_runs_differ(rows), *doubts(study)],
        tuning=_tuning(study),
    )


def _samples(rows: Sequence[Row]) -> Iterator[str]:
    least, most = _range_of_samples(rows)
    if most and least == most:
        yield f"The same number of samples: {most} in every run."
    elif most and most - least <= _NEARLY * most:
        yield f"Nearly the same number of samples: {least} to {most}, as the last steps fell."


def _sequences(rows: Sequence[Row], names: Names) -> Iterator[str]:
    parts = [
        f"for each of {number} ({names(group)})"
        for number, group in _grouped(rows, lambda row: row.workers)
        if number > 1 and len(group) > 1
    ]
    if parts:
        yield f"The same samples in the same order where as many workers are: {'; '.join(parts)}."


def _work(rows: Sequence[Row], names: Names) -> Iterator[str]:
    """Who computes how much, where workers need not step together."""
    rules = {
        "shared": "A worker that is free takes the next batch",
        "equal": "Each worker has an equal part of the samples, though nobody waits for it",
    }
    for kind, rule in rules.items():
        group = [row for row in rows if row.completed[0].record.work == kind]
        if group:
            yield f"{rule} ({names(group)})."


def _batches(rows: Sequence[Row], names: Names) -> Iterator[str]:
    """What was held equal; where the global batch differs, `unlike_batches` says more."""
    parts = [
        f"{batch} ({names(group)})" for batch, group in _grouped(rows, lambda row: row.global_batch)
    ]
    if len(parts) == 1:
        yield f"The same global batch: {rows[0].global_batch} samples in every row."
        if len({row.steps for row in rows}) == 1:
            yield f"The same number of steps: {rows[0].steps}."
    elif parts:
        own = {batch for row in rows if not row.single for batch in row.worker_batches}
        if len(own) == 1:
            yield f"The same batch for each worker: {own.pop()} samples."
        if not list(unlike_batches(rows)):
            yield f"The global batch, in samples: {'; '.join(parts)}."
    apart = [row for row in rows if row.synchronous is False]
    if apart:
        yield (
            f"Under {names(apart)} not every update is made of a whole global batch, which there "
            "is the workers' batches added up."
        )
    for shares, group in _grouped([row for row in rows if row.shares], lambda row: row.shares):
        weights = f"from {min(shares):g} to {max(shares):g}"
        yield f"Parts by the measured speed of the ranks, weighted {weights} ({names(group)})."


def _budgets(rows: Sequence[Row]) -> Iterator[str]:
    for ranks, group in _grouped(rows, lambda row: row.ranks):
        spending = [row for row in group if row.servers and row.workers < row.ranks]
        spent = [
            f"{number} of them servers under {_names(some)}"
            for number, some in _grouped(spending, lambda row: row.servers)
        ]
        inside = f"; {'; '.join(spent)}" if spent else ""
        yield f"A budget of {count('rank', ranks)}, dedicated servers included{inside}."
    if len({row.ranks for row in rows}) > 1:
        yield "Each row is measured against one process with the same budget and global batch."


def _threads(rows: Sequence[Row], names: Names) -> Iterator[str]:
    groups = _grouped(rows, lambda row: _range_of_threads(row.completed[0].record))
    _, others = max(groups, key=lambda item: len(item[1]), default=((), []))
    parts = [
        f"{least if least == most else f'{least} to {most}'} "
        f"({'the others' if group is others and len(group) < len(rows) else names(group)})"
        for (least, most), group in reversed(groups)
    ]
    if parts:
        yield f"Threads in a process: {'; '.join(parts)}."


def _nodes(rows: Sequence[Row], names: Names) -> Iterator[str]:
    alone = [(row.completed[0].record.node, row) for row in rows]
    parts = [f"{node} ({names([row])})" for node, row in alone if node is not None]
    if parts:
        yield f"One process on one node of the cluster: {'; '.join(parts)}."


def _range_of_threads(record: RunRecord) -> tuple[int, int]:
    """The least and the most that a rank computed with: nodes may be unlike."""
    numbers = record.threads_by_rank or [record.threads]
    return min(numbers), max(numbers)


def _settings_differ(study: Study) -> Iterator[str]:
    for key, values in study.differing.items():
        each = "; ".join(
            f"{setting_text(value)} ({source.folder.name})" for source, value in values
        )
        yield f"The runs differ in {key}: {each}."


def _machines_differ(study: Study) -> Iterator[str]:
    known = [source for source in study.sources if source.environment]
    for name, read in _MACHINE.items():
        values = {str(read(source.environment)): source for source in known}
        if len(values) > 1:
            each = "; ".join(f"{value} ({s.folder.name})" for value, s in values.items())
            yield f"Not the same {name}: {each}."


def _runs_differ(rows: Sequence[Row]) -> Iterator[str]:
    by_seeds: dict[frozenset[int], list[str]] = {}
    for row in rows:
        own = frozenset(run.record.seed for run in row.completed)
        by_seeds.setdefault(own, []).append(row.name)
    if len(by_seeds) > 1:
        parts = [f"{_numbers(own)} ({some(names)})" for own, names in by_seeds.items()]
        yield (
            f"Not every row completed the same seeds: {'; '.join(parts)}. Differences are over "
            "the seeds that both rows have."
        )
    least, most = _range_of_samples(rows)
    if most - least > _NEARLY * most:
        yield f"Not the same number of samples: from {least} to {most}."
    for what, read in (("engine", "engine"), ("split of the data to judge by", "judged_on")):
        values = sorted({str(getattr(run.record, read)) for row in rows for run in row.completed})
        if len(values) > 1:
            yield f"Not the same {what}: {listed(values)}."


def _tuning(study: Study) -> list[str]:
    texts = [_tuning_of(source) for source in study.sources if source.runs]
    if len(set(texts)) == 1:
        return texts[:1]
    named = zip((s for s in study.sources if s.runs), texts, strict=True)
    return [f"{text} ({source.folder.name})" for source, text in named]


def _tuning_of(source: Source) -> str:
    if not source.tuning:
        optimizer = source.experiment.get("optimizer", "the same optimizer")
        return (
            f"NOT tuned: every strategy ran with {optimizer}; another learning rate may suit some "
            "of them better"
        )
    tune = source.experiment.get("tune") or {}
    settings = listed(list(tune.get("settings", {}))) if tune.get("settings") else "settings"
    numbers = {len(choice["trials"]) for choice in source.tuning.get("choices", [])}
    most = "at most " if len(numbers) > 1 else ""
    return (
        f"tuned, {most}{count('trial', source.tuning['trials'])}: for each strategy and number of "
        f"ranks the best {settings} by {source.tuning.get('metric', 'loss')} on the validation "
        f"data, with seed {source.tuning.get('seed')}; the test data was looked at once, afterwards"
    )


def _range_of_samples(rows: Sequence[Row]) -> tuple[int, int]:
    samples = [run.record.samples for row in rows for run in row.completed]
    return min(samples, default=0), max(samples, default=0)


def _grouped(rows: Sequence[Row], key: Callable[[Row], K]) -> list[tuple[K, list[Row]]]:
    groups: dict[K, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return sorted(groups.items(), key=lambda item: item[0])


def _names(rows: Sequence[Row]) -> str:
    """Their names, with the ranks left out."""
    return listed([row.name.replace(f" ({count('rank', row.ranks)})", "") for row in rows])


def _names_with_ranks(rows: Sequence[Row]) -> str:
    """Their names, those on as many ranks together."""
    groups = _grouped(rows, lambda row: row.ranks)
    return ", ".join(f"{_names(group)} on {count('rank', ranks)}" for ranks, group in groups)


def _numbers(seeds: frozenset[int]) -> str:
    return ", ".join(str(seed) for seed in sorted(seeds))


_MACHINE: dict[str, Callable[[Any], object]] = {
    "processor": lambda environment: environment.get("processor"),
    "number of cores": lambda environment: environment.get("cores"),
    "system": lambda environment: environment.get("platform"),
    "Python": lambda environment: environment.get("python"),
    "torch": lambda environment: environment.get("packages", {}).get("torch"),
}
