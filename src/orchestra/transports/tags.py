"""The tags of all messages, in one place, so that no two purposes share one."""

from __future__ import annotations

import enum


class Tag(enum.IntEnum):
    """What a message between two flows is about."""

    GRADIENTS = 1
    AGREE = 2
    OBJECTS = 3
    BUFFERS = 4
    COLLECT = 5
    PARTS = 6
    CHECKPOINT = 7
    COUNT = 8
    BUCKET = 9
    DONE = 10
    COMPLETED = 11
    READY = 12

    # between workers and servers
    REQUEST = 16
    GRADIENT = 17
    ANSWER = 18
    VALUES = 19
    NORM = 20
