"""What begins and ends the phases of every strategy alike: to resume, to agree, to hand over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from orchestra import exchange, optimizers
from orchestra.settings.base import Mismatch
from orchestra.strategies.phased import Phased, PhasedMember

if TYPE_CHECKING:
    from orchestra.strategies.base import Strategy
    from orchestra.strategies.member import Member
    from orchestra.worker.worker import Worker


def resume(strategy: Strategy, worker: Worker, saved: Mapping[str, Any]) -> Member[Any]:
    """Join, then restore what a checkpoint kept of the member; return it. Collective.

    Replicas may differ: each rank keeps the parameters and buffers that it has.

    Raises:
        Mismatch: `saved` does not fit, on some rank. No flow is left.
    """
    if isinstance(strategy, Phased):
        return strategy.resume(worker, saved)
    # Kept beside `join`, which gives everyone the first rank's parameters.
    put_back = worker.keep()
    member = strategy.join(worker)
    try:
        exchange.require_fit(worker, member, saved)
    except Mismatch:
        finish(member)
        exchange.wait_for_everyone(worker)
        raise
    optimizers.restore(member, saved)
    put_back()
    # A flow in the background, as of a server beside a worker, answers whoever asks: nobody
    # does before what it answers from is restored.
    exchange.wait_for_everyone(worker)
    return member


def agree(member: Member[Any]) -> None:
    """Make all ranks' parameters and buffers the model that was learnt, and go on from there.

    Collective, with nothing in flight.
    """
    weight = member.innermost.buffers_weight
    _take_consensus(member)
    if _has_own_buffers(member):
        exchange.exact_mean_of_buffers(member.worker, weight)


def finish(member: Member[Any]) -> None:
    """End, and make all ranks' parameters the model that was learnt. Collective."""
    member.stop()
    _take_consensus(member)


def hand_over(member: Member[Any], moments: Literal["kept", "averaged", "reset"]) -> None:
    """End, and leave the model, its buffers and the optimizer's moments to a next phase."""
    finish(member)
    if _has_own_buffers(member):
        exchange.exact_mean_of_buffers(member.worker)
    exchange.hand_over(member.worker, member.kept(), moments)


def restart(member: Member[Any], renew: Callable[[], None]) -> Member[Any]:
    """End, and join the current phase anew with what `renew` puts in place. Collective.

    For loaded parameters or moments: all ranks take those of the first rank.
    """
    if isinstance(member, PhasedMember):
        member.inner = restart(member.inner, renew)
        return member
    finish(member)
    renew()
    joined: Member[Any] = member.strategy.join(member.worker)
    return joined


def _take_consensus(member: Member[Any]) -> None:
    exchange.take_consensus(member.worker, member.learnt(), tolerant=not member.traits.lockstep)
    member.rebase()


def _has_own_buffers(member: Member[Any]) -> bool:
    """Return whether each worker has buffers of its own, which are averaged at the end."""
    return not member.traits.lockstep and not member.roles.servers
