"""The costs of work, measured or assumed, and how far measured figures can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

from orchestra.cluster.units import BYTES, SECONDS, SECONDS_PER_BYTE, quantity
from orchestra.settings import REQUIRED, Settings, setting


@runtime_checkable
class Cost(Protocol):
    """Seconds over an amount."""

    def at(self, amount: float) -> float:
        """Return the seconds for `amount` units."""
        ...


@dataclass(frozen=True, repr=False)
class Line(Settings):
    """Seconds over an amount."""

    fixed: float = quantity(SECONDS, REQUIRED, "for each piece of work", low=0)
    each: float = quantity(SECONDS_PER_BYTE, REQUIRED, "for each unit in it", low=0)

    def at(self, amount: float) -> float:
        """Return the seconds for `amount` units."""
        return self.fixed + self.each * amount


@dataclass(frozen=True)
class Sharing:
    """How cores are shared when all compute at the same time, or when there are more threads
    than cores.

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


@dataclass(frozen=True, repr=False)
class MemoryCosts(Settings):
    """The costs of collectives in shared memory for each of their ranks, and of messages in shared
    memory for both ends, in processor seconds; `wake` is time that passes.

    The defaults are assumed, near what machines of two cores gave.
    """

    collective: float = quantity(SECONDS, 50e-6, "of a collective beside all else", low=0)
    barrier: float = quantity(SECONDS, 10e-6, "of a barrier, for each other rank", low=0)
    copy: float = quantity(SECONDS_PER_BYTE, 0.2e-9, "of a pass over a vector", low=0)
    wake: float = quantity(SECONDS, 30e-6, "from the last rank's coming until all go on", low=0)
    send: Cost | None = setting(
        None, "of a message's sender, over its bytes; none: all messages are those of sockets"
    )
    receive: Cost | None = setting(None, "of a message's receiver")


@dataclass(frozen=True, repr=False)
class Tcp(Settings):
    """The overhead of TCP on the links between nodes, besides the headers of `Overhead.wire`.

    Acknowledgements: one for every second full segment (RFC 5681, section 4.2): with timestamps, in
    Ethernet's frames, 90 bytes for 2 times 1,538. The first window: 10 segments (RFC 6928). The
    largest: Linux's `net.ipv4.tcp_wmem`. Shares by latency, and the queue: P. Velho et al., On the
    Validity of Flow-level TCP Network Models, ACM TOMACS 23(4), 2013, as in SimGrid. How unlike
    shares are beside that, and how much is taken in unread, was measured (docs/clusters.md); shares
    are even where no node has jitter.
    """

    acknowledgements: float = setting(
        0.029, "bytes of acknowledgements for each byte that goes the other way", low=0, high=1
    )
    first_window: float = quantity(
        BYTES, 14480, "in flight until the first acknowledgement", above=0
    )
    window: float = quantity(BYTES, 4 * 1024**2, "in flight on one connection at most", above=0)
    queue: float = quantity(
        BYTES, 20537, "at each link: shares go by 1 / (latency + queue / bandwidth)", low=0
    )
    unread: float = quantity(
        BYTES, 3e6, "that the kernel of a rank takes in on a connection while nobody reads", low=0
    )
    unfairness: float = setting(
        0.4, "standard deviation of the logarithm of a message's share of a link", low=0, high=5
    )


@dataclass(frozen=True, repr=False)
class Overhead(Settings):
    """The costs of messages besides the links that they cross, in processor seconds.

    `cold` is once for each step with messages: these and the gradient push each other out of the
    caches. `handling` is the strategy's own code around a message; in a collective there is none.
    """

    send: Cost = setting(REQUIRED, "of the sender, over the bytes of a message with its header")
    receive: Cost = setting(REQUIRED, "of the receiver")
    add: float = quantity(SECONDS_PER_BYTE, REQUIRED, "of adding what arrived to one's own", low=0)
    buffer: float = quantity(
        BYTES, REQUIRED, "of the kernel's: a sender is free once all others have crossed", low=0
    )
    wire: float = setting(
        REQUIRED, "bytes on a link between nodes for each byte of a message", low=1, high=1e3
    )
    local: Cost | None = setting(None, "of a message from a rank to itself; none: nothing")
    _: KW_ONLY
    cold: float = quantity(SECONDS, 0.0, "of a step with messages beside both alone", low=0)
    collective: float = quantity(SECONDS, 0.0, "of an all-reduce beside its messages", low=0)
    handling: float = quantity(
        SECONDS, 0.0, "of a message outside of collectives, at either end", low=0
    )
    in_memory: MemoryCosts = setting(MemoryCosts(), "of what is in shared memory")
    tcp: Tcp = setting(Tcp(), "what TCP takes of the links")

    def message(self, frame_bytes: int, near: bool = False) -> MessageCost:
        """Return the costs of a message of `frame_bytes` bytes, its header included.

        `near`: its ranks share memory.
        """
        send, receive = self.send, self.receive
        if near:
            send, receive = self.in_memory.send or send, self.in_memory.receive or receive
        # What a message without bytes costs is over before its first byte leaves
        first = send.at(0)
        # Measured costs may fall with the size, by chance; time must not go backward.
        rest = max(send.at(frame_bytes) - first, 0.0)
        return MessageCost(first, rest, receive.at(frame_bytes))

    def is_buffered(self, frame_bytes: int, near: bool = False) -> bool:
        """Return whether a sender is free at once, whatever the receiver does."""
        in_segment = near and self.in_memory.send is not None
        return in_segment or frame_bytes <= self.buffer


class MessageCost(NamedTuple):
    """The costs of one message.

    Attributes:
        send_setup: processor seconds of the sender until the first byte leaves.
        send_rest: processor seconds of the sender from then until the last byte has left.
        receiving: processor seconds of the receiver, from the arrival of the first byte on.
    """

    send_setup: float
    send_rest: float
    receiving: float


MAX_WAITED = 0.1
"""The most of the processor time that others may take from a measurement (decision 40)."""
MAX_SPREAD = 0.3
"""The largest spread of repeats that agree: half of their interquartile range over the median. With
this spread a simulation would draw jitter with a standard deviation of 0.44."""


@dataclass(frozen=True)
class Quality:
    """The conditions under which figures were measured.

    Attributes:
        measured_at: date and time, UTC.
        waited: the part of the processor time that the measurement wanted and other programs took;
            of several measurements the worst.
        spread: of the repeats, half of their interquartile range over the median: in the middle
            of all messages, or of a gradient of the batch that was asked for.
        repeats: how many measurements were made again because they had been disturbed.
        left_out: what there was no time for.
        kept_anyway: whether the figures are not to be trusted, and were kept because the user
            said so.
    """

    measured_at: str
    waited: float
    spread: float
    repeats: int = 0
    left_out: tuple[str, ...] = ()
    kept_anyway: bool = False

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the figures are not to be trusted; none where they are."""
        found = []
        if self.waited > MAX_WAITED:
            found.append(f"other programs took {self.waited:.0%} of the processor time")
        if self.spread > MAX_SPREAD:
            found.append(f"repeats differ by ±{self.spread:.0%}")
        return tuple(found)

    def __str__(self) -> str:
        again = f", {self.repeats} measured again" * (self.repeats > 0)
        text = f"waited {self.waited:.0%}, spread ±{self.spread:.0%}{again}"
        return text + ", kept anyway" * self.kept_anyway


def together(qualities: Sequence[Quality]) -> Quality:
    """Return the quality of figures that are used together: the worst of each, and the oldest
    date.
    """
    return Quality(
        measured_at=min(quality.measured_at for quality in qualities),
        # One doubtful figure makes a simulation doubtful
        waited=max(quality.waited for quality in qualities),
        spread=max(quality.spread for quality in qualities),
        repeats=sum(quality.repeats for quality in qualities),
        left_out=tuple(dict.fromkeys(what for q in qualities for what in q.left_out)),
        kept_anyway=any(quality.kept_anyway for quality in qualities),
    )


def marked(quality: Quality | None) -> Quality | None:
    """Return the quality with the mark that it was kept anyway, where there are doubts."""
    return replace(quality, kept_anyway=True) if quality and quality.doubts else quality
