"""`orchestra bench fidelity`: predictions of the simulation beside the same runs on processes."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file

from orchestra.bench.calibrate import calibrate
from orchestra.bench.cases import Case, predicted
from orchestra.bench.turns import Progress, order
from orchestra.cluster.calibration import Calibration, read_calibration
from orchestra.engines.run import train_run
from orchestra.trainer.settings import Run

SKIPPED = 4
"""One part of so many of a run's steps, its first, is not timed."""
Histogram = Mapping[int, float]


@dataclass(frozen=True)
class Observation:
    """One run: seconds of a step of the budget, bytes sent, shares of each staleness."""

    step_seconds: float
    bytes_sent: int
    staleness: Histogram


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


def bench_fidelity(
    chosen: Sequence[Case],
    rounds: int = 3,
    seconds: float = 0.4,
    calibration: Path | None = None,
    on_progress: Progress | None = None,
) -> tuple[list[FidelityRow], Calibration]:
    """Calibrate, predict, then run for real in `rounds` rounds, every other one in reverse.

    With `calibration`, that file is taken, and nothing is measured. Nothing that is predicted has
    been run before, and nothing is fitted afterwards. The calibration comes with the rows.
    """
    with tempfile.TemporaryDirectory(prefix="orchestra-fidelity-") as name:
        folder = Path(name)
        path = calibration or folder / "calibration.json"
        if calibration is None:
            subjects = {case.task.model: case.task.subject for case in chosen}
            path.write_text(calibrate([*subjects.values()], seconds, on_progress).to_json())
        measured = read_calibration(path)
        turns = [("predicting", place) for place in range(len(chosen))]
        for number in range(rounds):
            turns += [("running", place) for place in order(range(len(chosen)), number)]
        observed: dict[tuple[str, int], list[Observation]] = defaultdict(list)
        for done, turn in enumerate(turns, start=1):
            doing, place = turn
            run = chosen[place].run
            if doing == "predicting":
                run = chosen[place].simulated(measured.cluster, str(path))
            observed[turn].append(observe(run, folder / f"{place}-{doing}"))
            if on_progress is not None:
                on_progress(f"{doing} {chosen[place].label}", done / len(turns))
        rows = []
        for place, case in enumerate(chosen):
            formula, constant = predicted(case, measured)
            differ = None
            if case.run.strategy.synchronous:  # elsewhere the order of arrivals decides on them
                files = (folder / f"{place}-{done}" for done in ("predicting", "running"))
                differ = largest_difference(*files)
            (virtual,), real = observed["predicting", place], observed["running", place]
            rows.append(row_of(case, real, virtual, formula, constant, differ))
    return rows, measured


def observe(run: Run, keep: Path) -> Observation:
    """Carry out `run`; its final parameters go to the file `keep`.

    Raises:
        RunFailed: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="orchestra-fidelity-") as name:
        folder = Path(name)
        record = train_run(run, folder, quiet=True)
        seconds = step_seconds(run, folder)
        (folder / "parameters.safetensors").replace(keep)
    whole = sum(record.staleness_histogram.values())
    shares = {int(value): count / whole for value, count in record.staleness_histogram.items()}
    return Observation(seconds, record.bytes_sent, shares)


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


def row_of(
    case: Case,
    real: Sequence[Observation],
    virtual: Observation,
    formula: float,
    constant: float,
    parameters_differ: float | None,
) -> FidelityRow:
    """What became of `case`."""
    seconds = tuple(observation.step_seconds for observation in real)
    differences = [virtual.bytes_sent - observation.bytes_sent for observation in real]
    together: dict[int, float] = defaultdict(float)
    for observation in real:
        for value, share in observation.staleness.items():
            together[value] += share / len(real)
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


PREDICTORS = {"simulated": "simulation", "formula": "closed formula", "constant": "constant"}


class Verdict(NamedTuple):
    """Of one predictor: absolute errors of step times, and pairs of strategies in the right order.

    `pairs` are those on the same task and ranks that differ by more than the runs of both do.
    """

    predictor: str
    median: float
    worst: float
    pairs: int
    kept: int


def verdicts(rows: Sequence[FidelityRow]) -> list[Verdict]:
    """One of each predictor."""
    pairs = [
        (one, other, difference)
        for one, other in itertools.combinations(rows, 2)
        if (one.task, one.ranks) == (other.task, other.ranks)
        and abs(difference := one.real_seconds - other.real_seconds) > one.noise + other.noise
    ]
    found = []
    for name, title in PREDICTORS.items():
        errors = [abs(row.error(name)) for row in rows]
        kept = sum((getattr(a, name) - getattr(b, name)) * real > 0 for a, b, real in pairs)
        found.append(Verdict(title, statistics.median(errors), max(errors), len(pairs), kept))
    return found


CASE_HEADINGS = (
    "task", "ranks", "strategy", "real", "runs", "simulation", "formula", "constant",
    "bytes", "staleness", "parameters",
)  # fmt: skip


def markdown(rows: Sequence[FidelityRow], calibration: Calibration) -> str:
    """When and where, then two tables, for docs/fidelity.md: the predictors, and every case."""
    machine = calibration.machine
    reasons = (calibration.quality_of(task).doubts for task in calibration.tasks)
    doubts = "; ".join(dict.fromkeys(itertools.chain(*reasons)))
    lines = [
        f"Measured on {calibration.measured_at[:10]}: {machine.get('processor')}, "
        f"{calibration.cores} cores, torch {machine.get('packages', {}).get('torch')}; "
        f"{len(rows[0].runs)} runs of each row. While calibrating, other programs took at most "
        f"{calibration.busy_with_others:.0%} of the processor time that was wanted.",
        "",
    ]
    if doubts:
        lines += [f"**The calibration is not to be trusted**, nor are these figures: {doubts}.", ""]
    headings = ("predictor", "median error", "worst error", "pairs in the right order")
    summary = [
        (v.predictor, f"{v.median:.1%}", f"{v.worst:.1%}", f"{v.kept} of {v.pairs}")
        for v in verdicts(rows)
    ]
    lines += [*_table(headings, summary), "", *_table(CASE_HEADINGS, map(_cells, rows))]
    return "\n".join(lines) + "\n"


def _cells(row: FidelityRow) -> tuple[str, ...]:
    return (
        row.task,
        str(row.ranks),
        row.label,
        f"{row.real_seconds * 1e3:.2f} ms",
        f"±{row.noise / row.real_seconds:.0%}",
        f"{row.error('simulated'):+.1%}",
        f"{row.error('formula'):+.0%}",
        f"{row.error('constant'):+.0%}",
        f"{row.bytes_difference:+d}" if row.bytes_difference else "0",
        "" if row.staleness_distance is None else f"{row.staleness_distance:.2f}",
        "" if row.parameters_differ is None else f"{row.parameters_differ:.3g}",
    )


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---"] * len(headings)
    return ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *lines)]
