"""Checkpoints: atomic, checksummed, readable without running anybody's code.

    checkpoints/0002/manifest.json          the SHA-256 of each file beside it; written last
                     rank-0.safetensors     tensors; the rest as JSON in the file's metadata

A checkpoint is written into a hidden folder, which is renamed when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from orchestra.trainer.writing import writing

KEEP = 2
MANIFEST = "manifest.json"
TENSOR = "$tensor"
DOOMED = ".deleted"


class DamagedCheckpoint(Exception):
    """A file of a checkpoint is missing or was changed; the message names it."""


def rank_file(rank: int) -> str:
    """The name of a rank's file inside a checkpoint."""
    return f"rank-{rank}.safetensors"


def pending_folder(folder: Path, index: int) -> Path:
    """Where checkpoint `index` is written before it counts."""
    return folder / f".{index:04d}"


def write_rank(folder: Path, index: int, rank: int, state: Any) -> str:
    """Write one rank's `state` (as `capture` gives it); the SHA-256 of the file, in hex."""
    pending = pending_folder(folder, index)
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_flatten(state, "", tensors))
    path = pending / rank_file(rank)
    with writing(path):
        pending.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"tree": tree})
        _sync(path)
        return digest(path)


def commit(folder: Path, index: int, digests: dict[str, str]) -> None:
    """Make checkpoint `index` count: all ranks have written. Older ones but one are deleted."""
    pending = pending_folder(folder, index)
    manifest = pending / MANIFEST
    with writing(manifest):
        manifest.write_text(json.dumps({"schema": 1, "files": digests}, indent=1))
        _sync(manifest)
        _sync(pending)
        final = folder / f"{index:04d}"
        _remove(final)
        pending.rename(final)
        _sync(folder)
        _sweep(folder)  # a run that was killed in the midst of it left something
        for old in sorted(complete(folder))[:-KEEP]:
            (folder / f"{old:04d}").rename(folder / f".{old:04d}{DOOMED}")
        _sweep(folder)


def _sweep(folder: Path) -> None:
    """Delete what is doomed; it was renamed first, since one half deleted would seem damaged."""
    for doomed in folder.glob(f".*{DOOMED}"):
        _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Before a run goes on: delete what one that was killed began to write, or to delete."""
    with writing(folder):
        for path in folder.glob(".[0-9]*"):
            _remove(path)


def complete(folder: Path) -> Iterator[int]:
    """The numbers of the checkpoints in `folder`, whole or damaged."""
    yield from (int(path.name) for path in _entries(folder) if _is_checkpoint(path))


def others(folder: Path) -> list[Path]:
    """What lies in `folder` without being a checkpoint."""
    return [path for path in _entries(folder) if not _is_checkpoint(path)]


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _is_checkpoint(path: Path) -> bool:
    """By its name, as `commit` gives it."""
    name = path.name
    return name.isascii() and name.isdigit() and name == f"{int(name):04d}" and path.is_dir()


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


def read_rank(folder: Path, index: int, rank: int) -> Any:
    """What `rank` wrote into checkpoint `index`."""
    with safe_open(folder / f"{index:04d}" / rank_file(rank), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _nest(json.loads(file.metadata()["tree"]), tensors)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` with each tensor moved to `tensors` and its name left in its place."""
    if isinstance(value, Tensor):
        assert name not in tensors, f"two tensors of a checkpoint are called {name}"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {TENSOR: name}
    if isinstance(value, dict):
        return {key: _flatten(item, f"{name}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_flatten(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
    return value


def _nest(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if TENSOR in value:
            return tensors[value[TENSOR]]
        return {key: _nest(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_nest(item, tensors) for item in value]
    return value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
