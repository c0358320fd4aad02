"""Writing into a run's folder: a disk that is full or read-only ends the run in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from orchestra.errors import RunFailed


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `RunFailed`, which names `path`, where writing it fails inside."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunFailed(f"cannot write {path}: {reason}") from None
