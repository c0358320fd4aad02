"""An optimizer's moments by parameter name, so that another optimizer can inherit them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orchestra.optimizers.spec import ELEMENTWISE

Moments = dict[str, dict[str, Any]]
"""Parameter name -> state key ("momentum_buffer", "exp_avg", "step" ...) -> value.

Where the optimizer works element by element, a tensor with as many elements as the parameter
belongs to its elements one by one.
"""


def export_moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> Moments:
    """The moments of `parameters` in `optimizer`; parameters never updated have none."""
    return {
        name: dict(optimizer.state[parameter])
        for name, parameter in parameters.items()
        if parameter in optimizer.state
    }


def install_moments(
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, tuple[Tensor, int]],
    moments: Moments,
) -> None:
    """Give `optimizer` copies of the `moments` of its tensors.

    `parts` maps a name to the optimizer's tensor, which is the parameter or, for an optimizer
    that works element by element, the flat part of it that begins at the given element.
    """
    elementwise = type(optimizer) in ELEMENTWISE
    for name, (tensor, first) in parts.items():
        if name not in moments:
            continue
        state = optimizer.state[tensor]
        for key, value in moments[name].items():
            if isinstance(value, Tensor) and elementwise and value.dim():
                part = value.reshape(-1)[first : first + tensor.numel()]
                state[key] = part.clone().view(tensor.shape)
            else:
                state[key] = value.clone() if isinstance(value, Tensor) else value
