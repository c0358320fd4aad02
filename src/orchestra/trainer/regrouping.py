"""What a run goes on from where ranks were lost: the most advanced state of those that are left.

In lockstep the ranks that are left differ by one step at most, since none completes a step without
the contribution of all. Those that have completed it keep it; the others, which have contributed to
it, take it over from the first of these.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestra import exchange
from orchestra.collectives import receive_object, send_object
from orchestra.trainer import checkpoints
from orchestra.worker.worker import Worker


class StepStart:
    """What a forward pass changes beside gradients: buffers, and the global random streams.

    Parameters and the optimizer's moments change with the update alone, which no loss interrupts.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._buffers = [buffer.clone() for _, buffer in worker.buffers]
        self._streams: tuple[Any, ...] = ()
        self.note()

    def note(self) -> None:
        """Keep what there is now; a step begins."""
        for kept, (_, buffer) in zip(self._buffers, self._worker.buffers, strict=True):
            kept.copy_(buffer)
        self._streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
        if torch.cuda.is_initialized():
            self._streams += (torch.cuda.get_rng_state(),)

    def undo(self) -> None:
        """Go back to what there was: the step under way has no result."""
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
class Standing:
    """Where a rank stands that is left: the steps of its run, and the samples behind them."""

    steps: int
    consumed: int


def most_advanced(worker: Worker, own: Standing) -> tuple[int, bool]:
    """Collective over all ranks: return the first rank with the most steps, and whether `own` are
    as many."""
    table = exchange.gather_numbers(worker, (own.steps, own.consumed))
    steps = [row[0] for row in table]
    assert max(steps) - min(steps) <= 1, f"ranks in lockstep have made {steps} steps"
    return steps.index(max(steps)), own.steps == max(steps)
