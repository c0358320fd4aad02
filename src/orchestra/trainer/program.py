"""The program of every rank: take part in a run, and report. Ignorant of the engine."""

from __future__ import annotations

from pathlib import Path

from orchestra.errors import GroupChanged, PeerLost
from orchestra.records.report import RankReport
from orchestra.strategies.base import Strategy
from orchestra.trainer import checkpoints
from orchestra.trainer.groups import ElasticSession
from orchestra.trainer.recorder import write_order
from orchestra.trainer.settings import Run
from orchestra.worker.runtime import RankActivity, Runtime


def train(
    runtime: Runtime, assignment: tuple[Run, Path], *, entering: RankActivity | None = None
) -> RankReport:
    """Take this rank's part in a run, write its records into the run's folder, and report. In a run
    of shapes no value is computed, and nothing is written.

    `entering`: enter a run that is under way. As this activity, `JOINING` or `SPARE`, the rank
    waits to be taken in; until then the runtime is of it alone.
    """
    run, folder = assignment
    assert isinstance(run.strategy, Strategy)
    runtime.reporter.activity(RankActivity.SET_UP)
    with checkpoints.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    session = ElasticSession(runtime, run, run.strategy, folder, enters=entering is not None)
    report: RankReport | None = None
    try:
        if entering is None:
            session.begin()
        else:
            session = session.enter(entering)
        while report is None:
            try:
                session.train()
                report = session.finish()
            except (PeerLost, GroupChanged) as error:
                session = session.in_next_group(error)
    except Exception:
        session.flush_records()
        raise
    finally:
        if session.training.record_order:
            write_order(folder, runtime.slot, session.order)
    # Not where this rank fails: others may still write, and would fail by what is removed. The next
    # attempt removes what is left.
    session.close()
    return report
