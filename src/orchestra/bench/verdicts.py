"""How good predictions of step times are: ratios within a block, order, regret, absolute errors."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
"""Of the rounds, for an interval."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Block:
    """Strategies that took turns on one machine.

    Attributes:
        real: seconds of a step of each strategy, one for each round.
        predicted: seconds of a step of each strategy.
    """

    real: Mapping[str, Sequence[float]]
    predicted: Mapping[str, float]

    @property
    def medians(self) -> dict[str, float]:
        """Of the real seconds, by strategy."""
        return {label: statistics.median(runs) for label, runs in self.real.items()}

    def errors(self) -> list[float]:
        """Predicted over real, less 1, of each strategy."""
        return [self.predicted[label] / real - 1 for label, real in self.medians.items()]

    def distances(self) -> NDArray[np.float64]:
        """Shape (rounds, pairs): the logarithm of the ratio of each pair's real seconds."""
        logs = np.log(np.array(list(self.real.values()), dtype=float))
        first, second = np.triu_indices(len(logs), 1)
        return np.asarray(logs[first] - logs[second]).T

    def predicted_distances(self) -> NDArray[np.float64]:
        """Shape (pairs,): the same as predicted."""
        logs = np.log([self.predicted[label] for label in self.real])
        first, second = np.triu_indices(len(logs), 1)
        return np.asarray(logs[first] - logs[second])

    def tau(self) -> float | None:
        """Kendall's tau-a of predicted and real medians; None for a single strategy."""
        real = self.medians
        signs = [
            np.sign(real[a] - real[b]) * np.sign(self.predicted[a] - self.predicted[b])
            for a, b in itertools.combinations(real, 2)
        ]
        return float(np.mean(signs)) if signs else None

    def regret(self) -> float:
        """How much longer a step takes under the strategy that is predicted to be the fastest than
        under the one that is."""
        chosen = min(self.real, key=lambda label: self.predicted[label])
        return self.medians[chosen] / min(self.medians.values()) - 1

    def pairs(self) -> tuple[int, int]:
        """Pairs of strategies whose runs differ by more than those of both scatter, and how many of
        them are predicted in the right order."""
        found = kept = 0
        for a, b in itertools.combinations(self.real, 2):
            difference = self.medians[a] - self.medians[b]
            if abs(difference) > scatter(self.real[a]) + scatter(self.real[b]):
                found += 1
                kept += (self.predicted[a] - self.predicted[b]) * difference > 0
        return found, kept


def scatter(runs: Sequence[float]) -> float:
    """Half of the distance between the fastest and the slowest of `runs`."""
    return (max(runs) - min(runs)) / 2


@dataclass(frozen=True)
class Ratios:
    """Errors of the ratios between two strategies of a block, over all pairs: their size.

    Attributes:
        median, worst: of the predictions.
        interval: of the median, from resampled rounds (bootstrap, percentiles).
        floor, worst_floor: real against real: the ratios in one half of the rounds predicted by
            those in the other. Nothing is known of an error that is smaller.
    """

    median: float
    worst: float
    interval: tuple[float, float]
    floor: float
    worst_floor: float


def ratio_errors(blocks: Sequence[Block], seed: int = 0) -> Ratios:
    """Those of all pairs of `blocks`, which have at least two rounds and two strategies each."""
    real = [block.distances() for block in blocks]
    predicted = [block.predicted_distances() for block in blocks]

    def errors(rows: Sequence[NDArray[np.intp]]) -> NDArray[np.float64]:
        return np.concatenate(
            [
                np.abs(np.expm1(told - np.median(seen[chosen], axis=0)))
                for seen, told, chosen in zip(real, predicted, rows, strict=True)
            ]
        )

    whole = errors([np.arange(len(seen)) for seen in real])
    generator = np.random.default_rng(seed)
    medians = [
        float(np.median(errors([generator.integers(len(seen), size=len(seen)) for seen in real])))
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    halves = np.concatenate(
        [
            np.abs(np.expm1(np.median(seen[::2], axis=0) - np.median(seen[1::2], axis=0)))
            for seen in real
        ]
    )
    return Ratios(
        float(np.median(whole)),
        float(whole.max()),
        (float(low), float(high)),
        float(np.median(halves)),
        float(halves.max()),
    )


@dataclass(frozen=True)
class Verdict:
    """On one predictor, over all blocks.

    Attributes:
        ratios: errors of ratios within a block.
        tau: the mean of Kendall's tau of the blocks.
        regret, worst_regret: the median and the largest of the blocks.
        median, worst: absolute errors of single step times.
        pairs, kept: that differ by more than they scatter, and those in the right order.
    """

    ratios: Ratios | None
    tau: float | None
    regret: float
    worst_regret: float
    median: float
    worst: float
    pairs: int
    kept: int


def verdict(blocks: Sequence[Block]) -> Verdict:
    """On the predictions of all `blocks`; `ratios` only where a block has several strategies, in at
    least two rounds."""
    several = [block for block in blocks if len(block.real) > 1]
    rounds = min((len(runs) for block in several for runs in block.real.values()), default=0)
    errors = [abs(error) for block in blocks for error in block.errors()]
    regrets = [block.regret() for block in blocks]
    taus = [tau for block in several if (tau := block.tau()) is not None]
    pairs = [block.pairs() for block in blocks]
    return Verdict(
        ratio_errors(several) if rounds > 1 else None,
        statistics.mean(taus) if taus else None,
        statistics.median(regrets),
        max(regrets),
        statistics.median(errors),
        max(errors),
        sum(found for found, _ in pairs),
        sum(kept for _, kept in pairs),
    )
