"""Where what takes time to find out is kept from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path


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
