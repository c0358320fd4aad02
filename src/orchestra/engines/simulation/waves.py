"""The messages of an all-reduce's rounds as arrays: what each takes its sender, its way and its
receiver.

recurrence.py and alternation.py compute the times of all ranks from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from orchestra.cluster.costs import Cost, Overhead
from orchestra.engines.simulation.plan import HEADER, Plan
from orchestra.schedules import REDUCE

if TYPE_CHECKING:
    from orchestra.engines.simulation.streams import Stream
    from orchestra.engines.simulation.walk import Pair

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Wave:
    """The messages of a round that are the first of their runs, or the second, ...

    Attributes:
        first, rest: seconds of the sender until it is on its way, and then until it has left.
        take_in, adding: of the receiver, from its first byte on; and then to add it.
        held: the places of those that do not leave their sender free at once.
        rid: the places of those whose receiver adds them to what it sends itself in this round.
    """

    source: Integers
    target: Integers
    first: Floats
    rest: Floats
    latency: Floats
    cross: Floats
    take_in: Floats
    adding: Floats
    held: Integers
    rid: Integers


def waves_of(
    plan: Plan, overhead: Overhead, rates: Floats, streams: Mapping[Pair, Stream]
) -> list[list[Wave]]:
    """Those of each round of `plan` on `streams`, where rank i computes at `rates[i]`."""
    ways = _Ways(streams, len(rates))
    return [list(_waves(plan, transfers, overhead, rates, ways)) for transfers in plan.rounds]


class _Ways:
    """Latency and bandwidth of many pairs of ranks at once."""

    def __init__(self, streams: Mapping[Pair, Stream], ranks: int) -> None:
        self._ranks = ranks
        codes = np.array([source * ranks + target for source, target in streams])
        order = np.argsort(codes)
        self._codes = codes[order]
        self._latency = np.array([way.latency for way in streams.values()])[order]
        self._bandwidth = np.array([way.bandwidth for way in streams.values()])[order]

    def between(self, source: Integers, target: Integers) -> tuple[Floats, Floats]:
        """Seconds, and bytes/s."""
        places = np.searchsorted(self._codes, source * self._ranks + target)
        return self._latency[places], self._bandwidth[places]


def _waves(
    plan: Plan, transfers: Integers, overhead: Overhead, rates: Floats, ways: _Ways
) -> Iterator[Wave]:
    leaving = np.full((len(rates), 2), -1)
    leaving[transfers[:, 0]] = transfers[:, 2:4]
    first = overhead.send.at(0)
    for number in count():
        rows = transfers[transfers[:, 5] > number * plan.segment]
        if not len(rows):
            return
        source, target = rows[:, 0], rows[:, 1]
        elements = np.minimum(rows[:, 5] - number * plan.segment, plan.segment)
        payload = elements * plan.itemsize
        frame = payload + HEADER
        latency, bandwidth = ways.between(source, target)
        reduces = rows[:, 4] == REDUCE
        both_ways = (leaving[target] == rows[:, 2:4]).all(axis=1)
        yield Wave(
            source,
            target,
            first / rates[source],
            (costs_of(overhead.send, frame) - first) / rates[source],
            latency,
            frame * overhead.wire / bandwidth,
            costs_of(overhead.receive, frame) / rates[target],
            np.where(reduces, overhead.add * payload, 0.0) / rates[target],
            np.flatnonzero(frame > overhead.buffer_bytes),
            np.flatnonzero(reduces & both_ways),
        )


def costs_of(cost: Cost, amounts: Integers) -> Floats:
    """Of each of `amounts`, few of which differ."""
    distinct, places = np.unique(amounts, return_inverse=True)
    return np.array([cost.at(int(amount)) for amount in distinct])[places]
