"""How long work takes: straight lines over amounts, measured on some machine or assumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Cost(Protocol):
    """Seconds over an amount."""

    def at(self, amount: float) -> float:
        """Seconds for so many units."""
        ...


@dataclass(frozen=True)
class Line:
    """Seconds over an amount: `fixed` for each piece of work, and `each` for each unit in it."""

    fixed: float
    each: float

    def at(self, amount: float) -> float:
        """Seconds for so many units."""
        return self.fixed + self.each * amount


@dataclass(frozen=True)
class Sharing:
    """What becomes of cores that all compute at the same time, or are wanted by more threads.

    Attributes:
        speed: a core's while all compute, where it is 1 while one does.
        time_slice: seconds after which a thread gives way to one that waits; None: threads share
            the cores evenly at every instant.
        refill: seconds that a thread loses on a core that another one had before it: the caches
            hold what was the other's.
    """

    speed: float = 1.0
    time_slice: float | None = None
    refill: float = 0.0


EVENLY = Sharing()


@dataclass(frozen=True)
class Overhead:
    """What messages cost beside the links that they cross.

    Attributes:
        send: processor seconds of the sender, over the bytes of a message with its header.
        receive: the same of the receiver.
        add: seconds for each byte of what arrived and is added to the receiver's own.
        buffer_bytes: a message up to this size leaves its sender free at once.
        wire: bytes on a link for each byte of a message (Ethernet, IP and TCP have headers, too).
        local: processor seconds of a message from a rank to itself; None: nothing.
        cold: processor seconds more of a step with messages, once for each such step: gradient and
            messages push each other out of the caches.
        collective: processor seconds of an all-reduce beside its messages and additions.
    """

    send: Cost
    receive: Cost
    add: float
    buffer_bytes: int
    wire: float
    local: Cost | None = None
    cold: float = 0.0
    collective: float = 0.0

    def message(self, frame_bytes: int) -> MessageCost:
        """Of a message of so many bytes, its header included."""
        first = self.send.at(0)
        rest, taking_in = self.send.at(frame_bytes) - first, self.receive.at(frame_bytes)
        return MessageCost(first, rest, taking_in, frame_bytes * self.wire)


class MessageCost(NamedTuple):
    """What one message costs.

    Attributes:
        first: processor seconds of the sender until its first byte is on its way.
        rest: processor seconds of the sender until all of it has left.
        taking_in: processor seconds of the receiver, from the arrival of the first byte on.
        wire_bytes: bytes on each link that it crosses.
    """

    first: float
    rest: float
    taking_in: float
    wire_bytes: float
