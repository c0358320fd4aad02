"""`orchestra train`: one task under one strategy."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.cli.arguments import Parser
from orchestra.engines.processes.environment import Launched, detect
from orchestra.engines.processes.system import handling
from orchestra.errors import InputError, RunEnded, RunFailed
from orchestra.experiments import (
    PARENT,
    Entry,
    Experiment,
    for_training,
    fresh_folder,
    load,
    make_run,
    runs,
)
from orchestra.settings import read
from orchestra.settings.notation import bound
from orchestra.tasks.registry import TASKS

if TYPE_CHECKING:
    from orchestra.experiments.run import Train
    from orchestra.records.record import RunRecord
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
  orchestra train experiment.yaml --engine simulation --cluster 'lan_1gbit(nodes=16)' --ranks 16
  orchestra train experiment.yaml --set strategies.ring.algorithm=parallel --out runs/parallel
"""


def main(arguments: Sequence[str]) -> int:
    """Train as the command line says; 0 if the run was completed."""
    options = _parser().read(arguments)
    launched = detect(os.environ)
    if launched is None:
        return _run(options, None)
    # An agent of torchrun sends it once one rank has ended: the record is still to be written.
    with handling({signal.SIGTERM: lambda: None}):
        return _run(options, launched)


def _run(options: Namespace, launched: Launched | None) -> int:
    experiment = resolve(options, launched)
    check_task(experiment.task)
    (run,) = runs(experiment)
    if launched is not None and launched.rank > 0:
        return _follow(run, options.out, launched, experiment.name)
    folder = options.out or fresh_folder(PARENT, _folder_name(experiment))

    def tell_resumed(completed: RunRecord | None) -> None:
        state = "going on with this run"
        if completed is not None:
            state = "this run was completed before; its record:"
        print(f"{folder}: {state}")

    from orchestra.experiments.comparison import idle_nodes

    for line in idle_nodes([run]):
        print(line)
    record = make_run(run, experiment, folder, _trainer(launched), on_resume=tell_resumed)
    from orchestra.cli.tables import print_record

    print_record(record, run)
    return 0 if record.status == "completed" else 1


def resolve(options: Namespace, launched: Launched | None = None) -> Experiment:
    """The experiment of one strategy and one seed that the command line asks for."""
    if options.experiment is None and not (options.task and options.strategy):
        raise InputError(
            "give an experiment file, or both --task and --strategy; see orchestra train --help"
        )
    if launched is not None:
        if options.out is None:
            raise InputError(
                f"under {launched.launcher} give --out DIR: every rank has to know the folder"
            )
        options.ranks = launched.ranks if options.ranks is None else options.ranks
    experiment = load(options.experiment, options.set, _given(options))
    return for_training(experiment, str(options.experiment or "command line"))


def _parser() -> Parser:
    parser = Parser("train", DESCRIPTION, EPILOG)
    parser.add_argument("experiment", nargs="?", type=Path, metavar="EXPERIMENT")
    parser.add_argument("--task", metavar="TASK", help="digits, or package.module:function")
    parser.add_argument(
        "--strategy", metavar="EXPRESSION", help="in place of the file's: 'AllReduce(\"ring\")'"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="processes, servers included")
    parser.add_argument("--seed", type=int, metavar="N", help="in place of the file's first one")
    parser.add_run_options(
        out="the record's folder (default: a new one in runs/); one of the same run is resumed"
    )
    return parser


def _given(options: Namespace) -> dict[str, Entry]:
    """What options say in place of the file."""
    given = Parser.run_settings(options)
    given["tune"] = Entry(None, "train")  # it tunes nothing
    if options.task is not None:
        given["task"] = Entry(options.task, "--task")
    if options.strategy is not None:
        label = read(options.strategy, where="--strategy").name.rpartition(":")[2]
        given["strategies"] = Entry({label: options.strategy}, "--strategy")
        given["devices"] = Entry({}, "--strategy")
    if options.ranks is not None:
        given["ranks"] = Entry(options.ranks, "--ranks")
    if options.seed is not None:
        given["seeds"] = Entry([options.seed], "--seed")
    return given


def check_task(text: str) -> None:
    """Import a task of the user's own, and check its arguments, before anything is started."""
    bound(read(text, where="task"), TASKS, where="task")


def _folder_name(experiment: Experiment) -> str:
    (label,) = experiment.strategies
    return f"{experiment.name}-{label}"


def _follow(run: Run, folder: Path, launched: Launched, experiment: str) -> int:
    """Take part as a rank beside the first, which keeps the record and tells how the run ended;
    where that one is gone, this one does. The first rank of each node tells it in any case."""
    from orchestra.engines.processes.training import take_part
    from orchestra.experiments.run import write_failure

    def first_is_gone(reason: str) -> None:
        write_failure(run, folder, experiment, RunFailed(reason))

    try:
        take_part(run, folder, launched, first_is_gone=first_is_gone)
    except RunEnded:
        if launched.local_rank == 0:
            raise
        return 1
    return 0


def _trainer(launched: Launched | None) -> Train:
    """How this process trains: it starts the ranks, or is rank 0 of those that were launched."""

    def train(run: Run, folder: Path, completed: RunRecord | None) -> RunRecord:
        from orchestra.engines.processes.training import take_part
        from orchestra.engines.run import train_run

        if launched is None:
            return completed or train_run(run, folder)
        record = take_part(run, folder, launched, completed=completed)
        assert record is not None  # on rank 0
        return record

    return train
