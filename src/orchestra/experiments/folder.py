"""The folder of a run or a comparison: which one, and whose."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from orchestra.errors import InputError
from orchestra.experiments.experiment import Experiment
from orchestra.experiments.file import to_yaml
from orchestra.records.record import RunRecord, partial_of, read_summary, write_atomically
from orchestra.settings.yaml_text import yaml_value

RESOLVED = "experiment.yaml"
SUMMARY = "summary.json"
PARENT = Path("runs")


def fresh_folder(parent: Path, name: str) -> Path:
    """A new folder `name`-1, `name`-2, ... in `parent`, the first that does not exist."""
    for number in count(1):
        folder = parent / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not parent.is_dir():
                raise InputError(f"{parent}: is not a folder; choose another --out") from None
        except OSError as error:
            raise InputError(f"{folder}: cannot be made: {error.strerror}") from None
        else:
            return folder
    raise AssertionError("count() ends nowhere")


def claim(folder: Path, experiment: Experiment) -> bool:
    """Make `folder` that of `experiment`, which is written into it; whether it was so before.

    Raises:
        InputError: it belongs to a different experiment, holds other files, or cannot be written.
    """
    path = folder / RESOLVED
    text = to_yaml(experiment)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _require_same(path, path.read_text(encoding="utf-8"), text)
            return True
        if any(file != partial_of(path) for file in folder.iterdir()):
            raise InputError(f"{folder}: holds files, but no {RESOLVED}; choose another --out")
        write_atomically(path, text)
    except FileExistsError:
        raise InputError(f"{folder}: is not a folder; choose another --out") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{folder}: cannot be used: {_reason(error)}") from None
    return False


@contextmanager
def held(folder: Path, experiment: Experiment) -> Iterator[bool]:
    """`claim` the folder, and let no other process use it meanwhile; whether it was there before.

    A new folder in which nothing could be run, for bad input, is removed.

    Raises:
        InputError: as `claim` does, or another process uses it.
    """
    resumed = claim(folder, experiment)
    with _locked(folder):
        try:
            yield resumed
        except InputError:
            if not resumed:
                shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The lock is the kernel's, and ends with its holder, however that ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = _holder(os.fstat(descriptor).st_ino)
        os.close(descriptor)
        raise InputError(
            f"{folder}: {who} is using it; wait for its end, or choose another --out"
        ) from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(descriptor)


def _holder(inode: int) -> str:
    """The process that has locked a file, as far as it can be told."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5].endswith(f":{inode}") and int(words[4]) > 0:
                return f"process {words[4]}"
    return "another process"


def reclaim(folder: Path, experiment: Experiment) -> None:
    """`claim` for a folder inside a comparison's: what another experiment left there is removed."""
    path = folder / RESOLVED
    if folder.exists() and not (
        path.exists() and path.read_text(encoding="utf-8") == to_yaml(experiment)
    ):
        shutil.rmtree(folder)
    claim(folder, experiment)


def finished(folder: Path, *, failed: bool = False) -> list[RunRecord]:
    """The completed runs that `summary.json` in `folder` tells of; none where there is none yet.

    With `failed` the failed ones are among them.

    Raises:
        InputError: it is there, but damaged.
    """
    wanted = ("completed", "failed") if failed else ("completed",)
    try:
        records = read_summary(folder / SUMMARY)
    except FileNotFoundError:
        return []
    return [record for record in records if record.status in wanted]


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _require_same(path: Path, old_text: str, new_text: str) -> None:
    if old_text == new_text:
        return
    old, new = yaml_value(old_text), yaml_value(new_text)
    keys = ""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = ", ".join(key for key in {**new, **old} if new.get(key) != old.get(key))
    raise InputError(
        f"{path.parent}: holds a different experiment (in {keys or 'its form'}); "
        "choose another --out, or none for a new folder"
    )
