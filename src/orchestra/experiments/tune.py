"""What is tried out for each strategy before the strategies are compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeVar

from orchestra.errors import InputError
from orchestra.optimizers.settings import SCHEDULES
from orchestra.settings import MOST_SEED, REQUIRED, Registry, Settings, replace_setting, setting
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.settings import Run, Training

RATE = "optimizer.lr"
_STRATEGY = "strategy."
MOST_TRIALS = 10_000
S = TypeVar("S", bound=Settings)
_TUNABLE = ("optimizer", "schedule", "clip_norm", "strategy")


@dataclass(frozen=True, repr=False)
class Tune(Settings):
    """A grid of settings: every strategy gets a trial with each combination, on every number of
    ranks. The best on the validation data is what the strategy is compared with.

    Settings of a strategy itself (strategy.lambda0, strategy.outer.rate) are tried with the
    strategies that have them, which so get more trials.
    """

    settings: Mapping[str, tuple[Any, ...]] = setting(
        REQUIRED, "the values to try of each, such as {optimizer.lr: [0.01, 0.1]}"
    )
    by: Literal["target", "loss"] | None = setting(
        None, "the target's metric or the lowest loss; the metric where there is a target"
    )
    seed: int = setting(
        1000, "of the trials; none of the experiment's seeds", low=0, high=MOST_SEED
    )

    def check(self) -> None:
        if RATE not in self.settings:
            raise InputError(f"tune.settings: lacks {RATE}, the setting that matters most; add it")
        for key, values in self.settings.items():
            head, _, rest = key.partition(".")
            if head not in _TUNABLE or (head in ("optimizer", "strategy") and not rest):
                raise InputError(
                    f"tune.settings.{key}: cannot be tuned for each strategy on its own: all have "
                    "to have it alike; optimizer.*, schedule, schedule.*, clip_norm and "
                    "strategy.* can be"
                )
            if not values:
                raise InputError(f"tune.settings.{key}: there is no value to try")
            if any(value in values[:place] for place, value in enumerate(values)):
                raise InputError(f"tune.settings.{key}: {list(values)} holds a value twice")
        trials = math.prod(len(values) for values in self.settings.values())
        if trials > MOST_TRIALS:
            raise InputError(f"tune.settings: {trials} trials are more than {MOST_TRIALS}")
        for value in self.settings[RATE]:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"tune.settings.{RATE}: {value!r} is not a number")


def grid(tune: Tune, strategy: Strategy[Any]) -> list[dict[str, Any]]:
    """The settings of each trial of `strategy`, in order."""
    keys = [key for key in tune.settings if _has(strategy, key, tune.settings[key][0])]
    return [
        dict(zip(keys, values, strict=True))
        for values in product(*(tune.settings[key] for key in keys))
    ]


def check_tunable(tune: Tune, training: Training, strategies: Iterable[Strategy[Any]]) -> None:
    """That the training, and some of the `strategies`, can have all settings of `tune`.

    Raises:
        InputError: there is no such setting, or it cannot have one of the values.
    """
    some = list(strategies)
    for key, values in tune.settings.items():
        having = [strategy for strategy in some if _has(strategy, key, values[0])]
        for strategy in having or some[:1]:
            for value in values:
                _adapted(training, strategy, {key: value})


def tuned(run: Run, settings: Mapping[str, Any]) -> Run:
    """`run` with the settings of a trial.

    Raises:
        InputError: there is no such setting, or it cannot have this value.
    """
    training, strategy = _adapted(run.training, run.strategy, settings)
    return replace(run, training=training, strategy=strategy)


def _has(strategy: Strategy[Any], key: str, value: object) -> bool:
    """Whether the setting is the training's, or `strategy` has it and takes `value`."""
    if not key.startswith(_STRATEGY):
        return True
    try:
        _changed(strategy, key, key.removeprefix(_STRATEGY), value, STRATEGIES)
    except InputError:
        return False
    return True


def _adapted(
    training: Training, strategy: Strategy[Any], settings: Mapping[str, Any]
) -> tuple[Training, Strategy[Any]]:
    for key, value in settings.items():
        if key.startswith(_STRATEGY):
            strategy = _changed(strategy, key, key.removeprefix(_STRATEGY), value, STRATEGIES)
        else:
            training = _changed(training, key, key, value, SCHEDULES)
    return training, strategy


def _changed(holder: S, key: str, path: str, value: object, registry: Registry) -> S:
    text = value if isinstance(value, str) else repr(value)
    changed = replace_setting(holder, path, text, registry, where=f"tune.settings.{key}")
    assert isinstance(changed, type(holder))
    return changed
