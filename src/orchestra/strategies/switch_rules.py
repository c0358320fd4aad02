"""When to switch: rules over what every worker knows of each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from orchestra.settings import Settings, setting

if TYPE_CHECKING:
    from orchestra.worker.worker import Step


@dataclass
class RuleState:
    """What a rule remembers: steps seen, past observations, and the interval under way."""

    steps: int = 0
    observations: list[float] = field(default_factory=list)
    total: float = 0.0
    count: int = 0
    epoch: int = 0


@dataclass(frozen=True, repr=False)
class Rule(Settings, ABC):
    """Decides, after each step, whether it is time. All workers decide alike."""

    @property
    def reads_loss(self) -> bool:
        """Whether it depends on the training loss."""
        return False

    @abstractmethod
    def observe(self, state: RuleState, step: Step) -> bool:
        """Take note of a finished step; True to switch now."""


@dataclass(frozen=True, repr=False)
class AfterSteps(Rule):
    """After a fixed number of steps."""

    steps: int = setting(100, "steps of the first phase", low=1)

    def observe(self, state: RuleState, step: Step) -> bool:
        """True at step `steps`."""
        state.steps += 1
        return state.steps >= self.steps


@dataclass(frozen=True, repr=False)
class LossStable(Rule):
    """The empirical rule of Strategy-Switch (Provatas et al., IEEE Access 2025).

    With the last W observations L_1 .. L_W of the training loss:
    s = 1/(W-1) sum_{i=2..W} |L_i - L_{i-1}| / |L_{i-1}|, and switch when s <= threshold.

    The paper's abstract does not say what one observation is, so `every` and `source` are
    settings. A step's loss differs from the next by its batch's noise alone; observe means over
    several steps, or over epochs, where that noise hides the trend.
    """

    window: int = setting(6, "W: observations", low=2)
    threshold: float = setting(0.01, "largest mean relative change that counts as stable", low=0.0)
    _: KW_ONLY
    every: int | Literal["epoch"] = setting(
        1,
        "steps that one observation is the mean of; 'epoch': those of one pass over the data",
        low=1,
    )
    source: Literal["mean", "max"] = setting(
        "mean", "a step's loss: the sample-weighted mean over the workers, or the largest of them"
    )
    floor: float = setting(
        1e-12, "losses nearer to 0 than it count as this much in the denominator", above=0.0
    )

    @property
    def reads_loss(self) -> bool:
        """It does."""
        return True

    def observe(self, state: RuleState, step: Step) -> bool:
        """True when the window is full and the loss in it stable."""
        state.steps += 1
        state.total += step.loss if self.source == "mean" else max(step.losses)
        state.count += 1
        if not self._interval_ends(state, step):
            return False
        state.observations.append(state.total / state.count)
        del state.observations[: -self.window]
        state.total, state.count = 0.0, 0
        return self.change(state.observations) <= self.threshold

    def _interval_ends(self, state: RuleState, step: Step) -> bool:
        if self.every != "epoch":
            return state.count >= self.every
        before, state.epoch = state.epoch, int(step.epoch)
        return state.epoch > before

    def change(self, losses: list[float]) -> float:
        """s of the `window` losses in `losses`; infinite while there are fewer."""
        if len(losses) < self.window:
            return float("inf")
        changes = [abs(new - old) / max(abs(old), self.floor) for old, new in pairwise(losses)]
        return sum(changes) / len(changes)
