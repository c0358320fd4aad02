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
    REPLICAS = 13

    # between workers and servers
    REQUEST = 16
    GRADIENT = 17
    ANSWER = 18
    VALUES = 19
    NORM = 20


_NAMES = {tag.value: tag.name.lower() for tag in Tag}


def tag_name(tag: int) -> str:
    """What a tag is about, in a word; a tag that is not one of these as its number."""
    return _NAMES.get(tag, str(tag))
