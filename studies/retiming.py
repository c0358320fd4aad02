"""What a run would have taken on another cluster, without its gradients once more.

Where parameters do not depend on how fast ranks and links are, one run of real gradients knows them
for every cluster; a run of shapes knows the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestra.engines.run import train_run
from orchestra.errors import InputError
from orchestra.records.record import RunRecord, write_curve
from orchestra.records.report import Point
from orchestra.report.rows import RunData
from orchestra.trainer.settings import Run, target_times

FROM_RECORD = ("final_loss", "metrics", "nodes", "judged_on", "tuned", "parameters_sha256")


def retimed(run: Run, record: RunRecord, cluster: str, folder: Path) -> RunRecord:
    """The record of `run` on `cluster`, from its `record` on another; into `folder` its curve.

    The figures of parameters are those of `record`; bytes and all seconds, those of the snapshots
    and to the target among them, are simulated on `cluster` with tensors that have no values.

    Args:
        record: of the same run, completed; on any engine.

    Raises:
        InputError: the parameters depend on time, or on what a run of shapes does not have; or
            `record` is that of another run.
        RunFailed: the simulation failed.
    """
    if run.strategy.traits().depends_on_speed:
        raise InputError(
            f"{run.strategy!r}: what it learns depends on how fast ranks and links are: simulate "
            f"it on {cluster} with tensors: real"
        )
    if run.measures_shares or run.balancing is not None:
        raise InputError(
            f"shares: {run.training.shares}: what each worker reads depends on how fast ranks are: "
            f"simulate {run.strategy!r} on {cluster} with tensors: real, or give the shares as "
            "numbers"
        )
    training = replace(
        run.training,
        engine="simulation",
        cluster=cluster,
        tensors="shapes",
        snapshots=run.training.snapshots_wanted,  # which the target decides on
        target=None,
    )
    times = train_run(replace(run, training=training), folder, quiet=True)
    if _counts(times) != _counts(record) or record.status != "completed":
        raise InputError(f"{record.folder}: is the record of another run, or of none that ended")
    curve = _joined(RunData(record).curve, RunData(times).curve)
    write_curve(folder, curve)
    known = {name: getattr(record, name) for name in FROM_RECORD}
    reached: Any = target_times(curve, run.training.target)
    return replace(times, **known, **reached)


def _counts(record: RunRecord) -> tuple[object, ...]:
    """What the same run has on every cluster."""
    return record.name, record.strategy, record.ranks, record.seed, record.samples, record.steps


def _joined(figures: Sequence[Point], times: Sequence[Point]) -> list[Point]:
    """The `figures` of the snapshots, and the seconds of those that were taken at as many samples.

    Both runs take all of them.
    """
    seconds = {point.samples: point.seconds for point in times}
    return [replace(point, seconds=seconds[point.samples]) for point in figures]
