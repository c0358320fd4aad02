"""The traffic of the links of a cluster while a run trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

MAX_LINKS = 32  # the most links that are listed; the others are only counted in `tenths`
TENTHS = 10


@dataclass(frozen=True)
class LinkLoad:
    """One direction of a cable, the loopback of a node, or what a switch shares."""

    name: str
    bandwidth: float  # bytes/s
    bytes: int  # of the messages that crossed it, payload and headers
    share: float  # of what it could have carried, what the wire adds to messages included


@dataclass(frozen=True)
class Links:
    """All links that ranks could use, while the stopwatch ran: `seconds`.

    `tenths` counts those that carried less than a tenth of what they could have, from one to two
    tenths, and so on. The last includes a share of 1, and more: what was sent before the stopwatch
    stopped may have crossed later. `busiest` are at most `MAX_LINKS`.
    """

    seconds: float
    count: int
    unused: int
    tenths: Sequence[int]
    busiest: Sequence[LinkLoad]

    @classmethod
    def of(cls, seconds: float, links: Sequence[LinkLoad]) -> Self:
        """Sum up what each of `links` carried in `seconds`."""
        tenths = [0] * TENTHS
        for link in links:
            tenths[min(int(link.share * TENTHS), TENTHS - 1)] += 1
        # sorted() is stable: links of equal load stay in the order of the cluster
        busiest = sorted((link for link in links if link.bytes), key=lambda link: -link.share)
        unused = sum(not link.bytes for link in links)
        return cls(seconds, len(links), unused, tenths, busiest[:MAX_LINKS])
