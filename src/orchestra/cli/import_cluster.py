"""`orchestra import`: the file of a cluster of a cloud's instances."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from orchestra.cluster.file import cluster_text
from orchestra.cluster.machines import cluster_of
from orchestra.errors import InputError
from orchestra.records.files import write_atomically


def main(options: Namespace) -> int:
    out: Path | None = options.out
    if out is not None and out.suffix not in (".yaml", ".yml"):
        raise InputError(f"--out {out}: is neither .yaml nor .yml")
    sources: list[str] = options.sources
    text = cluster_text(cluster_of(sources, "imported" if out is None else out.stem))
    if out is None:
        print(text, end="")
    else:
        write_atomically(out, f"# from {' '.join(sources)}\n{text}")
        print(out)
    return 0
