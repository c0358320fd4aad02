"""The files of checkpoints, as a launcher looks at them. Imports without torch.

`orchestra.trainer.checkpoints` writes them and says what is inside.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestra.records.report import Membership
from orchestra.settings.base import REQUIRED, from_plain, setting

MANIFEST = "manifest.json"
FORMAT = 3
"""The version of the format of checkpoints; this is the only one that is read."""

LOST = "lost"
"""The role of a rank that has no file: it was lost before, or has just joined."""

_RANK_FILE = re.compile(r"rank-\d+\.safetensors")


class DamagedCheckpoint(Exception):
    """A file of a checkpoint is missing, was changed, or is not of this run."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: whose files, how the model lies over them, how far the run was."""

    generation: int = setting(REQUIRED, "number of the attempt at the run that wrote it", low=0)
    members: tuple[str, ...] = ()  # the role of each rank: "worker and server", "lost" ...
    layout: dict[str, str] = field(default_factory=dict)  # parameters, optimizer, replicas
    consumed: int = setting(0, "samples of all workers", low=0)
    budget: int = setting(0, "samples of the whole run", low=0)
    global_batch: int = setting(0, "samples in a step of all workers", low=0)
    snapshots: int = setting(0, "that are due over the whole run", low=0)
    phase: int = setting(0, "of the strategy, from 0", low=0)
    begun_on: int = setting(0, "ranks by which the samples of a step count", low=0)
    history: tuple[Membership, ...] = ()  # the last one is of the ranks that wrote the checkpoint
    files: dict[str, str] = field(default_factory=dict)  # each rank's file -> SHA-256
    slots: tuple[int, ...] = ()  # by which the run's files know the ranks; empty: their own numbers
    speaker: int | None = None  # the worker whose state is the newest, in a step after a loss

    @property
    def first_worker(self) -> int:
        """The worker that stands for all: the speaker, else the first rank with data."""
        if self.speaker is not None:
            return self.speaker
        return next(r for r, role in enumerate(self.members) if role.startswith("worker"))

    @property
    def present(self) -> list[int]:
        """The ranks that were not lost: those with a file."""
        return [rank for rank, role in enumerate(self.members) if role != LOST]

    @property
    def each_can_resume(self) -> bool:
        """True if each member can resume from its own file: all have one, written at rest."""
        return self.speaker is None and LOST not in self.members

    def steps_by_slot(self, folder: Path, index: int) -> dict[int, int]:
        """Return the steps that each rank which was not lost had made at checkpoint `index`, of
        which this is the manifest, by the number that the run's files know it by."""
        slots = self.slots or range(len(self.members))
        return {slots[rank]: steps_of(folder, index, rank) for rank in self.present}

    @property
    def ranks(self) -> int:
        """The setting `ranks` of those who wrote it."""
        return self.history[-1].ranks


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


def read_manifest(folder: Path, index: int) -> Manifest:
    """Return the manifest of checkpoint `index`. Raises `DamagedCheckpoint`."""
    path = folder / f"{index:04d}" / MANIFEST
    try:
        content = json.loads(path.read_text())
        written = content.pop("format", 1)
        if written != FORMAT:
            raise DamagedCheckpoint(
                f"{path}: is of format {written}, and this version of orchestra reads {FORMAT}"
            )
        found: Manifest = from_plain(Manifest, content)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error
    names = [rank_file(rank) for rank in found.present]
    numbered = len(found.slots) in (0, len(found.members))
    if sorted(found.files) != sorted(names) or not (found.history and numbered):
        raise DamagedCheckpoint(f"{path}: its files are not those of its members")
    return found


def verify(folder: Path, index: int) -> Manifest:
    """Return the manifest of checkpoint `index`. Raise `DamagedCheckpoint` unless the files of all
    its members are as they were written, and there are no others."""
    place, manifest = folder / f"{index:04d}", read_manifest(folder, index)
    for name, expected in manifest.files.items():
        path = place / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path}: missing")
        if digest(path) != expected:
            raise DamagedCheckpoint(f"{path}: its checksum is not that of the manifest")
    for surplus in surplus_files(place, manifest):
        raise DamagedCheckpoint(f"{surplus}: the manifest names no such member")
    return manifest


def surplus_files(place: Path, manifest: Manifest) -> list[Path]:
    """Return the ranks' files in the folder of a checkpoint that `manifest` does not name."""
    there = {path.name for path in place.iterdir() if _RANK_FILE.fullmatch(path.name)}
    return [place / name for name in sorted(there - manifest.files.keys())]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest_whole(folder: Path) -> tuple[int, Manifest] | None:
    """Return the number and the manifest of the newest whole checkpoint in `folder`, if any."""
    for index in sorted(complete(folder), reverse=True):
        with suppress(DamagedCheckpoint, OSError):
            return index, verify(folder, index)
    return None


def steps_of(folder: Path, index: int, rank: int) -> int:
    """Return the steps that `rank` had made when checkpoint `index`, a whole one, was taken."""
    # The header of a file of safetensors: its length in 8 bytes, then JSON.
    with (folder / f"{index:04d}" / rank_file(rank)).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return int(json.loads(header["__metadata__"]["tree"])["position"]["steps"])
