"""What `Auto` decides by: predicted seconds of the candidates, from plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pace:
    """How fast a candidate is, and how far the target is from it.

    Attributes:
        name: the candidate in its notation.
        samples: to the target, in a unit that all candidates share.
        exchange: seconds of one exchange, as it was rehearsed.
        predicted: seconds a step, by what workers compute and the exchange.
        ratio: of the seconds measured while it was under way over those predicted; 1 before.
    """

    name: str
    samples: float
    exchange: float
    predicted: float
    ratio: float = 1.0

    @staticmethod
    def of(
        name: str, samples: float, own: Sequence[Sequence[float]], exchange: float, every: int
    ) -> Pace:
        """Predict the pace of a candidate whose workers exchange after every `every` steps.

        `own` are each worker's seconds in each of some steps, without the exchange.
        """
        steps = len(own[0])
        rounds = [slice(first, first + every) for first in range(0, steps, every)]
        # Workers wait for each other once a round: the slowest over all steps of the round counts.
        slowest = sum(max(sum(worker[steps]) for worker in own) for steps in rounds)
        return Pace(name, samples, exchange, slowest / steps + exchange / every)

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step, corrected by what was measured."""
        return self.predicted * self.ratio

    @property
    def to_target(self) -> float:
        """The predicted time to the target, in a unit that all candidates share."""
        return self.samples * self.seconds


def choose(paces: Sequence[Pace], current: int, margin: float) -> tuple[int, str]:
    """Return the candidate to go on with, and why: another one if it is sooner by the margin."""
    own, best = paces[current], min(range(len(paces)), key=lambda n: paces[n].to_target)
    if best == current:
        return current, "no other candidate is predicted to reach the target sooner"
    sooner = own.to_target / paces[best].to_target
    text = f"{paces[best].name} is predicted to reach the target {sooner:.2f} times as soon"
    if sooner < 1 + margin:
        return current, f"{text}, less than the margin of {1 + margin:g}"
    return best, text


def decision(
    step: int,
    sample: int,
    seconds: float,
    paces: Sequence[Pace],
    current: int,
    new: int,
    reason: str,
) -> dict[str, Any]:
    """Make the record of a decision after `step` steps and `sample` samples of the cluster.

    `seconds` were measured of a step since the decision before.
    """
    return {
        "step": step,
        "sample": sample,
        "under": paces[current].name,
        "then": paces[new].name,
        "reason": reason,
        "measured_step_seconds": seconds,
        "candidates": [
            {
                "strategy": pace.name,
                "exchange_seconds": pace.exchange,
                "step_seconds": pace.seconds,
                "to_target": pace.to_target / paces[current].to_target,
            }
            for pace in paces
        ],
    }
