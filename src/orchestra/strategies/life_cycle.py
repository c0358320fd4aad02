"""What begins and ends the phases of every strategy alike: to resume, to agree, to hand over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from orchestra import exchange, optimizers
from orchestra.settings.base import Mismatch
from orchestra.strategies.base import Replicas, Strategy
from orchestra.strategies.phased import Phased, current_roles, current_traits, innermost

if TYPE_CHECKING:
    from orchestra.worker.worker import Worker


def resume(strategy: Strategy[Any], worker: Worker, saved: Mapping[str, Any]) -> Any:
    """Start, then restore the state that a checkpoint kept; return it. Collective.

    Replicas may differ: each rank keeps the parameters and buffers that it has.

    Raises:
        Mismatch: `saved` does not fit, on some rank. No flow is left.
    """
    if isinstance(strategy, Phased):
        return strategy.resume(worker, saved)
    # Kept beside `start`, which gives everyone the first rank's parameters.
    put_back = worker.keep()
    state = strategy.start(worker)
    try:
        exchange.require_fit(worker, state, saved)
    except Mismatch:
        finish(strategy, worker, state)
        exchange.wait_for_everyone(worker)
        raise
    optimizers.restore(state, saved)
    put_back()
    # A flow in the background, as of a server beside a worker, answers whoever asks: nobody
    # does before what it answers from is restored.
    exchange.wait_for_everyone(worker)
    return state


def agree(strategy: Strategy[Any], worker: Worker, state: Any) -> None:
    """Make all ranks' parameters and buffers the model that was learnt, and go on from there.

    Collective, with nothing in flight.
    """
    phase, inner = innermost(strategy, state)
    weight = phase.buffers_weight(inner) if isinstance(phase, Replicas) else 1.0
    _take_consensus(strategy, worker, state)
    if _has_own_buffers(strategy, worker, state):
        exchange.exact_mean_of_buffers(worker, weight)


def finish(strategy: Strategy[Any], worker: Worker, state: Any) -> None:
    """End, and make all ranks' parameters the model that was learnt. Collective."""
    strategy.stop(worker, state)
    _take_consensus(strategy, worker, state)


def hand_over(
    strategy: Strategy[Any],
    worker: Worker,
    state: Any,
    moments: Literal["kept", "averaged", "reset"],
) -> None:
    """End, and leave the model, its buffers and the optimizer's moments to a next phase."""
    finish(strategy, worker, state)
    if _has_own_buffers(strategy, worker, state):
        exchange.exact_mean_of_buffers(worker)
    exchange.hand_over(worker, strategy.kept(worker, state), moments)


def restart(strategy: Strategy[Any], worker: Worker, state: Any, renew: Callable[[], None]) -> Any:
    """End, and start the current phase anew with what `renew` puts in place. Collective.

    For loaded parameters or moments: all ranks take those of the first rank.
    """
    if isinstance(strategy, Phased):
        state.inner = restart(strategy.phase(state), worker, state.inner, renew)
        return state
    finish(strategy, worker, state)
    renew()
    return strategy.start(worker)


def _take_consensus(strategy: Strategy[Any], worker: Worker, state: Any) -> None:
    tolerant = not current_traits(strategy, worker, state).lockstep
    exchange.take_consensus(worker, strategy.learnt(worker, state), tolerant=tolerant)
    strategy.rebase(worker, state)


def _has_own_buffers(strategy: Strategy[Any], worker: Worker, state: Any) -> bool:
    """Return whether each worker has buffers of its own, which are averaged at the end."""
    lockstep = current_traits(strategy, worker, state).lockstep
    return not lockstep and not current_roles(strategy, worker, state).servers
