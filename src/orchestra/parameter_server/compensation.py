"""Gradients of stale parameters, corrected to first order (Zheng et al., ICML 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-7
"""Inside the root of the adaptive strength, as in the authors' code."""


class DelayCompensation:
    """DC-ASGD on one server's slice: w_bak(m), the values that worker m was last given.

    The gradient g of worker m was computed at w_bak(m), and the slice w has moved since. Its
    Taylor expansion around w_bak(m), with lambda g*g for the diagonal of the Hessian, gives
    g + lambda g*g*(w - w_bak(m)), element by element. lambda is `lambda0` where `mean_square` is
    None (DC-ASGD-c). Otherwise (DC-ASGD-a), with m = `mean_square`,

        MS <- m MS + (1 - m) g*g        lambda = lambda0 / sqrt(MS + 1e-7)

    where each worker has an MS of its own, 0 at first. Memory: a copy of the slice for each
    worker, and as much again for MS.
    """

    def __init__(
        self, lambda0: float, mean_square: float | None, values: Tensor, workers: Sequence[int]
    ) -> None:
        self.lambda0 = lambda0
        self.mean_square = mean_square
        self._given = dict.fromkeys(workers, values.clone())
        self._squares: dict[int, Tensor] = {}

    def correct(self, worker: int, gradient: Tensor, values: Tensor) -> None:
        """Change the `gradient` of `worker`, in place, to what it would be at `values`."""
        if not self.lambda0:
            return
        square = gradient * gradient
        if self.mean_square is not None:
            mean = self._squares.setdefault(worker, torch.zeros_like(square))
            mean.mul_(self.mean_square).add_(square, alpha=1 - self.mean_square)
            square.div_((mean + EPSILON).sqrt_())
        gradient.addcmul_(square, values - self._given[worker], value=self.lambda0)

    def give(self, worker: int, values: Tensor) -> None:
        """`worker` computes its next gradient at `values`, which nobody changes from now on."""
        self._given[worker] = values

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint keeps."""
        return {
            "given": {str(worker): values for worker, values in self._given.items()},
            "squares": {str(worker): mean for worker, mean in self._squares.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        device = next(iter(self._given.values())).device
        self._given = {int(worker): values.to(device) for worker, values in saved["given"].items()}
        self._squares = {int(worker): mean.to(device) for worker, mean in saved["squares"].items()}
