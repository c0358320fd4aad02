"""What a run goes on from where ranks are lost or join: a state that all of them can have.

In lockstep the ranks that are left differ by one step at most, since none completes a step without
the contribution of all. Those that have completed it keep it; the others, which have contributed to
it, take it over from the first of these, and so do newcomers. Where replicas are averaged by
rounds, the same holds for the last average. Where they are never equal, all ranks go back to a
step whose state each has kept, and take the mean there.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestra import exchange
from orchestra.errors import GroupChanged, RunFailed
from orchestra.optimizers.state import common_of, restore
from orchestra.records.report import Regrouping
from orchestra.strategies.base import state_of
from orchestra.strategies.member import Member
from orchestra.trainer import checkpoints
from orchestra.worker.batches import map_tensors
from orchestra.worker.worker import Worker


class Retreat(ABC):
    """Where a rank goes back to when its group changes.

    `live` returns its state now, as `capture` gives it.
    """

    def __init__(self, worker: Worker, live: Callable[[], dict[str, Any]]) -> None:
        self._worker, self._live = worker, live
        self.under_way = False  # a step

    def begin(self) -> None:
        """A step begins.

        Raises:
            GroupChanged: the group is over. Some steps need no message, which would tell that.
        """
        if self._worker.reporter.group_is_over():
            raise GroupChanged()
        self.under_way = True

    def done(self) -> None:
        """The step has its result."""
        self.under_way = False

    def ended(self, made: int) -> None:  # noqa: B027
        """All that belongs to the last of `made` steps is done, what rules observe and the records
        included."""

    @abstractmethod
    def steps(self, made: int) -> int:
        """Return after how many steps the newest state is to which a rank can go back that has
        `made` so many."""

    @abstractmethod
    def state(self, steps: int) -> dict[str, Any]:
        """Go back to that after `steps` steps; return it. A step under way is void."""


class StepStart(Retreat):
    """In lockstep: the start of the step under way.

    Copied are buffers, the global random streams, and what compression keeps. Parameters and the
    optimizer's moments change with the update alone, which no loss interrupts.
    """

    def __init__(self, worker: Worker, live: Callable[[], dict[str, Any]]) -> None:
        super().__init__(worker, live)
        worker.steps_may_be_void = True
        self._buffers = [buffer.clone() for _, buffer in worker.buffers]
        self._streams: tuple[Any, ...] = ()

    def begin(self) -> None:
        super().begin()
        for kept, (_, buffer) in zip(self._buffers, self._worker.buffers, strict=True):
            kept.copy_(buffer)
        self._streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
        if torch.cuda.is_initialized():
            self._streams += (torch.cuda.get_rng_state(),)

    def done(self) -> None:
        super().done()
        self._worker.undo_exchange = Worker.undo_exchange

    def steps(self, made: int) -> int:
        return made

    def state(self, steps: int) -> dict[str, Any]:
        if self.under_way:
            self.under_way = False
            self._undo()
        return self._live()

    def _undo(self) -> None:
        self._worker.undo_exchange()
        with torch.no_grad():
            for kept, (_, buffer) in zip(self._buffers, self._worker.buffers, strict=True):
                buffer.copy_(kept)
        state, python, numbers, *cuda = self._streams
        torch.set_rng_state(state)
        random.setstate(python)
        np.random.set_state(numbers)
        for each in cuda:
            torch.cuda.set_rng_state(each)


class RoundStart(Retreat):
    """Where replicas are averaged by rounds: the last average of all, with a copy of everything."""

    def __init__(self, worker: Worker, live: Callable[[], dict[str, Any]]) -> None:
        super().__init__(worker, live)
        self._keep()

    def _keep(self) -> None:
        self._kept: dict[str, Any] = map_tensors(self._live(), Tensor.clone)

    def ended(self, made: int) -> None:
        if self._worker.step.agreed:
            self._keep()

    def steps(self, made: int) -> int:
        steps: int = self._kept["steps"]
        return steps

    def state(self, steps: int) -> dict[str, Any]:
        self.under_way = False
        return self._kept


class KeptSteps(Retreat):
    """Where replicas are never equal, but nothing is on its way between two steps: one of the last
    two copies of everything, which are made after as many steps on all ranks.

    Ranks may be a `round` of steps apart, and where they mix with neighbours alone, as many steps
    as there are links between them: no more than lie between two copies.
    """

    def __init__(self, worker: Worker, live: Callable[[], dict[str, Any]], round: int) -> None:
        super().__init__(worker, live)
        self._every = max(LEAST_STEPS, worker.runtime.ranks, round)
        self._copies = [self._copy()]

    def _copy(self) -> dict[str, Any]:
        copy: dict[str, Any] = map_tensors(self._live(), Tensor.clone)
        return copy

    def ended(self, made: int) -> None:
        if made % self._every == 0:
            self._copies = [self._copies[-1], self._copy()]

    def steps(self, made: int) -> int:
        steps: int = self._copies[-1]["steps"]
        return steps

    def state(self, steps: int) -> dict[str, Any]:
        self.under_way = False
        for copy in self._copies:
            if copy["steps"] == steps:
                return copy
        raise RunFailed(f"no copy is left of step {steps}, at which other ranks are")


class TakenOver(Retreat):
    """A state that this rank has just taken over from another, until it trains again."""

    def __init__(self, worker: Worker, state: dict[str, Any]) -> None:
        super().__init__(worker, lambda: state)

    def steps(self, made: int) -> int:
        steps: int = self._live()["steps"]
        return steps

    def state(self, steps: int) -> dict[str, Any]:
        return self._live()


@dataclass(frozen=True)
class NoticedChange:
    """What a rank knows of a change of its group when it notices that.

    It had begun `steps` steps. With the last of them, all ranks together would have consumed
    `samples` samples.
    """

    members: tuple[int, ...]
    noticed: float  # on the stopwatch
    began: float  # the same moment on this rank's clock
    steps: int
    samples: int

    def made(self, members: tuple[int, ...], steps: int, samples: int, now: float) -> Regrouping:
        """Return the change into the group of `members`, who go on after `steps` steps, and so many
        `samples`."""
        before, after = set(self.members), set(members)
        return Regrouping(
            tuple(sorted(before - after)), tuple(sorted(after - before)), len(members), steps,
            self.noticed, now - self.began, max(0, self.steps - steps),
            max(0, self.samples - samples),
        )  # fmt: skip


LEAST_STEPS = 16
"""Steps between two copies of a replica, at least."""
NO_STEPS = -1
"""The steps of a newcomer, which has no state of the run."""


@dataclass(frozen=True)
class GroupStanding:
    """Where this rank stands in its group, which goes on after `steps` steps.

    `donor` is the first rank that has the state there.
    """

    steps: int
    donor: int
    behind: frozenset[int]  # those that do not have it
    is_behind: bool

    @staticmethod
    def among(worker: Worker, steps: int, *, apart: bool) -> GroupStanding:
        """Collective over all ranks: compare the `steps` that each would go back to. They go back
        to the most, or where they are `apart` to the least.

        Raises:
            RunFailed: only newcomers are left.
        """
        made = [int(row[0]) for row in exchange.gather_numbers(worker, (steps,))]
        known = [each for each in made if each != NO_STEPS]
        if not known:
            raise RunFailed("all ranks that had the state of the run are lost")
        back = min(known) if apart else max(known)
        behind = frozenset(rank for rank, each in enumerate(made) if each < back)
        donor = next(rank for rank, each in enumerate(made) if each >= back)
        return GroupStanding(back, donor, behind, worker.rank in behind)

    def receive(self, worker: Worker) -> dict[str, Any]:
        """Return the state of the donor, as `give` sends it, on a rank that is behind."""
        state = checkpoints.receive_state(worker.transport, self.donor, {})
        # What has equal content comes as one tensor, and an optimizer changes its own in place.
        cloned: dict[str, Any] = map_tensors(state, Tensor.clone)
        return cloned

    def give(self, worker: Worker, member: Member[Any], state: Mapping[str, Any]) -> None:
        """On the donor, send `state`, as plain data, to those that are behind: without what its
        `member` keeps as a rank's own."""
        if worker.rank == self.donor and self.behind:
            learnt = [[each.offset, each.values.numel()] for each in member.kept().learnt]
            strategy = {**state["strategy"], "member": _shared(member, state)}
            for rank in sorted(self.behind):
                given = {**state, "strategy": strategy, "learnt": learnt}
                checkpoints.send_state(worker.transport, given, rank)


def _shared(member: Member[Any], own: Any) -> dict[str, Any]:
    """Return the part of the state of `member`, in `own`, that any rank goes on with."""
    state = own["strategy"]["member"]
    moments = {
        name: state[name]
        for name, value in state_of(member).items()
        if isinstance(value, torch.optim.Optimizer)
    }
    return {**common_of(member, state), **moments}


def take_mean(worker: Worker, member: Member[Any] | None, state: Mapping[str, Any]) -> None:
    """Collective over all ranks: let all take the mean of what their members have learnt, each in
    the `state` that it has gone back to.

    `member` is of the group before, `worker` of the new one. A newcomer has none, and has learnt
    nothing.
    """
    if member is None:
        zeros = worker.parameters.new_zeros
        learnt = [
            exchange.Learnt(offset, zeros(size), 0.0, summed=True)
            for offset, size in state["learnt"]
        ]
        exchange.take_consensus(worker, learnt, tolerant=False)
        exchange.exact_mean_of_buffers(worker, 0.0)
        return
    restore(member.worker.parameters, state["parameters"])
    for name, value in state_of(member).items():
        setattr(member, name, restore(value, state["strategy"]["member"][name]))
    for name, buffer in worker.buffers:
        restore(buffer, state["buffers"][name])
    kept = member.kept()
    exchange.take_consensus(worker, kept.learnt, tolerant=False)
    exchange.exact_mean_of_buffers(worker, kept.buffers_weight)


def take_moments(member: Member[Any], state: Any) -> None:
    """Let the optimizers of `member` go on with the moments in `state`."""
    for name, value in state_of(member).items():
        if isinstance(value, torch.optim.Optimizer):
            restore(value, state["strategy"]["member"][name])


def with_own(state: Any, own: Any) -> Any:
    """Return the `state` that a rank has taken over, completed by what its own member keeps."""
    member = _merged(own["strategy"]["member"], state["strategy"]["member"])
    return {**state, "strategy": {**state["strategy"], "member": member}}


def _merged(own: Any, other: Any) -> Any:
    """Return `own`, plain data, with all that `other` has of it in place."""
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        return {**own, **{name: _merged(own.get(name), other[name]) for name in other}}
    if isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        return [_merged(*pair) for pair in zip(own, other, strict=True)]
    return other
