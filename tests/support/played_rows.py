"""Rows of schedules, played by the compiled executor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestra.schedules import Schedule
from orchestra.transports.executor import Plan, plan_of


def plan(schedule: Schedule, rank: int, memory: Tensor, edges: Sequence[int] | None = None) -> Plan:
    length = memory.numel() // schedule.pieces if schedule.slots else memory.numel()
    cuts = schedule.edges(length) if edges is None else tuple(edges)
    return plan_of(schedule, rank, cuts, memory.element_size())


def memory_before(schedule: Schedule, rank: int, vector: Tensor) -> Tensor:
    if not schedule.slots:
        return vector.clone()
    slots = vector.new_empty(schedule.pieces, vector.numel())
    slots[rank] = vector
    return slots.view(-1)


def random_vectors(count: int, length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    if dtype.is_floating_point or dtype.is_complex:
        exponents = torch.randint(-12, 12, (count, length), generator=generator)
        values = torch.randn((count, length), generator=generator, dtype=torch.float64)
        made = (values * 2.0**exponents).to(dtype)
        return list(made * (1 + 1j) if dtype.is_complex else made)
    return list(torch.randint(-(2**62), 2**62, (count, length), generator=generator).to(dtype))


def played(schedule: Schedule, vectors: Sequence[Tensor]) -> list[Tensor]:
    """What the rounds of `schedule` give, by torch."""
    memories = [memory_before(schedule, rank, each) for rank, each in enumerate(vectors)]
    edges = schedule.edges(vectors[0].numel())
    for transfers in schedule.rounds():
        before = [memory.clone() for memory in memories]
        for source, target, first, end, operation in transfers.tolist():
            part = slice(edges[first], edges[end])
            if operation == 0:
                memories[target][part].add_(before[source][part])
            else:
                memories[target][part] = before[source][part]
    return memories
