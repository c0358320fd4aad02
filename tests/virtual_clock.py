"""A clock of virtual time for what needs no flows: calls in the order of (time, sequence)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf

Call = Callable[[], object]


class Due:
    """A call that is due."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call

    def cancel(self) -> None:
        self.call = None


class VirtualClock:
    """Virtual time, which passes in `run` alone.

    Attributes:
        events: how many calls have been carried out.
    """

    def __init__(self) -> None:
        self.events = 0
        self._now = 0.0
        self._sequence = 0
        self._due: list[tuple[float, int, Due]] = []

    def now(self) -> float:
        return self._now

    def at(self, time: float, call: Call) -> Due:
        assert time >= self._now, f"{time} lies before {self._now}"
        self._sequence += 1
        due = Due(call)
        heapq.heappush(self._due, (time, self._sequence, due))
        return due

    def after(self, seconds: float, call: Call) -> Due:
        return self.at(self._now + seconds, call)

    def run(self, until: float = inf) -> None:
        """Carry out all that is due up to `until`, and let it be that time, unless it is never."""
        due = self._due
        while due and due[0][0] <= until:
            self._now, _, entry = heapq.heappop(due)
            if entry.call is not None:
                self.events += 1
                entry.call()
        if until < inf:
            self._now = until
