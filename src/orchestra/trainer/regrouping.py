"""What a run goes on from where ranks are lost or join: the most advanced state of its ranks.

In lockstep the ranks that are left differ by one step at most, since none completes a step without
the contribution of all. Those that have completed it keep it; the others, which have contributed to
it, take it over from the first of these, and so do newcomers. Where replicas are averaged by
rounds, the same holds for the last average.
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
from orchestra.optimizers.state import common_of
from orchestra.records.report import Regrouping
from orchestra.strategies.base import state_of
from orchestra.strategies.member import Member
from orchestra.trainer import checkpoints
from orchestra.worker.batches import map_tensors
from orchestra.worker.worker import Worker


class Retreat(ABC):
    """Where a rank goes back to when its group changes: a state that is equal on all ranks.

    `live` returns its state now, as `capture` gives it.
    """

    def __init__(self, worker: Worker, live: Callable[[], dict[str, Any]]) -> None:
        self._worker, self._live = worker, live
        self.under_way = False  # a step

    def begin(self) -> None:
        """A step begins."""
        self.under_way = True

    def done(self) -> None:
        """The step has its result."""
        self.under_way = False

    def ended(self) -> None:  # noqa: B027
        """All that belongs to the step is done, what rules observe and the records included."""

    @abstractmethod
    def steps(self, made: int) -> int:
        """Return after how many steps the state is to which a rank goes back that has `made` so
        many."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Go back; return the state. A step under way is void."""


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

    def state(self) -> dict[str, Any]:
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
    """Where replicas are averaged by rounds: the last average of all, with a copy of everything.

    Local steps need no message, so a rank asks before each of them whether its group is over.
    """

    def __init__(self, worker: Worker, live: Callable[[], dict[str, Any]]) -> None:
        super().__init__(worker, live)
        self._keep()

    def _keep(self) -> None:
        self._kept: dict[str, Any] = map_tensors(self._live(), Tensor.clone)

    def begin(self) -> None:
        if self._worker.reporter.group_is_over():
            raise GroupChanged("there is a new group")
        super().begin()

    def ended(self) -> None:
        if self._worker.step.agreed:
            self._keep()

    def steps(self, made: int) -> int:
        steps: int = self._kept["steps"]
        return steps

    def state(self) -> dict[str, Any]:
        self.under_way = False
        return self._kept


@dataclass(frozen=True)
class Change:
    """What a rank knows of a change of its group when it notices that.

    It would go back to where it had made `steps` steps; the steps from there on are `voided`, and
    their `samples` are to be dealt out again.
    """

    members: tuple[int, ...]
    noticed: float  # on the stopwatch
    began: float  # the same moment on this rank's clock
    steps: int
    voided: int
    samples: int

    def made(self, members: tuple[int, ...], steps: int, now: float) -> Regrouping:
        """Return the change into the group of `members`, who go on after `steps` steps."""
        before, after = set(self.members), set(members)
        # Else others have completed what was under way here.
        voided, again = (self.voided, self.samples) if steps == self.steps else (0, 0)
        return Regrouping(
            tuple(sorted(before - after)), tuple(sorted(after - before)), len(members), steps,
            self.noticed, now - self.began, voided, again,
        )  # fmt: skip


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
    def among(worker: Worker, steps: int) -> GroupStanding:
        """Collective over all ranks: compare the `steps` that each would go back to.

        Raises:
            RunFailed: only newcomers are left.
        """
        made = [int(row[0]) for row in exchange.gather_numbers(worker, (steps,))]
        most = max(made)
        if most == NO_STEPS:
            raise RunFailed("all ranks that had the state of the run are lost")
        behind = frozenset(rank for rank, each in enumerate(made) if each < most)
        return GroupStanding(most, made.index(most), behind, worker.rank in behind)

    def take_over(self, worker: Worker, member: Member[Any], own: Any) -> Any:
        """Collective over all ranks: return the state to go on from. `own` is that of this rank,
        as plain data, and of its `member`. Who takes it over keeps what is that rank's alone."""
        if self.is_behind:
            state = checkpoints.receive_state(worker.transport, self.donor, {})
            # What has equal content comes as one tensor, and an optimizer changes its own in place.
            return map_tensors(state, Tensor.clone)
        if worker.rank == self.donor:
            state = {**own, "strategy": {**own["strategy"], "member": _shared(member, own)}}
            for rank in sorted(self.behind):
                checkpoints.send_state(worker.transport, state, rank)
        return own


def _shared(member: Member[Any], own: Any) -> dict[str, Any]:
    """Return the part of the state of `member`, in `own`, that any rank goes on with."""
    state = own["strategy"]["member"]
    moments = {
        name: state[name]
        for name, value in state_of(member).items()
        if isinstance(value, torch.optim.Optimizer)
    }
    return {**common_of(member, state), **moments}


def with_own(state: Any, own: Any) -> Any:
    """Return the `state` that a rank has taken over, with what its member keeps beside that."""
    member = _merged(own["strategy"]["member"], state["strategy"]["member"])
    return {**state, "strategy": {**state["strategy"], "member": member}}


def _merged(own: Any, other: Any) -> Any:
    """Return `own`, plain data, with all that `other` has of it in place."""
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        return {**own, **{name: _merged(own.get(name), other[name]) for name in other}}
    if isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        return [_merged(*pair) for pair in zip(own, other, strict=True)]
    return other
