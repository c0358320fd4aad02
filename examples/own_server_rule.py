"""A server rule: when servers apply pushes, and how they correct stale ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestra.parameter_server.how import Correction
from orchestra.parameter_server.when import When
from orchestra.settings import setting

if TYPE_CHECKING:  # so that `orchestra list` need not import torch
    from torch import Tensor

    from orchestra.parameter_server.how import WorkerMemory
    from orchestra.parameter_server.messages import Push


@dataclass(frozen=True, repr=False)
class Majority(When):
    """Apply the average of the pushes that are there, once they come from half of the workers."""

    def ready(self, pending: Sequence[Push], working: int) -> list[list[Push]]:
        return [list(pending)] if pending and 2 * len(pending) >= working else []


@dataclass(frozen=True, repr=False)
class Limited(Correction):
    """Drop gradients that are too stale."""

    most: int = setting(8, "updates since the worker's read", low=0, high=10_000)

    def correct(self, push: Push, gradient: Tensor, values: Tensor, memory: WorkerMemory) -> float:
        if push.staleness > self.most:
            gradient.zero_()
        return 1.0
