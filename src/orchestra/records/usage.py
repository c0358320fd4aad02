"""What processes took of a machine's processors, and what other programs took meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NOTABLE = 0.1
"""Part of a machine's processor time that other programs took: from here on there is a warning."""
LEAST_SECONDS = 0.25
"""Shorter stretches tell nothing: the system counts processor time in hundredths of a second."""


@dataclass(frozen=True)
class Usage:
    """Processor seconds of a process and of its machine, over the same stretch of time.

    Attributes:
        machine: equal for processes of one machine.
        cores: those that the process may run on.
        passed: seconds on the clock.
        own: processor seconds of the process, all of its threads.
        busy: processor seconds of all programs on those cores, what a hypervisor gave to other
            machines included; None where the system does not tell.
    """

    machine: str
    cores: int
    passed: float
    own: float
    busy: float | None


def taken_by_others(usages: Sequence[Usage]) -> float | None:
    """How many cores other programs kept busy in the mean, beside the processes of `usages`,
    which ran on one machine at the same time; None where that is not known."""
    longest = max(usages, key=lambda usage: usage.passed, default=None)
    if longest is None or longest.busy is None or longest.passed < LEAST_SECONDS:
        return None
    own = sum(usage.own for usage in usages)
    return min(max(longest.busy - own, 0.0) / longest.passed, float(longest.cores))


def busy_with_others(usages: Iterable[Usage | None]) -> float | None:
    """The part of a machine's processor time that other programs took; the largest of all machines,
    None where it is known of none."""
    by_machine: dict[str, list[Usage]] = {}
    for usage in usages:
        if usage is not None:
            by_machine.setdefault(usage.machine, []).append(usage)
    known = [(taken_by_others(group), group[0].cores) for group in by_machine.values()]
    return max((taken / cores for taken, cores in known if taken is not None), default=None)
