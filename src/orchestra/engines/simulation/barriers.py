"""Barriers in virtual time, of ranks that share memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from operator import itemgetter

from orchestra.engines.simulation.kernel import Call, Events


class Barriers:
    """Barriers in virtual time: who waits at one goes on when all have arrived."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._there: dict[Hashable, list[tuple[int, float, Call]]] = defaultdict(list)

    def arrive(
        self, key: Hashable, count: int, place: int, time: float, wake: float, then: Call
    ) -> None:
        """Let `place` wait from `time` on until `count` have arrived at the barrier `key`.

        All go on, in the order of their places, `wake` seconds after the last one's time.
        """
        there = self._there[key]
        there.append((place, time, then))
        if len(there) == count:
            del self._there[key]
            self._events.call_at(max(time for _, time, _ in there) + wake, _go_on, there)


def _go_on(there: list[tuple[int, float, Call]]) -> None:
    for _, _, then in sorted(there, key=itemgetter(0)):
        then()
