"""Tensors that take seconds to make, kept in a folder of the user from one run to the next."""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from orchestra.records.layout import cache_folder

Tensors: TypeAlias = dict[str, Tensor]


def cached(name: str, make: Callable[[], Tensors]) -> Tensors:
    """What `make` gives, from the file `name` in the cache folder if a whole one is there.

    Otherwise it is made and kept there, by one process of those that ask at the same time; the
    others wait for it. A damaged file is replaced. Where the folder cannot be written, each
    process makes its own. The tensors are mapped from the file, so that processes share the
    memory; whatever is written to them stays with the writer.

    Args:
        name: names the content: other content needs another name.
        make: gives the tensors by name; CPU, contiguous.
    """
    try:
        path = cache_folder() / name
    except RuntimeError:
        return make()
    tensors = _read(path)
    if tensors is None:
        with _one_at_a_time(path):
            tensors = _read(path)
            if tensors is None:
                tensors = make()
                with suppress(OSError):
                    _write(path, tensors)
    return tensors


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Be alone among processes, where the folder of `path` can be written."""
    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> Tensors | None:
    """Return the tensors in `path`; None if it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            expected = (file.metadata() or {}).get("crc32")
            tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    return tensors if expected == _checksum(tensors) else None


def _write(path: Path, tensors: Tensors) -> None:
    """Write under another name first: a reader finds a whole file or none."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.write_bytes(save(tensors, {"crc32": _checksum(tensors)}))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _checksum(tensors: Tensors) -> str:
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(tensors[name].numpy().data, checksum)
    return f"{checksum:08x}"
