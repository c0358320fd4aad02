"""How many intra-op threads a rank computes with. Imports without torch."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

VARIABLE = "OMP_NUM_THREADS"
GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def allowed_cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def usable_cores() -> tuple[int, ...]:
    """Return as many of the allowed cores as this process can keep busy.

    A container's quota (`docker run --cpus 2`, a limit of Kubernetes) is rounded up. With a thread
    for each core of the host, all of them would stand still for most of each period.
    """
    cores, quota = allowed_cores(), cpu_quota()
    return cores if quota is None else cores[: math.ceil(quota)]


def cpu_quota() -> float | None:
    """Return how many cores the control groups of this process let it use, by version 1 or 2 of
    control groups; None where nothing limits it.
    """
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        mount = GROUPS / "cpu" if controllers else GROUPS
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be the host's, and only the mount itself be there
        folder = mount / group.lstrip("/")
        found += [_quota(each) for each in (folder, *folder.parents) if each.is_relative_to(mount)]
    return min((quota for quota in found if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    """Return the quota of one control group in cores; None if it has none."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((group / name).read_text() for name in names)
        # "max" and -1 stand for no limit
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None


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
