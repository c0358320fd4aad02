"""An all-reduce before it runs: its messages, in numbers, for a vector of a given length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestra.collectives import executor
from orchestra.schedules import REDUCE, Schedule
from orchestra.transports.framing import header_bytes

Integers = NDArray[np.int64]

HEADER = header_bytes(1)


class Sends(NamedTuple):
    """A run of pieces that leaves for `target`, in messages of so many elements."""

    target: int
    run: tuple[int, int]
    elements: tuple[int, ...]


class Receives(NamedTuple):
    """A run of pieces that comes from `source`."""

    source: int
    run: tuple[int, int]
    elements: tuple[int, ...]
    reduces: bool


class Part(NamedTuple):
    """What one rank does in one round, as the executor does it."""

    sends: list[Sends]
    receives: list[Receives]


class Plan:
    """All messages of `schedule`, for a vector of `length` elements cut at `edges`.

    Ranks are numbered as in the schedule. A run of pieces that is empty makes no message; a long
    one makes several, as in collectives/executor.py.

    Attributes:
        rounds: of each round the transfers, shape [transfers, 6]: source, target, first, end,
            operation, elements.
        pairs: every (source, target) that there is a message for, with the bytes of all of them.
        segment: elements of the longest message.
        bytes_sent, messages_sent, bytes_received, messages_received, buffer_bytes: of each rank.
        added_slots_bytes: what each rank adds up at the end, beside what it added before.
    """

    def __init__(
        self, schedule: Schedule, length: int, edges: Sequence[int] | None, itemsize: int
    ) -> None:
        self.schedule = schedule
        self.itemsize = itemsize
        self.segment = executor.SEGMENT_BYTES // itemsize
        self.length = length
        self._slot_bytes = length * itemsize if schedule.slots else 0
        self.added_slots_bytes = self._slot_bytes * (schedule.ranks - 1)
        cuts = np.array(schedule.edges(length) if edges is None else edges)
        self.rounds = [_with_elements(transfers, cuts) for transfers in schedule.rounds()]
        every = np.concatenate(self.rounds)
        messages = -(-every[:, 5] // self.segment)
        wire = every[:, 5] * itemsize + messages * HEADER
        self.pairs = self._by_pair(every[:, 0] * schedule.ranks + every[:, 1], wire)
        self.messages_sent, self.bytes_sent = self._by(every[:, 0], messages, wire)
        self.messages_received, self.bytes_received = self._by(every[:, 1], messages, wire)
        self.buffer_bytes = self._buffers()
        self._parts: dict[int, dict[int, Part]] = {}

    def frame_bytes(self, elements: int) -> int:
        """Of a message with its header."""
        return elements * self.itemsize + HEADER

    def part(self, number: int, rank: int) -> Part | None:
        """What `rank` does in a round; None: nothing."""
        if number not in self._parts:
            parts: dict[int, Part] = defaultdict(lambda: Part([], []))
            for source, target, first, end, operation, count in self.rounds[number].tolist():
                run, elements = (first, end), self._messages(count)
                parts[source].sends.append(Sends(target, run, elements))
                parts[target].receives.append(Receives(source, run, elements, operation == REDUCE))
            self._parts[number] = dict(parts)
        return self._parts[number].get(rank)

    def _messages(self, elements: int) -> tuple[int, ...]:
        whole, rest = divmod(elements, self.segment)
        return (self.segment,) * whole + ((rest,) if rest else ())

    def _by_pair(self, pair: Integers, amount: Integers) -> dict[tuple[int, int], int]:
        """`amount`, summed by the pair that it goes between."""
        pairs, places = np.unique(pair, return_inverse=True)
        sums = np.zeros(len(pairs), np.int64)
        np.add.at(sums, places, amount)
        ends = (divmod(pair, self.schedule.ranks) for pair in pairs.tolist())
        return dict(zip(ends, sums.tolist(), strict=True))

    def _by(self, rank: Integers, *amounts: Integers) -> list[list[int]]:
        """Each of `amounts`, summed by the rank that it falls to."""
        sums = []
        for amount in amounts:
            each = np.zeros(self.schedule.ranks, np.int64)
            np.add.at(each, rank, amount)
            sums.append(each.tolist())
        return sums

    def _buffers(self) -> list[int]:
        """What the executor allocates beside the vector: all slots, or two messages a reduce."""
        ranks = self.schedule.ranks
        if self._slot_bytes:
            return [ranks * self._slot_bytes] * ranks
        peak = np.zeros(ranks, np.int64)
        for transfers in self.rounds:
            now, reduced = np.zeros(ranks, np.int64), transfers[transfers[:, 4] == REDUCE]
            scratch = np.minimum(reduced[:, 5], 2 * self.segment) * self.itemsize
            np.add.at(now, reduced[:, 1], scratch)
            peak = np.maximum(peak, now)
        buffers: list[int] = peak.tolist()
        return buffers


def _with_elements(transfers: Integers, edges: Integers) -> Integers:
    elements = edges[transfers[:, 3]] - edges[transfers[:, 2]]
    return np.column_stack([transfers, elements])[elements > 0]
