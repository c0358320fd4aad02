"""Experiment files, and the folders that their runs leave."""

from __future__ import annotations

from orchestra.experiments.document import Entry
from orchestra.experiments.file import Experiment, load, runs, to_yaml
from orchestra.experiments.folder import claim, finished, fresh_folder, release

__all__ = [
    "Entry",
    "Experiment",
    "claim",
    "finished",
    "fresh_folder",
    "load",
    "release",
    "runs",
    "to_yaml",
]
