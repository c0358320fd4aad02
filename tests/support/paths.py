"""Where the project and its scripts for tests lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
