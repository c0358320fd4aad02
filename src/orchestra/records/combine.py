"""The record of a run from the reports of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any

from orchestra.records.record import (
    Asked,
    Batching,
    BytesSent,
    Durations,
    Ending,
    Learned,
    MachineUse,
    Pacing,
    RankTotals,
    RunRecord,
    Switching,
    Updates,
)
from orchestra.records.report import Point, RankReport, busy_with_others


def combine(
    reports: Sequence[RankReport], asked: Asked, pacing: Pacing, batching: Batching
) -> RunRecord:
    """Return the record of a run, as far as its ranks know it."""
    # A rank that a switch made a server has computed samples, too.
    workers = [report for report in reports if report.role == "worker" or report.samples]
    # One rank alone evaluates
    leader = next(report.leader for report in reports if report.leader is not None)
    # A run is over when its last rank is
    seconds = max(report.train_seconds for report in reports)
    samples = sum(report.samples for report in workers)
    # A part that has begun after another one, and not from a checkpoint: ranks came or were lost.
    if any(part.checkpoint is None for part in workers[0].history[1:]):
        samples = workers[0].consumed  # all know what those that were lost have read
    switches = [report for report in workers if report.switched_at_step is not None]
    return RunRecord(
        asked,
        pacing,
        batching,
        Ending(
            "stopped" if any(report.stopped for report in reports) else "completed",
            ranks_history=reports[0].history,
            regroupings=workers[0].regroupings,
        ),
        Learned(
            steps=max(report.steps for report in workers),
            samples=samples,
            loss=leader.final_loss,
            metrics=leader.metrics,
            nodes=_nodes(leader.curve[-1]) if leader.curve else None,
            parameters_sha256=leader.parameters_sha256,
        ),
        Durations(
            training=seconds,
            worker={
                # Of workers alone: a server waits whenever nobody asks it
                part: sum(report.seconds[part] for report in workers) / len(workers)
                for part in ("compute", "communicate", "wait")
            },
            samples_per_second=samples / seconds if seconds > 0 else None,
        ),
        traffic=BytesSent(
            sum(report.bytes_sent for report in reports),
            any(report.bytes_estimated for report in reports),
            max(report.peak_buffer_bytes for report in reports),
        ),
        updates=_updates(reports),
        switching=Switching(
            switches[0].switched_at_step if switches else None,
            switches[0].switched_at_sample if switches else None,
            workers[0].decisions,
        ),
        machine=_machine_use(reports),
    )


def _updates(reports: Sequence[RankReport]) -> Updates:
    stale: Counter[int] = Counter()
    for report in reports:
        stale.update({int(value): count for value, count in report.staleness.items()})
    return Updates(
        {"mean": fmean(stale, stale.values()), "max": max(stale)} if stale else None,
        {str(value): stale[value] for value in sorted(stale)},
        sum(report.dropped for report in reports),
    )


def _machine_use(reports: Sequence[RankReport]) -> MachineUse:
    of_rank = [field.name for field in fields(RankTotals)]
    busy = busy_with_others(report.usage for report in reports)
    return MachineUse(
        threads=max(report.threads for report in reports),
        by_rank=[RankTotals(*(getattr(report, name) for name in of_rank)) for report in reports],
        busy_with_others=None if busy is None else round(busy, 3),
    )


def _nodes(last: Point) -> dict[str, Any] | None:
    """Return the figures of the replicas at the last snapshot."""
    if not last.nodes:
        return None
    figures = {"mean": last.metrics, "worst": last.worst_nodes()}
    return {"replicas": last.replicas, "judged": len(last.nodes), **figures}
