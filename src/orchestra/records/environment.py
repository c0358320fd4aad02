"""What a run ran on; kept beside it, out of the summary."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("neural-orchestra", "torch", "numpy", "safetensors", "scikit-learn")


def environment() -> dict[str, Any]:
    """Machine, system and versions, as far as they can bear on a result."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "command": sys.argv,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
