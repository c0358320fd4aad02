"""What a run would have taken on another cluster, without its gradients once more.

Where parameters do not depend on how fast ranks and links are, one run of real gradients knows them
for every cluster; a run of shapes knows the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestra.engines.run import train_run
from orchestra.errors import InputError
from orchestra.records.record import RunRecord
from orchestra.records.report import Point
from orchestra.records.store import RunFolder, write_curve
from orchestra.trainer.settings import Run, target_times


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
    if _counts(times) != _counts(record) or record.ending.status != "completed":
        raise InputError(f"{record.folder}: is the record of another run, or of none that ended")
    curve = _joined(RunFolder(record.folder).curve, RunFolder(times.folder).curve)
    write_curve(folder, curve)
    judged_on, chosen = record.asked.judged_on, record.asked.tuned
    return replace(
        times,
        asked=replace(times.asked, judged_on=judged_on, tuned=chosen),
        learned=record.learned,  # the steps and samples are those of both
        to_target=target_times(curve, run.training.target),
    )


def _counts(record: RunRecord) -> tuple[object, ...]:
    """What the same run has on every cluster."""
    return (
        record.asked.name,
        record.asked.strategy,
        record.asked.ranks,
        record.asked.seed,
        record.learned.samples,
        record.learned.steps,
    )


def _joined(figures: Sequence[Point], times: Sequence[Point]) -> list[Point]:
    """The `figures` of the snapshots, and the seconds of those that were taken at as many samples.

    Both runs take all of them.
    """
    seconds = {point.samples: point.seconds for point in times}
    return [replace(point, seconds=seconds[point.samples]) for point in figures]
