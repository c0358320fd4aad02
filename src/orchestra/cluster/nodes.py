"""The parts of a cluster: nodes, switches and the links between them."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass

from orchestra.cluster.jitter import DEFAULT, JITTER_MEANS, Drift, JitterSetting
from orchestra.cluster.units import BANDWIDTH, BYTES, FLOPS, SECONDS, quantity
from orchestra.errors import InputError
from orchestra.settings import REQUIRED, Settings, setting

MOST_CORES = 4096
"""Of a node, and devices: several times those of the largest machine."""

_NAME = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True, repr=False)
class Link(Settings):
    """One direction of a cable: what it carries each second, and how long a crossing takes."""

    bandwidth: float = quantity(BANDWIDTH, REQUIRED, "what it carries", above=0)
    latency: float = quantity(SECONDS, REQUIRED, "from one end to the other", low=0)


@dataclass(frozen=True)
class Channel:
    """A link with its name in a cluster ("worker-3 up"): a capacity that messages share.

    `bandwidth` in bytes/s, `latency` in seconds.
    """

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Path:
    """What a message crosses on its way, in order; `latency` in seconds is that of all together."""

    channels: tuple[Channel, ...]
    latency: float


@dataclass(frozen=True, repr=False)
class Switch(Settings):
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
        """A switch below another one has a link to it, in both directions."""
        _require_word(self.name)
        if self.to is None and (self.up or self.down):
            raise InputError(f"switch {self.name} has a link, but not to what; give to")
        if self.to is not None and not (self.up and self.down):
            raise InputError(f"switch {self.name} lacks a link to {self.to}; give up and down")


@dataclass(frozen=True, repr=False)
class Node(Settings):
    """A machine, which holds ranks."""

    name: str = setting(REQUIRED, "a word")
    cores: int = setting(REQUIRED, "processor cores", low=1, high=MOST_CORES)
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
        0, "accelerators; with any, ranks compute on them", low=0, high=MOST_CORES
    )
    jitter: JitterSetting = setting(DEFAULT, JITTER_MEANS)
    drift: Drift | None = setting(None, "how its speed changes slowly; none: not at all")
    switch: str | None = setting(None, "what its link leads to; none where it is the only node")
    up: Link | None = setting(None, "the link towards the switch")
    down: Link | None = setting(None, "the link back from the switch")
    loopback: Link = setting(REQUIRED, "between ranks of this node")

    def check(self) -> None:
        """Exactly one of speed and flops; a link in both directions, or none."""
        _require_word(self.name)
        if self.speed is None and self.flops is None:
            raise InputError(f"node {self.name} lacks a speed; give speed: 1 or flops: 1.5 TFLOP/s")
        if self.speed is not None and self.flops is not None:
            raise InputError(f"node {self.name} has both speed and flops; give one of them")
        if len({part is None for part in (self.switch, self.up, self.down)}) > 1:
            raise InputError(f"node {self.name} needs all of switch, up and down, or none of them")

    def speed_beside(self, flops: float) -> float:
        """Of a core (or a device), where one that does so many FLOP/s has 1."""
        if self.speed is not None:
            return self.speed
        assert self.flops is not None
        return self.flops / flops

    def threads(self, ranks: int, chosen: int | None = None) -> int:
        """Of each of `ranks` ranks here: its share of the cores, at least one; or as many as are
        `chosen`, and cores there. One on a device."""
        if self.devices:
            return 1
        return min(chosen or max(1, self.cores // ranks), self.cores)

    @property
    def slots(self) -> int:
        """Ranks that compute at full speed at the same time: one for each device, else core."""
        return self.devices or self.cores


def _require_word(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is no name; use letters, digits, '_', '-' and '.'")
