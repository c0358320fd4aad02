"""Ranks of a loop of the user's own that may be lost, or join: processes of `elastic_loop.py`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.commands import Started
from tests.support.free_ports import free_port

SCRIPT = Path(__file__).with_name("elastic_loop.py")


@contextlib.contextmanager
def ranks(folder: Path, number: int, epochs: int = 4, **variables: str) -> Iterator[list[Started]]:
    """The script on so many ranks, which a launcher that looks after nobody has started."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **variables}
    command = [sys.executable, str(SCRIPT), str(folder), str(epochs)]
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(number):
            own = {"RANK": str(rank), "WORLD_SIZE": str(number), **common}
            started.append(stack.enter_context(Started(command, folder, own)))
        yield started


def written(folder: Path, rank: int) -> tuple[list[Any], list[Any]]:
    """What a rank has written after its steps, and after its epochs."""
    lines = [json.loads(line) for line in (folder / f"rank-{rank}").read_text().splitlines()]
    return [each for each in lines if len(each) == 3], [each for each in lines if len(each) == 4]


def join(folder: Path, epochs: int = 4, **variables: str) -> Started:
    """The script, as one rank more."""
    command = [sys.executable, str(SCRIPT), str(folder), str(epochs)]
    return Started(command, folder, {"ORCHESTRA_JOIN": str(folder / "join.json"), **variables})
