"""`orchestra join`: a process more for a run that is under way."""

from __future__ import annotations

import os
import re
import signal
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from orchestra.cli.train import check_task
from orchestra.engines.events import RUN_OVER
from orchestra.engines.processes.environment import JOIN_VARIABLE
from orchestra.engines.processes.joining import ENTRANCE, Admission, Entrance, ask
from orchestra.engines.processes.system import StopWish, handling
from orchestra.engines.processes.training import join_run
from orchestra.errors import InputError, RunFailed, tell
from orchestra.experiments.experiment import only_run
from orchestra.experiments.file import load
from orchestra.experiments.run import fresh_folder
from orchestra.records.files import EXPERIMENT, PARENT, steps_file, write_atomically
from orchestra.transports.handshake import from_environment

ADDRESS = re.compile(r"(?P<host>.+):(?P<port>[0-9]+)")


def main(options: Namespace) -> int:
    entrance = _entrance(options.run, options.secret)
    place = ask(entrance, from_environment(os.environ))
    if not place.experiment:
        raise InputError(
            f"{options.run}: this is a loop of a script's own: start that script with "
            f"{JOIN_VARIABLE}=FILE, which names the run's {ENTRANCE}"
        )
    folder = _folder(place, options.out)
    run = only_run(load(folder / EXPERIMENT, [], {}), str(folder))
    writes = run.training.checkpoint_every or not run.after_loss.keeps_state
    if writes and folder.resolve() != Path(place.folder):
        raise InputError(
            f"{place.folder}: the run writes checkpoints there, and this machine does "
            "not have the folder: ranks of several machines need one that all share"
        )
    check_task(run.task)
    tell(f"rank {place.rank} of the run in {folder}: getting ready")
    wish = StopWish()
    try:
        with handling({signal.SIGINT: wish, signal.SIGTERM: wish}):
            report = join_run(run, folder, entrance, place, spare=options.spare, wish=wish)
    except RunFailed as failure:
        if str(failure) != RUN_OVER:
            raise
        steps_file(folder, place.rank).unlink(missing_ok=True)
        print("the run is over; this rank was not needed")
        return 0
    print(f"the run has ended after step {report.steps}; {report.samples} samples were read here")
    return 0


def _entrance(place: str, secret: Path | None) -> Entrance:
    """Return the entrance of the run at `place`, a folder or an address."""
    folder = Path(place)
    if folder.is_dir():
        return Entrance.read(secret or folder / ENTRANCE)
    found = ADDRESS.fullmatch(place)
    if found is None:
        raise InputError(f"{place}: is no folder, and no address such as 10.0.0.1:40123")
    if secret is None:
        raise InputError(f"{place}: give a copy of the run's {ENTRANCE} with --secret")
    return replace(Entrance.read(secret), host=found["host"], port=int(found["port"]))


def _folder(place: Admission, out: Path | None) -> Path:
    """Return the folder of the run, or a new one with its experiment where that is not here."""
    shared = Path(place.folder)
    path = shared / EXPERIMENT
    if out is None and path.exists() and path.read_text() == place.experiment:
        return shared
    folder = out or fresh_folder(PARENT, f"{shared.name}-rank-{place.rank}")
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / EXPERIMENT
    if own.exists() and own.read_text() != place.experiment:
        raise InputError(f"{folder}: holds another experiment; choose another --out")
    write_atomically(own, place.experiment)
    return folder
