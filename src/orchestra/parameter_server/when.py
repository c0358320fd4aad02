"""WHEN a server applies pushes, and when it answers: one small class for each rule.

A rule is a value and decides from its arguments alone. `ServerState` asks it after each message.
Subclass `When` to add a rule; `ParameterServer(consistency=...)` takes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, Protocol

from orchestra.settings import MAX_RANKS, MAX_STEPS, Settings, setting

if TYPE_CHECKING:
    from orchestra.parameter_server.messages import Push

Groups = list[list["Push"]]

_by_worker = attrgetter("worker")

ON_ARRIVAL = "consistency='asynchronous', or 'bounded' with a staleness above 0"
"""The remedy where a rule needs a server that applies each push on arrival."""


class ServerSettings(Protocol):
    """What a rule may ask of the settings that it is combined with: those of `ParameterServer`."""

    @property
    def servers(self) -> int: ...

    @property
    def returns(self) -> str: ...

    @property
    def compression(self) -> object: ...

    @property
    def consistency(self) -> object: ...

    @property
    def averages(self) -> bool:
        """True if a step has one update, an average over workers."""


@dataclass(frozen=True, repr=False)
class When(Settings, ABC):
    """Decides which pushes the server applies now, and which workers it answers."""

    tolerates_loss: ClassVar[bool] = True
    """The other workers go on if one is lost."""

    averages: ClassVar[bool] = False
    """A step has one update, over workers that read the same values. Groups are averaged in any
    case."""

    drops_late: ClassVar[bool] = False
    """The server drops a push for a step that has been applied."""

    @property
    def lockstep(self) -> bool:
        """True if all workers take every step together."""
        return self.averages and not self.drops_late

    applies_singly: ClassVar[bool] = False
    """Each push is an update by itself, which comes before its answer."""

    waits_for_slowest: ClassVar[bool] = False
    """The server holds an answer back until `may_go` says that its worker may go on."""

    answers_on_arrival: ClassVar[bool] = False
    """The server answers a push when it arrives, although it may apply it later."""

    @abstractmethod
    def ready(self, pending: Sequence[Push], working: int) -> Groups:
        """Return the pushes to apply now, in groups: each group becomes one update.

        Args:
            pending: the pushes that have arrived and were not applied, in order of arrival. A
                worker has at most one of them, unless the rule `answers_on_arrival`.
            working: the number of workers that have not paused, finished or been lost. With 0
                all of `pending` has to be applied, since no further push comes.
        """

    def may_go(self, ahead: int) -> bool:
        """Return whether a worker that is `ahead` steps ahead of the slowest may go on."""
        return True

    def contradictions(self, given: ServerSettings, *, own_loop: bool = False) -> Iterator[str]:
        """Yield what of the `given` settings does not go with this rule: why, and the remedy.

        `own_loop`: a loop of the user's own drives the workers.
        """
        return iter(())


@dataclass(frozen=True, repr=False)
class Synchronous(When):
    """Apply the average over all workers, once a step."""

    tolerates_loss = False
    averages = True

    def ready(self, pending: Sequence[Push], working: int) -> Groups:
        """Return all pushes, once every worker has pushed."""
        return [sorted(pending, key=_by_worker)] if pending and len(pending) >= working else []


@dataclass(frozen=True, repr=False)
class FirstArrivals(When):
    """Apply the average of the first `count` pushes of a step; drop later ones.

    The other workers are backup workers (Chen et al., 2016): nobody waits for the slowest of them.
    """

    averages = True
    drops_late = True

    count: int = setting(1, "pushes that make a step", low=1, high=MAX_RANKS)

    def ready(self, pending: Sequence[Push], working: int) -> Groups:
        """Return the first pushes once there are `count`, or all workers have pushed."""
        enough = len(pending) >= min(self.count, working)
        return [sorted(pending, key=_by_worker)] if pending and enough else []

    def contradictions(self, given: ServerSettings, *, own_loop: bool = False) -> Iterator[str]:
        """Yield what does not go with backup workers."""
        if given.servers > 1 or given.returns == "gradients":
            yield (
                "backup needs servers=1 and returns='parameters': several servers would not drop "
                "the same gradients, and a late worker would miss updates"
            )
        if given.compression is not None:
            yield (
                "backup does not go with compression: what waits for a later step would count on "
                "gradients that are dropped"
            )
        if own_loop:
            yield (
                "backup needs orchestra's own loop (orchestra train): a late worker passes over "
                "batches, which a loop of your own cannot"
            )


@dataclass(frozen=True, repr=False)
class Asynchronous(When):
    """Apply each push on arrival."""

    applies_singly = True

    def ready(self, pending: Sequence[Push], working: int) -> Groups:
        """Return each push as a group of its own."""
        return [[push] for push in pending]


@dataclass(frozen=True, repr=False)
class Bounded(Asynchronous):
    """Apply each push on arrival; nobody is more than `staleness` steps ahead of the slowest.

    Stale synchronous parallel (Ho et al., NIPS 2013). A worker that reads after c steps sees all
    pushes of steps up to c - staleness, of every worker, and all of its own. If workers take
    batches from a queue, a step is a round: as many samples as all workers take together, in the
    global order (the bounded delay of Li et al., OSDI 2014).
    """

    waits_for_slowest = True

    staleness: int = setting(1, "steps a worker may be ahead of the slowest", low=0, high=MAX_STEPS)

    def may_go(self, ahead: int) -> bool:
        """Return whether `ahead` is within the bound."""
        return ahead <= self.staleness


@dataclass(frozen=True, repr=False)
class Buffered(When):
    """Apply the average of every `size` pushes, from any workers; no worker waits for others.

    FedBuff (Nguyen et al., AISTATS 2022), where K is `size`. The server answers a push at once,
    with the values as they are. Before a checkpoint, a change of phase and the end, it applies
    what is left in the buffer.
    """

    answers_on_arrival = True

    size: int = setting(2, "K: pushes that make an update", low=1, high=MAX_RANKS)

    def ready(self, pending: Sequence[Push], working: int) -> Groups:
        """Return groups of `size` pushes, and once nobody works also what is left."""
        end = len(pending) - (len(pending) % self.size if working else 0)
        return [list(pending[first : first + self.size]) for first in range(0, end, self.size)]
