"""All runs of an experiment in one folder; a comparison that was stopped goes on there.

What is done stands in the folders of the runs, a `summary.json` in each; that of the comparison is
put together from them after every run. So it can be killed at any moment: the same comparison on
the same folder finds the runs that are done, and goes on with the first that is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from orchestra.engines.events import Event, Interrupted, Notice, Terminated
from orchestra.engines.live import Progress
from orchestra.engines.processes import training
from orchestra.engines.run import beside_single, failed_record, train_run
from orchestra.errors import InputError, RunFailed, nearest
from orchestra.experiments.experiment import (
    Choice,
    Experiment,
    Tune,
    TuningTrial,
    alone,
    choose,
    not_run,
    on_ranks,
    runs,
    trials,
    with_one_process,
    write_tuning,
)
from orchestra.experiments.run import (
    claim,
    clear_others,
    folder_for,
    held,
    idle_nodes,
    make_run,
    write_failure,
)
from orchestra.experiments.techniques import (
    Judged,
    break_even,
    on_most_ranks,
    read_techniques,
    techniques,
    write_techniques,
)
from orchestra.records.files import run_folder
from orchestra.records.record import RunRecord
from orchestra.records.store import finished, write_summary
from orchestra.report.numbers import count
from orchestra.trainer.settings import Run

SEARCH_SECONDS = 30.0


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison.

    Attributes:
        records: of the runs, completed and failed, in the order in which they are made.
        folder: where everything lies.
        report: the page to open in a browser; None if no page was written.
        planned: how many runs there are to be.
        not_run: name, ranks and reason of what cannot be run.
        stopped: whether Ctrl-C ended it before its time.
    """

    records: list[RunRecord]
    folder: Path
    report: Path | None
    planned: int
    not_run: Sequence[Mapping[str, Any]]
    stopped: bool

    @property
    def well(self) -> bool:
        """True if every run was completed."""
        return not self.stopped and all(
            record.ending.status == "completed" for record in self.records
        )


def carry_out(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    retry: bool = False,
    report: bool = True,
    baseline: str | None = None,
    search_seconds: float = SEARCH_SECONDS,
    quiet: bool = False,
) -> Comparison:
    """Make the runs of `experiment` that are still missing in the folder `out`, and the report.

    Args:
        out: the folder of the comparison; a new one in `runs` by default.
        retry: make the failed runs again, too.
        report: write report.html.
        baseline: the label that the report's differences refer to; the report's choice if None.
        search_seconds: to search, for each technique of a simulated comparison, for the
            bandwidth at which it begins to pay; 0: no search.
        quiet: no progress, no notices.

    Raises:
        InputError: nothing can be run; the folder is a different experiment's, or in use.
    """
    experiment = with_one_process(experiment)
    if baseline is not None and baseline not in experiment.strategies:
        hint = nearest(baseline, experiment.strategies)
        raise InputError(f"baseline: there is no strategy {baseline!r}; {hint}")
    planned = _Planned.of(experiment)
    folder = folder_for(out, experiment.name)
    with held(folder, experiment, planned=planned.names(folder)):
        execution = _Execution(experiment, planned, folder, retry, search_seconds, quiet)
        stopped = execution.run()
    records, page = execution.rows(), None
    if report and records:
        from orchestra.report.page import write_report

        page = write_report([folder], out=folder, baseline=baseline)
    return Comparison(records, folder, page, len(execution.runs), execution.not_run, stopped)


@dataclass(frozen=True)
class _Planned:
    """The trials and runs of an experiment on this machine, and the rows that cannot be there."""

    trials: Sequence[TuningTrial]
    runs: Sequence[Run]
    not_run: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, experiment: Experiment) -> Self:
        lacking = [(run, training.lacking(run)) for run in runs(experiment)]
        others = [
            {"name": run.name, "ranks": run.training.ranks, "reason": reason}
            for run, reason in lacking
            if reason is not None and run.seed == experiment.seeds[0]
        ]
        made = [trial for trial in trials(experiment) if training.lacking(trial.run) is None]
        there = [run for run, reason in lacking if reason is None]
        return cls(made, there, [*not_run(experiment), *others])

    def names(self, comparison: Path) -> dict[Path, str]:
        """Return the folder of each trial and run in that of the `comparison`, with its name."""
        named = {trial.folder(comparison): f"tuning: {trial}" for trial in self.trials}
        return named | {_place(comparison, run): _what(run) for run in self.runs}


class _Execution:
    """Makes the runs that are missing, until the end or Ctrl-C.

    A run that fails is a record, too: the others go on.
    """

    def __init__(
        self,
        experiment: Experiment,
        planned: _Planned,
        folder: Path,
        retry: bool,
        search_seconds: float,
        quiet: bool,
    ) -> None:
        self.runs, self.not_run, self._trials = planned.runs, planned.not_run, planned.trials
        self._experiment, self._folder, self._retry = experiment, folder, retry
        self._choices: Mapping[tuple[str, int], Choice] = {}
        self._pairs = techniques(experiment.strategies)
        simulates = experiment.training.engine == "simulation"
        self._seconds = search_seconds if simulates else 0.0
        searches = len(self._pairs) if self._seconds else 0
        self._progress = Progress(len(self._trials) + len(self.runs) + searches, quiet=quiet)
        self._bad_input: list[InputError] = []
        self._made = 0
        places = map(self._place, self.runs)
        self._records = {p: record for p in places for record in finished(p, failed=True)}

    def run(self) -> bool:
        """Make all runs that are missing; return whether Ctrl-C ended it early."""
        with self._progress:
            for row in self.not_run:
                what = f"{row['name']}, {count('rank', row['ranks'])}"
                self._progress.tell(f"{what}: left out: {row['reason']}")
            for line in idle_nodes(self.runs):
                self._progress.tell(line)
            try:
                if self._experiment.tune is not None:
                    self._choices = self._tuned(self._experiment.tune)
                self._compare()
                self._judge()
            except KeyboardInterrupt:
                return True
        return False

    def rows(self) -> list[RunRecord]:
        """Return the records of the runs that are done, in the order of the runs."""
        places = map(self._place, self.runs)
        records = [self._records[place] for place in places if place in self._records]
        single = {
            (r.asked.ranks, r.asked.seed): r for r in records if r.pacing.distributed is False
        }
        return [beside_single(r, single.get((r.asked.ranks, r.asked.seed))) for r in records]

    def _tuned(self, tune: Tune) -> Mapping[tuple[str, int], Choice]:
        """Make all trials, and choose; rows with a completed run keep their choice."""
        made = all(finished(trial.folder(self._folder), failed=True) for trial in self._trials)
        if not made and not training.has_validation(self._experiment.task):
            lacks = f"{self._experiment.task} has no validation data to choose by"
            raise InputError(f"tune: {lacks}; leave tune out, or give the task some")
        # A retried trial could change the choice, and runs of one row would have unlike settings.
        settled = {
            (r.asked.name, r.asked.ranks) for r in self.rows() if r.ending.status == "completed"
        }
        outcomes = []
        # Trial by trial over all rows: a machine that grows slower does so for everybody.
        for _, block in groupby(self._trials, lambda trial: trial.number):
            for trial in block:
                retry = self._retry and trial.row not in settled
                folder = trial.folder(self._folder)
                outcomes.append((trial, self._make(trial.run, folder, str(trial), retry)))
            self._require_good_input()
        choices = choose(tune, self._experiment.training, outcomes)
        write_tuning(self._folder, tune, self._experiment.training, choices)
        return choices

    def _compare(self) -> None:
        def write() -> None:
            write_summary(self._folder, self._experiment.name, self.rows(), self.not_run)

        write()
        # After a whole block, so that one strategy with bad settings does not end the comparison.
        for _, block in groupby(self.runs, key=lambda run: run.seed):
            for run in block:
                self._records[self._place(run)] = self._one(run)
                write()
            self._require_good_input()

    def _judge(self) -> None:
        """Write down which rows differ in one setting, and at which bandwidth that pays."""
        records = self.rows()
        known = {(j.technique, j.ranks): j.break_even for j in read_techniques(self._folder)}
        judged: list[Judged] = []
        for pair, technique, plain in on_most_ranks(self._pairs, self.runs, records):
            ranks = technique.training.ranks
            found = known.get((pair, ranks))
            # A search that found nothing may find something with more time.
            if self._seconds and (found is None or found.pays is None):
                self._progress.begin(f"where {pair.name} pays")
                found = break_even(technique, plain, records, self._seconds, self._on_event)
                self._progress.finish(str(found))
            elif self._seconds:
                self._progress.skip()
            judged.append(Judged(pair, ranks, found, "" if found is None else str(found)))
            write_techniques(self._folder, judged)

    def _on_event(self, event: Event | Notice) -> None:
        if isinstance(event, Interrupted | Terminated):
            self._progress.interrupted = True

    def _one(self, run: Run) -> RunRecord:
        """Make a run with the settings that were chosen for it, or give it up without any."""
        what = _what(run)
        place, chosen = self._place(run), None
        if (choice := self._choices.get((run.name, run.training.ranks))) is not None:
            if choice.best is None:
                self._made += 1
                self._progress.begin(what)
                return self._finished(failed_record(run, place, RunFailed(choice.reason)), run)
            # The trial has another seed and is judged on validation data: its settings are taken.
            best, chosen = choice.best.run, choice.best.settings
            run = replace(run, training=best.training, strategy=best.strategy)
        return self._make(run, place, what, self._retry, chosen)

    def _place(self, run: Run) -> Path:
        return _place(self._folder, run)

    def _make(
        self,
        run: Run,
        folder: Path,
        what: str,
        retry: bool,
        chosen: Mapping[str, Any] | None = None,
    ) -> RunRecord:
        """Make `run` in `folder` unless it was completed, or failed, before; return its record.

        Args:
            what: names the run for the user.
            retry: make it again if it failed.
            chosen: the settings that trials have chosen for it.

        Raises:
            KeyboardInterrupt: Ctrl-C; what the run needs to go on is in `folder`.
        """
        self._made += 1
        if done := finished(folder, failed=not retry):
            self._progress.skip()
            return done[0]
        # Ctrl-C during the evaluation of a run comes too late to stop that run, but has to stop the
        # comparison.
        if self._progress.interrupted:
            raise KeyboardInterrupt
        own = alone(self._experiment, run)
        clear_others(folder, own)
        self._progress.begin(what)
        try:
            record = make_run(run, own, folder, self._train, tuned=chosen)
        except (RunFailed, InputError) as failure:
            if isinstance(failure, InputError):
                self._bad_input.append(failure)
            # `held` has removed the folder of a run that was refused before it began.
            claim(folder, own)
            record = write_failure(run, folder, own.name, failure)
        if record.ending.status == "stopped":
            raise KeyboardInterrupt
        return self._finished(record, run)

    def _train(self, run: Run, folder: Path) -> RunRecord:
        try:
            return train_run(run, folder, progress=self._progress)
        except (RunFailed, InputError):
            if self._progress.interrupted:  # the failure is the user's second Ctrl-C
                raise KeyboardInterrupt from None
            raise

    def _finished(self, record: RunRecord, run: Run) -> RunRecord:
        """Tell the user the outcome of a run in a few words, and return its record."""
        target = run.training.target
        name = target.metric if target is not None else next(iter(record.learned.metrics), "loss")
        value = record.learned.metrics.get(name, record.learned.loss if name == "loss" else None)
        figure = "" if value is None else f"{name} {value:.4g}, "
        text = f"{figure}{record.time.training or 0.0:.1f} s"
        if record.ending.failure is not None:
            text = f"failed: {record.ending.failure.splitlines()[0]}"
        self._progress.finish(text, failed=record.ending.status == "failed")
        return record

    def _require_good_input(self) -> None:
        """Raise the first error if every run so far was refused as bad input."""
        if self._bad_input and len(self._bad_input) == self._made:
            raise self._bad_input[0]


def _place(comparison: Path, run: Run) -> Path:
    return run_folder(comparison, run.name, run.training.ranks, run.seed)


def _what(run: Run) -> str:
    return f"{on_ranks(run)}, seed {run.seed}"
