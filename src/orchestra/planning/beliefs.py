"""What is believed of a candidate's time to the target, and what a further simulation gains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist, stdev
from typing import NamedTuple

from orchestra.planning.standing import OF_SEEDS, Reached

UNKNOWN, UNTRAINED, OF_SPEEDS = 0.7, 0.4, 0.03
"""Standard deviations of the logarithm of a time to the target: of a candidate without a speed, of
one that has learned nothing yet, and of a speed that was measured over a few steps."""
BEHIND = 0.5
"""By so much a candidate without a speed is expected to be behind the best, as a logarithm."""
UNLIKELY = 2.5
"""A candidate whose time is by so many standard deviations longer than the best is left out."""
NORMAL = NormalDist()


class Belief(NamedTuple):
    """What is thought of a time to the target: the logarithm of the seconds, and its deviation."""

    log: float
    deviation: float

    def is_hopeless(self, best: Belief | None) -> bool:
        """Return whether it is too far behind that of the best, if there is one."""
        if best is None:
            return False
        return self.log - best.log > UNLIKELY * math.hypot(self.deviation, best.deviation)


def spread_of(times: Mapping[int, Reached]) -> float:
    """Return the deviation of the logarithm of times over seeds. As a few seeds say little, an
    assumed deviation counts as two more of them."""
    logs = [math.log(each.seconds) for each in times.values()]
    own = stdev(logs) if len(logs) > 1 else 0.0
    return math.sqrt((2 * OF_SEEDS**2 + (len(logs) - 1) * own**2) / (1 + len(logs)))


def gain_of(behind: float, change: float) -> float:
    """Return the gain that is expected of a simulation, as a part of the time to the target.

    It is the knowledge gradient (Frazier, Powell and Dayanik, 2008): by how much the least of two
    beliefs falls in the mean, that are `behind` apart, if one of them changes by `change`.
    """
    if change <= 0 or math.isinf(behind):
        return 0.0
    z = -abs(behind) / change
    return change * (NORMAL.pdf(z) + z * NORMAL.cdf(z))


def fallen(before: float, after: float) -> float:
    """Return the deviation of what is learned where that of a belief falls."""
    return math.sqrt(max(before**2 - after**2, 0.0))
