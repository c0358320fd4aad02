"""The tags of all messages, in one place, so that no two purposes share one."""

from __future__ import annotations

import enum


class Tag(enum.IntEnum):
    """The purpose of a message between two flows."""

    GRADIENTS = 1
    AGREE = 2
    OBJECTS = 3
    BUFFERS = 4
    COLLECT = 5
    PARTS = 6
    CHECKPOINT = 7
    COUNT = 8
    MEAN = 9
    DONE = 10
    COMPLETED = 11
    READY = 12
    REPLICAS = 13
    NATIVE = 14
    CONNECT = 15  # the handshake of a new group, where time is virtual

    # between workers and servers
    REQUEST = 16
    GRADIENT = 17
    ANSWER = 18
    VALUES = 19
    NORM = 20
    BACKUP_GRADIENT = 21  # about the slice of another server, here and below
    BACKUP_ANSWER = 22
    BACKUP_VALUES = 23

    # all-reduce of a part of the workers, or of slices
    SHARDS = 24
    ARRIVED = 25
    CHOSEN = 26
    AVERAGE = 27

    # between replicas without a server
    MIX = 32
    PAIR = 33
    PAIR_VALUES = 34
    PAIR_MEAN = 35
    HAND_OVER = 36
    TAKEN = 37
    WORK_REQUEST = 38  # to the queue of batches, and from it: the number after that
    WORK = 39

    # between the stages of a pipeline
    ACTIVATION = 40
    ACTIVATION_GRADIENT = 41
    TIED = 42

    # memory that the workers of one host share
    SHARED = 45

    # of Hop: parameters, and the number of the iteration that a worker enters with them
    UPDATE = 43
    ITERATION = 44

    # averages in groups: to the generator of groups, from it, and inside a group
    GROUP_REQUEST = 48
    GROUP = 49
    GROUP_VALUES = 50

    # a fence: each level of nesting takes two numbers from here
    # Above all others, as it grows: level n takes FENCE + 2 n.
    FENCE = 64


_NAMES = {tag.value: tag.name.lower() for tag in Tag}


def tag_name(tag: int) -> str:
    """Return the name of a tag, or its number if it is not listed here."""
    return _NAMES.get(tag, str(tag))
