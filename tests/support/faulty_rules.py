"""Server rules of a user's own, each with one mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestra.parameter_server.how import Correction
from orchestra.parameter_server.messages import Push
from orchestra.parameter_server.when import When
from orchestra.settings import setting


@dataclass(frozen=True, repr=False)
class Seven(When):
    """Applies seven pushes, although there may never be as many."""

    def ready(self, pending: Sequence[Push], working: int) -> list[list[Push]]:
        return [list(pending)] if len(pending) >= 7 else []


@dataclass(frozen=True, repr=False)
class SevenOnArrival(Seven):
    """Seven as well, and nobody waits for it."""

    answers_on_arrival = True


@dataclass(frozen=True, repr=False)
class Returns(When):
    """Does not return groups."""

    what: str = setting("nothing", "what")

    def ready(self, pending: Sequence[Push], working: int) -> Any:
        return {
            "nothing": None,
            "pushes": list(pending),
            "twice": [list(pending), list(pending)],
            "empty": [list(pending), []],
        }[self.what]


@dataclass(frozen=True, repr=False)
class Forgets(Correction):
    """Does not return a divisor."""

    zero: bool = setting(False, "0 in place of nothing")

    def correct(self, *arguments: Any) -> Any:
        return 0.0 if self.zero else None
