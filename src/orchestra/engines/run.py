"""One run, on the engine that its settings name. Imports without torch."""

from __future__ import annotations

from pathlib import Path

from orchestra.engines.processes import training as processes
from orchestra.engines.processes.display import Progress
from orchestra.engines.simulation import training as simulation
from orchestra.records.record import RunRecord
from orchestra.trainer.settings import Run

ENGINES = {"processes": processes.train_run, "simulation": simulation.train_run}


def train_run(
    run: Run, folder: Path, *, quiet: bool = False, progress: Progress | None = None
) -> RunRecord:
    """Carry out `run`; its records go into `folder`.

    `progress` is that of the runs that it is one of.

    Raises:
        InputError: the strategy cannot run on that many ranks, or not on this engine.
        RunFailed: names the first cause; what was measured until then stays in `folder`.
    """
    return ENGINES[run.training.engine](run, folder, quiet=quiet, progress=progress)
