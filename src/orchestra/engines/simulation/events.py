"""What is due when, in virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
Call = Callable[[], None]


class Timer:
    """A call that is due; it may be cancelled until then."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call: Call | None = call

    def cancel(self) -> None:
        """Let it pass without effect."""
        self._call = None

    def fire(self, _: object) -> None:
        """Make the call, unless it has been cancelled."""
        if self._call is not None:
            self._call()


class Events:
    """Calls in the order of their times, and of their making where these are equal."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._due: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._sequence = itertools.count()

    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now

    def at(self, time: float, call: Call) -> Timer:
        """Let `call` happen at `time`, after all that is already due then."""
        timer = Timer(call)
        self.call_at(time, timer.fire, None)
        return timer

    def call_at(self, time: float, call: Callable[[T], object], argument: T) -> None:
        """Like `at`, for `call(argument)`, which cannot be cancelled: cheaper, for each message."""
        assert time >= self._now, f"{time} lies before {self._now}"
        heapq.heappush(self._due, (time, next(self._sequence), call, argument))

    def after(self, seconds: float, call: Call) -> Timer:
        """Let `call` happen so many seconds from now."""
        return self.at(self._now + seconds, call)

    def run_until(self, until: float) -> None:
        """Make all calls that are due by the time `until`, which it is then."""
        while self._due and self._due[0][0] <= until:
            self._now, _, call, argument = heapq.heappop(self._due)
            call(argument)
        self._now = until

    def left(self) -> Iterator[tuple[float, Callable[[Any], object], Any]]:
        """What is still due, in its order: time, call and argument."""
        for time, _, call, argument in sorted(self._due, key=lambda due: due[:2]):
            yield time, call, argument
