"""Clipping by the norm of a whole gradient, where each rank has a part of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestra.collectives import Group, all_reduce
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag


def clip_together(
    limit: float, group: Group, algorithm: str, transport: Transport, *gradients: Tensor
) -> None:
    """Clip by the norm of the whole gradient: each rank of `group` knows the square of its part."""
    square = torch.zeros(1, dtype=torch.float64)
    for gradient in gradients:
        square = square.to(gradient.device) + gradient.double().square().sum()
    all_reduce(transport, square, algorithm, group, Tag.NORM)
    # As `torch.nn.utils.clip_grad_norm_`, with its 1e-6.
    factor = limit / (float(square.sqrt()) + 1e-6)
    if factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
