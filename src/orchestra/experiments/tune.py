"""What is tried out for each strategy before the strategies are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from orchestra.errors import InputError
from orchestra.optimizers.settings import SCHEDULES
from orchestra.settings import REQUIRED, Settings, replace_setting, setting
from orchestra.trainer.settings import Training

RATE = "optimizer.lr"
_TUNABLE = ("optimizer", "schedule", "clip_norm")


@dataclass(frozen=True, repr=False)
class Tune(Settings):
    """A grid of settings: every strategy gets a trial with each combination, on every number of
    ranks. The best on the validation data is what the strategy is compared with."""

    settings: Mapping[str, tuple[Any, ...]] = setting(
        REQUIRED, "the values to try of each, such as {optimizer.lr: [0.01, 0.1]}"
    )
    by: Literal["target", "loss"] | None = setting(
        None, "the target's metric or the lowest loss; the metric where there is a target"
    )
    seed: int = setting(1000, "of the trials; none of the experiment's seeds", low=0)

    def check(self) -> None:
        if RATE not in self.settings:
            raise InputError(f"tune.settings: lacks {RATE}, the setting that matters most; add it")
        for key, values in self.settings.items():
            head, _, rest = key.partition(".")
            if head not in _TUNABLE or (head == "optimizer" and not rest):
                raise InputError(
                    f"tune.settings.{key}: cannot be tuned for each strategy on its own: all have "
                    "to have it alike; optimizer.*, schedule, schedule.* and clip_norm can be"
                )
            if not values:
                raise InputError(f"tune.settings.{key}: there is no value to try")
            if any(value in values[:place] for place, value in enumerate(values)):
                raise InputError(f"tune.settings.{key}: {list(values)} holds a value twice")
        for value in self.settings[RATE]:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"tune.settings.{RATE}: {value!r} is not a number")


def grid(tune: Tune) -> list[dict[str, Any]]:
    """The settings of each trial, in order."""
    return [
        dict(zip(tune.settings, values, strict=True)) for values in product(*tune.settings.values())
    ]


def tuned(training: Training, settings: Mapping[str, Any]) -> Training:
    """`training` with the settings of a trial.

    Raises:
        InputError: there is no such setting, or it cannot have this value.
    """
    for key, value in settings.items():
        text = value if isinstance(value, str) else repr(value)
        where = f"tune.settings.{key}"
        training = replace_setting(training, key, text, SCHEDULES, where=where)
    return training
