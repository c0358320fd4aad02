"""When pushes become updates, and when pulls are answered: one class for each kind of server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from orchestra.parameter_server.state import Push


class Consistency(ABC):
    """Decides which pushes are applied now, and together, and which pulls may be answered yet."""

    tolerates_loss: ClassVar[bool] = True
    """The others can go on without a worker."""

    drops_late: ClassVar[bool] = False
    """A push for a step that is over is not applied."""

    bounds: ClassVar[bool] = False
    """A worker may have to wait for the slowest."""

    @abstractmethod
    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """Groups of workers whose pending pushes are to be applied now, each group as one update.

        `pending` holds the pushes by worker, in the order in which they came.
        """

    def may_answer(self, ahead: int) -> bool:
        """True if a worker that is `ahead` steps ahead of the slowest may go on."""
        return True


class Synchronous(Consistency):
    """One update a step, from the average over all workers that are still there."""

    tolerates_loss = False

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """All pending pushes together, once every live worker has pushed."""
        return [sorted(pending)] if pending and live <= pending.keys() else []


class FirstArrivals(Consistency):
    """One update a step, from the average of the first `count` pushes; later ones are dropped.

    The others are backup workers (Chen et al., 2016): nobody waits for the slowest of them.
    """

    drops_late = True

    def __init__(self, count: int) -> None:
        assert count > 0
        self.count = count

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """The first to arrive, in rank order; everybody where fewer are left."""
        needed = min(self.count, len(live))
        return [sorted(pending)] if pending and len(pending) >= needed else []


class Asynchronous(Consistency):
    """One update a push, on arrival."""

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """Each push alone."""
        return [[worker] for worker in sorted(pending)]


class Bounded(Asynchronous):
    """One update a push, on arrival; nobody is more than `staleness` steps ahead of the slowest.

    Stale synchronous parallel (Ho et al., NIPS 2013). Who reads with c steps behind it sees all
    pushes of steps up to c - staleness, of every worker, and its own. Where workers take batches
    from a queue, a step is a round of as many samples as all workers take together, in their global
    order: the bounded delay of Li et al. (OSDI 2014).
    """

    bounds = True

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness

    def may_answer(self, ahead: int) -> bool:
        """Once the slowest is near enough."""
        return ahead <= self.staleness
