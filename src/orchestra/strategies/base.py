"""The base classes of strategies, which are values: settings, roles, traits, and how to join.

A strategy object has no state, because all ranks of a simulation share it; `join` returns a member.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from orchestra import exchange, optimizers
from orchestra.errors import InputError
from orchestra.settings import Settings
from orchestra.settings.notation import LazyModule
from orchestra.strategies.traits import (
    Dealing,
    Footprint,
    Pace,
    Partition,
    Traits,
    WorkMode,
    combined,
)

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor, nn

    from orchestra.strategies.member import Member
    from orchestra.worker.layout import Share
    from orchestra.worker.worker import Worker
else:
    torch = LazyModule("torch")  # for all strategies, which are settings, and load without it


@dataclass(frozen=True)
class Roles:
    """The workers and servers of a run, for a number of ranks.

    `shares` has one entry for each process: its part of the data, in per-worker batches a step
    (0: a rank without data). `servers` are the ranks that own slices of the parameters. `reads`
    holds for each rank the rank whose part of the data it works on; if empty, each works on its
    own. If slices have `replicas`, the run survives the loss of a server.
    """

    shares: tuple[float, ...]
    servers: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    replicas: int = 0

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The ranks that have data."""
        return tuple(rank for rank in range(len(self.shares)) if self.shares[self.part(rank)] > 0)

    def part(self, rank: int) -> int:
        """The rank whose part of the data `rank` works on."""
        return self.reads[rank] if self.reads else rank

    @property
    def leader(self) -> int:
        """The rank that gathers and evaluates. The run cannot go on without it."""
        # With replicas any server may be lost: a worker has to stay, and gathers.
        if self.servers and not self.replicas:
            return self.servers[0]
        # A worker beside a server would be lost together with it
        return next(rank for rank in self.workers if rank not in self.servers)


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that one rank trains; its tensors have their names in the whole model."""

    module: nn.Module
    owned: frozenset[str]  # the tensors that snapshots and the final model take from this rank


@dataclass(frozen=True, repr=False)
class Strategy(Settings, ABC):
    """A distribution strategy, as a value: settings, and what follows from them."""

    use: ClassVar[str] = ""  # when to use it: a line of `orchestra list`
    # Notable settings of it, in the notation, each with when to use them
    variants: ClassVar[tuple[tuple[str, str], ...]] = ()

    def traits(self, work: WorkMode = "shared") -> Traits:
        """Return the traits of the strategy in a run with this setting of `work`. Pure."""
        return Traits(functools.partial(replica_memory, self))

    def roles(self, ranks: int) -> Roles:
        """Return the roles at the start.

        Raises:
            InputError: the strategy cannot run on `ranks` ranks.
        """
        return Roles((1.0,) * ranks)

    def place(
        self, module: nn.Module, loss_of: Callable[[nn.Module], Tensor], rank: int, ranks: int
    ) -> ModelPart | Share | None:
        """Return the stage or shard of `module` that `rank` holds; None if it holds all of it.

        Called before there is a `Worker`. Pure, so that all ranks agree. `loss_of` returns a
        model's loss on a few samples.
        """
        return None

    @abstractmethod
    def member(self, worker: Worker) -> Member[Any]:
        """Make this rank's end of the strategy, with the state that it begins with. Collective.

        What is under way between steps, such as connections and flows, begins with its `open`.
        """

    def join(
        self,
        worker: Worker,
        saved: Mapping[str, Any] | None = None,
        common: Mapping[str, Any] | None = None,
    ) -> Member[Any]:
        """Return this rank's end of the strategy, ready for a step. Collective.

        All begin with the parameters and buffers of the first rank. With `saved`, the state of this
        rank's member in a checkpoint, each goes on from the parameters and buffers that it has.
        With `common`, the state of another rank's, all begin with that part of it which any member
        could have kept.

        Raises:
            Mismatch: `saved` does not fit, on some rank. Nothing is open.
            InputError: the member is made from something that no checkpoint can keep.
        """
        if saved is None and self.traits().partition is Partition.REPLICATED:
            exchange.agree_on_parameters(worker)
        member = self.member(worker)
        require_keepable(member)
        if saved is not None:
            restore_state(worker, member, saved)
        elif common is not None:
            restore_state(worker, member, optimizers.common_of(member, common))
        worker.reporter.expendable(is_expendable(self, worker.rank, worker.budget_ranks))
        worker.survives_losses |= survives_losses(self, worker.budget_ranks)
        member.open(fresh=saved is None)
        return member


_roles_of: Callable[[Strategy, int], Roles] = lru_cache(256)(lambda each, n: each.roles(n))


def roles_of(strategy: Strategy, ranks: int) -> Roles:
    """Return `strategy.roles(ranks)`, cached because computing it takes a while for many ranks."""
    try:
        return _roles_of(strategy, ranks)
    except TypeError:  # a setting of it, such as a list, cannot be looked up
        return strategy.roles(ranks)


def refusal_of(strategy: Strategy, ranks: int) -> str | None:
    """Return why `strategy` cannot run on `ranks` ranks; None if it can."""
    try:
        strategy.roles(ranks)
    except InputError as error:
        return str(error)
    return None


def survives_losses(strategy: Strategy, ranks: int) -> bool:
    """Return whether the run can go on, in place, without some of its ranks."""
    roles = roles_of(strategy, ranks)
    # Without servers every replica is needed: what was learnt is their mean.
    return bool(roles.servers) and (roles.replicas > 0 or not strategy.traits().lockstep)


def is_expendable(strategy: Strategy, rank: int, ranks: int) -> bool:
    """Return whether the run can go on without `rank`."""
    roles = roles_of(strategy, ranks)
    if rank == roles.leader or not survives_losses(strategy, ranks):
        return False
    return roles.replicas > 0 if rank in roles.servers else not strategy.traits().lockstep


def state_of(member: Any) -> dict[str, Any]:
    """Return what a checkpoint keeps of `member`: all that it was made from."""
    made_from = [item.name for item in fields(member) if item.init]
    return {name: getattr(member, name) for name in made_from if name not in ("strategy", "worker")}


def require_keepable(member: Any) -> None:
    """Raise `InputError` if a checkpoint cannot keep a value that `member` was made from."""
    for name, value in state_of(member).items():
        if isinstance(value, torch.optim.Optimizer):
            continue  # any can be kept, and a user's has hooks on its state
        try:
            optimizers.capture(value)
        except AssertionError as error:
            raise InputError(
                f"{type(member).__name__}.{name}: {error}: make it in `open`, as field(init=False)"
            ) from None


def restore_state(worker: Worker, member: Any, saved: Mapping[str, Any]) -> None:
    """Collective over all ranks: let `member` go on from `saved`, what was captured of its state.

    Raises:
        Mismatch: it does not fit, on some rank.
    """
    state = state_of(member)
    exchange.require_fit(worker, state, saved)
    for name, value in state.items():
        if name in saved:
            setattr(member, name, optimizers.restore(value, saved[name]))


def replica_memory(strategy: Strategy, rank: int, ranks: int) -> Footprint:
    """Return the memory of a worker that trains a replica: a model and its optimizer."""
    roles = roles_of(strategy, ranks)
    return Footprint(batches=roles.shares[roles.part(rank)])


@dataclass(frozen=True, repr=False)
class Replicas(Strategy):
    """Each worker trains a replica of its own, and averages it with some or all others.

    The final parameters are the exact mean of the replicas.
    """

    def traits(self, work: WorkMode = "shared") -> Traits:
        """Return the traits of replicas that all count the same steps."""
        return Traits(self._memory, Pace.ROUNDS)

    def _free_traits(self, work: WorkMode) -> Traits:
        """Return the traits of replicas at their own pace. Over a plan all count the same steps."""
        if work == "shared":
            return Traits(self._memory, Pace.FREE, Dealing.QUEUE)
        return Traits(self._memory, Pace.ROUNDS, depends_on_speed=True)

    def _memory(self, rank: int, ranks: int) -> Footprint:
        return replica_memory(self, rank, ranks)


class Phased(Strategy):
    """A strategy whose steps are those of others, one after the other; see `Phases`."""

    @property
    @abstractmethod
    def phases(self) -> tuple[Strategy, ...]:
        """The strategies that may be under way."""

    def traits(self, work: WorkMode = "shared") -> Traits:
        return combined([phase.traits(work) for phase in self.phases])

    def member(self, worker: Worker) -> Member[Any]:
        raise AssertionError(f"{self!r} has phases, which are joined one by one")
