"""Collectives by name, begun and waited for at once, among any group of ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orchestra.schedules import ALL_REDUCE, Schedule
from orchestra.schedules import broadcast as broadcast_schedule
from orchestra.transports.protocol import CollectiveCall, Group, Transport
from orchestra.transports.tags import Tag

__all__ = ["Group", "all_reduce", "broadcast", "execute", "gather_objects"]


@functools.cache
def _broadcast_schedule(ranks: int, root: int) -> Schedule:
    return broadcast_schedule(ranks, root)


def all_reduce(transport: Transport, vector: Tensor, algorithm: str, group: Group, tag: int) -> int:
    """Replace `vector` (flat, contiguous) by its sum over `group`, on every rank of it.

    Returns the bytes of buffer that this rank needed beside the vector.
    """
    return execute(transport, vector, ALL_REDUCE[algorithm](len(group)), group, tag)


def broadcast(transport: Transport, vector: Tensor, root: int, group: Group, tag: int) -> None:
    """Replace `vector` (flat, contiguous) by that of rank `root`, on every rank of `group`."""
    execute(transport, vector, _broadcast_schedule(len(group), group.index(root)), group, tag)


def execute(
    transport: Transport,
    vector: Tensor,
    schedule: Schedule,
    group: Group,
    tag: int,
    edges: Sequence[int] | None = None,
) -> int:
    """Begin `Transport.collective` and wait for it: the bytes of buffer used beside `vector`."""
    return transport.collective(CollectiveCall(schedule, vector, group, tag, edges)).wait()


def gather_objects(transport: Transport, value: Any, group: Group, root: int) -> Sequence[Any]:
    """Plain JSON data of every rank of `group`, in its order, on `root` (empty elsewhere)."""
    text = json.dumps(value).encode()
    if transport.rank != root:
        message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        transport.send(message, root, Tag.OBJECTS).wait()
        return ()
    gathered = []
    for rank in group.ranks:
        if rank == root:
            gathered.append(json.loads(text))
        else:
            message = transport.receive(rank, Tag.OBJECTS).wait()
            gathered.append(json.loads(message.numpy().tobytes()))
    return gathered
