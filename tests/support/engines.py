"""The examples of engines that call a function on each rank: Ray and Spark."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.commands import Ended, Started
from tests.support.paths import ROOT
from tests.support.warm import MODULE_PATH

EXAMPLES = ROOT / "examples/engines"
DEADLINE_SECONDS = 500.0  # engines take a minute to start where other programs are busy


def example(name: str, folder: Path, *arguments: str, **variables: str) -> Ended:
    """Run an example as a user does, to its end, which the engine's processes do not outlive."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {
        "PATH": path, "PYTHONPATH": MODULE_PATH, "RAY_USAGE_STATS_ENABLED": "0", **variables,
        "PYSPARK_PYTHON": sys.executable,
    }  # fmt: skip
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    with Started(command, folder, own, fresh=True) as started:
        started.process.wait(DEADLINE_SECONDS)
        return started.end()


def one_loss(folder: Path, gradient: int) -> dict[str, str]:
    """Variables that kill the process of rank 1 once, at its gradient of that number."""
    return {
        "ORCHESTRA_INJECT": f'Inject("kill", rank=1, at="gradient", number={gradient})',
        "ORCHESTRA_INJECT_LOG": str(folder / "injected"),
    }
