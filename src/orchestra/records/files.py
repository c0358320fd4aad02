"""The files of a run: their names, their folders, and how they are written.

    DIR/experiment.yaml, summary.json, tuning.json, techniques.json, report.html, figures/
    DIR/runs/LABEL/N-ranks/seed-S/       the folder of a run, as that of a training
    DIR/tuning/LABEL/N-ranks/trial-T/    the same for a trial, judged on the validation data

The folder of a training is that of its one run.
"""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PARENT = Path("runs")  # where folders of runs are made by default
EXPERIMENT = "experiment.yaml"  # of a run or comparison: what was asked for
SUMMARY = "summary.json"
RUNS = "runs.json"  # of a comparison: the folders and names of its trials and runs
TUNING = "tuning.json"
TECHNIQUES = "techniques.json"  # of a comparison: rows that differ in one setting
HOSTS_VARIABLE = "ORCHESTRA_HOSTS"
"""The hosts of a run of `orchestra train --hosts`, as its user wrote them."""
ENVIRONMENT = "environment.json"  # of a run: its machine, system and versions
CURVE = "curve.jsonl"
TRACE = "trace.json.gz"
LINKS = "links.json"
CLUSTER = "cluster.yaml"  # of a run on a described cluster: the whole cluster
EMULATION = "emulation.json"  # of an emulated run: the counts of transports and cables
LIVE = "live.json"  # of a run under way; removed at a normal end
PACKAGES = ("neural-orchestra", "torch", "numpy", "safetensors", "scikit-learn")


def steps_file(folder: Path, rank: int) -> Path:
    """Return the file of the steps of `rank`, in the folder of its run."""
    return folder / f"steps-rank-{rank}.jsonl"


def steps_files(folder: Path) -> dict[int, Path]:
    """Return the files of steps in the folder of a run, by rank in ascending order."""
    # The folder is open to others, who may leave a file such as "steps-rank-0 copy.jsonl".
    ranks = (path.stem.rpartition("-")[2] for path in folder.glob("steps-rank-*.jsonl"))
    return {
        rank: steps_file(folder, rank) for rank in sorted(int(r) for r in ranks if r.isdecimal())
    }


def run_folder(comparison: Path, label: str, ranks: int, seed: int) -> Path:
    """Return the folder of one run of the comparison in `comparison`."""
    return comparison / "runs" / label / f"{ranks}-ranks" / f"seed-{seed}"


def trial_folder(comparison: Path, label: str, ranks: int, trial: int) -> Path:
    """Return the folder of one trial of its tuning."""
    return comparison / "tuning" / label / f"{ranks}-ranks" / f"trial-{trial}"


def cache_folder() -> Path:
    """Return `ORCHESTRA_CACHE`, else `orchestra` in `XDG_CACHE_HOME`, else in `~/.cache`; raise
    `RuntimeError` if none of these is set and the user has no home."""
    if own := os.environ.get("ORCHESTRA_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "orchestra"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there whole, or as it was before."""
    partial = partial_of(path)
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
        with partial.open("rb") as file:
            # Otherwise the rename may reach the disk before the content does.
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)  # a full disk names no file
        raise


def partial_of(path: Path) -> Path:
    """Return the file that `write_atomically` writes first, and leaves if killed meanwhile."""
    return path.with_name(f".{path.name}.partial")


def environment() -> dict[str, Any]:
    """Return machine, system and versions, as far as they can bear on a result."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        **({"hosts": hosts} if (hosts := os.environ.get(HOSTS_VARIABLE)) else {}),
        "packages": {name: _version(name) for name in PACKAGES},
        "command": sys.argv,
        # A replay looks for the module of the task in these folders.
        "modules": [p for p in sys.path if p and not p.startswith((sys.prefix, sys.base_prefix))],
    }


def _version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def _processor() -> str:
    # On Linux `platform.processor()` is empty, or names the architecture alone.
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
