"""Where modules of a user's own are looked up: behind everything that is installed.

Python puts the working folder first for `python -m`, and where an empty entry of PYTHONPATH says
so. A file `rich.py` in it would then stand in for an installed package.
"""

from __future__ import annotations

import site
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def leave_out_working_folder() -> None:
    """Take the working folder off the module path, unless packages are installed right there."""
    here = str(Path.cwd())
    if here not in (*site.getsitepackages(), site.getusersitepackages()):
        sys.path[:] = [entry for entry in sys.path if entry and entry != here]


def admit_working_folder() -> None:
    """Put the working folder at the end of the module path."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def admit(folder: str) -> None:
    """Put `folder` behind what is installed, before the working folder if that is last."""
    if folder not in sys.path:
        sys.path.insert(len(sys.path) - (sys.path[-1:] == [str(Path.cwd())]), folder)


@contextmanager
def without_working_folder() -> Iterator[None]:
    """Inside, nothing is imported from the working folder until it is admitted."""
    before = list(sys.path)
    leave_out_working_folder()
    try:
        yield
    finally:
        sys.path[:] = before
