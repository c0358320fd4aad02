"""`orchestra train` and `orchestra replay`: one task under one strategy, and the same again."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from rich.table import Table

from orchestra.cli.terminal import RUN_SETTINGS, Parser, entries
from orchestra.engines.processes.environment import Launched, detect
from orchestra.engines.processes.system import StopWish, handling
from orchestra.engines.processes.training import take_part
from orchestra.errors import InputError, RunEnded, RunFailed
from orchestra.experiments.experiment import Experiment, only_run
from orchestra.experiments.file import load
from orchestra.experiments.run import folder_for, idle_nodes, make_run, write_failure
from orchestra.records.record import RunRecord
from orchestra.records.report import changes_in
from orchestra.records.terminal import Terminal
from orchestra.report.fairness import costs_text
from orchestra.report.numbers import fixed, places_of
from orchestra.settings import read
from orchestra.settings.notation import bound
from orchestra.settings.reading import Entry
from orchestra.tasks import TASKS
from orchestra.trainer.settings import Run

DESCRIPTION = """\
Train one task under one strategy, and write the record of the run into a folder.

The experiment is a YAML file; its keys are those of `orchestra list experiment`. It may be left
out where --task and --strategy are given.
"""

EPILOG = """\
examples:
  orchestra train --task digits --strategy 'ParameterServer(consistency="asynchronous")'
  orchestra train --task my_package.tasks:speech --strategy Single --set batch_size=64
  orchestra train experiment.yaml --strategy ring
  orchestra train experiment.yaml --engine simulation --cluster 'lan_1gbit(nodes=16)' --ranks 16
  orchestra train experiment.yaml --set strategies.ring.algorithm=parallel --out runs/parallel
"""


def main(arguments: Sequence[str]) -> int:
    parser = Parser("train", DESCRIPTION, EPILOG)
    parser.add_argument("experiment", nargs="?", type=Path, metavar="EXPERIMENT")
    parser.option("--task", "TASK", "digits, or package.module:function")
    strategy = "one of the file's, by its label, or another: 'AllReduce(\"ring\")'"
    parser.option("--strategy", "STRATEGY", strategy)
    parser.option("--ranks", "N", "processes, servers included", type=int)
    parser.option("--seed", "N", "in place of the file's first one", type=int)
    out = (
        "the record's folder (default: a new one in runs/); one of the same run is resumed, also "
        "with another --ranks"
    )
    parser.add_run_options(out)
    restarts = "restart a run that lost a rank, from its newest checkpoint (default: 0 times)"
    parser.option("--max-restarts", "N", restarts, type=int, default=0)
    options, launched = parser.read(arguments), detect(os.environ)
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
        return _follow(run, options.out, launched, experiment.name, wish)
    folder = folder_for(options.out, f"{experiment.name}-{run.name}")

    def tell_resumed(completed: RunRecord | None) -> None:
        if completed is None:
            print(f"{folder}: going on with this run")
            return
        print(f"{folder}: this run was completed before; its record:")
        if launched is not None:  # the other ranks wait to hear of it
            take_part(run, folder, launched, completed=completed)

    def train(run: Run, folder: Path) -> RunRecord:
        from orchestra.engines.run import train_run

        if launched is None:  # this process starts the ranks, else it is rank 0 of them
            return train_run(run, folder)
        on_left = _writer(run, folder, experiment.name)
        record = take_part(run, folder, launched, on_left=on_left, wish=wish)
        assert record is not None  # on rank 0
        return record

    for line in idle_nodes([run]):
        print(line)
    record = make_run(
        run, experiment, folder, train, on_resume=tell_resumed, max_restarts=options.max_restarts
    )
    print_record(record, run)
    # The system that stopped the run got what it asked for; who pressed Ctrl-C did not get a run.
    return 0 if record.status == "completed" or record.stopped_by == "SIGTERM" else 1


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
    return load(options.experiment, options.set, given, strategy=options.strategy)


def check_task(text: str) -> None:
    """Import a task of the user's own, and check its arguments, before anything is started."""
    bound(read(text, where="task"), TASKS, where="task")


def _follow(run: Run, folder: Path, launched: Launched, experiment: str, wish: StopWish) -> int:
    """Take part as a rank beside the first, which keeps the record and tells how the run ended.

    Where the first is gone, this rank does; the first rank of each node tells it in any case.
    """

    try:
        take_part(run, folder, launched, on_left=_writer(run, folder, experiment), wish=wish)
    except RunEnded:
        if launched.local_rank == 0:
            raise
        return 1
    return 0


def _writer(run: Run, folder: Path, experiment: str) -> Callable[[str], None]:
    """Return what writes the record of a run that failed for a reason."""

    def write(reason: str) -> None:
        write_failure(run, folder, experiment, RunFailed(reason))

    return write


def print_record(record: RunRecord, run: Run) -> None:
    table = Table(title=record.strategy, title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column()
    for name, value in figures(record, run):
        table.add_row(name, value)
    console = Terminal()
    console.print(table)
    console.print(f"record: {record.folder}", soft_wrap=True)


def figures(record: RunRecord, run: Run) -> Iterator[tuple[str, str]]:
    """Yield the figures of a run for the terminal: names, and values in words."""
    yield "status", record.status
    yield "ranks", f"{record.ranks} ({record.workers} workers, {record.servers} servers)"
    for one, other in pairwise(record.ranks_history):
        text = f"{one['ranks']} from sample {one['sample']} to {other['sample']}"
        yield "ranks before", text
    yield "length", f"{record.steps} steps, {record.samples} samples"
    if record.train_seconds is not None:
        yield "time", f"{record.train_seconds:.2f} s, and {record.setup_seconds or 0:.2f} s set-up"
    if record.samples_per_second is not None:
        yield "speed", f"{record.samples_per_second:.0f} samples/s"
    if record.final_loss is not None:
        yield "loss", f"{record.final_loss:.4g}"
    yield from ((name, f"{value:.4g}") for name, value in record.metrics.items())
    if record.nodes is not None:  # their mean and the worst, at the last snapshot
        worst = {name: f" (worst {value:.4g})" for name, value in record.nodes["worst"].items()}
        means = record.nodes["mean"].items()
        each = [f"{name} {mean:.4g}{worst.get(name, '')}" for name, mean in means]
        yield "nodes' own models", f"mean {', '.join(each)}"
    if run.training.target is not None:
        after, by = record.time_to_target_after_seconds, record.time_to_target_seconds
        if after is None or by is None:
            yield "target", "not reached"
        else:  # between two snapshots
            places = max(0, places_of(by - after))
            yield "target", f"reached between {fixed(after, places)} and {fixed(by, places)} s"
    yield from _conditions(record, run)


def _conditions(record: RunRecord, run: Run) -> Iterator[tuple[str, str]]:
    yield "sent", f"{record.bytes_sent / 1e6:.3f} MB" + " (estimated)" * record.bytes_estimated
    if record.seconds:
        yield "a worker's time", ", ".join(f"{k} {v:.2f} s" for k, v in record.seconds.items())
    if record.costs is not None:
        yield "cost model", costs_text(record)
    if record.disturbed:
        part = f"{record.busy_with_others:.0%} of the processor time"
        yield "busy machine", f"other programs took {part}: these seconds are too long"
    if record.staleness is not None:
        mean, most = record.staleness["mean"], record.staleness["max"]
        yield "staleness", f"{mean:.2f} updates in the mean, at most {most:.0f}"
    if record.decisions:
        count, changes = len(record.decisions), changes_in(record.decisions)
        yield "decisions", f"{count}, of which {len(changes)} went on with another strategy"
        yield from (("switched", text) for text in changes)
    elif run.strategy.traits().phases:
        step = record.switched_at_step
        yield "switched", "never: its rule did not fire" if step is None else f"at step {step}"
    yield from ((f"without rank {rank}", reason) for rank, reason in record.left_out.items())
    if regroupings := record.regroupings:
        lost, joined = (sum(len(each[kind]) for each in regroupings) for kind in ("lost", "joined"))
        again = sum(each["samples_again"] for each in regroupings)
        text = f"{lost} lost, {joined} joined; {regroupings[-1]['ranks']} at the end"
        yield "rank changes", f"{text}, {again} samples done twice"
    if record.restarts:
        again = sum(restart["steps_again"] for restart in record.restarts)
        yield "restarts", f"{len(record.restarts)}; {again} steps were done twice"


REPLAY = """\
Repeat a run that was made with --record-order, in virtual time, in one process: every message that
a receive from any source took comes from the same rank again, so that an asynchronous training
goes the same way and ends with the same parameters, bit for bit. What was recorded holds no
parameter and no gradient: they are computed again.

With --until the state of each worker after so many steps of its own is written, and that of the
servers when the last worker is there: parameters, gradient, optimizer, random streams.

Exit status: 0 the parameters are those of the run (or it was stopped where you said), 1 they are
not, 2 bad input.
"""

REPLAY_EPILOG = """\
examples:
  orchestra train experiment.yaml --record-order --out runs/recorded
  orchestra replay runs/recorded
  orchestra replay runs/recorded --until 40 --out runs/step-40

  in Python: states = orchestra.replay("runs/recorded", until=40).states
      states[2]["parameters"] is the flat vector of rank 2
"""


def replay(arguments: Sequence[str]) -> int:
    parser = Parser("replay", REPLAY, REPLAY_EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a recorded run")
    parser.option("--until", "STEP", "stop each worker there", type=int)
    parser.option("--out", "DIR", "a new folder", type=Path)
    options = parser.read(arguments)
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
