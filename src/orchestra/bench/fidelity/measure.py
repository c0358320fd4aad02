"""Runs on processes, their predictions, and what both say."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from orchestra.bench.fidelity.cases import Case
from orchestra.engines.run import train_run
from orchestra.trainer.settings import Run

SKIPPED = 4
"""One part of so many of a run's steps, its first, is not timed."""
Histogram = Mapping[int, float]


@dataclass(frozen=True)
class Observation:
    """One run: seconds of a step of the budget, bytes sent, shares of each staleness, and the hash
    of the final parameters."""

    step_seconds: float
    bytes_sent: int
    staleness: Histogram
    parameters: str


def observe(run: Run, keep: Path | None = None) -> Observation:
    """Carry out `run`; its final parameters go to `keep`.

    Raises:
        RunFailed: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="orchestra-fidelity-") as name:
        folder = Path(name)
        record = train_run(run, folder, quiet=True)
        seconds = step_seconds(run, folder)
        if keep is not None:
            (folder / "parameters.safetensors").replace(keep)
    whole = sum(record.staleness_histogram.values())
    shares = {int(value): count / whole for value, count in record.staleness_histogram.items()}
    return Observation(
        seconds,
        record.bytes_sent,
        shares,
        record.parameters_sha256 or "",
    )


def step_seconds(run: Run, folder: Path) -> float:
    """Seconds of a step of the budget, from the steps that the ranks wrote down.

    The first quarter, in which memory is taken for the first time, does not count; nor does what
    follows the last step.
    """
    paces: list[float] = []
    for file in folder.glob("steps-rank-*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [line for line in lines if line["seconds"] is not None]
        if len(lines) > SKIPPED * 2:
            begin, end = lines[len(lines) // SKIPPED], lines[-1]
            steps = end["step"] - begin["step"]
            paces.append((end["seconds"] - begin["seconds"]) / steps * len(lines))
    assert run.training.steps is not None
    return statistics.mean(paces) / run.training.steps


@dataclass(frozen=True)
class FidelityRow:
    """A case: what was predicted, and what real runs were like.

    Attributes:
        real_seconds: the median of the runs; `runs` are all of them.
        bytes_difference: predicted less real, of the run that is nearest.
        staleness_distance: half the sum of the differences of the shares (total variation), from
            all runs together; None where nothing can be stale.
        parameters_differ: the largest difference of a parameter; None where the order of arrivals
            decides.
    """

    task: str
    ranks: int
    label: str
    real_seconds: float
    runs: tuple[float, ...]
    simulated: float
    formula: float
    constant: float
    bytes_difference: int
    staleness_distance: float | None
    parameters_differ: float | None

    def error(self, predictor: str) -> float:
        """Predicted over real, less 1."""
        predicted: float = getattr(self, predictor)
        return predicted / self.real_seconds - 1

    @property
    def noise(self) -> float:
        """Half of the distance between the fastest and the slowest run."""
        return (max(self.runs) - min(self.runs)) / 2


def row_of(
    case: Case,
    real: Sequence[Observation],
    virtual: Observation,
    *,
    formula: float,
    constant: float,
    parameters_differ: float | None,
) -> FidelityRow:
    """What became of `case`."""
    seconds = tuple(observation.step_seconds for observation in real)
    differences = [virtual.bytes_sent - observation.bytes_sent for observation in real]
    together: dict[int, float] = {}
    for observation in real:
        for value, share in observation.staleness.items():
            together[value] = together.get(value, 0.0) + share / len(real)
    stale = bool(together) or bool(virtual.staleness)
    return FidelityRow(
        case.task.model,
        case.ranks,
        case.label,
        statistics.median(seconds),
        seconds,
        virtual.step_seconds,
        formula,
        constant,
        min(differences, key=abs),
        distance(together, virtual.staleness) if stale else None,
        parameters_differ,
    )


def distance(one: Histogram, other: Histogram) -> float:
    """The total variation distance: 0 for the same shares, 1 where none is common."""
    values = one.keys() | other.keys()
    return sum(abs(one.get(v, 0.0) - other.get(v, 0.0)) for v in values) / 2


def largest_difference(one: Path, other: Path) -> float:
    """Of any parameter or buffer in two files."""
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    differences = (first[name].double() - second[name].double() for name in first)
    return max(float(difference.abs().max()) for difference in differences if difference.numel())
