"""What all workers of a loop of the user's own do alike: their steps, with equal options."""

from __future__ import annotations

import torch

from orchestra.errors import InputError
from orchestra.worker.batches import digest

IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable"}
"""What a group holds beside options that change the result."""


class Ledger:
    """A digest of the steps that this worker's optimizer has made, which all workers have alike.

    It takes in the place of each step among the batches, and the options of all groups then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._phase = self._digest = 0

    def enter(self, phase: int, *place: int) -> None:
        """Note a step at `place`."""
        options = [
            value
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if name not in IMPLEMENTATION
        ]
        self._phase, self._digest = phase, digest([place, options], self.digest(phase))

    @property
    def state(self) -> tuple[int, int]:
        """What has been noted, for a rank that goes on with it."""
        return self._phase, self._digest

    @state.setter
    def state(self, state: tuple[int, int]) -> None:
        self._phase, self._digest = state

    def digest(self, phase: int) -> int:
        """Return the digest of this phase's steps: before it, workers may have made unlike ones."""
        return self._digest if phase == self._phase else 0

    def refusal(self, steps: int) -> InputError:
        """Return what to raise where workers have unlike digests."""
        rates = ", ".join(f"{group['lr']:g}" for group in self._optimizer.param_groups)
        return InputError(
            f"after {steps} steps of this worker, whose learning rates are {rates} now, the "
            "workers' optimizers differ: in the batches at which step() was called, or in rates or "
            "other options. Let all workers decide by the same number, such as orchestra.mean(loss)"
        )
