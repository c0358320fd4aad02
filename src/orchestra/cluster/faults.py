"""The faults of a cluster, and the ranks that join, in seconds since the beginning of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from orchestra.cluster.units import SECONDS, quantity
from orchestra.errors import InputError
from orchestra.settings import REQUIRED, Settings, setting

_RANK = re.compile(r"rank (\d+)")

Changes = tuple[tuple[float, float], ...]
"""Pairs (time, factor): a factor holds from its time to the next one; the first time is 0."""


@dataclass(frozen=True, repr=False)
class Fault(Settings):
    """Something that happens at a time. Base of all faults."""

    WORDS: ClassVar[str]
    """The format of `words`: `self` is the fault; `at` and `seconds` are texts with their units."""

    @property
    def words(self) -> str:
        """The fault and its time in a few words: "dies at 90 s"."""
        times = ((name, getattr(self, name, None)) for name in ("at", "seconds"))
        texts = {name: SECONDS.write(time) for name, time in times if time is not None}
        return self.WORDS.format(self=self, **texts)

    @property
    def names(self) -> list[str]:
        """The nodes, switches and ranks ("rank 2") that it names."""
        values = (getattr(self, name, None) for name in ("of", "node", "source", "target"))
        return [value for value in values if value is not None]


@dataclass(frozen=True, repr=False)
class Lasting(Fault):
    """A fault that begins and may end."""

    _: KW_ONLY
    at: float = quantity(SECONDS, REQUIRED, "its beginning", low=0)
    until: float | None = quantity(SECONDS, None, "its end; none: it stays", low=0)

    def check(self) -> None:
        """Check that it ends after it begins."""
        if self.until is not None and self.until <= self.at:
            ends, begins = SECONDS.write(self.until), SECONDS.write(self.at)
            raise InputError(
                f"{type(self).__name__} ends at {ends}, not after it begins at {begins}"
            )

    def holds(self, time: float) -> bool:
        """Return whether it is there at `time`."""
        return self.at <= time < (math.inf if self.until is None else self.until)

    @property
    def span(self) -> str:
        """The time from its beginning to its end, in words."""
        begin = SECONDS.write(self.at)
        return f"from {begin}" if self.until is None else f"{begin} to {SECONDS.write(self.until)}"


@dataclass(frozen=True, repr=False)
class SlowDown(Lasting):
    """A node computes more slowly: each piece of compute takes `factor` times as long."""

    WORDS: ClassVar = "{self.factor:g}x slower {self.span}"
    node: str = setting(REQUIRED, "name of the node")
    factor: float = setting(REQUIRED, "how many times as long", above=1, high=1e9)


@dataclass(frozen=True, repr=False)
class LinkSlow(Lasting):
    """A link carries less, in both directions: its bandwidth divided by `factor`."""

    WORDS: ClassVar = "link {self.factor:g}x slower {self.span}"
    of: str = setting(REQUIRED, "name of the node or switch, whose link upwards it is")
    factor: float = setting(REQUIRED, "what the bandwidth is divided by", above=1, high=1e9)


@dataclass(frozen=True, repr=False)
class LinkCut(Lasting):
    """Nothing passes a link, in both directions; what is under way continues after its end."""

    WORDS: ClassVar = "link cut {self.span}"
    of: str = setting(REQUIRED, "name of the node or switch, whose link upwards it is")


@dataclass(frozen=True, repr=False)
class Delay(Lasting):
    """Messages that are sent meanwhile arrive later; the way is free for others in the meantime."""

    WORDS: ClassVar = "messages {self.ends}{seconds} late {self.span}"
    seconds: float = quantity(SECONDS, REQUIRED, "how much later", above=0)
    source: str | None = setting(None, "from this node or rank alone ('rank 2'); none: from any")
    target: str | None = setting(None, "to this node or rank alone; none: to any")

    def check(self) -> None:
        """Check that some messages are meant, not all: a delay of all would be a latency."""
        super().check()
        if self.source is None and self.target is None:
            raise InputError("Delay has neither source nor target; name a node or a rank")

    @property
    def ends(self) -> str:
        """The ends of the messages that it concerns, as text for `words`."""
        return f"from {self.source} " * bool(self.source) + f"to {self.target} " * bool(self.target)


@dataclass(frozen=True, repr=False)
class Pause(Fault):
    """A rank, or every rank of a node, is stopped for a while, as by SIGSTOP, and continues."""

    WORDS: ClassVar = "paused {seconds} at {at}"
    of: str = setting(REQUIRED, "name of the node, or 'rank 2'")
    _: KW_ONLY
    at: float = quantity(SECONDS, REQUIRED, "when it stops", low=0)
    seconds: float = quantity(SECONDS, REQUIRED, "how long it stands still", above=0)


@dataclass(frozen=True, repr=False)
class Death(Fault):
    """A rank, or every rank of a node, ends without a farewell, as by SIGKILL, for good."""

    WORDS: ClassVar = "dies at {at}"
    of: str = setting(REQUIRED, "name of the node, or 'rank 2'")
    _: KW_ONLY
    at: float = quantity(SECONDS, REQUIRED, "when it dies", low=0)


@dataclass(frozen=True, repr=False)
class Join(Fault):
    """A further rank joins the run, as by `orchestra join`; a spare one, once a rank is lost."""

    WORDS: ClassVar = "{self.role} {at}"
    node: str = setting(REQUIRED, "name of the node that it is on")
    _: KW_ONLY
    at: float = quantity(SECONDS, REQUIRED, "when it is ready", low=0)
    spare: bool = setting(False, "whether it waits until a rank is lost")

    @property
    def role(self) -> str:
        """The beginning of its `words`."""
        return "a spare from" if self.spare else "a rank joins at"


FAULTS: dict[str, type[Fault]] = {
    cls.__name__: cls for cls in (SlowDown, Pause, Death, LinkCut, LinkSlow, Delay, Join)
}


def rank_of(name: str) -> int | None:
    """Return the rank that a name such as "rank 2" means; None for the name of a node."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match else None


def changes(faults: Iterable[tuple[Lasting, float]]) -> Changes:
    """Return the product of the factors of the faults that hold, from each time it changes on."""
    pairs = list(faults)
    times = {0.0, *(fault.at for fault, _ in pairs)}
    times |= {fault.until for fault, _ in pairs if fault.until is not None}
    found: list[tuple[float, float]] = []
    for time in sorted(times):
        factor = math.prod(factor for fault, factor in pairs if fault.holds(time))
        # Each change is an event of the simulation, which shares out links and cores anew.
        if not found or found[-1][1] != factor:
            found.append((time, factor))
    return tuple(found)


def joined(spans: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the times that `spans` cover, as (from, to) that neither overlap nor touch, rising."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return tuple(found)
