"""The settings of each row: a grid, and beyond its edges until the best one lies inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from orchestra.experiments.experiment import RATE, Choice, Tune, TuningTrial, choose, tuned
from orchestra.records.record import RunRecord
from orchestra.trainer.settings import Training

ROUNDS = 8
"""Of going on; a best trial that still has an untried neighbour then is said to be at an edge."""
CHANCE = 0.5
"""Below this accuracy a trial has learnt nothing, and says nothing of its neighbours."""
MOMENTUM = "momentum"
Outcomes = Sequence[tuple[TuningTrial, RunRecord]]
Choices = Mapping[tuple[str, int], Choice]


def search(
    tune: Tune,
    training: Training,
    grid: Sequence[TuningTrial],
    make: Callable[[Sequence[TuningTrial]], Outcomes],
) -> Choices:
    """By row what is best, after its trials of the `grid` and of all neighbours of the best."""
    outcomes = list(make(grid))
    for _ in range(ROUNDS):
        choices = choose(tune, training, outcomes)
        more = [trial for choice in choices.values() for trial in untried(choice)]
        if not more:
            return choices
        outcomes += make(more)
    return choose(tune, training, outcomes)


def untried(choice: Choice) -> list[TuningTrial]:
    """What has not been tried one step from the best trial, along each setting.

    Where no trial has learnt anything, a lower rate than all that were tried.
    """
    best = choice.best
    if best is None:
        return []
    tried = [trial.settings for trial, _ in choice.outcomes]
    rates = sorted({settings[RATE] for settings in tried})
    reached = max(record.learned.metrics.get("accuracy", 0.0) for _, record in choice.outcomes)
    if reached < CHANCE and len(rates) > 1:
        wanted = [{**best.settings, RATE: beyond(RATE, rates[0], rates[1])}]
    else:
        wanted = [near for near in neighbours(best.settings, tried) if near not in tried]
    return [
        TuningTrial(number, near, tuned(best.run, near))
        for number, near in enumerate(wanted, start=len(choice.outcomes))
    ]


def neighbours(
    best: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """`best` with one setting a step lower or higher: the next value tried, or beyond the edge."""
    for key, value in best.items():
        values = sorted({settings[key] for settings in tried})
        if len(values) < 2:
            continue
        place = values.index(value)
        below = values[place - 1] if place else beyond(key, value, values[1])
        above = values[place + 1] if place + 1 < len(values) else beyond(key, value, values[-2])
        yield from ({**best, key: near} for near in (below, above) if near is not None)


def beyond(key: str, edge: float, inner: float) -> float | None:
    """As far from `edge` as that is from `inner`, in ratio; of a momentum m, in the ratio of 1 - m.

    None where there is nothing: below a momentum of 0.
    """
    if not key.endswith(MOMENTUM):
        return _rounded(edge * edge / inner)
    if edge == 0:
        return None
    return max(0.0, _rounded(1 - (1 - edge) ** 2 / (1 - inner)))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def at_edge(choice: Choice) -> bool:
    """Whether the search ended before the best trial lay inside."""
    return bool(untried(choice))
