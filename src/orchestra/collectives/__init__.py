"""Collectives by name, which are begun and waited for, among any group of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orchestra.schedules import ALL_REDUCE, Schedule
from orchestra.schedules import broadcast as broadcast_schedule
from orchestra.transports.protocol import CollectiveCall, Transport
from orchestra.transports.protocol import Group as Group
from orchestra.transports.tags import Tag


def all_reduce(transport: Transport, vector: Tensor, algorithm: str, group: Group, tag: int) -> int:
    """Replace `vector` (flat, contiguous) by its sum over `group`, on every rank of it.

    Returns the bytes of buffer that this rank needed in addition to the vector. For a group of one
    rank it does nothing.
    """
    if len(group) == 1:
        return 0
    return execute(transport, vector, ALL_REDUCE[algorithm](len(group)), group, tag)


def broadcast(transport: Transport, vector: Tensor, root: int, group: Group, tag: int) -> None:
    """Replace `vector` (flat, contiguous) by that of rank `root`, on every rank of `group`."""
    execute(transport, vector, broadcast_schedule(len(group), group.index(root)), group, tag)


def execute(
    transport: Transport,
    vector: Tensor,
    schedule: Schedule,
    group: Group,
    tag: int,
    edges: Sequence[int] | None = None,
) -> int:
    """Wait for a `Transport.collective`; return the bytes of buffer used beside `vector`."""
    return transport.collective(CollectiveCall(schedule, vector, group, tag, edges)).wait()


def send_object(transport: Transport, value: Any, to: int) -> None:
    """Send plain JSON data to the rank `to`, which calls `receive_object`."""
    # A bytearray, since torch warns of memory that cannot be written.
    message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    transport.send(message, to, Tag.OBJECTS).wait()


def receive_object(transport: Transport, source: int) -> Any:
    """Return what the rank `source` has sent with `send_object`."""
    return json.loads(transport.receive(source, Tag.OBJECTS).wait().numpy().tobytes())


def gather_objects(transport: Transport, value: Any, group: Group, root: int) -> Sequence[Any]:
    """Return on `root` the plain JSON data of all ranks of `group`, in order; else nothing."""
    if transport.rank != root:
        send_object(transport, value, root)
        return ()
    # As those of others arrive: a tuple has become a list.
    own = json.loads(json.dumps(value))
    return [own if rank == root else receive_object(transport, rank) for rank in group.ranks]
