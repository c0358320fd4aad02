"""What a rank has to say at the end of its program."""

from __future__ import annotations

from collections.abc import Mapping

from orchestra.records.report import RankReport
from orchestra.strategies.base import Roles
from orchestra.trainer.recorder import Totals, histogram
from orchestra.worker.worker import Worker


def rank_report(
    worker: Worker,
    roles: Roles,
    totals: Totals,
    *,
    steps: int,
    setup: Mapping[str, float],
    stopped: bool,
    threads: int,
) -> RankReport:
    """The part of `worker`, which has the last of its `roles` and took so many steps."""
    spent, measures = totals.spent, worker.measures
    return RankReport(
        rank=worker.rank,
        role="worker" if worker.rank in roles.workers else "server",
        steps=steps,
        samples=totals.samples,
        setup=dict(setup),
        train_seconds=totals.elapsed,
        seconds={
            "compute": spent.compute,
            "communicate": spent.communicate,
            "wait": spent.wait,
        },
        bytes_sent=spent.bytes_sent,
        bytes_estimated=measures.native_bytes > 0,
        staleness=histogram(measures.staleness),
        dropped=measures.dropped,
        peak_buffer_bytes=measures.peak_buffer_bytes,
        switched_at_step=measures.switched_at_step,
        switched_at_sample=measures.switched_at_sample,
        stopped=stopped,
        threads=threads,
    )
