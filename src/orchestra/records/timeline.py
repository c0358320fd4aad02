"""What one rank did when: plain data, free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Message(NamedTuple):
    """Which message of a run: the `number`-th from `source` to `target` with this tag."""

    source: int
    target: int
    tag: int
    number: int


class Slice(NamedTuple):
    """Something that took from `start` to `end`, in seconds of the rank's clock.

    `category` is compute, send, receive, wait, native or step; `flow` the index of the flow that
    did it. A send and the receive of the same message have an equal `message`.
    """

    flow: int
    category: str
    name: str
    start: float
    end: float
    args: Mapping[str, Any]
    message: Message | None = None


class Instant(NamedTuple):
    """Something that happened at a moment; to the whole run, or to this rank only."""

    name: str
    at: float
    whole_run: bool = False


@dataclass(frozen=True)
class Timeline:
    """The windows of a run in which one rank wrote down what it did.

    Ranks whose `clock` is equal read the same clock; the stopwatch began at `began` on it. `flows`
    are the names of its threads of work, by index.
    """

    clock: str
    began: float
    flows: tuple[str, ...]
    slices: list[Slice] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
