"""The first of a plan's candidates on real processes, or emulated nodes: predicted and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from orchestra.cluster import Cluster
from orchestra.engines.run import train_run
from orchestra.errors import InputError, RunFailed
from orchestra.planning.answer import Plan, Verified
from orchestra.planning.candidates import Candidate
from orchestra.planning.judging import reached
from orchestra.report.collect import RunData
from orchestra.trainer.settings import Engine, Run

VERIFIED = 3
"""Candidates that are carried out."""


def verify(
    plan: Plan,
    candidates: dict[str, Candidate],
    cluster: Cluster,
    snapshots: int,
    tell: Callable[[str, float], None],
) -> list[Verified]:
    """Train the first candidates of `plan` for real, one after the other.

    Nodes of a `cluster` are emulated on this machine, which may refuse that; a cluster of one node
    is taken to be this machine.
    """
    engine: Engine = "emulation" if len(cluster.nodes) > 1 else "processes"
    rows = [row for row in plan.rows if row.seconds is not None][:VERIFIED]
    found = []
    for number, row in enumerate(rows):
        tell(f"verifying {row.name}", number / len(rows))
        run = _real(candidates[row.name].run, engine, snapshots)
        measured, failure = None, None
        assert plan.target is not None
        assert row.seconds is not None
        try:
            record = train_run(run, plan.folder / "verified" / str(number + 1), quiet=True)
        except (InputError, RunFailed) as error:
            failure = str(error).splitlines()[0]
        else:
            if record.status == "stopped":
                raise KeyboardInterrupt
            at = reached(RunData(record).curve, plan.target)
            measured = None if at is None else at.seconds
        found.append(Verified(row.name, row.seconds, measured, engine, failure))
    return found


def _real(run: Run, engine: Engine, snapshots: int) -> Run:
    training = replace(run.training, engine=engine, snapshots=snapshots)
    if engine == "processes":
        training = replace(training, cluster="one_host", calibration="auto")
    return replace(run, training=training)
