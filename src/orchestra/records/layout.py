"""Where things lie: in the folder of a comparison, and what is kept from one run to the next.

    DIR/experiment.yaml, summary.json, tuning.json, techniques.json, report.html, figures/
    DIR/runs/LABEL/N-ranks/seed-S/       the folder of a run, as that of a training
    DIR/tuning/LABEL/N-ranks/trial-T/    the same for a trial, judged on the validation data

The folder of a training is that of its one run.
"""

from __future__ import annotations

import os
from pathlib import Path

SUMMARY = "summary.json"
CLUSTER = "cluster.yaml"
"""In the folder of a run on a described cluster: the cluster, written out in full."""

EMULATION = "emulation.json"
"""In the folder of an emulated run: what the transports counted, and what the cables carried."""


TECHNIQUES = "techniques.json"
"""In the folder of a comparison: the rows that differ in one setting, and where each pays."""


def run_folder(comparison: Path, label: str, ranks: int, seed: int) -> Path:
    """The folder of one run of the comparison in `comparison`."""
    return comparison / "runs" / label / f"{ranks}-ranks" / f"seed-{seed}"


def trial_folder(comparison: Path, label: str, ranks: int, trial: int) -> Path:
    """The folder of one trial of its tuning."""
    return comparison / "tuning" / label / f"{ranks}-ranks" / f"trial-{trial}"


def cache_folder() -> Path:
    """`ORCHESTRA_CACHE`, else `orchestra` in `XDG_CACHE_HOME`, else in `~/.cache`.

    Raises:
        RuntimeError: none of these is set, and the user has no home.
    """
    own = os.environ.get("ORCHESTRA_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "orchestra"
