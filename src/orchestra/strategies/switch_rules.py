"""When to switch: rules over what is known of each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from statistics import fmean, median_low
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from orchestra.errors import InputError
from orchestra.settings import MAX_STEPS, Settings, setting
from orchestra.settings.base import REQUIRED

if TYPE_CHECKING:
    from orchestra.worker.worker import Step


@dataclass
class RuleState:
    """The memory of a rule: steps seen, past observations, and the interval under way."""

    steps: int = 0
    observations: list[float] = field(default_factory=list)
    total: float = 0.0
    count: int = 0
    epoch: int = 0


@dataclass(frozen=True, repr=False)
class Rule(Settings, ABC):
    """Decides, after each step, whether it is time.

    Where all workers know the same of a step each observes it, and all decide alike. Elsewhere
    they report to one, which observes for all. Rules combine: `a & b`, `a | b`.
    """

    memory: ClassVar[type[RuleState]] = RuleState  # of its state
    reads_loss: ClassVar[bool] = False  # it depends on the training loss
    counts: ClassVar[bool] = False  # on the number of the step alone, or on what is planned
    compares_workers: ClassVar[bool] = False  # it needs what each worker measures by itself
    reads_gradients: ClassVar[bool] = False  # of workers, which are then averaged

    def begin(self) -> RuleState:
        """Return the memory at the beginning."""
        return self.memory()

    @abstractmethod
    def observe(self, state: Any, step: Step) -> bool:
        """Take note of a finished step in `state`, as `begin` made it; True to switch now."""

    def __and__(self, other: Rule) -> Both:
        return Both(self, other)

    def __or__(self, other: Rule) -> Either:
        return Either(self, other)


@dataclass(frozen=True, repr=False)
class AfterSteps(Rule):
    """After a fixed number of steps."""

    counts = True

    steps: int = setting(100, "steps of the first phase", low=1, high=MAX_STEPS)

    def observe(self, state: RuleState, step: Step) -> bool:
        state.steps += 1
        return state.steps >= self.steps


@dataclass(frozen=True, repr=False)
class AfterFraction(Rule):
    """After a fraction of the work: the timing policy of Sync-Switch (Li et al., ICDCS 2021)."""

    counts = True  # what is consumed is planned

    fraction: float = setting(0.125, "of the samples of the whole run", low=0.0, high=1.0)

    def observe(self, state: RuleState, step: Step) -> bool:
        if not step.fraction:
            raise InputError("AfterFraction: a loop of your own has no known end; use AfterSteps")
        return step.fraction >= self.fraction


@dataclass
class DecayState(RuleState):
    """The largest learning rate so far."""

    largest: float = 0.0


@dataclass(frozen=True, repr=False)
class AfterDecay(Rule):
    """At the first decay of the learning rate: when post-local SGD begins (Lin et al., ICLR 2020).

    A warm-up before it is no decay.
    """

    memory = DecayState

    below: float = setting(
        1.0, "a decay is a rate below so much of the largest before", above=0, high=1
    )

    def observe(self, state: DecayState, step: Step) -> bool:
        rate = step.rates[0]
        state.largest = max(state.largest, rate)
        return rate < self.below * state.largest


@dataclass
class StragglerState(RuleState):
    """For each of the last steps the seconds of each worker."""

    recent: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class Straggler(Rule):
    """While some worker needs longer for a step than the others, waiting for others left out.

    The time for computing and communicating counts. So the rule sees a slow processor, and a slow
    link, which takes long from the first to the last byte of a message. Both ends of a link see it:
    two of three workers in a ring are then slow, and so is the median. The rule does not see the
    inside of torch.distributed's own collectives. The online policy of Sync-Switch (Li et al.,
    ICDCS 2021), to asynchrony and back:
    Switch(a, Switch(b, a, when=Straggler(present=False)), when=Straggler()).
    """

    compares_workers = True
    memory = StragglerState

    ratio: float = setting(
        1.5, "seconds of the slowest over the median that make one", above=1.0, high=1e9
    )
    _: KW_ONLY
    window: int = setting(10, "steps that the seconds are the mean of", low=1, high=1_000_000)
    present: bool = setting(True, "false: when there is none any more")

    def observe(self, state: StragglerState, step: Step) -> bool:
        """Return True if the last `window` steps say so, all of the same number of workers."""
        if state.recent and len(state.recent[-1]) != len(step.seconds):
            state.recent.clear()
        state.recent.append(list(step.seconds))
        del state.recent[: -self.window]
        if len(state.recent) < self.window:
            return False
        seconds = [fmean(own) for own in zip(*state.recent, strict=True)]
        return (max(seconds) > self.ratio * median_low(seconds)) == self.present


@dataclass
class NoiseState(RuleState):
    """Smoothed estimates of tr(Sigma) and |G|^2."""

    noise: float = 0.0
    signal: float = 0.0


@dataclass(frozen=True, repr=False)
class NoiseScale(Rule):
    """Once the gradient's noise asks for a larger batch than all workers' together.

    The simple noise scale B = tr(Sigma) / |G|^2 (McCandlish et al., 2018), both estimated from
    |g_i|^2 of each worker's n_i samples and |g|^2 of the average over all N, and smoothed:

        tr(Sigma) = (mean_i |g_i|^2 - |g|^2) / (mean_i 1/n_i - 1/N);  |G|^2 = |g|^2 - tr(Sigma) / N

    It grows along a training, so that smaller batches, and with them asynchrony, cost little at
    first and exact averages pay later. It needs a first phase that averages gradients.
    """

    compares_workers = True  # by their gradients
    reads_gradients = True
    memory = NoiseState

    ratio: float = setting(
        1.0, "B over the samples of a step, from which on it fires", above=0.0, high=1e9
    )
    _: KW_ONLY
    smoothing: float = setting(0.95, "of the two estimates, from step to step", low=0.0, high=1.0)
    least: int = setting(20, "steps before it may fire", low=1, high=MAX_STEPS)

    def observe(self, state: NoiseState, step: Step) -> bool:
        state.steps += 1
        known = [(n, square) for n, square in zip(step.counts, step.squares, strict=True) if n]
        total = sum(n for n, _ in known)
        if len(known) < 2:
            return False
        # E|g_i|^2 = |G|^2 + tr(Sigma) / n_i, and E|g|^2 = |G|^2 + tr(Sigma) / N: two equations.
        gap = fmean(1 / n for n, _ in known) - 1 / total
        noise = (fmean(square for _, square in known) - step.square) / gap
        keep = self.smoothing
        state.noise = keep * state.noise + (1 - keep) * noise
        state.signal = keep * state.signal + (1 - keep) * (step.square - noise / total)
        # Both are smoothed from 0 alike, which their ratio does not see.
        return state.steps >= self.least and state.noise >= self.ratio * total * state.signal


@dataclass
class PairState(RuleState):
    """The memories of two rules."""

    first: RuleState = field(default_factory=RuleState)
    second: RuleState = field(default_factory=RuleState)


def _of_either(name: str) -> Any:
    """Return a property that two rules have if one of them has it."""
    return property(lambda rule: getattr(rule.first, name) or getattr(rule.second, name))


@dataclass(frozen=True, repr=False)
class Combined(Rule):
    """Two rules. Both observe every step."""

    first: Rule = setting(REQUIRED, "a rule")
    second: Rule = setting(REQUIRED, "another rule")

    reads_loss = _of_either("reads_loss")
    compares_workers = _of_either("compares_workers")
    reads_gradients = _of_either("reads_gradients")

    @property
    def counts(self) -> bool:  # type: ignore[override]
        return self.first.counts and self.second.counts

    def begin(self) -> PairState:
        return PairState(first=self.first.begin(), second=self.second.begin())

    def _both(self, state: PairState, step: Step) -> tuple[bool, bool]:
        return self.first.observe(state.first, step), self.second.observe(state.second, step)


@dataclass(frozen=True, repr=False)
class Both(Combined):
    """`first & second`: when both say so of the same step."""

    def observe(self, state: PairState, step: Step) -> bool:
        return all(self._both(state, step))


@dataclass(frozen=True, repr=False)
class Either(Combined):
    """`first | second`: when one of them says so."""

    def observe(self, state: PairState, step: Step) -> bool:
        return any(self._both(state, step))


@dataclass(frozen=True, repr=False)
class LossStable(Rule):
    """The empirical rule of Strategy-Switch (Provatas et al., IEEE Access 2025).

    With the last W observations L_1 .. L_W of the training loss:
    s = 1/(W-1) sum_{i=2..W} |L_i - L_{i-1}| / |L_{i-1}|, and switch when s <= threshold.

    The paper's abstract does not say what one observation is, so `every` and `source` are
    settings. A step's loss differs from the next by its batch's noise alone; observe means over
    several steps, or over epochs, where that noise hides the trend.
    """

    reads_loss = True

    window: int = setting(6, "W: observations", low=2, high=1_000_000)
    threshold: float = setting(
        0.01, "largest mean relative change that counts as stable", low=0, high=1e9
    )
    _: KW_ONLY
    every: int | Literal["epoch"] = setting(
        1, "steps that one observation is the mean of; 'epoch': those of one pass over the data",
        low=1, high=MAX_STEPS,
    )  # fmt: skip
    source: Literal["mean", "max"] = setting(
        "mean", "a step's loss: the sample-weighted mean over the workers, or the largest of them"
    )
    floor: float = setting(
        1e-12, "losses nearer to 0 count as this much in the denominator", above=0.0, high=1e9
    )

    def observe(self, state: RuleState, step: Step) -> bool:
        state.total += step.loss if self.source == "mean" else max(step.losses)
        state.count += 1
        if self.every == "epoch":
            before, state.epoch = state.epoch, int(step.epoch)
            if state.epoch <= before:
                return False
        elif state.count < self.every:
            return False
        state.observations.append(state.total / state.count)
        del state.observations[: -self.window]
        state.total, state.count = 0.0, 0
        return self.change(state.observations) <= self.threshold

    def change(self, losses: list[float]) -> float:
        """Return s of the `window` losses in `losses`; infinite while there are fewer."""
        if len(losses) < self.window:
            return float("inf")
        changes = [abs(new - old) / max(abs(old), self.floor) for old, new in pairwise(losses)]
        return sum(changes) / len(changes)
