"""`orchestra train --hosts`: the same training on several hosts, by ssh."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orchestra.cli.train import check_task, resolve
from orchestra.engines.hosts.checks import (
    meet,
    require_alike,
    require_files,
    require_shared,
)
from orchestra.engines.hosts.connection import Hosts
from orchestra.engines.hosts.facts import facts_here
from orchestra.engines.hosts.names import HostRanks, read_hosts
from orchestra.engines.hosts.restarts import HostRestarts
from orchestra.engines.hosts.run import Command, first_free, run_on
from orchestra.engines.processes.environment import LOST_STATUS, detect
from orchestra.errors import InputError, RankLost, tell
from orchestra.experiments.experiment import Experiment, alone, only_run
from orchestra.experiments.file import FOLDER_VARIABLE, STANDARD_INPUT, to_yaml
from orchestra.records.files import PARENT
from orchestra.settings.reading import read_bytes, yaml_value
from orchestra.strategies.base import roles_of
from orchestra.trainer.settings import Run


def train(options: Namespace) -> int:
    """Check all hosts, and train there; rank 0, on the first one, keeps the record."""
    places = read_hosts(options.hosts)
    experiment, run = _planned(options, places)
    restarts = HostRestarts(run, options.max_restarts)
    check_task(run.task)
    while True:
        cause = None
        try:
            status = _attempt(options, experiment, run, places, restarts)
            if status != LOST_STATUS:
                return status
        except RankLost as loss:
            cause = str(loss)
        except InputError as error:  # a host that restarts, too, may not answer yet
            if not restarts.number:
                raise
            cause = str(error)
        if not restarts.prepare(cause, options.out):
            return 1


def _attempt(
    options: Namespace,
    experiment: Experiment,
    run: Run,
    places: Sequence[HostRanks],
    restarts: HostRestarts,
) -> int:
    """Check all hosts, and train until the run has ended or has lost a rank that it needs.

    Return the exit status; `LOST_STATUS` where rank 0 has told the loss. Raises as `run_on` does.
    """
    folders = [Path.cwd()]
    if options.experiment is not None:
        folders.append(options.experiment.resolve().parent)
    here, first = facts_here(), places[0].name
    python = options.remote_python or sys.executable
    with Hosts([place.name for place in places], python) as hosts:
        facts = require_alike(hosts, here)
        require_files(hosts, Path.cwd(), [*own_modules(folders)])
        meeting = meet(hosts)
        if options.out is None:
            name = f"{experiment.name}-{run.name}"
            options.out = Path(first_free(hosts, first, str(PARENT), name))
        if run.training.checkpoint_every:
            require_shared(hosts, first, options.out)
        variables = {FOLDER_VARIABLE: str(folders[-1]), **restarts.begin(hosts, first, options.out)}
        tell(", ".join(f"{p.name} ({meeting.addresses[p.name]}): {_ranks(p)}" for p in places))
        where = "" if facts[first].machine == here.machine else f", on {first}"
        tell(f"progress: orchestra watch {options.out}{where}")
        command = _command(options, experiment, run, variables)
        try:
            status = run_on(hosts, places, meeting, command)
        except RankLost:
            restarts.note_checkpoint(hosts, first, options.out)
            raise
        if status == LOST_STATUS:
            restarts.note_checkpoint(hosts, first, options.out)
    if facts[first].machine != here.machine and status != LOST_STATUS:
        tell(f"the record is on {first}, in {options.out.absolute()}")
    return status


def _planned(options: Namespace, places: Sequence[HostRanks]) -> tuple[Experiment, Run]:
    """Return the experiment and its run, whose ranks are those on all hosts."""
    if (launched := detect(os.environ)) is not None:
        raise InputError(f"--hosts: {launched.launcher} has started this process; leave out one")
    total = sum(place.ranks for place in places)
    if options.ranks not in (None, total):
        raise InputError(f"--ranks: {options.ranks}, but --hosts has {total}; leave out --ranks")
    options.ranks = total
    experiment = resolve(options)
    if (there := _ranks_in(options.experiment)) not in (None, total, [total]):
        text = ", ".join(map(str, there)) if isinstance(there, list) else there
        tell(f"ranks: {options.experiment} has {text}, --hosts has {total}: training with {total}")
    run = only_run(experiment, str(options.experiment or "command line"))
    if run.training.engine != "processes":
        raise InputError(f"--hosts: the engine {run.training.engine} runs here; leave out --hosts")
    if (processes := len(roles_of(run.strategy, total).shares)) != total:
        raise InputError(
            f"--hosts: {run.strategy!r} on {total} ranks runs on {processes} processes; "
            f"name hosts with {processes} in all"
        )
    return experiment, run


def _ranks_in(path: Path | None) -> object:
    """Return the ranks that the file of an experiment, which has been read, gives; else None."""
    if path is None or str(path) == STANDARD_INPUT:
        return None
    document = yaml_value(read_bytes(path).decode(errors="replace"), str(path))
    return document.get("ranks") if isinstance(document, dict) else None


def _command(
    options: Namespace, experiment: Experiment, run: Run, variables: Mapping[str, str]
) -> Command:
    """Return what each rank runs: this command, with the whole experiment as its input."""
    return Command(
        arguments=[
            "-m",
            "orchestra",
            "train",
            STANDARD_INPUT,
            "--out",
            str(options.out),
            "--stopped-status",
            str(options.stopped_status),
        ],
        input=to_yaml(alone(experiment, run)),
        variables=variables,
        grace=run.training.grace,
        goes_on=run.is_elastic or run.after_loss.is_in_place,
    )


def own_modules(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of the imported modules that lie below `folders`, and are not installed."""
    installed = [Path(each).resolve() for each in (sys.prefix, sys.base_prefix)]
    installed.append(Path(__file__).resolve().parents[1])
    for module in [*sys.modules.values()]:
        name = getattr(module, "__file__", None)
        if name is None:
            continue
        path = Path(name).resolve()
        if any(path.is_relative_to(each) for each in installed):
            continue
        if any(path.is_relative_to(folder) for folder in folders):
            yield path


def _ranks(place: HostRanks) -> str:
    return f"{place.ranks} rank{'s' * (place.ranks > 1)}"
