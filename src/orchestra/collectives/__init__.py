"""Collectives by name, among any group of ranks."""

from orchestra.collectives.operations import (
    all_reduce,
    broadcast,
    execute,
    gather_objects,
    receive_object,
    send_object,
)
from orchestra.transports.protocol import Group

__all__ = [
    "Group",
    "all_reduce",
    "broadcast",
    "execute",
    "gather_objects",
    "receive_object",
    "send_object",
]
