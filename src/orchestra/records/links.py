"""What the links of a simulated cluster carried: `links.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestra.errors import InputError
from orchestra.records.record import write_atomically

FILE = "links.json"
MOST = 32
"""Links that are listed; of the others only `tenths` tell."""
TENTHS = 10


@dataclass(frozen=True)
class Link:
    """One direction of a cable, the loopback of a node, or what a switch shares.

    Attributes:
        name: "worker-3 up".
        bandwidth: bytes/s.
        bytes: of messages that crossed it, payload and headers.
        share: of what it could have carried meanwhile, what the wire adds to messages included.
    """

    name: str
    bandwidth: float
    bytes: int
    share: float


@dataclass(frozen=True)
class Links:
    """All links that ranks could use.

    Attributes:
        seconds: on the stopwatch, in which that was.
        count: how many links there are.
        unused: how many carried nothing.
        tenths: how many carried less than a tenth of what they could have, how many from one to
            two tenths, and so on. The last includes a share of 1, and more: what was sent before
            the stopwatch stopped may have crossed later.
        busiest: the links with the largest shares, at most `MOST`.
    """

    seconds: float
    count: int
    unused: int
    tenths: Sequence[int]
    busiest: Sequence[Link]


def write_links(folder: Path, links: Links) -> None:
    """Write `links.json` into `folder`, whole or not at all."""
    write_atomically(folder / FILE, json.dumps(asdict(links), indent=1) + "\n")


def read_links(folder: Path) -> Links | None:
    """What stands in `links.json` of a run's folder; None where there is none.

    Raises:
        InputError: it is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        busiest = [Link(**link) for link in entry.pop("busiest")]
        return Links(**entry, busiest=busiest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is damaged: {error}") from None
