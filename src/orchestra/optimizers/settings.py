"""Optimizers by name, parameter groups, and learning-rate schedules; imports no torch.

Which optimizers and arguments exist is torch's to say, so here only their form is checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import NoneType
from typing import Protocol, Self, runtime_checkable

from orchestra.errors import InputError
from orchestra.settings import Call, Registry, Settings, read, setting
from orchestra.settings.notation import calls_in


def _require_literals(arguments: Mapping[str, object], name: str) -> None:
    """Refuse arguments that no file can hold; a word without quotes was read as a `Call`."""
    for key, value in arguments.items():
        for call in calls_in(value):
            raise InputError(f"{name}.{key}: {call.name} is not a literal; quote it: {call.name!r}")
        items = value if isinstance(value, list | tuple) else (value,)
        for item in items:
            if isinstance(item, float) and not math.isfinite(item):
                raise InputError(f"{name}.{key}: {item!r} is not a finite number")
            if type(item) not in (int, float, bool, str, NoneType):
                raise InputError(f"{name}.{key}: {item!r} is not a number, a text, true or false")


@dataclass(frozen=True, repr=False)
class ParameterGroup(Settings):
    """The parameters whose name matches a pattern, with arguments of their own.

    A parameter belongs to the first group that matches it.
    """

    match: str = setting("", "regular expression, searched for in the names of parameters")
    _: KW_ONLY
    arguments: Mapping[str, object] = setting({}, "the optimizer's arguments for this group")

    def check(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            message = f"ParameterGroup.match: {self.match!r} is not a regular expression: {error}"
            raise InputError(message) from None
        _require_literals(self.arguments, "ParameterGroup")
        # YAML has lists only: what is written as a tuple has to compare equal when it comes back.
        tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in self.arguments.items()}
        object.__setattr__(self, "arguments", tuples)


@dataclass(frozen=True, repr=False)
class Optimizer(Settings):
    """A class of torch.optim with its arguments: its repr is the call, SGD(lr=0.1)."""

    name: str = setting("SGD", "a class of torch.optim")
    arguments: Mapping[str, object] = setting({}, "its arguments, by name")
    groups: tuple[ParameterGroup, ...] = setting((), "parameters with arguments of their own")

    def check(self) -> None:
        # Whether torch has such a class is known only where torch is imported: in the ranks
        if not self.name.isidentifier():
            raise InputError(f"Optimizer.name: {self.name!r} is not the name of a class")
        _require_literals(self.arguments, self.name)

    def with_setting(self, name: str, value: object) -> Self:
        """Return a copy with the optimizer's argument `name` set."""
        return type(self)(self.name, {**self.arguments, name: value}, self.groups)

    @classmethod
    def parse(cls, text: str | Call, *, where: str) -> Self:
        """Return the optimizer that `text`, such as "SGD(lr=0.1, momentum=0.9)", names.

        Raises:
            InputError: not such a call; `where` opens the message.
        """
        call = read(text, where=where)
        # By position arguments mean different things in different optimizers
        if call.positional:
            raise InputError(f"{where}: name the arguments of {call.name}: {call.name}(lr=0.1)")
        try:
            return cls(call.name, call.keywords)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def __repr__(self) -> str:
        return str(Call(self.name, (), self.arguments))


ADAPTIVE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad")
"""Optimizers whose learning rate follows the square root of the batch size."""


def rate_factor(optimizer: Optimizer, batch_ratio: float) -> float:
    """Return the factor of the learning rate for `batch_ratio` times as many samples per step.

    The factor is `batch_ratio` for SGD (Goyal et al., 2017), and its square root for Adam and its
    kin (Malladi et al., NeurIPS 2022).
    """
    return math.sqrt(batch_ratio) if optimizer.name in ADAPTIVE else batch_ratio


@runtime_checkable
class RateSchedule(Protocol):
    """The learning rate as a function of the samples that the whole cluster has consumed."""

    def factor(self, fraction: float) -> float:
        """Return the factor of the learning rate.

        Args:
            fraction: samples consumed by the cluster / samples of the whole run, 0 to 1.
        """


@dataclass(frozen=True, repr=False)
class WarmUp(Settings):
    """A linear warm-up: the base of all schedules here."""

    _: KW_ONLY
    warmup: float = setting(0.0, "fraction of the run that warms up linearly", low=0, high=1)

    def factor(self, fraction: float) -> float:
        """Rise from 0 at the start to 1 at `warmup`, and stay there."""
        # By samples of the whole cluster, so that it is as long on every number of ranks
        return fraction / self.warmup if fraction < self.warmup else 1.0


@dataclass(frozen=True, repr=False)
class Constant(WarmUp):
    """The same learning rate throughout, after the warm-up."""


@dataclass(frozen=True, repr=False)
class StepDecay(WarmUp):
    """The learning rate falls by a factor at given points of the run."""

    at: tuple[float, ...] = setting((0.5, 0.75), "fractions of the run", low=0, high=1)
    by: float = setting(0.1, "what the rate is multiplied by at each of them", above=0, high=1e3)

    def check(self) -> None:
        if len(self.at) > 100:
            raise InputError(f"StepDecay.at: {len(self.at)} points are more than 100")

    def factor(self, fraction: float) -> float:
        passed = sum(fraction >= point for point in self.at)
        return super().factor(fraction) * self.by**passed


@dataclass(frozen=True, repr=False)
class Cosine(WarmUp):
    """Half a cosine from the end of the warm-up to the end of the run (Loshchilov, Hutter 2016).

    https://arxiv.org/abs/1608.03983, without restarts.
    """

    final: float = setting(0.0, "the factor at the end of the run", low=0, high=1)

    def factor(self, fraction: float) -> float:
        if fraction < self.warmup:
            return super().factor(fraction)
        left = 1.0 - self.warmup
        progress = min((fraction - self.warmup) / left, 1.0) if left else 1.0
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES = Registry(
    "schedule",
    {cls.__name__: f"{__name__}:{cls.__name__}" for cls in (Constant, Cosine, StepDecay)},
)

OPTIMIZERS = Registry("optimizer", {}, makes=callable)
"""Those of torch.optim. Only torch knows them, so that no name can be resolved here."""
