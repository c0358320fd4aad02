"""Conditions and fairness of the runs in a report: the machine or cluster, what was equal for
all rows and what was not, what makes their seconds doubtful, and how their settings were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from orchestra.records.record import RunRecord
from orchestra.records.report import NOTABLE
from orchestra.records.store import RunStore
from orchestra.report.numbers import count, figure_text, listed, percent, some
from orchestra.report.rows import Row, grouped
from orchestra.report.study import Study

_STOPWATCH = (
    "One stopwatch: it starts when every rank has started, joined the group and warmed up on a "
    "copy of the model, which is counted as set-up; checkpoints and evaluation are outside."
)
_START = (
    "One start for each seed: the same initial parameters, and the samples in one global order "
    "that the seed fixes."
)
K = TypeVar("K", int, str, tuple[int, int], tuple[float, ...])
Names = Callable[[Sequence[Row]], str]

_NEARLY = 0.01  # numbers that differ by a smaller part do so because of the last steps only
_WORTH = 1.1
"""Shares are proposed if the slowest gradient takes at least this many times the best time."""


@dataclass(frozen=True)
class Condition:
    """A condition `name` with its `text`; `doubtful` if it makes seconds of the runs doubtful."""

    name: str
    text: str
    doubtful: bool = False


def conditions(study: Study) -> list[Condition]:
    """Return the machine of real processes; of simulated runs the cluster and the cost model."""
    records = study.records
    kinds = {"simulation": "simulated cluster", "emulation": "emulated cluster"}
    clusters = [
        Condition(kinds[r.asked.engine], r.asked.cluster) for r in records if r.asked.cluster
    ]
    costs = [
        Condition("cost model", costs_text(record), bool(record.machine.costs_doubts))
        for record in records
        if record.machine.costs
    ]
    machines = []
    for source in study.sources:
        # Emulated runs take this machine's time, too; a simulation's seconds do not depend on it
        real = [run.record for run in source.runs if run.record.asked.engine != "simulation"]
        if real and (text := machine_text(source)):
            if busy := [
                r.machine.busy_with_others for r in real if r.machine.busy_with_others is not None
            ]:
                text += f"; other programs took at most {percent(max(busy))} of its processor time"
            machines.append(
                Condition("machine", text, any(record.machine.disturbed for record in real))
            )
    return [*dict.fromkeys([*clusters, *costs]), *machines]


def costs_text(record: RunRecord) -> str:
    """Return the cost model of a simulated run in one line."""
    return f"{record.machine.costs}{'; NOT to be trusted' * bool(record.machine.costs_doubts)}"


def machine_text(source: RunStore) -> str:
    """Return the processor of a source, its cores and its hosts; empty if unknown."""
    processor, cores = (source.environment.get(key) for key in ("processor", "cores"))
    text = f"{processor}, {count('core', cores)}" if processor and cores else str(processor or "")
    if (hosts := source.environment.get("hosts")) is None:
        return text
    return f"hosts {hosts}" + f"; the first: {text}" * bool(text)


def doubts(study: Study) -> Iterator[str]:
    """Yield the reasons not to trust seconds; none if there is no reason."""
    records = study.records
    for reasons in filter(
        None, dict.fromkeys(tuple(record.machine.costs_doubts) for record in records)
    ):
        yield (
            "The cost model is not to be trusted, nor are simulated seconds: when measured, "
            f"{'; '.join(reasons)}. Calibrate again on a quiet machine."
        )
    disturbed = [record for record in records if record.machine.disturbed]
    if disturbed:
        most = max(record.machine.busy_with_others or 0.0 for record in disturbed)
        names = some(list(dict.fromkeys(record.asked.name for record in disturbed)))
        yield (
            f"The machine was busy: in {len(disturbed)} of {count('run', len(records))} ({names}) "
            f"other programs took more than {percent(NOTABLE)} of its processor time, at most "
            f"{percent(most)}. Seconds of these runs are too long, and differences between rows "
            "may be due to that. Compare again on a quiet machine."
        )


# What was equal


@dataclass(frozen=True)
class Fairness:
    """The two parts: `equal` with the `doubts` about it, and the `tuning` of each strategy."""

    fair: bool  # False where runs differ in more than their strategy, ranks and seed
    equal: Sequence[str]
    doubts: Sequence[str]
    tuning: Sequence[str]


def fairness(study: Study) -> Fairness:
    """Return what the records say about the fairness of the comparison."""
    rows = study.completed
    several = len({row.ranks for row in rows}) > 1

    def names(rows: Sequence[Row]) -> str:  # those on as many ranks together
        groups = _grouped(rows, lambda row: row.ranks)
        on = (f"{_names(group)} on {count('rank', ranks)}" for ranks, group in groups)
        return ", ".join(on) if several else _names(rows)

    unfair = list(_unfair(study))
    return Fairness(
        fair=not unfair,
        equal=[_START, *_work(rows, names), *_batches(rows, names), *_budgets(rows, names),
               _STOPWATCH],
        doubts=[*unfair, *_unlike_batches(rows), *_runs_differ(rows), *doubts(study)],
        tuning=_tuning(study),
    )  # fmt: skip


def _work(rows: Sequence[Row], names: Names) -> Iterator[str]:
    """Yield how samples are assigned to workers, and how many each run used."""
    least, most = _range_of_samples(rows)
    if most and least == most:
        yield f"The same number of samples: {most} in every run."
    elif most and most - least <= _NEARLY * most:
        yield f"Nearly the same number of samples: {least} to {most}, as the last steps fell."
    parts = [
        f"for each of {number} ({names(group)})"
        for number, group in _grouped(rows, lambda row: row.record.asked.workers)
        if number > 1 and len(group) > 1
    ]
    if parts:
        yield f"The same samples in the same order where as many workers are: {'; '.join(parts)}."
    rules = {
        "shared": "A worker that is free takes the next batch",
        "equal": "Each worker has an equal part of the samples, though nobody waits for it",
    }
    for kind, rule in rules.items():
        if group := [row for row in rows if row.record.pacing.work == kind]:
            yield f"{rule} ({names(group)})."


def _batches(rows: Sequence[Row], names: Names) -> Iterator[str]:
    """Yield what was equal in the batches; see `_unlike_batches` where the global batch differs."""
    groups = _grouped(rows, lambda row: row.global_batch)
    if len(groups) == 1:
        yield f"The same global batch: {groups[0][0]} samples in every row."
        if len({row.record.learned.steps for row in rows}) == 1:
            yield f"The same number of steps: {rows[0].record.learned.steps}."
    elif groups:
        own = {
            batch for row in rows if not row.single for batch in row.record.batching.worker_batches
        }
        if len(own) == 1:
            yield f"The same batch for each worker: {own.pop()} samples."
        if not list(_unlike_batches(rows)):
            parts = (f"{batch} ({names(group)})" for batch, group in groups)
            yield f"The global batch, in samples: {'; '.join(parts)}."
    if apart := [row for row in rows if row.record.pacing.synchronous is False]:
        yield (
            f"Under {names(apart)} not every update is made of a whole global batch, which there "
            "is the workers' batches added up."
        )
    weighted = [row for row in rows if row.record.batching.shares]
    for shares, group in _grouped(weighted, lambda row: tuple(row.record.batching.shares)):
        weights = f"from {min(shares):g} to {max(shares):g}"
        yield f"Parts by the measured speed of the ranks, weighted {weights} ({names(group)})."


def _budgets(rows: Sequence[Row], names: Names) -> Iterator[str]:
    """Yield the resources of the processes: their number, threads and nodes."""
    budgets = _grouped(rows, lambda row: row.ranks)
    for ranks, members in budgets:
        spending = [
            r for r in members if r.record.asked.servers and r.record.asked.workers < r.ranks
        ]
        # Dedicated servers are paid for from the budget, as the workers are
        inside = "".join(
            f"; {number} of them servers under {_names(group)}"
            for number, group in _grouped(spending, lambda row: row.record.asked.servers)
        )
        yield f"A budget of {count('rank', ranks)}, dedicated servers included{inside}."
    if len(budgets) > 1:
        yield "Each row is measured against one process with the same budget and global batch."
    by_rank = {row.name: row.record.threads_by_rank or [row.record.machine.threads] for row in rows}
    by_threads = _grouped(rows, lambda row: (min(by_rank[row.name]), max(by_rank[row.name])))
    most_rows = max((group for _, group in by_threads), key=len, default=[])
    parts = []
    for own, group in reversed(by_threads):
        # The largest group is "the others": a list of nearly all names would hide the exceptions
        others = group is most_rows and len(by_threads) > 1
        parts.append(f"{_from_to(*own)} ({'the others' if others else names(group)})")
    if parts:
        yield f"Threads in a process: {'; '.join(parts)}."
    nodes = [
        f"{node} ({names([row])})" for row in rows if (node := row.record.machine.node) is not None
    ]
    if nodes:
        yield f"One process on one node of the cluster: {'; '.join(nodes)}."


def _range_of_samples(rows: Sequence[Row]) -> tuple[int, int]:
    samples = [run.record.learned.samples for row in rows for run in row.completed]
    return min(samples, default=0), max(samples, default=0)


# What was not


def _unfair(study: Study) -> Iterator[str]:
    """Yield the differences between the runs other than strategy, ranks and seed."""
    for key, values in study.differing.items():
        each = [f"{setting_text(value)} ({source.folder.name})" for source, value in values]
        yield f"The runs differ in {key}: {'; '.join(each)}."
    names = {"processor": "processor", "cores": "number of cores", "platform": "system",
             "python": "Python", "torch": "torch"}  # fmt: skip
    for key, name in names.items():
        found = {
            str({**known.get("packages", {}), **known}.get(key)): source.folder.name
            for source in study.sources
            if (known := source.environment)
        }
        if len(found) > 1:
            each = [f"{value} ({folder})" for value, folder in found.items()]
            yield f"Not the same {name}: {'; '.join(each)}."


def setting_text(value: object) -> str:
    """Return a setting in words."""
    if isinstance(value, dict):
        known = {key: item for key, item in value.items() if item is not None}
        return ", ".join(f"{key} {setting_text(item)}" for key, item in known.items())
    if isinstance(value, list):
        return ", ".join(map(setting_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def worker_batch(batches: Sequence[int]) -> str:
    """Return a worker's samples in a step: "32 a worker", "42 to 43 a worker"; empty for one."""
    return f"{_from_to(min(batches), max(batches))} a worker" if len(batches) > 1 else ""


def _from_to(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _unlike_batches(rows: Sequence[Row]) -> Iterator[str]:
    """Yield, for each number of ranks on which the global batches of rows differ, those batches.

    Larger batches on more ranks are what a comparison of several numbers of ranks is about.
    """
    for _, group in _grouped(rows, lambda row: row.ranks):
        alike = _grouped(group, lambda row: (row.global_batch, row.record.learned.steps))
        if len({batch for (batch, _), _ in alike}) > 1:
            parts = [
                f"{batch} samples in each of {count('step', steps)} "
                f"({listed([row.name for row in members])})"
                for (batch, steps), members in alike
            ]
            yield (
                f"Not the same global batch: {'; '.join(parts)}. Differences between such rows "
                "come from the batch as well as from the strategy; equal: global_batch makes the "
                "batches equal."
            )


def _runs_differ(rows: Sequence[Row]) -> Iterator[str]:
    by_seeds = grouped(
        rows, lambda row: tuple(sorted(run.record.asked.seed for run in row.completed))
    )
    # Rows whose seeds differ are compared over fewer pairs than their means suggest
    if len(by_seeds) > 1:
        parts = [
            f"{', '.join(map(str, own))} ({some([row.name for row in members])})"
            for own, members in by_seeds.items()
        ]
        yield (
            f"Not every row completed the same seeds: {'; '.join(parts)}. Differences are over "
            "the seeds that both rows have."
        )
    least, most = _range_of_samples(rows)
    if most - least > _NEARLY * most:
        yield f"Not the same number of samples: from {least} to {most}."
    asked = [run.record.asked for row in rows for run in row.completed]
    for what, found in (
        ("engine", {each.engine for each in asked}),
        ("split of the data to judge by", {each.judged_on for each in asked}),
    ):
        values = sorted(found)
        if len(values) > 1:
            yield f"Not the same {what}: {listed(values)}."


def unequal_shares(study: Study) -> Iterator[str]:
    """Yield how much rows whose workers wait for one another would gain from parts by speed.

    A step's gradients take as long as the slowest worker's, batch / speed; at best, the global
    batch / the sum of the speeds. Speeds are samples over seconds of computation in the runs.
    """
    gains = [(row.name, *gain) for row in study.completed if (gain := _gain(row)) is not None]
    for name, now, best in gains[:1]:
        others = [other for other, *_ in gains[1:]]
        also = f"; the same holds for {listed(others)}" if others else ""
        yield (
            f"under {name} all wait for the slowest worker, which computes for "
            f"{figure_text(now, 's')} in a step; with parts by speed (shares: measured, or LBBSP) "
            f"it would be about {figure_text(best, 's')}, estimated from what the workers computed "
            f"here{also}"
        )


def _gain(row: Row) -> tuple[float, float] | None:
    """Return the seconds of a step's gradients, now and at best; None if the gain is too small."""
    batches = row.record.batching.worker_batches
    # Nobody waits for the slowest, or the parts follow the speeds already
    if (
        not row.record.pacing.steps_together
        or row.record.batching.shares
        or row.record.batching.changes
    ):
        return None
    workers = [rank for rank in row.record.machine.by_rank if rank.role == "worker"]
    seconds = [rank.seconds["compute"] for rank in workers]
    if len(workers) != len(batches) or len(workers) < 2 or not all(seconds):
        return None
    # As measured in this run; the ranks' sharing of cores is in it
    speeds = [rank.samples / spent for rank, spent in zip(workers, seconds, strict=True)]
    if not all(speeds):
        return None
    now = max(batch / speed for batch, speed in zip(batches, speeds, strict=True))
    best = row.global_batch / sum(speeds)
    return (now, best) if now > _WORTH * best else None


def _tuning(study: Study) -> list[str]:
    texts = {source.folder: _tuning_of(source) for source in study.sources if source.runs}
    if len({*texts.values()}) == 1:
        return list(texts.values())[:1]
    return [f"{text} ({folder.name})" for folder, text in texts.items()]


def _tuning_of(source: RunStore) -> str:
    if not source.tuning:
        optimizer = source.experiment.get("optimizer", "the same optimizer")
        return (
            f"NOT tuned: every strategy ran with {optimizer}; another learning rate may suit some "
            "of them better"
        )
    tune = source.experiment.get("tune") or {}
    settings = listed(list(tune.get("settings") or ["settings"]))
    numbers = {len(choice["trials"]) for choice in source.tuning.get("choices", [])}
    most = "at most " if len(numbers) > 1 else ""
    return (
        f"tuned, {most}{count('trial', source.tuning['trials'])}: for each strategy and number of "
        f"ranks the best {settings} by {source.tuning.get('metric', 'loss')} on the validation "
        f"data, with seed {source.tuning.get('seed')}; the test data was looked at once, afterwards"
    )


def _grouped(rows: Sequence[Row], key: Callable[[Row], K]) -> list[tuple[K, list[Row]]]:
    return sorted(grouped(rows, key).items(), key=lambda item: item[0])


def _names(rows: Sequence[Row]) -> str:
    """Return the rows' names without their ranks."""
    return listed([row.name.replace(f" ({count('rank', row.ranks)})", "") for row in rows])
