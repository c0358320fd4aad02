"""The timelines that runs left: links to them, and copies inside the page while it is small."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from orchestra.report.rows import Row

ROOM = 3_000_000
"""The most characters that copies may add to a page."""


@dataclass(frozen=True)
class Traces:
    """The timelines of a row.

    `links` are their places, seen from the page, by seed. `copy` is the first of them in base64,
    None where it would have made the page too large.
    """

    name: str
    links: Mapping[int, str]
    copy: str | None = None


def traces(rows: Sequence[Row], page: Path) -> list[Traces]:
    """The timelines of the runs of `rows`, for a page in the folder `page`."""
    found = []
    room = ROOM
    for row in rows:
        paths = {run.record.seed: run.trace for run in row.runs if run.trace is not None}
        if not paths:
            continue
        links = {seed: Path(os.path.relpath(path, page)) for seed, path in paths.items()}
        copy = base64.b64encode(next(iter(paths.values())).read_bytes()).decode()
        fits = len(copy) <= room
        room -= len(copy) * fits
        places = {seed: quote(link.as_posix()) for seed, link in links.items()}
        found.append(Traces(row.name, places, copy if fits else None))
    return found
