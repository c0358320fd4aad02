"""Where the runs of a report took place, what makes their seconds doubtful, and their batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestra.records.record import RunRecord
from orchestra.records.report import NOTABLE
from orchestra.report.numbers import count, figure_text, listed, percent, some
from orchestra.report.rows import Row
from orchestra.report.study import Study


@dataclass(frozen=True)
class Condition:
    """A `name` with its `text`; `doubtful` where the seconds of the runs are, for that reason."""

    name: str
    text: str
    doubtful: bool = False


def conditions(study: Study) -> list[Condition]:
    """The machine of real processes; of simulated runs the cluster and the cost model."""
    records = _records(study)
    clusters = dict.fromkeys(record.cluster for record in records if record.cluster)
    found = [Condition("simulated cluster", cluster) for cluster in clusters]
    found += dict.fromkeys(
        Condition("cost model", costs_text(record), bool(record.costs_doubts))
        for record in records
        if record.costs
    )
    return [*found, *_machines(study)]


def doubts(study: Study) -> Iterator[str]:
    """Sentences on why seconds are not to be trusted; none where they are."""
    records = _records(study)
    for reasons in dict.fromkeys(tuple(record.costs_doubts) for record in records):
        if reasons:
            yield (
                "The cost model is not to be trusted, nor are simulated seconds: when measured, "
                f"{'; '.join(reasons)}. Calibrate again on a quiet machine."
            )
    disturbed = [record for record in records if record.disturbed]
    if disturbed:
        most = max(record.busy_with_others or 0.0 for record in disturbed)
        names = some(list(dict.fromkeys(record.name for record in disturbed)))
        yield (
            f"The machine was busy: in {len(disturbed)} of {count('run', len(records))} ({names}) "
            f"other programs took more than {percent(NOTABLE)} of its processor time, at most "
            f"{percent(most)}. Seconds of these runs are too long, and differences between rows "
            "may be due to that. Compare again on a quiet machine."
        )


def costs_text(record: RunRecord) -> str:
    """The cost model of a simulated run in one line."""
    return f"{record.costs}{'; NOT to be trusted' * bool(record.costs_doubts)}"


def _machines(study: Study) -> Iterator[Condition]:
    for source in study.sources:
        records = [run.record for run in source.runs if run.record.engine == "processes"]
        processor, cores = (source.environment.get(key) for key in ("processor", "cores"))
        if not records or not processor:
            continue
        text = f"{processor}, {count('core', cores)}" if cores else str(processor)
        busy = [r.busy_with_others for r in records if r.busy_with_others is not None]
        if busy:
            text += f"; other programs took at most {percent(max(busy))} of its processor time"
        yield Condition("machine", text, any(record.disturbed for record in records))


def _records(study: Study) -> list[RunRecord]:
    return [run.record for row in study.rows for run in row.completed]


_WORTH = 1.1
"""How many times as long as need be a step's gradients take before shares are proposed."""


def worker_batch(batches: Sequence[int]) -> str:
    """The samples of a worker in a step: "32 a worker", "42 to 43 a worker"; "" of one alone."""
    if len(batches) < 2:
        return ""
    least, most = min(batches), max(batches)
    return f"{least} a worker" if least == most else f"{least} to {most} a worker"


def unlike_batches(rows: Sequence[Row]) -> Iterator[str]:
    """For each number of ranks on which rows have unlike global batches: which, and what follows.

    Larger batches on more ranks are what a comparison of several numbers of ranks is about.
    """
    for ranks in sorted({row.ranks for row in rows}):
        groups: dict[tuple[int, int], list[str]] = {}
        for row in rows:
            if row.ranks == ranks:
                groups.setdefault((row.global_batch, row.steps), []).append(row.name)
        if len({batch for batch, _ in groups}) > 1:
            parts = [
                f"{batch} samples in each of {count('step', steps)} ({listed(names)})"
                for (batch, steps), names in sorted(groups.items())
            ]
            yield (
                f"Not the same global batch: {'; '.join(parts)}. Differences between such rows "
                "come from the batch as well as from the strategy; equal: global_batch makes the "
                "batches equal."
            )


def unequal_shares(study: Study) -> Iterator[str]:
    """What parts by speed would bring to rows whose workers wait for one another.

    A step's gradients take as long as the slowest worker's, batch / speed; at best, the global
    batch / the sum of the speeds. Speeds are samples over seconds of computation in the runs.
    """
    gains = [(row, *gain) for row in study.ranked if (gain := _gain(row)) is not None]
    if not gains:
        return
    row, now, best = gains[0]
    others = [other.name for other, *_ in gains[1:]]
    also = f"; the same holds for {listed(others)}" if others else ""
    yield (
        f"under {row.name} all wait for the slowest worker, which computes for "
        f"{figure_text(now, 's')} in a step; with shares: measured, parts by speed, it would be "
        f"about {figure_text(best, 's')}, estimated from what the workers computed here{also}"
    )


def _gain(row: Row) -> tuple[float, float] | None:
    """Seconds of a step's gradients as they are, and at best, where that is worth the while."""
    if not row.steps_together or row.shares or not row.completed:
        return None
    workers = [rank for rank in row.completed[0].record.by_rank if rank["role"] == "worker"]
    seconds = [rank["seconds"]["compute"] for rank in workers]
    if len(workers) != len(row.worker_batches) or len(workers) < 2 or not all(seconds):
        return None
    speeds = [rank["samples"] / spent for rank, spent in zip(workers, seconds, strict=True)]
    if not all(speeds):
        return None
    now = max(batch / speed for batch, speed in zip(row.worker_batches, speeds, strict=True))
    best = row.global_batch / sum(speeds)
    return (now, best) if now > _WORTH * best else None
