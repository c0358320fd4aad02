"""How many intra-op threads a rank computes with. Imports without torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

VARIABLE = "OMP_NUM_THREADS"


def usable_cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def shares_of_cores(usable: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """Return how many threads each rank gets, at least one.

    Each core is divided among the ranks that may use it. `usable` are host and cores of each rank.
    """
    users = Counter((host, core) for host, cores in usable for core in cores)
    return [
        # Exact fractions: ten float tenths add up to less than 1, and `int` would make 0 of it.
        max(1, int(sum((Fraction(1, users[host, core]) for core in cores), Fraction())))
        for host, cores in usable
    ]


def chosen_threads(environ: Mapping[str, str]) -> int | None:
    """Return what the user asks for with `OMP_NUM_THREADS` (its first number); None: nothing.

    torchrun sets it to 1 itself where it starts several processes and finds it unset. So a 1 in a
    process of torchrun is the user's only where torchrun was started with it.
    """
    first = environ.get(VARIABLE, "").partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        return None
    if first == "1" and "TORCHELASTIC_RUN_ID" in environ and not _parent_began_with(VARIABLE):
        return None
    return int(first)


def _parent_began_with(name: str) -> bool:
    """Return whether the parent process was started with this variable; True if not known."""
    try:
        # As it was when the process started: what torchrun has set since is not in it.
        entries = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return any(entry.startswith(f"{name}=".encode()) for entry in entries)
