"""The factor by which a GradScaler of the user's multiplies the loss, and so the gradients."""

from __future__ import annotations

import sys
import types

import torch


class LossScale:
    """Follows the scale of a GradScaler, once that has made a step.

    Attributes:
        of_exchange: the scale of the gradient that was exchanged last.
    """

    def __init__(self) -> None:
        self._scaler: torch.amp.GradScaler | None = None
        self.of_exchange = 1.0

    @property
    def rescale(self) -> float:
        """What the scale of gradients was multiplied by since the last exchange."""
        now = 1.0 if self._scaler is None else self._scaler.get_scale()
        return now / (self.of_exchange or 1.0)

    def look_for_scaler(self) -> None:
        """Find the GradScaler that calls `step()`, which nothing else tells of."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
            frame = frame.f_back
        if frame is not None:
            self._scaler = scaler = frame.f_locals["self"]
            self.of_exchange = scaler.get_scale()

    def go_on(self, rescale: float) -> None:
        """Let the next exchange see a `rescale`, which a state has."""
        self._scaler, self.of_exchange = None, 1.0 / (rescale or 1.0)
