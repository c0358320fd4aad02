"""The files of checkpoints, as a launcher looks at them. Imports without torch.

`orchestra.trainer.checkpoints` writes them and says what is inside.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MANIFEST = "manifest.json"


class DamagedCheckpoint(Exception):
    """A file of a checkpoint is missing, was changed, or is not of this run."""


def rank_file(rank: int) -> str:
    """Return the name of a rank's file inside a checkpoint."""
    return f"rank-{rank}.safetensors"


def complete(folder: Path) -> Iterator[int]:
    """Yield the numbers of the checkpoints in `folder`, whole or damaged."""
    yield from (int(path.name) for path in sorted(folder.glob("*")) if _is_checkpoint(path))


def others(folder: Path) -> list[Path]:
    """Return the paths in `folder` that are no checkpoints, without hidden ones."""
    return [path for path in sorted(folder.glob("[!.]*")) if not _is_checkpoint(path)]


def _is_checkpoint(path: Path) -> bool:
    """Return whether the name of `path` is one that `commit` gives."""
    name = path.name
    # "²" is a digit to `isdigit`, but not to `int`.
    number = name.isascii() and name.isdigit() and name == f"{int(name):04d}"
    return number and path.is_dir()


def verify(folder: Path, index: int, ranks: int) -> None:
    """Raise `DamagedCheckpoint` unless every file of checkpoint `index` is as it was written."""
    place = folder / f"{index:04d}"
    try:
        files = dict(json.loads((place / MANIFEST).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{place / MANIFEST}: {error}") from error
    for name in (rank_file(rank) for rank in range(ranks)):
        path = place / name
        if name not in files or not path.is_file():
            raise DamagedCheckpoint(f"{path}: missing")
        if digest(path) != files[name]:
            raise DamagedCheckpoint(f"{path}: its checksum is not that of the manifest")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest_steps(folder: Path, ranks: int) -> tuple[int, list[int]] | None:
    """Return the number of the newest whole checkpoint in `folder`, and the steps that each of the
    `ranks` ranks had made when it was taken; None where there is no whole checkpoint."""
    for index in sorted(complete(folder), reverse=True):
        with suppress(DamagedCheckpoint, OSError, ValueError, LookupError, TypeError):
            verify(folder, index, ranks)
            return index, [_steps_of(folder, index, rank) for rank in range(ranks)]
    return None


def _steps_of(folder: Path, index: int, rank: int) -> int:
    # The header of a file of safetensors: its length in 8 bytes, then JSON.
    with (folder / f"{index:04d}" / rank_file(rank)).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return int(json.loads(header["__metadata__"]["tree"])["position"]["steps"])
