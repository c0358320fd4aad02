"""The model in a loop of the user's own: what is refused, what is put into it, what is watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from orchestra.errors import InputError
from orchestra.worker.worker import Worker


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer, workers: int) -> None:
    """Refuse what would be trained wrongly on `workers` workers."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise InputError(
            f"the model is wrapped in {type(model).__name__}, which distributes it already: pass "
            "the model itself (model.module)"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and workers > 1:
            raise InputError(
                f"{name!r} is a SyncBatchNorm, which needs a process group of torch.distributed "
                "and would be a plain BatchNorm without one: use GroupNorm, or nn.BatchNorm"
            )
        if getattr(module, "sparse", False) is True:
            raise InputError(
                f"{name!r} has sparse gradients, which do not travel here: make the "
                f"{type(module).__name__} with sparse=False"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise InputError(
                f"parameter {name!r} is complex, and such numbers do not travel here: keep it as "
                "torch.view_as_real(...) of them"
            )
    known = set(model.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter not in known:
                raise InputError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                    "model does not have, so that no other worker would learn of it: put both into "
                    "one nn.Module (an nn.ModuleList) and distribute that"
                )


def part_storages(worker: Worker) -> None:
    """Give each parameter a storage of its own in the flat vector: files get whole storages."""
    if worker.layout.device.type != "meta":
        for parameter in worker.gradients.parameters:
            parameter.data = from_dlpack(parameter.data)


class Hook:
    """Calls `function`, as a hook of a module; in copies of the module, and its file, `harmless`.

    That is a method of a builtin object: such a file loads where Orchestra is missing, too.
    """

    def __init__(self, function: Callable[..., None], harmless: tuple[object, str]) -> None:
        self._function = function
        self._harmless = harmless

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._harmless


FORWARD: tuple[object, str] = ({}, "get")  # {}.get(module, inputs): the inputs, as they are
STATE_DICT = ("", "format")  # "".format(module, prefix, keep): nothing that anybody reads


@dataclass(frozen=True)
class _Place:
    name: str
    owner: nn.Module
    attribute: str
    parameter: nn.Parameter
    address: int


class Audit:
    """Sees at each step whether the parameters that are trained are still those that were laid out.

    `Worker` lays out those that need a gradient then, and moves them into one flat vector.
    """

    def __init__(self, worker: Worker) -> None:
        named = dict(worker.module.named_parameters())
        laid_out = worker.named_parameters()
        self._places = [
            _Place(name, *_home(worker.module, name), named[name], parameter.data_ptr())
            for name, parameter in laid_out.items()
        ]
        self._frozen = [(name, p) for name, p in named.items() if name not in laid_out]
        self._known = set(named.values())

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises InputError for the first parameter that would not be trained as it should."""
        for place in self._places:
            if place.owner._parameters.get(place.attribute) is not place.parameter:
                raise InputError(
                    f"parameter {place.name!r} was replaced after distribute, so that its "
                    "gradients go nowhere: replace it before, or copy values into it "
                    "(with torch.no_grad(): parameter.copy_(values))"
                )
            if place.parameter.data_ptr() != place.address:
                raise InputError(
                    f"parameter {place.name!r} got other memory after distribute (by p.data = ..., "
                    "or the model's to()), and what is exchanged would not be what it holds: do "
                    "that before, or copy (with torch.no_grad(): parameter.copy_(values))"
                )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise InputError(
                    f"parameter {name!r} needs a gradient now, which it did not when distribute "
                    "was called, so that no other worker would learn of it: call distribute while "
                    "all that is to be trained at any time needs a gradient, then freeze it with "
                    "requires_grad_(False)"
                )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._known:
                    raise InputError(
                        f"the optimizer was given a parameter of shape {tuple(parameter.shape)} "
                        "after distribute: give it to model and optimizer before"
                    )


def _home(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The owner of the parameter `name`, and its attribute there."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute
