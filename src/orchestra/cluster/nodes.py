"""The parts of a cluster: nodes and how their speed varies, switches, links, costs of messages."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, runtime_checkable

from orchestra.cluster.units import (
    BANDWIDTH,
    BYTES,
    FLOPS,
    SECONDS,
    SECONDS_PER_BYTE,
    quantity,
    read_price,
)
from orchestra.errors import InputError
from orchestra.settings import REQUIRED, Settings, setting

if TYPE_CHECKING:
    from numpy.random import Generator

MAX_CORES = 4096
"""The most cores or devices of a node: several times those of the largest machine."""

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_NORMAL = NormalDist()
_LEAST_UNIFORM = 2.0**-54  # `Generator.random` gives multiples of 2^-53, zero among them
_MAX_UNIFORM = 1 - 2.0**-53


@dataclass(frozen=True, repr=False)
class Jitter(Settings, ABC):
    """A factor on the duration of each piece of compute, drawn anew each time, always above 0."""

    @abstractmethod
    def factor(self, uniform: float) -> float:
        """Return the factor at the quantile `uniform`, between 0 and 1, both excluded."""

    @property
    def expectation(self) -> float:
        return 1.0

    def draw(self, generator: Generator) -> float:
        """Return a factor, from one uniform number of `generator`."""
        return self.factor(max(generator.random(), _LEAST_UNIFORM))


@dataclass(frozen=True, repr=False)
class Normal(Jitter):
    """A normal distribution around 1, cut off at 0.1 and 1.9: mean 1, factors from 0.1 to 1.9.

    Cut off evenly on both sides it keeps its mean; `sigma` is the deviation before that.
    """

    sigma: float = setting(0.05, "standard deviation, in durations", above=0, high=100)

    def factor(self, uniform: float) -> float:
        """Return the quantile of the truncated distribution, by the inverse of the whole one."""
        low, high = 0.1, 1.9
        # Both tails have this part of the distribution, so the mean stays 1
        first = _NORMAL.cdf((low - 1) / self.sigma)
        # Rounding may reach 1, which has no quantile.
        inside = min(first + uniform * (1 - 2 * first), _MAX_UNIFORM)
        # Rounding may leave the interval
        return min(max(1 + self.sigma * _NORMAL.inv_cdf(inside), low), high)


@dataclass(frozen=True, repr=False)
class LogNormal(Jitter):
    """exp of a normal distribution: mean 1, skewed towards long durations, any factor above 0."""

    sigma: float = setting(0.1, "standard deviation of the logarithm", above=0, high=5)

    def factor(self, uniform: float) -> float:
        """exp(sigma z - sigma^2 / 2), which has the mean 1."""
        # E exp(sigma z) = exp(sigma^2 / 2), so that the mean is 1
        return math.exp(self.sigma * _NORMAL.inv_cdf(uniform) - self.sigma**2 / 2)


@dataclass(frozen=True, repr=False)
class ExponentialTail(Jitter):
    """A duration and an exponential tail: factors from 1, their mean 1 + `mean`."""

    mean: float = setting(0.1, "mean of the tail, in durations", above=0, high=1e3)

    @property
    def expectation(self) -> float:
        return 1 + self.mean

    def factor(self, uniform: float) -> float:
        """1 - mean log(1 - uniform)."""
        return 1 - self.mean * math.log1p(-uniform)


DEFAULT: Final = "default"
"""In place of a jitter: the calibrated one, or `ASSUMED` if nothing was measured."""
ASSUMED = LogNormal(0.03)
"""Gradients on a core with nothing else to do deviated by 1.5 to 6 % in calibrations of a machine
with 2 cores (half of the interquartile range over the median, divided by 0.6745)."""
JitterSetting = Jitter | Literal["default"] | None
JITTER_MEANS = f"of the durations of compute; default: as calibrated, else {ASSUMED}; none: exact"


@dataclass(frozen=True, repr=False)
class Drift(Settings):
    """A slow change of speed: exp of an Ornstein-Uhlenbeck process, in its stationary state.

    The factor on durations is log-normal with mean 1 at any time, and the correlation of its
    logarithm over t seconds is exp(-t / time_constant). It changes ten times in a time constant.
    """

    sigma: float = setting(0.1, "standard deviation of the logarithm", above=0, high=5)
    time_constant: float = quantity(SECONDS, 60.0, "after which it is forgotten", low=0.01, above=0)

    def factors(self, generator: Generator) -> Callable[[float], float]:
        """Return the factor of one node over time, in seconds, from numbers of `generator`."""
        # The exact step of the process over a tenth of the time constant.
        keep = math.exp(-0.1)
        # Begins in the stationary state: nodes have drifted before the run, too
        states = [generator.standard_normal()]

        def factor(time: float) -> float:
            place = int(10 * time / self.time_constant)
            # As far as anybody has asked: the values do not depend on when they are asked for
            while len(states) <= place:
                new = math.sqrt(1 - keep**2) * generator.standard_normal()
                states.append(keep * states[-1] + new)
            return math.exp(self.sigma * states[place] - self.sigma**2 / 2)

        return factor


@dataclass(frozen=True, repr=False)
class Link(Settings):
    """One direction of a cable: what it carries each second, and how long a crossing takes."""

    bandwidth: float = quantity(BANDWIDTH, REQUIRED, "what it carries", above=0)
    latency: float = quantity(SECONDS, REQUIRED, "from one end to the other", low=0)


@dataclass(frozen=True)
class Channel:
    """A link with its name in a cluster ("worker-3 up"): a capacity that messages share."""

    name: str
    bandwidth: float  # bytes/s
    latency: float  # seconds


@dataclass(frozen=True)
class Path:
    """The channels that a message crosses, in order."""

    channels: tuple[Channel, ...]
    latency: float  # seconds, of all together


@dataclass(frozen=True, repr=False)
class NetworkSwitch(Settings):
    """Joins nodes and further switches; never the bottleneck itself, unless `shared` says so."""

    name: str = setting(REQUIRED, "a word")
    _: KW_ONLY
    to: str | None = setting(None, "the switch above; none for the one at the root")
    up: Link | None = setting(None, "the link towards `to`; none at the root")
    down: Link | None = setting(None, "the link back from `to`; none at the root")
    shared: float | None = quantity(
        BANDWIDTH, None, "what all its traffic shares, as on a radio channel; none: no limit",
        above=0,
    )  # fmt: skip

    def check(self) -> None:
        """Check that a switch below another one has a link to it, in both directions."""
        _require_word(self.name)
        if self.to is None and (self.up or self.down):
            raise InputError(f"switch {self.name} has a link, but not to what; give to")
        if self.to is not None and not (self.up and self.down):
            raise InputError(f"switch {self.name} lacks a link to {self.to}; give up and down")


@dataclass(frozen=True, repr=False)
class Node(Settings):
    """A machine, which holds ranks."""

    name: str = setting(REQUIRED, "a word")
    cores: int = setting(REQUIRED, "processor cores", low=1, high=MAX_CORES)
    _: KW_ONLY
    speed: float | None = setting(
        None,
        "of a core (or a device), where the machine that was calibrated has 1",
        above=0,
        high=1e9,
    )
    flops: float | None = quantity(
        FLOPS, None, "instead of speed: what a core (or a device) sustains", above=0
    )
    memory: float | None = quantity(
        BYTES, None, "of the node, or of each device if it has any; none: not known", above=0
    )
    devices: int = setting(
        0, "accelerators; with any, ranks compute on them", low=0, high=MAX_CORES
    )
    jitter: JitterSetting = setting(DEFAULT, JITTER_MEANS)
    drift: Drift | None = setting(None, "how its speed changes slowly; none: not at all")
    switch: str | None = setting(None, "what its link leads to; none where it is the only node")
    up: Link | None = setting(None, "the link towards the switch")
    down: Link | None = setting(None, "the link back from the switch")
    loopback: Link = setting(REQUIRED, "between ranks of this node")
    shared_memory: bool = setting(True, "whether its ranks carry out collectives in shared memory")
    price: str | None = setting(None, "of an hour, such as 3.06 USD/h; none: not known")
    watts: float | None = setting(
        None, "what it draws while it trains, in the mean; none: not known", above=0, high=1e9
    )

    def check(self) -> None:
        """Check for one of speed and flops, a link in both directions or none, and the price."""
        _require_word(self.name)
        if self.speed is None and self.flops is None:
            raise InputError(f"node {self.name} lacks a speed; give speed: 1 or flops: 1.5 TFLOP/s")
        if self.speed is not None and self.flops is not None:
            raise InputError(f"node {self.name} has both speed and flops; give one of them")
        if len({part is None for part in (self.switch, self.up, self.down)}) > 1:
            raise InputError(f"node {self.name} needs all of switch, up and down, or none of them")
        if self.price is not None:
            read_price(self.price, where="price")

    @property
    def currency(self) -> str | None:
        return None if self.price is None else read_price(self.price, where="price")[1]

    def speed_beside(self, flops: float) -> float:
        """Return the speed of a core (or a device), relative to one of `flops` FLOP/s."""
        if self.speed is not None:
            return self.speed
        assert self.flops is not None
        return self.flops / flops

    def threads(self, ranks: int, chosen: int | None = None) -> int:
        """Return the threads of each of `ranks` ranks on this node: its share of the cores, at
        least one, or `chosen`, up to the number of cores. A rank with a device has one.
        """
        if self.devices:
            return 1
        # The ranks of a node divide its cores among themselves, as on real processes.
        return min(chosen or max(1, self.cores // ranks), self.cores)

    @property
    def slots(self) -> int:
        """The ranks that compute at full speed at the same time: one a device, else one a core."""
        return self.devices or self.cores


def _require_word(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is no name; use letters, digits, '_', '-' and '.'")


# What messages cost


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
    """How cores are shared when all compute at once, or when there are more threads than cores."""

    speed: float = 1.0  # a core's while all compute, where it is 1 while one does
    # Seconds after which a thread gives way to one that waits; None: threads share the cores evenly
    # at every instant
    time_slice: float | None = None
    # Seconds that a thread loses on a core that another one had before it: the caches hold what was
    # the other's
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
class TransferCosts(Settings):
    """The costs of a transfer in a collective that does not go in shared memory, in processor
    seconds: compiled code moves it, and no message."""

    send: Cost | None = setting(
        None, "of its sender, over the bytes of a message; none: a transfer is a message"
    )
    receive: Cost | None = setting(None, "of its receiver")


@dataclass(frozen=True, repr=False)
class Tcp(Settings):
    """The overhead of TCP on the links between nodes, besides the headers of `Overhead.wire`.

    Acknowledgements: one for every second full segment (RFC 5681, section 4.2): with timestamps, in
    Ethernet's frames, 90 bytes for 2 times 1,538. The first window: 10 segments (RFC 6928). The
    largest: Linux's `net.ipv4.tcp_wmem`. Shares by latency, and the queue: P. Velho et al., On the
    Validity of Flow-level TCP Network Models, ACM TOMACS 23(4), 2013, as in SimGrid. `unfairness`
    was measured (docs/reference/clusters.md); shares are even where no node has jitter.
    """

    acknowledgements: float = setting(
        0.029, "bytes of acknowledgements for each byte that goes the other way", low=0, high=1
    )
    first_window: float = quantity(
        BYTES, 14480, "in flight until the first acknowledgement", above=0
    )
    window: float = quantity(BYTES, 4 * 1024**2, "in flight on one connection at most", above=0)
    queue: float = quantity(
        BYTES, 20537, "at a node's link: shares go by 1 / (latency + queue / bandwidth)", low=0
    )
    unfairness: float = setting(
        0.4, "standard deviation of the logarithm of a message's share of a link", low=0, high=5
    )


@dataclass(frozen=True, repr=False)
class Overhead(Settings):
    """The costs of messages besides the links that they cross, in processor seconds.

    `cold` is once for each step with messages: these and the gradient push each other out of the
    caches. `handling` is the strategy's own code around a message; a collective has no such code.
    """

    send: Cost = setting(REQUIRED, "of the sender, over the bytes of a message with its header")
    receive: Cost = setting(REQUIRED, "of the receiver")
    add: float = quantity(SECONDS_PER_BYTE, REQUIRED, "of adding what arrived to one's own", low=0)
    buffer: float = quantity(
        BYTES, REQUIRED, "up to which a message leaves its sender free at once", low=0
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
    transfers: TransferCosts = setting(TransferCosts(), "of a collective's transfers")
    tcp: Tcp = setting(Tcp(), "what TCP takes of the links")

    def message(self, frame_bytes: int, near: bool = False) -> MessageCost:
        """Return the costs of a message, its header included; `near`: its ranks share memory."""
        send, receive = self.send, self.receive
        in_segment = near and self.in_memory.send is not None
        if near:
            send, receive = self.in_memory.send or send, self.in_memory.receive or receive
        return self._cost(frame_bytes, send, receive, in_segment or frame_bytes <= self.buffer)

    def transfer(self, frame_bytes: int, near: bool = False) -> MessageCost:
        """Return the costs of a transfer of a collective, as of the message that it counts as."""
        send, receive = self.transfers.send, self.transfers.receive
        if send is None or receive is None:
            return self.message(frame_bytes, near)
        return self._cost(frame_bytes, send, receive, frame_bytes <= self.buffer)

    @staticmethod
    def _cost(frame_bytes: int, send: Cost, receive: Cost, is_buffered: bool) -> MessageCost:
        # What a message without bytes costs is over before its first byte leaves
        first = send.at(0)
        # Measured costs may fall with the size, by chance; time must not go backward.
        rest = max(send.at(frame_bytes) - first, 0.0)
        return MessageCost(first, rest, receive.at(frame_bytes), is_buffered)


class MessageCost(NamedTuple):
    """The costs of one message."""

    send_setup: float  # processor seconds of the sender until the first byte leaves
    send_rest: float  # processor seconds of the sender from then until the last byte has left
    receiving: float  # processor seconds of the receiver, from the arrival of the first byte on
    is_buffered: bool  # whether the sender is free at once, whatever the receiver does
