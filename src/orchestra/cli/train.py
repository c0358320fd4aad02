"""`orchestra train` and `orchestra replay`: one task under one strategy, and the same again."""

from __future__ import annotations

import json
import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from rich.table import Table

from orchestra.engines.processes.environment import (
    LAUNCHER_VARIABLE,
    LOST_STATUS,
    RESTARTS_VARIABLE,
    Launched,
    detect,
)
from orchestra.engines.processes.system import StopWish, handling
from orchestra.engines.processes.training import take_part
from orchestra.errors import InputError, RankLost, RunEnded, RunFailed, tell
from orchestra.experiments.experiment import Experiment, only_run
from orchestra.experiments.file import load, refuse_task
from orchestra.experiments.run import folder_for, idle_nodes, make_run, write_failure
from orchestra.records.record import Restart, RunRecord
from orchestra.records.report import changes_in
from orchestra.records.terminal import Terminal
from orchestra.report.fairness import costs_text
from orchestra.report.numbers import count, fixed, places_of
from orchestra.settings import read
from orchestra.settings.base import from_plain
from orchestra.settings.notation import bound
from orchestra.settings.reading import Entry
from orchestra.tasks import TASKS
from orchestra.trainer.settings import Run

RUN_SETTINGS = ("engine", "cluster", "record_order")
"""The options of `Parser.add_run_options` that are keys of an experiment."""
MOST_STATUS = 255


def entries(options: Namespace, *keys: str) -> dict[str, Entry]:
    """Return the options that are `keys` of an experiment and were given, in place of a file's."""
    given = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    return {key: Entry(value, f"--{key.replace('_', '-')}") for key, value in given.items()}


def main(options: Namespace) -> int:
    if not 0 <= options.stopped_status <= MOST_STATUS:
        raise InputError(f"--stopped-status: {options.stopped_status} is not 0 to {MOST_STATUS}")
    if options.hosts is not None:
        from orchestra.cli import hosts

        return hosts.train(options)
    if options.remote_python is not None:
        raise InputError("--remote-python: names the Python of --hosts; leave it out")
    launched = detect(os.environ)
    # Whoever has started the ranks sends it to end the run, and an agent of torchrun also once one
    # rank has ended, while the record is still to be written.
    wish = StopWish()
    with handling({} if launched is None else {signal.SIGTERM: wish}):
        return _run(options, launched, wish)


def _run(options: Namespace, launched: Launched | None, wish: StopWish) -> int:
    experiment = resolve(options, launched)
    run = only_run(experiment, str(options.experiment or "command line"))
    check_task(run.task)
    if launched is not None and launched.rank > 0:
        return _follow(run, options, launched, experiment.name, wish)
    folder = folder_for(options.out, f"{experiment.name}-{run.name}")

    def tell_resumed(completed: RunRecord | None) -> None:
        if completed is None:
            print(f"{folder}: going on with this run", flush=True)  # before those of ranks
            return
        asked = completed.asked.ranks
        ranks = f" with {count('rank', asked)}" if asked != run.training.ranks else ""
        print(f"{folder}: this run was completed before{ranks}; its record:", flush=True)
        if launched is not None:  # the other ranks wait to hear of it
            take_part(run, folder, launched, completed=completed)

    def train(run: Run, folder: Path) -> RunRecord:
        from orchestra.engines.run import train_run

        if launched is None:  # this process starts the ranks, else it is rank 0 of them
            return train_run(run, folder)
        on_left = _writer(run, folder, experiment.name)
        record = take_part(run, folder, launched, on_left=on_left, wish=wish)
        assert isinstance(record, RunRecord)  # on rank 0
        return record

    for line in idle_nodes([run]):
        print(line)
    try:
        record = make_run(
            run, experiment, folder, train, on_resume=tell_resumed,
            max_restarts=options.max_restarts, restarts_before=restarts_before(os.environ),
        )  # fmt: skip
    except RankLost as loss:
        if LAUNCHER_VARIABLE not in os.environ:
            raise
        tell(loss)
        return LOST_STATUS
    print_record(record, run)
    # The system that stopped the run got what it asked for; who pressed Ctrl-C did not get a run.
    if record.ending.stopped_by == "SIGTERM":
        return int(options.stopped_status)
    return 0 if record.ending.status == "completed" else 1


def restarts_before(environ: Mapping[str, str]) -> Sequence[Restart]:
    """Return the restarts that a launcher of Orchestra's own has made."""
    found: Sequence[Restart] = from_plain(
        tuple[Restart, ...], json.loads(environ.get(RESTARTS_VARIABLE, "[]"))
    )
    return found


def resolve(options: Namespace, launched: Launched | None = None) -> Experiment:
    """Return the experiment that the command line asks for."""
    if options.experiment is None and not (options.task and options.strategy):
        raise InputError(
            "give an experiment file, or both --task and --strategy; see orchestra train --help"
        )
    if launched is not None:
        if options.out is None:
            raise InputError(
                f"under {launched.launcher} give --out DIR: every rank has to know the folder"
            )
        if options.max_restarts:
            raise InputError(
                f"--max-restarts: {launched.launcher} has started the ranks, and only it can start "
                "them again: give torchrun its own --max-restarts"
            )
        # A launcher has said how many ranks there are.
        options.ranks = launched.ranks if options.ranks is None else options.ranks
    given = entries(options, *RUN_SETTINGS, "task", "ranks")
    given["tune"] = Entry(None, "train")  # it tunes nothing
    if options.seed is not None:
        given["seeds"] = Entry([options.seed], "--seed")
    if options.experiment is not None:
        refuse_task(options.experiment)
    return load(options.experiment, options.set, given, strategy=options.strategy)


def check_task(text: str) -> None:
    """Import a task of the user's own, and check its arguments, before anything is started."""
    bound(read(text, where="task"), TASKS, where="task")


def _follow(
    run: Run, options: Namespace, launched: Launched, experiment: str, wish: StopWish
) -> int:
    """Take part as a rank other than the first, which writes the record and prints how the run
    ended.

    If the first rank is lost, this rank writes the record. The first rank of each node prints how
    the run ended in any case, unless all lines appear on one terminal.
    """
    on_left = _writer(run, options.out, experiment)
    try:
        stopped = take_part(run, options.out, launched, on_left=on_left, wish=wish)
    except RunEnded:
        if launched.local_rank == 0 and LAUNCHER_VARIABLE not in os.environ:
            raise
        return 1
    return int(options.stopped_status) if stopped else 0


def _writer(run: Run, folder: Path, experiment: str) -> Callable[[str], None]:
    """Return what writes the record of a run that failed for a reason."""

    def write(reason: str) -> None:
        write_failure(run, folder, experiment, RunFailed(reason))

    return write


def print_record(record: RunRecord, run: Run) -> None:
    table = Table(title=record.asked.strategy, title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column()
    for name, value in figures(record, run):
        table.add_row(name, value)
    console = Terminal()
    console.print(table)
    console.print(f"record: {record.folder}", soft_wrap=True)


def figures(record: RunRecord, run: Run) -> Iterator[tuple[str, str]]:
    """Yield the figures of a run for the terminal: names, and values in words."""
    yield "status", record.ending.status
    asked = record.asked
    yield "ranks", f"{asked.ranks} ({asked.workers} workers, {asked.servers} servers)"
    for one, other in pairwise(record.ending.ranks_history):
        text = f"{one.ranks} from sample {one.sample} to {other.sample}"
        yield "ranks before", text
    yield "length", f"{record.learned.steps} steps, {record.learned.samples} samples"
    if record.time.training is not None:
        yield "time", f"{record.time.training:.2f} s, and {record.time.setup or 0:.2f} s set-up"
    if record.time.samples_per_second is not None:
        yield "speed", f"{record.time.samples_per_second:.0f} samples/s"
    if record.learned.loss is not None:
        yield "loss", f"{record.learned.loss:.4g}"
    yield from ((name, f"{value:.4g}") for name, value in record.learned.metrics.items())
    if record.learned.nodes is not None:  # their mean and the worst, at the last snapshot
        worst = {
            name: f" (worst {value:.4g})" for name, value in record.learned.nodes["worst"].items()
        }
        means = record.learned.nodes["mean"].items()
        each = [f"{name} {mean:.4g}{worst.get(name, '')}" for name, mean in means]
        yield "nodes' own models", f"mean {', '.join(each)}"
    if run.training.target is not None:
        after, by = record.to_target.after, record.to_target.seconds
        if after is None or by is None:
            yield "target", "not reached"
        else:  # between two snapshots
            places = max(0, places_of(by - after))
            yield "target", f"reached between {fixed(after, places)} and {fixed(by, places)} s"
    yield from _conditions(record, run)


def _conditions(record: RunRecord, run: Run) -> Iterator[tuple[str, str]]:
    yield "sent", f"{record.traffic.sent / 1e6:.3f} MB" + " (estimated)" * record.traffic.estimated
    if record.time.worker:
        yield "a worker's time", ", ".join(f"{k} {v:.2f} s" for k, v in record.time.worker.items())
    if record.machine.costs is not None:
        yield "cost model", costs_text(record)
    if record.machine.disturbed:
        part = f"{record.machine.busy_with_others:.0%} of the processor time"
        yield "busy machine", f"other programs took {part}: these seconds are too long"
    if record.updates.staleness is not None:
        mean, most = record.updates.staleness["mean"], record.updates.staleness["max"]
        yield "staleness", f"{mean:.2f} updates in the mean, at most {most:.0f}"
    if record.switching.decisions:
        count, changes = len(record.switching.decisions), changes_in(record.switching.decisions)
        yield "decisions", f"{count}, of which {len(changes)} went on with another strategy"
        yield from (("switched", text) for text in changes)
    elif run.strategy.traits().phases:
        step = record.switching.at_step
        yield "switched", "never: its rule did not fire" if step is None else f"at step {step}"
    yield from ((f"without rank {rank}", reason) for rank, reason in record.ending.left_out.items())
    if regroupings := record.ending.regroupings:
        lost = sum(len(each.lost) for each in regroupings)
        joined = sum(len(each.joined) for each in regroupings)
        again = sum(each.samples_again for each in regroupings)
        text = f"{lost} lost, {joined} joined; {regroupings[-1].ranks} at the end"
        yield "rank changes", f"{text}, {again} samples done twice"
    if record.ending.restarts:
        again = sum(restart.steps_again for restart in record.ending.restarts)
        yield "restarts", f"{len(record.ending.restarts)}; {again} steps were done twice"


def replay(options: Namespace) -> int:
    from orchestra.experiments import api

    done = api.replay(options.run, options.until, out=options.out)
    steps = ", ".join(f"rank {rank}: {count}" for rank, count in done.steps.items())
    print(f"steps done: {steps}")
    if done.states:
        print(f"the state of every rank: {done.folder}")
        return 0
    if options.until is not None:
        print(f"the run ended before step {options.until} of every worker")
    if done.equal is None:
        print("the run has no final parameters to compare with")
        return 0
    print("the parameters are those of the run, bit for bit" if done.equal else
          "the parameters differ from those of the run")  # fmt: skip
    return 0 if done.equal else 1
