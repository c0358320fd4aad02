"""What a schedule means, in NumPy: for tests, and independent of the executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestra.schedules import REDUCE, Schedule

Vector = NDArray[Any]


def interpret(
    schedule: Schedule, vectors: Sequence[Vector], edges: Sequence[int] | None = None
) -> list[Vector]:
    """Every rank's vector after `schedule`; what it never received is NaN."""
    length = len(vectors[0])
    edges = schedule.edges(length) if edges is None else edges
    memories = memories_before(schedule, vectors)
    for transfers in schedule.rounds():
        before = [memory.copy() for memory in memories]
        for source, target, first, end, operation in transfers.tolist():
            part = slice(edges[first], edges[end])
            arrived = before[source][part]
            memories[target][part] = (
                memories[target][part] + arrived if operation == REDUCE else arrived
            )
    return [sum_of_slots(schedule, memory) for memory in memories]


def memories_before(schedule: Schedule, vectors: Sequence[Vector]) -> list[Vector]:
    """Return what each rank holds when `schedule` begins: a copy of its vector, or its slots."""
    if not schedule.slots:
        return [vector.copy() for vector in vectors]
    length = len(vectors[0])
    memories = [np.full(schedule.pieces * length, np.nan, v.dtype) for v in vectors]
    for rank, vector in enumerate(vectors):
        memories[rank][rank * length : (rank + 1) * length] = vector
    return memories


def sum_of_slots(schedule: Schedule, memory: Vector) -> Vector:
    if not schedule.slots:
        return memory
    slots = memory.reshape(schedule.pieces, len(memory) // schedule.pieces)
    total: Vector = slots[0].copy()
    for slot in slots[1:]:
        total += slot
    return total


def elements_sent(schedule: Schedule, length: int) -> NDArray[np.int64]:
    """How many elements each rank sends for a vector of `length`: shape [ranks]."""
    edges = np.array(schedule.edges(length), dtype=np.int64)
    sent = np.zeros(schedule.ranks, dtype=np.int64)
    for transfers in schedule.rounds():
        np.add.at(sent, transfers[:, 0], edges[transfers[:, 3]] - edges[transfers[:, 2]])
    return sent


def buffer_elements(schedule: Schedule, rank: int, length: int) -> int:
    """Elements of extra memory that `rank` needs beside its own vector of `length`."""
    if schedule.slots:
        return schedule.pieces * length if schedule.ranks > 1 else 0
    edges = np.array(schedule.edges(length), dtype=np.int64)
    peak = 0
    for transfers in schedule.rounds():
        mine = transfers[(transfers[:, 1] == rank) & (transfers[:, 4] == REDUCE)]
        peak = max(peak, int((edges[mine[:, 3]] - edges[mine[:, 2]]).sum()))
    return peak
