"""Checks of model, optimizer and roles in a loop of the user's own; hooks that may be copied."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from orchestra.errors import InputError
from orchestra.strategies.base import Strategy
from orchestra.strategies.switch import flattened_phases
from orchestra.worker.layout import owner_of
from orchestra.worker.worker import Worker


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer, workers: int) -> None:
    """Refuse what would be trained wrongly on `workers` workers."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise InputError(
            f"the model is wrapped in {type(model).__name__}, which distributes it already: pass "
            "the model itself (model.module)"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{name or 'the model'!r} is a TorchScript module, which takes no hooks: pass the "
                "module that it was made from, and script that after training"
            )
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


def may_serve(strategy: Strategy, ranks: int) -> bool:
    """Return whether a rank has no data in some phase of `strategy`."""
    return any(len(phase.roles(ranks).workers) < ranks for phase in flattened_phases(strategy))


def check_roles(strategy: Strategy, ranks: int) -> None:
    """Refuse another number of ranks, and one that serves first: it would not run the loop."""
    shares = len(strategy.roles(ranks).shares)
    if shares != ranks:
        raise InputError(
            f"{strategy!r} runs on {shares} process(es), but {ranks} were started: start as many, "
            "or name another strategy"
        )
    for first, then in itertools.pairwise(flattened_phases(strategy)):
        late = set(then.roles(ranks).workers) - set(first.roles(ranks).workers)
        if late:
            raise InputError(
                f"{strategy!r}: rank {min(late)} serves first, and could not come into a loop of "
                "your own in mid-epoch: set placement='beside' in the first phase"
            )


@dataclass(eq=False)
class Hook:
    """A hook of a module that calls `function`, and may be copied and pickled with the module.

    In the copy or the file it is replaced by `harmless`, a builtin object and the name of one of
    its methods, which as a hook has no effect. So the file loads without Orchestra, too.
    """

    function: Callable[..., None]
    harmless: tuple[object, str]

    def __call__(self, *arguments: Any) -> None:
        self.function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.harmless


FORWARD: tuple[object, str] = ({}, "get")  # {}.get(module, inputs): the inputs, as they are
STATE_DICT = ("", "format")  # "".format(module, prefix, keep): nothing that anybody reads
LOADED: tuple[object, str] = (contextlib.nullcontext(), "__exit__")  # of any arguments: nothing


class Audit:
    """Checks at each step that the trained parameters are still those that were laid out.

    `Worker` lays out those that need a gradient then, and moves them into one flat vector.
    """

    def __init__(self, worker: Worker) -> None:
        named = dict(worker.module.named_parameters())
        laid_out = worker.named_parameters()
        self._trained = [
            (name, *owner_of(worker.module, name), named[name], parameter.data_ptr())
            for name, parameter in laid_out.items()
        ]
        self._frozen = [(name, p) for name, p in named.items() if name not in laid_out]
        self._known = set(named.values())

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise InputError for the first parameter that would not be trained as it should."""
        for name, owner, attribute, parameter, address in self._trained:
            # A look-up in the dictionary: `getattr` of a module is slow for every step.
            if owner._parameters.get(attribute) is not parameter:
                raise InputError(
                    f"parameter {name!r} was replaced after distribute, so that its "
                    "gradients go nowhere: replace it before, or copy values into it "
                    "(with torch.no_grad(): parameter.copy_(values))"
                )
            if parameter.data_ptr() != address:
                raise InputError(
                    f"parameter {name!r} got other memory after distribute (by p.data = ..., "
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
