"""When the rules fire: computed here from the published formula, apart from the code."""

from __future__ import annotations

import math
import random

import pytest

from orchestra.errors import InputError
from orchestra.optimizers import capture, restore
from orchestra.settings import parse, write
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.switch_rules import (
    AfterDecay,
    AfterFraction,
    AfterSteps,
    Both,
    Either,
    LossStable,
    NoiseScale,
    Rule,
    Straggler,
)
from orchestra.worker.worker import Step


def fires_at(rule: Rule, steps: list[Step]) -> int | None:
    """The number of the step after which `rule` says so, counted from 1."""
    state = rule.begin()
    for number, step in enumerate(steps, 1):
        if rule.observe(state, step):
            return number
    return None


def steps_of(losses: list[float]) -> list[Step]:
    return [Step(loss=loss, losses=(loss,)) for loss in losses]


def formula(observations: list[float], window: int, threshold: float) -> int | None:
    """The first observation, from 1, at which s <= threshold over the last `window` of them."""
    for last in range(window, len(observations) + 1):
        seen = observations[last - window : last]
        s = sum(abs(seen[i] - seen[i - 1]) / seen[i - 1] for i in range(1, window)) / (window - 1)
        if s <= threshold:
            return last
    return None


def noisy_descent_to(plateau: float, steps: int, seed: int) -> list[float]:
    noise = random.Random(seed)
    falling = (plateau + 3 * math.exp(-step / 20) for step in range(steps))
    return [loss * (1 + noise.uniform(-0.01, 0.01)) for loss in falling]


@pytest.mark.parametrize("rate", [0.98, 0.9, 0.5])
@pytest.mark.parametrize("window", [2, 6, 20])
def test_a_steadily_falling_loss_never_fires(rate: float, window: int) -> None:
    losses = [2.5 * rate**step for step in range(500)]
    assert fires_at(LossStable(window=window, floor=1e-300), steps_of(losses)) is None


@pytest.mark.parametrize("window", [2, 3, 6, 20])
@pytest.mark.parametrize("threshold", [0.004, 0.01, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_a_plateau_fires_at_the_step_of_the_formula(
    window: int, threshold: float, seed: int
) -> None:
    losses = noisy_descent_to(0.3, 400, seed)
    expected = formula(losses, window, threshold)
    assert fires_at(LossStable(window, threshold), steps_of(losses)) == expected
    if threshold == 0.01 and window > 2:
        assert expected is not None
        assert expected > window


def test_the_paper_s_window_fires_at_the_sixth_observation_of_a_constant_loss() -> None:
    assert fires_at(LossStable(), steps_of([0.7] * 20)) == 6


def test_the_threshold_itself_is_stable() -> None:
    losses = [1.0, 0.75, 0.5625]  # exact in binary: each change is a quarter
    assert fires_at(LossStable(3, 0.25), steps_of(losses)) == 3
    assert fires_at(LossStable(3, 0.2499), steps_of(losses)) is None


@pytest.mark.parametrize("every", [1, 4, 7])
def test_an_observation_is_the_mean_of_every_so_many_steps(every: int) -> None:
    losses = noisy_descent_to(0.5, 600, seed=1)
    means = [sum(losses[i : i + every]) / every for i in range(0, len(losses) - every + 1, every)]
    expected = formula(means, 6, 0.01)
    assert expected is not None
    assert fires_at(LossStable(every=every), steps_of(losses)) == expected * every


def test_an_observation_is_the_mean_of_an_epoch_whatever_its_steps() -> None:
    """Of 10 samples, in batches of 4: epochs end within steps 3, 5, 8, 10 ..."""
    losses = noisy_descent_to(0.5, 400, seed=2)
    steps = steps_of(losses)
    for number, step in enumerate(steps, 1):
        step.epoch = 4 * number / 10
    ends = [n for n in range(1, 401) if (4 * n) // 10 > (4 * (n - 1)) // 10]
    assert ends[:4] == [3, 5, 8, 10]
    means = [
        sum(losses[first:end]) / (end - first) for first, end in zip([0, *ends], ends, strict=False)
    ]
    expected = formula(means, 6, 0.01)
    assert expected is not None
    assert fires_at(LossStable(every="epoch"), steps) == ends[expected - 1]


def test_the_largest_loss_of_the_workers_as_source() -> None:
    plateau = noisy_descent_to(0.3, 200, seed=3)
    flat = Step(loss=0.1)
    steps = [Step(loss=0.1, losses=(0.1, largest, 0.05)) for largest in plateau]
    assert fires_at(LossStable(source="max"), steps) == formula(plateau, 6, 0.01)
    assert fires_at(LossStable(source="mean"), [flat] * 10) == 6
    assert formula(plateau, 6, 0.01) != 6


def test_losses_of_zero_are_counted_by_the_floor() -> None:
    assert fires_at(LossStable(3), steps_of([0.0] * 5)) == 3
    assert fires_at(LossStable(3), steps_of([0.0, 1e-3] * 50)) is None
    # Changes of 1e-6 against a floor of 1e-4 are a hundredth each.
    assert fires_at(LossStable(3, 0.0101, floor=1e-4), steps_of([0.0, 1e-6, 0.0])) == 3
    assert fires_at(LossStable(3, 0.0099, floor=1e-4), steps_of([0.0, 1e-6, 0.0])) is None


def test_negative_losses_count_by_their_size() -> None:
    losses = noisy_descent_to(0.3, 200, seed=4)
    expected = formula(losses, 6, 0.01)
    assert fires_at(LossStable(), steps_of([-loss for loss in losses])) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_never_counts_as_stable(bad: float) -> None:
    assert fires_at(LossStable(3), steps_of([1.0, bad, bad, 1.0, 1.0])) is None


def test_after_steps() -> None:
    assert fires_at(AfterSteps(4), steps_of([1.0] * 10)) == 4
    assert fires_at(AfterSteps(11), steps_of([1.0] * 10)) is None


def test_only_what_reads_the_loss_says_so() -> None:
    assert LossStable().reads_loss
    assert not AfterSteps().reads_loss


@pytest.mark.parametrize(
    "setting", [{"window": 1}, {"threshold": -1.0}, {"every": 0}, {"floor": 0.0}]
)
def test_settings_without_meaning_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(setting))):
        LossStable(**setting)  # type: ignore[arg-type]


def test_after_a_fraction_of_the_work() -> None:
    steps = [Step(fraction=number / 40) for number in range(1, 41)]
    assert fires_at(AfterFraction(0.125), steps) == 5
    assert fires_at(AfterFraction(1.0), steps) == 40
    with pytest.raises(InputError, match="no known end; use AfterSteps"):
        fires_at(AfterFraction(), [Step()])


def test_a_warm_up_is_no_decay() -> None:
    rates = [0.1, 0.2, 0.3, 0.3, 0.29, 0.03]
    steps = [Step(rates=(rate, 5.0)) for rate in rates]
    assert fires_at(AfterDecay(), steps) == 5
    assert fires_at(AfterDecay(below=0.5), steps) == 6
    assert fires_at(AfterDecay(below=0.05), steps) is None


def test_a_straggler_is_seen_in_the_mean_of_a_window() -> None:
    usual, slow = (1.0, 1.1, 0.9, 1.0), (1.0, 1.1, 3.0, 1.0)
    steps = [Step(seconds=seconds) for seconds in [usual] * 5 + [slow] + [usual] * 4 + [slow] * 9]
    # A worker that takes 3.0 in k of 5 steps is at (k 3.0 + (5 - k) 0.9) / 5.
    assert fires_at(Straggler(1.5, window=5), steps) == 12
    assert fires_at(Straggler(1.5, window=1), steps) == 6
    assert fires_at(Straggler(4.0, window=1), steps) is None
    assert fires_at(Straggler(1.5, window=5, present=False), steps[10:]) is None
    assert fires_at(Straggler(1.5, window=3, present=False), steps[5:]) == 4
    assert fires_at(Straggler(1.5, window=1), [Step(seconds=(1.0, 2.0))]) == 1
    assert fires_at(Straggler(1.5, window=1), [Step(seconds=(0.0, 0.0))]) is None
    assert fires_at(Straggler(1.5, window=1), [Step(seconds=(1.0,))]) is None


def test_rules_combine() -> None:
    steps = steps_of([1.0] * 3 + [2.0] + [1.0] * 10)
    stable = LossStable(window=3)
    assert fires_at(stable, steps) == 3
    assert fires_at(stable & AfterSteps(4), steps) == 7
    assert fires_at(stable | AfterSteps(2), steps) == 2
    assert fires_at((stable & AfterSteps(20)) | AfterSteps(9), steps) == 9
    assert (stable & AfterSteps(4)).reads_loss
    assert not (stable | AfterSteps(4)).counts
    assert (AfterFraction() | AfterSteps(4)).counts
    assert (Straggler() | AfterSteps(4)).compares_workers
    assert not AfterSteps(4).compares_workers


def test_combined_rules_have_a_notation() -> None:
    rule = Either(Both(LossStable(), AfterSteps(9)), Straggler(2.0))
    text = "LossStable & AfterSteps(9) | Straggler(2.0)"
    assert parse(text, STRATEGIES, where="here") == rule
    assert parse(write(rule, STRATEGIES), STRATEGIES, where="here") == rule
    with pytest.raises(InputError, match="is not a literal"):
        parse("LossStable + AfterSteps(9)", STRATEGIES, where="here")


@pytest.mark.parametrize(
    "rule",
    [AfterDecay(), Straggler(window=7), LossStable(3) & (AfterDecay() | AfterSteps(8))],
    ids=repr,
)
@pytest.mark.parametrize("saved_after", [2, 5])
def test_what_a_rule_remembers_goes_through_a_checkpoint(rule: Rule, saved_after: int) -> None:
    steps = [
        Step(loss=1.0, rates=(0.1 if n < 6 else 0.01,), seconds=(1.0, 1.0, float(n)))
        for n in range(1, 20)
    ]
    expected = fires_at(rule, steps)
    assert expected is not None
    assert expected > saved_after
    before = rule.begin()
    for step in steps[:saved_after]:
        rule.observe(before, step)
    after = restore(rule.begin(), capture(before))
    fired = [rule.observe(after, step) for step in steps[saved_after:]]
    assert fired.index(True) + saved_after + 1 == expected


def test_the_noise_scale_is_found_from_gradients_of_two_sizes() -> None:
    """Gradients of n samples have |G|^2 = 4 and noise tr(Sigma) / n, with tr(Sigma) = 300."""

    def step(counts: tuple[int, ...]) -> Step:
        squares = tuple(4 + 300 / n if n else 0.0 for n in counts)
        return Step(counts=counts, squares=squares, square=4 + 300 / sum(counts))

    steps = [step((8, 8, 8)), step((16, 8, 0))] * 15  # B = 75 samples, 75/24 of a batch
    assert fires_at(NoiseScale(75.1 / 24), steps) is None
    assert fires_at(NoiseScale(74.9 / 24), steps) == 20
    assert fires_at(NoiseScale(74.9 / 24, least=3), steps) == 3
    assert fires_at(NoiseScale(0.1, least=1), [step((8, 0, 0))] * 5) is None
    assert fires_at(NoiseScale(0.1, least=1), [step((8,))] * 5) is None
