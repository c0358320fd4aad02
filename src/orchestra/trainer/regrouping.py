"""What a run goes on from where ranks were lost: the most advanced state of those that are left.

In lockstep the ranks that are left differ by one step at most, since none completes a step without
the contribution of all. Those that have completed it keep it; the others, which have contributed to
it, take it over from the first of these.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from orchestra import exchange
from orchestra.optimizers.state import common_of
from orchestra.strategies.base import state_of
from orchestra.strategies.member import Member
from orchestra.trainer import checkpoints
from orchestra.worker.worker import Worker


class StepStart:
    """What a step changes before its update: buffers, the global random streams, and what
    compression keeps.

    Parameters and the optimizer's moments change with the update alone, which no loss interrupts.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        worker.steps_may_be_void = True
        self._buffers = [buffer.clone() for _, buffer in worker.buffers]
        self._streams: tuple[Any, ...] = ()
        self.under_way = False

    def note(self) -> None:
        """Keep what there is now; a step begins."""
        self.under_way = True
        for kept, (_, buffer) in zip(self._buffers, self._worker.buffers, strict=True):
            kept.copy_(buffer)
        self._streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
        if torch.cuda.is_initialized():
            self._streams += (torch.cuda.get_rng_state(),)

    def done(self) -> None:
        """The step has its result."""
        self.under_way = False
        self._worker.undo_exchange = Worker.undo_exchange

    def undo(self) -> None:
        """Go back to where the step under way began, if one is: it has no result."""
        if not self.under_way:
            return
        self.under_way = False
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


@dataclass(frozen=True)
class GroupStanding:
    """Where this rank stands among those that are left, which have made `steps` steps at most.

    `donor` is the first one that has.
    """

    steps: int
    donor: int
    behind: frozenset[int]  # those that have not completed the last of these steps
    is_behind: bool

    @staticmethod
    def among(worker: Worker, steps: int) -> GroupStanding:
        """Collective over all ranks: compare the `steps` that each has made."""
        made = [int(row[0]) for row in exchange.gather_numbers(worker, (steps,))]
        most = max(made)
        assert most - min(made) <= 1, f"ranks in lockstep have made {made} steps"
        behind = frozenset(rank for rank, each in enumerate(made) if each < most)
        return GroupStanding(most, made.index(most), behind, worker.rank in behind)

    def take_over(self, worker: Worker, member: Member[Any], own: Any) -> Any:
        """Collective over all ranks: return the state to go on from. `own` is that of this rank,
        as plain data, and of its `member`, which keeps what is this rank's alone."""
        if self.is_behind:
            state = checkpoints.receive_state(worker.transport, self.donor, {})
            kept, theirs = own["strategy"]["member"], state["strategy"]["member"]
            moments = {
                name: theirs[name]
                for name, value in state_of(member).items()
                if isinstance(value, torch.optim.Optimizer)
            }
            state["strategy"]["member"] = _merged(kept, {**common_of(member, theirs), **moments})
            return state
        if worker.rank == self.donor:
            for rank in sorted(self.behind):
                checkpoints.send_state(worker.transport, own, rank)
        return own


def _merged(own: Any, other: Any) -> Any:
    """Return `own`, plain data, with all that `other` has of it in place."""
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        return {**own, **{name: _merged(own.get(name), other[name]) for name in other}}
    if isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        return [_merged(*pair) for pair in zip(own, other, strict=True)]
    return other
