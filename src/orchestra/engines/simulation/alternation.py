"""The times of exchanges in which a link carries now one pair's message, now another's.

In recursive halving and doubling each rank has another partner in each round. Its link up is used
by all of its own messages, and its link down by all that come to it. As long as no two of them are
on a link at a time, the times of a round follow from those of the round before, as in a ring
(recurrence.py). Whether they are is known once the times are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from orchestra.engines.simulation.plan import Plan
from orchestra.engines.simulation.waves import Floats, Wave, waves_of

if TYPE_CHECKING:
    from orchestra.cluster.costs import Overhead
    from orchestra.engines.simulation.streams import Stream
    from orchestra.engines.simulation.walk import Pair

EARLY = 1 - 1e-12
"""A message that begins so little before another one's end begins with it: sums are rounded."""


def alternates(plan: Plan, streams: Mapping[Pair, Stream]) -> bool:
    """Whether each rank sends to one other in a round and receives from one, and each link belongs
    to one sender or to one receiver."""
    for transfers in plan.rounds:
        for end in (transfers[:, 0], transfers[:, 1]):
            if len(np.unique(end)) < len(end):
                return False
    ends: dict[object, tuple[set[int], set[int]]] = {}
    for (source, target), stream in streams.items():
        for link in stream.resources:
            sources, targets = ends.setdefault(link, (set(), set()))
            sources.add(source)
            targets.add(target)
            if link.log is not None or min(len(sources), len(targets)) > 1:
                return False
    return True


class Alternation:
    """Of `plan` on `streams`, where rank i computes at `rates[i]`."""

    def __init__(
        self,
        plan: Plan,
        overhead: Overhead,
        rates: Sequence[float],
        streams: Mapping[Pair, Stream],
    ) -> None:
        by_rank = np.array(rates)
        self._rounds = waves_of(plan, overhead, by_rank, streams)
        self._last = overhead.add * plan.added_slots_bytes / by_rank

    def run(self, clock: Floats, up: Floats, down: Floats) -> tuple[Floats, Floats, Floats] | None:
        """When each rank is through that begins at `clock`, and until when its links are in use.

        Given until when they were before. None: two messages are on a link at a time.
        """
        clock, up, down = clock.copy(), up.copy(), down.copy()
        for waves in self._rounds:
            if not self._round(waves, clock, up, down):
                return None
        return clock + self._last, up, down

    def _round(self, waves: list[Wave], clock: Floats, up: Floats, down: Floats) -> bool:
        crossings = []
        gone = np.full_like(clock, -inf)
        for number, wave in enumerate(waves):
            source, target = wave.source, wave.target
            sent = clock[source] + wave.first
            clock[source] = left = sent + wave.rest
            began = sent + wave.latency
            if number:
                began = np.maximum(began, up[source])  # behind the one before, on the same way
            elif (began < np.maximum(up[source], down[target]) * EARLY).any():
                return False
            ended = np.maximum(began + wave.cross, left)
            up[source] = down[target] = ended
            own = np.full_like(clock, -inf)
            own[source[wave.held]] = ended[wave.held]
            gone = np.maximum(gone, own)
            crossings.append((began, ended, own))
        for wave, (began, ended, own) in zip(waves, crossings, strict=True):
            target = wave.target
            taken_in = np.maximum(np.maximum(clock[target], began) + wave.take_in, ended)
            taken_in[wave.rid] = np.maximum(taken_in[wave.rid], own[target[wave.rid]])
            clock[target] = taken_in + wave.adding
        np.maximum(clock, gone, out=clock)
        return True
