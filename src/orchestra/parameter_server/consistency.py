"""When pushes become updates, and when pulls are answered: one class for each kind of server.

Each answers two questions. Which pushes may be applied now, and together? May this worker's pull
be answered yet?
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from orchestra.parameter_server.state import Push


class Consistency(Protocol):
    """The two answers, and what follows from them.

    `tolerates_loss`: the others can go on without a worker. `drops_late`: a push for a step that
    is over is not applied.
    """

    tolerates_loss: bool
    drops_late: bool

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """Groups of workers whose pending pushes are to be applied now, each as one update.

        `pending` holds the pushes by worker, in the order in which they came.
        """
        ...

    def may_answer(self, clock: int, clocks: Mapping[int, int], live: frozenset[int]) -> bool:
        """Whether a worker that has step `clock` behind it may go on.

        `clocks` tells how far each worker is; only those in `live` are at work.
        """
        ...


class Synchronous:
    """One update a step, from the average over all workers that are still there."""

    tolerates_loss = False
    drops_late = False

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """All pending pushes together, once every live worker has pushed."""
        return [sorted(pending)] if pending and live <= pending.keys() else []

    def may_answer(self, clock: int, clocks: Mapping[int, int], live: frozenset[int]) -> bool:
        """At once: the update held everybody's gradient."""
        return True


class FirstArrivals:
    """One update a step, from the average of the first `count` pushes; later ones are dropped.

    The others are backup workers (Chen et al., 2016): nobody waits for the slowest of them.
    """

    tolerates_loss = True
    drops_late = True

    def __init__(self, count: int) -> None:
        assert count > 0
        self.count = count

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """The first to arrive, in rank order; everybody where fewer are left."""
        needed = min(self.count, len(live))
        return [sorted(pending)] if pending and len(pending) >= needed else []

    def may_answer(self, clock: int, clocks: Mapping[int, int], live: frozenset[int]) -> bool:
        """At once: whoever waits has its step behind it."""
        return True


class Asynchronous:
    """One update a push, on arrival."""

    tolerates_loss = True
    drops_late = False

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """Each push alone."""
        return [[worker] for worker in sorted(pending)]

    def may_answer(self, clock: int, clocks: Mapping[int, int], live: frozenset[int]) -> bool:
        """At once."""
        return True


class Bounded(Asynchronous):
    """One update a push, on arrival; nobody is more than `staleness` steps ahead of the slowest.

    Stale synchronous parallel (Ho et al., NIPS 2013). Who reads with c steps behind it sees all
    pushes of steps up to c - staleness, of every worker, and its own.
    """

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness

    def may_answer(self, clock: int, clocks: Mapping[int, int], live: frozenset[int]) -> bool:
        """Once the slowest of those at work is near enough."""
        return clock - min(clocks.get(worker, 0) for worker in live) <= self.staleness
