"""An optimizer's moments by parameter name, so that another optimizer can inherit them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestra.optimizers.spec import ELEMENTWISE

Moments = dict[str, dict[str, Any]]
"""Parameter name -> state key ("momentum_buffer", "exp_avg", "step" ...) -> value.

Where the optimizer works element by element, a tensor with as many elements as the parameter
belongs to its elements one by one.
"""


@dataclass(frozen=True)
class OptimizerPart:
    """An optimizer of parts of the parameters: by name the tensor, and the element it begins at."""

    optimizer: torch.optim.Optimizer
    tensors: Mapping[str, tuple[Tensor, int]]

    def moments(self) -> list[dict[str, Any]]:
        """Of each tensor that was updated its name, first element and state."""
        return [
            {"name": name, "first": first, "state": dict(self.optimizer.state[tensor])}
            for name, (tensor, first) in self.tensors.items()
            if tensor in self.optimizer.state
        ]


def join_moments(
    parts: Iterable[Mapping[str, Any]], parameters: Mapping[str, Tensor], *, elementwise: bool
) -> Moments:
    """The moments of whole `parameters`, from what `OptimizerPart.moments` gave on all ranks."""
    joined: Moments = {}
    for part in parts:
        whole, first = joined.setdefault(part["name"], {}), part["first"]
        shape = parameters[part["name"]].shape
        for key, value in part["state"].items():
            if isinstance(value, Tensor) and elementwise and value.dim():
                flat = whole.setdefault(key, value.new_zeros(shape)).view(-1)
                flat[first : first + value.numel()] = value.reshape(-1)
            else:
                whole[key] = value
    return joined


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
                state[key] = part.to(tensor.device, copy=True).view(tensor.shape)
            elif isinstance(value, Tensor):  # numbers, such as counts of steps, stay where they are
                state[key] = value.to(tensor.device if value.dim() else value.device, copy=True)
            else:
                state[key] = value
