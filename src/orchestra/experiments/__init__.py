"""Experiment files, and the folders that their runs leave."""

from __future__ import annotations

from orchestra.experiments.experiment import Experiment, for_training, runs
from orchestra.experiments.file import load, to_yaml
from orchestra.experiments.run import PARENT, claim, finished, fresh_folder, make_run
from orchestra.settings.reading import Entry

__all__ = [
    "PARENT",
    "Entry",
    "Experiment",
    "claim",
    "finished",
    "for_training",
    "fresh_folder",
    "load",
    "make_run",
    "runs",
    "to_yaml",
]
