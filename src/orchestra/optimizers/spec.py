"""A torch.optim optimizer as a value: class, arguments and groups, rebuilt where it updates.

And its moments by parameter name, whole or in parts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchestra.errors import InputError, nearest, text_of
from orchestra.optimizers.settings import Optimizer as OptimizerSettings
from orchestra.optimizers.state import undisturbed

_OPTIM = torch.optim
ELEMENTWISE = frozenset(
    {
        _OPTIM.SGD, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.Adamax, _OPTIM.NAdam, _OPTIM.RAdam,
        _OPTIM.RMSprop, _OPTIM.Adagrad, _OPTIM.Adadelta, _OPTIM.ASGD, _OPTIM.Rprop,
    }
)  # fmt: skip
"""Optimizers that update each element by itself, so that servers may divide a tensor."""

Moments = dict[str, dict[str, Any]]
"""Parameter name -> state key ("momentum_buffer", "exp_avg", "step" ...) -> value.

Where the optimizer works element by element, a tensor with as many elements as the parameter
belongs to its elements one by one.
"""

REFUSED: Mapping[type[torch.optim.Optimizer], str] = {
    _OPTIM.LBFGS: "it evaluates the loss several times a step, through a closure",
    _OPTIM.SparseAdam: "it needs sparse gradients, which do not travel here",
}


@dataclass(frozen=True)
class OptimizerSpec:
    """The recipe for the optimizer of some parameters, by name.

    `groups` holds for each parameter group the names of its parameters and the arguments that
    differ from `arguments`. Hooks and anything else attached to an instance do not travel.
    """

    cls: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    groups: tuple[tuple[frozenset[str], Mapping[str, Any]], ...] = field(default=())

    def __post_init__(self) -> None:
        for refused, reason in REFUSED.items():
            if issubclass(self.cls, refused):
                raise InputError(f"optimizer {self.cls.__name__} cannot be distributed: {reason}")

    @staticmethod
    def from_settings(settings: OptimizerSettings, names: Sequence[str]) -> OptimizerSpec:
        """Return the spec for `names` of an experiment's `optimizer` and `parameter_groups`.

        A parameter belongs to the first group whose pattern is found in its name.
        """
        classes = torch_optimizers()
        if settings.name not in classes:
            hint = nearest(settings.name, classes)
            raise InputError(f"optimizer {settings.name!r} is not in torch.optim; {hint}")
        remaining = list(names)
        groups = []
        for group in settings.groups:
            matched = frozenset(name for name in remaining if re.search(group.match, name))
            if not matched:
                raise InputError(
                    f"parameter_groups: {group.match!r} matches no parameter that an earlier group "
                    f"left over; the model has {', '.join(names)}"
                )
            remaining = [name for name in remaining if name not in matched]
            groups.append((matched, dict(group.arguments)))
        if remaining:
            groups.insert(0, (frozenset(remaining), {}))
        spec = OptimizerSpec(classes[settings.name], dict(settings.arguments), tuple(groups))
        spec.check()
        return spec

    @staticmethod
    def from_instance(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerSpec:
        """Return the spec of a user's optimizer; `names` maps id(parameter) to its name."""
        groups = []
        for group in optimizer.param_groups:
            members = frozenset(names[id(p)] for p in group["params"] if id(p) in names)
            groups.append((members, {key: group[key] for key in group if key != "params"}))
        arguments, known = optimizer.defaults, inspect.signature(type(optimizer)).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            # Some defaults are no arguments of the constructor; the groups hold them anyway.
            arguments = {name: value for name, value in arguments.items() if name in known}
        return OptimizerSpec(type(optimizer), dict(arguments), tuple(groups))

    @functools.cached_property
    def group_of(self) -> Mapping[str, int]:
        """The number of each parameter's group."""
        return {name: index for index, (members, _) in enumerate(self.groups) for name in members}

    @property
    def elementwise(self) -> bool:
        """True if a tensor may be cut, and its parts updated apart."""
        return self.cls in ELEMENTWISE

    @property
    def stateless(self) -> bool:
        """True if an update depends on gradient and parameters alone: SGD without momentum."""
        momenta = [{**self.arguments, **group}.get("momentum", 0.0) for _, group in self.groups]
        return self.cls is torch.optim.SGD and not any(momenta)

    @property
    def base_rates(self) -> tuple[float, ...]:
        """The learning rate of each group before any schedule."""
        given: list[Any] = [
            {**self.arguments, **overrides}.get("lr") for _, overrides in self.groups
        ]
        if None not in given:
            return tuple(map(float, given))
        # The class's own default, which only an instance tells.
        names = sorted(name for members, _ in self.groups for name in members)
        return get_rates(self.build({name: torch.zeros(1, 1) for name in names}))

    def check(self) -> None:
        """Refuse early, and clearly, arguments that the class or a step of it does not take.

        Some of them only a step refuses, which each group takes on a matrix of one element: every
        class takes matrices.
        """
        for members, overrides in self.groups:
            arguments = {**self.arguments, **overrides}
            if arguments.get("capturable"):
                # Meant for devices, and refused on the CPU, where this step is taken.
                arguments["capturable"] = False
            one = OptimizerSpec(self.cls, arguments, ((members, {}),))
            parameter = torch.zeros(1, 1, device="cpu")
            parameter.grad = torch.zeros_like(parameter)
            try:
                optimizer = one.build(dict.fromkeys(sorted(members)[:1], parameter))
                optimizer.step()
                set_rates(optimizer, one.base_rates)
            except InputError:
                raise
            except Exception as error:  # whatever a class makes of a value
                reason = f"refuses {arguments}: {text_of(error)}"
                raise InputError(f"optimizer {self.cls.__name__} {reason}") from error

    def written_options(self) -> list[str]:
        """Return the options that a step of the optimizer writes into its groups: none of torch's.

        Found by two steps, as the first one may only begin to count.
        """
        if self.cls.__module__.startswith("torch.optim."):
            return []
        parameter = torch.ones(1, 1, device="cpu")
        parameter.grad = torch.ones_like(parameter)
        # It may draw random numbers; if it fails, its first real step tells why.
        with undisturbed(), contextlib.suppress(Exception):
            optimizer = self.build(dict.fromkeys(sorted(self.group_of)[:1], parameter))
            before = get_options(optimizer)
            optimizer.step()
            optimizer.step()
            groups = zip(before, get_options(optimizer), strict=True)
            return sorted({key for old, new in groups for key in new if old.get(key) != new[key]})
        return []

    def build(self, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer of `parameters` (any subset, or parts, of the model's), groups kept.

        A group none of whose parameters is here stays, empty, so that groups keep their numbers.
        """
        groups = [
            {"params": [p for name, p in parameters.items() if name in members], **overrides}
            for members, overrides in self.groups
        ]
        try:
            return self.cls(groups, **self.arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"optimizer {self.cls.__name__}: {error}") from error


_unwrapped = functools.cache(inspect.unwrap)


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`; one of torch's own without hooks, and without its label for profilers.

    For an optimizer that nobody else has: both take longer than a small update.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        optimizer.step()
        return
    with torch.no_grad():  # as do the wrappers that are passed over
        _unwrapped(type(optimizer).step)(optimizer)


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Give each parameter group its learning rate for the next update."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def get_rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in optimizer.param_groups)


def get_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group, not its parameters: rates, momentum and so on."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_options(optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)


def changed_options(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> str:
    """Return as JSON, group by group, the options that `optimizer` had `before` with other values.

    Return "" if no option has changed. Learning rates are left out, as they always travel.
    """
    changed = [
        {key: group[key] for key, value in old.items() if key != "lr" and group[key] != value}
        for group, old in zip(optimizer.param_groups, before, strict=True)
    ]
    return json.dumps(changed, default=_plain) if any(changed) else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.dim():
        return value.item()
    raise InputError(
        f"an option of a parameter group became {value!r}, which cannot be sent to servers: make "
        "it a number, a text or a tuple of them"
    )


def apply_changed_options(
    optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]], changed: str
) -> None:
    """Give each group the options that it had `before`, and of these the `changed` ones anew."""
    set_options(optimizer, before)
    for group, values in zip(optimizer.param_groups, json.loads(changed or "[]"), strict=False):
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def torch_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the classes of torch.optim by name, in the order of the names."""
    base = torch.optim.Optimizer
    classes = ((n, c) for n, c in sorted(vars(torch.optim).items()) if isinstance(c, type))
    return {name: cls for name, cls in classes if issubclass(cls, base) and cls is not base}


# Moments


@dataclass(frozen=True)
class OptimizerPart:
    """An optimizer of parts of the parameters: by name the tensor, and the element it begins at."""

    optimizer: torch.optim.Optimizer
    tensors: Mapping[str, tuple[Tensor, int]]

    def moments(self) -> list[dict[str, Any]]:
        """Return the name, first element and state of each tensor that was updated."""
        return [
            {"name": name, "first": first, "state": dict(self.optimizer.state[tensor])}
            for name, (tensor, first) in self.tensors.items()
            if tensor in self.optimizer.state
        ]


def join_moments(
    parts: Iterable[Mapping[str, Any]], parameters: Mapping[str, Tensor], *, elementwise: bool
) -> Moments:
    """Return moments of whole `parameters`, from those that all ranks' `OptimizerPart`s gave."""
    joined: Moments = {}
    for part in parts:
        whole, first = joined.setdefault(part["name"], {}), part["first"]
        shape = parameters[part["name"]].shape
        for key, value in part["state"].items():
            if isinstance(value, Tensor) and elementwise and value.dim():
                # Element-wise state has the parameter's shape, and is cut where the parameter is.
                flat = whole.setdefault(key, value.new_zeros(shape)).view(-1)
                flat[first : first + value.numel()] = value.reshape(-1)
            else:
                whole[key] = value
    return joined


def export_moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> Moments:
    """Return the moments of `parameters` in `optimizer`; parameters never updated have none."""
    updated = {name: p for name, p in parameters.items() if p in optimizer.state}
    return {name: dict(optimizer.state[parameter]) for name, parameter in updated.items()}


def install_moments(
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, tuple[Tensor, int]],
    moments: Mapping[str, Mapping[str, Any]],
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
            if not isinstance(value, Tensor):
                state[key] = value
            elif not value.dim():
                state[key] = value.clone()  # a count of steps: torch keeps it on the CPU
            elif elementwise:
                part = value.reshape(-1)[first : first + tensor.numel()]
                state[key] = part.to(tensor.device, copy=True).view(tensor.shape)
            else:
                state[key] = value.to(tensor.device, copy=True)
