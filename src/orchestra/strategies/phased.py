"""Strategies that train in phases, each of which is another strategy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from orchestra.strategies.base import Roles, Strategy
from orchestra.strategies.member import Member
from orchestra.strategies.traits import Traits, WorkMode, combined

if TYPE_CHECKING:
    from orchestra.coordinator.batches import WorkSource
    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import Kept, Learnt
    from orchestra.parameter_server.messages import QuietPoint
    from orchestra.worker.batches import Batch
    from orchestra.worker.worker import Worker

P = TypeVar("P", bound="Phased")


class Phased(Strategy):
    """A strategy whose steps are those of another one, its phase under way."""

    @property
    @abstractmethod
    def phases(self) -> tuple[Strategy, ...]:
        """The strategies that may be under way."""

    @abstractmethod
    def resume(self, worker: Worker, saved: Mapping[str, Any]) -> Member[Any]:
        """Join in the phase that the checkpoint was taken in. Collective."""

    def traits(self, work: WorkMode = "shared") -> Traits:
        return combined([phase.traits(work) for phase in self.phases])


@dataclass(eq=False)
class PhasedMember(Member[P]):
    """A member that does what `inner`, the member of the phase under way, does."""

    # None until `join` has made it, because the inner `join` asks this member for a queue
    inner: Member[Any] = field(init=False, default=None)  # type: ignore[arg-type]

    def end_phase(self, level: int) -> None:
        """Begin the phase after the one that is over, the number `level` of nested ones.
        Collective, called when `work` has ended before the budget.
        """
        raise AssertionError(f"no queue ends a phase of {self.strategy!r}")

    @property
    def innermost(self) -> Member[Any]:
        return self.inner.innermost

    @property
    def roles(self) -> Roles:
        return self.inner.roles

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    @property
    def work(self) -> WorkSource | None:
        return self.inner.work

    def begin(self) -> None:
        self.inner.begin()

    def gradient(self, batch: Batch | None) -> None:
        self.inner.gradient(batch)

    def exchange(self) -> None:
        self.inner.exchange()

    def update(self) -> None:
        self.inner.update()

    def serve(self) -> QuietPoint | None:
        return self.inner.serve()

    def quiesce(self, rest: Rest) -> bool:
        return self.inner.quiesce(rest)

    def stop(self) -> None:
        self.inner.stop()

    def learnt(self) -> Iterable[Learnt]:
        return self.inner.learnt()

    def rebase(self) -> None:
        self.inner.rebase()

    def kept(self) -> Kept:
        return self.inner.kept()
