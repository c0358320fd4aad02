"""One run after the other, each in a folder of its own, unless that tells of it already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestra.engines.processes.display import Progress
from orchestra.engines.run import train_run
from orchestra.engines.run_record import failed_record
from orchestra.errors import InputError, RunFailed
from orchestra.experiments.experiment import Experiment, alone
from orchestra.experiments.folder import SUMMARY, finished, reclaim
from orchestra.records.record import RunRecord, write_summary
from orchestra.trainer.settings import Run, Target


class Runner:
    """Makes the runs of `experiment`. A run that fails is a record, too: the others go on."""

    def __init__(self, experiment: Experiment, progress: Progress) -> None:
        self._experiment = experiment
        self._progress = progress
        self._bad_input: list[InputError] = []
        self._made = 0

    def make(
        self,
        run: Run,
        folder: Path,
        what: str,
        *,
        retry: bool = False,
        tuned: Mapping[str, Any] | None = None,
    ) -> RunRecord:
        """The record of `run` in `folder`; it is made unless it was completed, or failed, before.

        Args:
            what: names the run for the user.
            retry: make it again if it failed.
            tuned: the settings that were chosen for it.

        Raises:
            KeyboardInterrupt: Ctrl-C; what the run needs to go on is in `folder`.
        """
        self._made += 1
        done = finished(folder, failed=not retry)
        if done:
            self._progress.skip()
            return done[0]
        if self._progress.interrupted:  # too late for the run before
            raise KeyboardInterrupt
        own = alone(self._experiment, run)
        reclaim(folder, own)
        (folder / SUMMARY).unlink(missing_ok=True)  # cut off now, it is no failed run any more
        self._progress.begin(what)
        record = replace(self._train(run, folder), tuned=tuned or {})
        write_summary(folder, own.name, [record])
        if record.status == "stopped":
            raise KeyboardInterrupt
        self._progress.finish(
            outcome(record, run.training.target), failed=record.status == "failed"
        )
        return record

    def give_up(self, run: Run, folder: Path, what: str, failure: RunFailed) -> RunRecord:
        """The record of a run that need not be begun."""
        self._made += 1
        self._progress.begin(what)
        record = failed_record(run, folder, failure)
        self._progress.finish(outcome(record, run.training.target), failed=True)
        return record

    def require_good_input(self) -> None:
        """Raise the first error if every run so far was refused as bad input."""
        if self._bad_input and len(self._bad_input) == self._made:
            raise self._bad_input[0]

    def _train(self, run: Run, folder: Path) -> RunRecord:
        try:
            return train_run(run, folder, progress=self._progress)
        except (RunFailed, InputError) as failure:
            if self._progress.interrupted:
                raise KeyboardInterrupt from None
            if isinstance(failure, InputError):
                self._bad_input.append(failure)
            return failed_record(run, folder, failure)


def outcome(record: RunRecord, target: Target | None) -> str:
    """What has become of a run, in a few words."""
    if record.failure is not None:
        return f"failed: {record.failure.splitlines()[0]}"
    name, value = headline(record, target)
    figure = "" if value is None else f"{name} {value:.4g}, "
    return f"{figure}{record.train_seconds or 0.0:.1f} s"


def headline(record: RunRecord, target: Target | None) -> tuple[str, float | None]:
    """The figure by which a run is judged: the target's metric, else the first, else the loss."""
    name = target.metric if target is not None else next(iter(record.metrics), "loss")
    return name, record.metrics.get(name, record.final_loss if name == "loss" else None)
