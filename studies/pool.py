"""Runs of a study, some at a time, each in a folder of its own; what is finished stays."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from studies.retiming import retimed

from orchestra.engines.run import failed_record, train_run
from orchestra.errors import RunFailed
from orchestra.experiments.experiment import Experiment, alone
from orchestra.experiments.run import clear_others, make_run
from orchestra.records.record import RunRecord
from orchestra.records.store import finished
from orchestra.trainer.settings import Run


@dataclass(frozen=True)
class Job:
    """A run to be made in `folder`; with a `source`, the folder of one that is only re-timed."""

    run: Run
    experiment: Experiment
    folder: Path
    what: str
    tuned: Mapping[str, Any] = field(default_factory=dict)
    source: Path | None = None


def make(job: Job) -> RunRecord:
    """In a process of the pool: the record of a run, which is written into its folder."""
    shutil.rmtree(job.folder, ignore_errors=True)  # what was cut off begins anew
    own = alone(job.experiment, job.run)
    try:
        record = make_run(job.run, own, job.folder, lambda *_: _trained(job), tuned=job.tuned)
    except RunFailed as failure:
        return failed_record(job.run, job.folder, failure)
    if record.ending.status == "stopped":
        raise KeyboardInterrupt
    return record


def _trained(job: Job) -> RunRecord:
    if job.source is None:
        return train_run(job.run, job.folder, quiet=True)
    known = finished(job.source)
    if not known:
        raise RunFailed(f"the run in {job.source} failed, which this one has its figures from")
    first = replace(known[0], folder=job.source)
    return retimed(job.run, first, job.run.training.cluster, job.folder)


class Pool:
    """Makes runs, some at a time, and says how far they are, of `total`."""

    def __init__(self, jobs: int, total: int) -> None:
        # Where cores are wanted by others, threads that wait for each other cost ten times as much.
        os.environ["OMP_NUM_THREADS"] = "1"
        self._executor = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
        self.total = total
        self._done: set[Path] = set()
        self._made = 0
        self._began = datetime.now()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._executor.shutdown(cancel_futures=kind is not None)

    def expect(self, jobs: Sequence[Job]) -> None:
        """`jobs` that were not in the total, and are to be made."""
        self.total += sum(job.folder not in self._done for job in jobs)

    def make(self, jobs: Sequence[Job]) -> list[RunRecord]:
        """The records of `jobs`, in their order; those that are there are not made again."""
        for job in jobs:  # what is there of another run is none of it
            clear_others(job.folder, alone(job.experiment, job.run))
        records = {
            job.folder: done[0] for job in jobs if (done := finished(job.folder, failed=True))
        }
        self._done |= records.keys()
        missing = [job for job in jobs if job.folder not in records]
        futures = {self._executor.submit(make, job): job for job in missing}
        for future in as_completed(futures):
            job = futures[future]
            records[job.folder] = future.result()
            self._tell(job, records[job.folder])
        return [records[job.folder] for job in jobs]

    def _tell(self, job: Job, record: RunRecord) -> None:
        self._done.add(job.folder)
        self._made += 1
        minutes = (datetime.now() - self._began).total_seconds() / 60
        left = round(minutes / self._made * (self.total - len(self._done)))
        accuracy = record.learned.metrics.get("accuracy", float("nan"))
        outcome = (
            record.ending.status
            if record.ending.status != "completed"
            else f"accuracy {accuracy:.3f}"
        )
        line = f"{len(self._done)}/{self.total} {job.what}: {outcome}; about {left} min left"
        print(line, file=sys.stderr, flush=True)
