"""How durations of compute vary: from one piece of work to the next, and slowly with time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, Literal

from orchestra.cluster.units import SECONDS, quantity
from orchestra.settings import Settings, setting

if TYPE_CHECKING:
    from numpy.random import Generator

_NORMAL = NormalDist()
_LEAST_UNIFORM = 2.0**-54  # `Generator.random` gives multiples of 2^-53, zero among them
_MOST_UNIFORM = 1 - 2.0**-53


@dataclass(frozen=True, repr=False)
class Jitter(Settings, ABC):
    """A factor on the duration of each piece of compute, drawn anew each time, always above 0."""

    @abstractmethod
    def factor(self, uniform: float) -> float:
        """The factor at the quantile `uniform`, which lies between 0 and 1, both excluded."""

    def draw(self, generator: Generator) -> float:
        """A factor, from one uniform number of `generator`."""
        return self.factor(max(generator.random(), _LEAST_UNIFORM))


@dataclass(frozen=True, repr=False)
class Normal(Jitter):
    """A normal distribution around 1, cut off at 0.1 and 1.9: mean 1, factors from 0.1 to 1.9.

    Cut off evenly on both sides it keeps its mean; `sigma` is the deviation before that.
    """

    sigma: float = setting(0.05, "standard deviation, in durations", above=0, high=100)

    def factor(self, uniform: float) -> float:
        """The quantile of the truncated distribution, from the whole one's inverse."""
        low, high = 0.1, 1.9
        first = _NORMAL.cdf((low - 1) / self.sigma)
        inside = min(first + uniform * (1 - 2 * first), _MOST_UNIFORM)
        return min(max(1 + self.sigma * _NORMAL.inv_cdf(inside), low), high)


@dataclass(frozen=True, repr=False)
class LogNormal(Jitter):
    """exp of a normal distribution: mean 1, skewed towards long durations, any factor above 0."""

    sigma: float = setting(0.1, "standard deviation of the logarithm", above=0, high=5)

    def factor(self, uniform: float) -> float:
        """exp(sigma z - sigma^2 / 2), which has the mean 1."""
        return math.exp(self.sigma * _NORMAL.inv_cdf(uniform) - self.sigma**2 / 2)


@dataclass(frozen=True, repr=False)
class ExponentialTail(Jitter):
    """A duration and an exponential tail: factors from 1, their mean 1 + `mean`."""

    mean: float = setting(0.1, "mean of the tail, in durations", above=0, high=1e3)

    def factor(self, uniform: float) -> float:
        """1 - mean log(1 - uniform)."""
        return 1 - self.mean * math.log1p(-uniform)


DEFAULT: Final = "default"
"""In place of a jitter: as calibrated, and where nothing was measured `ASSUMED`."""
ASSUMED = LogNormal(0.03)
"""Gradients on a core with nothing else to do deviated by 1.5 to 6 % in calibrations of a machine
with 2 cores (half of the interquartile range over the median, divided by 0.6745)."""
JitterSetting = Jitter | Literal["default"] | None
JITTER_MEANS = f"of the durations of compute; default: as calibrated, else {ASSUMED}; none: exact"


@dataclass(frozen=True, repr=False)
class Drift(Settings):
    """A slow change of speed: exp of an Ornstein-Uhlenbeck process, in its stationary state.

    The factor on durations is log-normal with mean 1 at any time, and the correlation of its
    logarithm over t seconds is exp(-t / time_constant). It changes ten times in a time constant.
    """

    sigma: float = setting(0.1, "standard deviation of the logarithm", above=0, high=5)
    time_constant: float = quantity(SECONDS, 60.0, "after which it is forgotten", low=0.01, above=0)

    def factors(self, generator: Generator) -> Callable[[float], float]:
        """The factor over time, in seconds, of one node: from normal numbers of `generator`."""
        keep = math.exp(-0.1)
        states = [generator.standard_normal()]

        def factor(time: float) -> float:
            place = int(10 * time / self.time_constant)
            while len(states) <= place:
                new = math.sqrt(1 - keep**2) * generator.standard_normal()
                states.append(keep * states[-1] + new)
            return math.exp(self.sigma * states[place] - self.sigma**2 / 2)

        return factor
