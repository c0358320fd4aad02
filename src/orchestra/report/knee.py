"""From how many ranks on more of them are hardly worth what they cost."""

from __future__ import annotations

from collections.abc import Mapping


def knee(speeds: Mapping[int, float]) -> int | None:
    """The number of ranks with the most benefit for its cost; None where more may be better still.

    `speeds` are samples a second by number of ranks. The knee of the profile of execution time
    against efficiency (Eager, Zahorjan and Lazowska, "Speedup Versus Efficiency in Parallel
    Systems", IEEE Transactions on Computers 38(3), 1989) is where efficiency over time is largest,
    that is speed^2 / ranks. Twice as many ranks are past it where they are less than sqrt(2) times
    as fast; under Amdahl's law it lies where about half of each rank is used.
    """
    if len(speeds) < 2:
        return None
    best = max(sorted(speeds), key=lambda ranks: speeds[ranks] ** 2 / ranks)
    return best if best < max(speeds) else None


def efficiency(speeds: Mapping[int, float]) -> dict[int, float]:
    """By number of ranks, the speed of each rank as a part of that on the fewest ranks."""
    fewest = min(speeds)
    alone = speeds[fewest] / fewest
    return {ranks: speed / ranks / alone for ranks, speed in speeds.items()}
