"""The quality of predicted step times; tables for a terminal and for docs/results/fidelity.md."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.fidelity.cases import CONTROLS
from benchmarks.fidelity.runs import EMULATED_QUIET, QUIET, FidelityRow
from orchestra.cluster.calibration import Calibration
from orchestra.report.rows import grouped

RESAMPLES = 1000  # the number of resamplings of the rounds for an interval
LEAST_ROUNDS = 6
"""The fewest rounds for an interval: n of them lie on both sides of their median with probability
1 - 2^(1 - n), so fewer rounds cannot hold it with 95 %."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class StrategyTurns:
    """The strategies that took turns on one machine.

    Attributes:
        real: seconds of a step of each strategy, one for each round.
        predicted: seconds of a step of each strategy.
    """

    real: Mapping[str, Sequence[float]]
    predicted: Mapping[str, float]

    @property
    def medians(self) -> dict[str, float]:
        return {label: statistics.median(runs) for label, runs in self.real.items()}

    def errors(self) -> list[float]:
        """Return predicted over real, less 1, of each strategy."""
        return [self.predicted[label] / real - 1 for label, real in self.medians.items()]

    def distances(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the logarithms of the ratios of all pairs: real ones, of shape (rounds, pairs),
        and predicted ones, of shape (pairs,).
        """
        first, second = np.triu_indices(len(self.real), 1)
        # Logarithms, so that a ratio and its inverse have errors of the same size
        real = np.log(np.array(list(self.real.values()), dtype=float))
        predicted = np.log([self.predicted[label] for label in self.real])
        return (real[first] - real[second]).T, predicted[first] - predicted[second]

    def tau(self) -> float | None:
        """Return Kendall's tau-a of predicted and real medians; None for a single strategy."""
        real = self.medians
        signs = [
            # Equal predictions count as neither right nor wrong (tau-a)
            np.sign(real[a] - real[b]) * np.sign(self.predicted[a] - self.predicted[b])
            for a, b in itertools.combinations(real, 2)
        ]
        return float(np.mean(signs)) if signs else None

    def regret(self) -> float:
        """Return how much longer a step takes under the strategy predicted to be the fastest
        than under the strategy that is the fastest, as a fraction.
        """
        chosen = min(self.real, key=lambda label: self.predicted[label])
        return self.medians[chosen] / min(self.medians.values()) - 1

    def pairs(self) -> tuple[int, int]:
        """Return the number of pairs of strategies whose runs differ by more than they scatter,
        and how many of these are predicted in the right order.
        """
        found = kept = 0
        for a, b in itertools.combinations(self.real, 2):
            difference = self.medians[a] - self.medians[b]
            # The order of runs that overlap is chance
            if abs(difference) > scatter(self.real[a]) + scatter(self.real[b]):
                found += 1
                kept += (self.predicted[a] - self.predicted[b]) * difference > 0
        return found, kept


def scatter(runs: Sequence[float]) -> float:
    """Return half the distance between the fastest and the slowest of `runs`."""
    return (max(runs) - min(runs)) / 2


@dataclass(frozen=True)
class Ratios:
    """Errors of the predicted ratios between two strategies of a block, over all pairs, by size.

    Attributes:
        median, worst: of the predictions.
        interval: of the median, from resampled rounds (bootstrap, percentiles); None where there
            are fewer than `LEAST_ROUNDS`.
        floor, worst_floor: the noise of the real ratios: half of the difference between those in
            one half of the rounds and those in the other, whose noise is twice that of the ratios
            over all rounds. Smaller errors cannot be told from noise.
    """

    median: float
    worst: float
    interval: tuple[float, float] | None
    floor: float
    worst_floor: float


def ratio_errors(blocks: Sequence[StrategyTurns]) -> Ratios:
    """Return the errors over all pairs of `blocks`, each of two or more rounds and strategies."""
    distances = [block.distances() for block in blocks]

    def errors(rows: Sequence[NDArray[np.intp]]) -> NDArray[np.float64]:
        """Return the errors against the medians over these rows of the real ratios."""
        pairs = zip(distances, rows, strict=True)
        # A round's ratio cancels the machine's speed in that round; a ratio of medians does not.
        apart = (told - np.median(real[chosen], axis=0) for (real, told), chosen in pairs)
        return np.asarray(np.abs(np.expm1(np.concatenate([*apart]))))

    rounds = [len(real) for real, _ in distances]
    # All rounds as they are, then resampled ones
    whole = errors([np.arange(count) for count in rounds])
    interval = None
    if min(rounds) >= LEAST_ROUNDS:
        # Seeded, so that a table of the same runs is the same
        generator = np.random.default_rng(0)
        medians = [
            np.median(errors([generator.integers(count, size=count) for count in rounds]))
            for _ in range(RESAMPLES)
        ]
        low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        interval = float(low), float(high)
    # Every other round, not the first half and the second: a machine may drift
    apart = (np.median(real[::2], axis=0) - np.median(real[1::2], axis=0) for real, _ in distances)
    halves = np.abs(np.expm1(np.concatenate([*apart]) / 2))
    return Ratios(
        median=float(np.median(whole)),
        worst=float(whole.max()),
        interval=interval,
        floor=float(np.median(halves)),
        worst_floor=float(halves.max()),
    )


@dataclass(frozen=True)
class FidelityVerdict:
    """The quality of one predictor, over all blocks."""

    ratios: Ratios | None  # errors of ratios within a block
    tau: float | None  # the mean of Kendall's tau of the blocks
    regret: float  # the median of the blocks
    worst_regret: float
    median: float  # of the absolute errors of single step times
    worst: float
    pairs: int  # that differ by more than they scatter
    kept: int  # those in the right order


def verdict(blocks: Sequence[StrategyTurns]) -> FidelityVerdict:
    """Return the verdict on the predictions of all `blocks`. It has `ratios` only if some block
    has several strategies, each in at least two rounds.
    """
    several = [block for block in blocks if len(block.real) > 1]
    rounds = min((len(runs) for block in several for runs in block.real.values()), default=0)
    errors = [abs(error) for block in blocks for error in block.errors()]
    regrets = [block.regret() for block in blocks]
    taus = [tau for block in several if (tau := block.tau()) is not None]
    pairs = [block.pairs() for block in blocks]
    return FidelityVerdict(
        # A single round has no halves to compare
        ratio_errors(several) if rounds > 1 else None,
        statistics.mean(taus) if taus else None,
        statistics.median(regrets),
        max(regrets),
        statistics.median(errors),
        max(errors),
        sum(found for found, _ in pairs),
        sum(kept for _, kept in pairs),
    )


PREDICTORS = {
    "simulated": "simulation",
    "replayed": "simulation, computation as recorded",
    "formula": "closed formula",
    "constant": "constant",
}


def verdicts(rows: Sequence[FidelityRow]) -> dict[str, FidelityVerdict]:
    """Return a verdict on each predictor, by its title; controls are left out."""
    strategies = [row for row in rows if row.label not in CONTROLS]
    groups = grouped(strategies, lambda row: (row.task, row.ranks, row.cluster))
    found = {}
    for name, title in PREDICTORS.items():
        # `replayed` is known of emulated clusters only
        if all(getattr(row, name) is not None for row in strategies):
            blocks = (
                StrategyTurns(
                    {r.label: r.runs for r in rows}, {r.label: getattr(r, name) for r in rows}
                )
                for rows in groups.values()
            )
            found[title] = verdict([*blocks])
    return found


VERDICT_HEADINGS = (
    "predictor", "ratios: median error (95 %)", "worst", "Kendall's tau", "regret: median", "worst",
    "step times: median error", "worst", "pairs in the right order",
)  # fmt: skip
CASE_HEADINGS = (
    "task", "ranks", "cluster", "strategy", "real", "runs", "simulation", "replayed", "formula",
    "constant", "time to target", "bytes", "staleness", "parameters", "others", "switches",
)  # fmt: skip


def markdown(rows: Sequence[FidelityRow], calibration: Calibration) -> str:
    """Return the date, the machine, and tables of the predictors, the controls, and every case."""
    machine = calibration.machine
    reasons = (calibration.quality_of(task).doubts for task in calibration.tasks)
    doubts = "; ".join(dict.fromkeys(itertools.chain(*reasons)))
    runs = sum(len(row.runs) for row in rows)
    # All rows of a table are of one engine
    quiet = EMULATED_QUIET if rows[0].cluster else QUIET
    lines = [
        f"Measured on {calibration.measured_at[:10]}: {machine.get('processor')}, "
        f"{calibration.cores} cores, torch {machine.get('packages', {}).get('torch')}; "
        f"{len(rows[0].runs)} runs of each row, {sum(row.attempts for row in rows) - runs} made "
        f"again since other programs took more than {quiet:.0%}. While calibrating these took at "
        f"most {calibration.busy_with_others:.0%} of the processor time that was wanted.",
        "",
    ]
    if doubts:
        lines += [f"**The calibration is not to be trusted**, nor are these figures: {doubts}.", ""]
    strategies = [row for row in rows if row.label not in CONTROLS]
    controls = [row for row in rows if row.label in CONTROLS]
    if strategies:
        lines += _verdict_lines(strategies)
    for group in (controls, strategies):
        lines += ["", *_table(CASE_HEADINGS, map(_cells, group))] if group else []
    return "\n".join(lines) + "\n"


def _verdict_lines(strategies: Sequence[FidelityRow]) -> list[str]:
    found = verdicts(strategies)
    lines = _table(VERDICT_HEADINGS, itertools.starmap(_verdict_cells, found.items()))
    if (floor := next(iter(found.values())).ratios) is not None:
        lines += [
            "",
            f"Noise of the ratios of real runs, from the halves of their rounds: {floor.floor:.1%} "
            f"in the median, {floor.worst_floor:.1%} at worst. Errors below these say nothing.",
        ]
    errors = [abs(error) for row in strategies if (error := row.target_error) is not None]
    if errors:
        middle, worst = f"{statistics.median(errors):.1%}", f"{max(errors):.1%}"
        text = f"Time to target of the simulation: {middle} in the median, {worst} at worst."
        lines += ["", text]
    return lines


def _verdict_cells(title: str, found: FidelityVerdict) -> tuple[str, ...]:
    median = worst = ""
    if (ratios := found.ratios) is not None:
        median = _at_least(ratios.median, ratios.floor)
        if ratios.interval is not None:
            low, high = ratios.interval
            median += f" ({low:.1%} to {high:.1%})"
        worst = _at_least(ratios.worst, ratios.worst_floor)
    tau = "" if found.tau is None else f"{found.tau:.2f}"
    shares = (found.regret, found.worst_regret, found.median, found.worst)
    pairs = f"{found.kept} of {found.pairs}"
    return title, median, worst, tau, *(f"{share:.1%}" for share in shares), pairs


def _at_least(error: float, floor: float) -> str:
    """Return `error` in words, or that it is below what can be measured."""
    # Nothing is known of an error that is smaller than that of real runs beside each other
    return f"{error:.1%}" if error >= floor else f"below {floor:.1%}"


def _cells(row: FidelityRow) -> tuple[str, ...]:
    to_target = ""
    if row.to_target is not None and row.target_error is not None:
        to_target = f"{row.target_error:+.1%} ({row.to_target[1]:.2f} s)"
    return (
        row.task,
        str(row.ranks),
        row.cluster,
        row.label,
        f"{row.real_seconds * 1e3:.2f} ms",
        f"±{scatter(row.runs) / row.real_seconds:.0%}",
        f"{row.error('simulated'):+.1%}",
        "" if row.replayed is None else f"{row.error('replayed'):+.1%}",
        f"{row.error('formula'):+.0%}",
        f"{row.error('constant'):+.0%}",
        to_target,
        f"{row.bytes_difference:+d}" if row.bytes_difference else "0",
        _staleness(row),
        "" if row.parameters_differ is None else f"{row.parameters_differ:.3g}",
        "" if row.others is None else f"{row.others:.0%}",
        str(row.switches),
    )


def _staleness(row: FidelityRow) -> str:
    if row.staleness is None or row.staleness_distance is None:
        return ""
    (mean, tail), (real_mean, real_tail) = row.staleness
    real = f"real {real_mean:.2f}, {real_tail:g}"
    return f"{row.staleness_distance:.2f} ({mean:.2f}, {tail:g}; {real})"


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---"] * len(headings)
    return ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *lines)]
