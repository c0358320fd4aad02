"""What strategies that train in phases have in common: they do as the phase under way does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from orchestra.strategies.base import Strategy

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.optimizers.spec import OptimizerPart
    from orchestra.worker.batches import Batch
    from orchestra.worker.worker import Worker


class PhaseState(Protocol):
    """`inner` is the state of the phase under way."""

    inner: Any


P = TypeVar("P", bound=PhaseState)


class Phased(Strategy[P]):
    """A strategy whose steps are those of another one, its phase under way."""

    @abstractmethod
    def phase(self, state: P) -> Strategy[Any]:
        """Return the phase under way, whose state is `state.inner`."""

    def under_way(self, state: P) -> Strategy[Any]:
        """Return the innermost phase under way."""
        return self.phase(state).under_way(state.inner)

    def before_forward(self, worker: Worker, state: P) -> None:
        self.phase(state).before_forward(worker, state.inner)

    def gradient(self, worker: Worker, state: P, batch: Batch | None) -> None:
        self.phase(state).gradient(worker, state.inner, batch)

    def reduce(self, worker: Worker, state: P) -> None:
        self.phase(state).reduce(worker, state.inner)

    def quiesce(self, worker: Worker, state: P, step: int) -> bool:
        return self.phase(state).quiesce(worker, state.inner, step)

    def agree(self, worker: Worker, state: P) -> None:
        self.phase(state).agree(worker, state.inner)

    def stop(self, worker: Worker, state: P) -> None:
        self.phase(state).stop(worker, state.inner)

    def restart(self, worker: Worker, state: P, renew: Callable[[], None]) -> P:
        state.inner = self.phase(state).restart(worker, state.inner, renew)
        return state

    def optimizer_of(self, state: P) -> Optimizer | None:
        return self.phase(state).optimizer_of(state.inner)

    def optimizer_parts(self, worker: Worker, state: P) -> list[OptimizerPart]:
        return self.phase(state).optimizer_parts(worker, state.inner)
