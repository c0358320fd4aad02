"""Predictions of the simulation beside the same runs on processes."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

from benchmarks.fidelity.cases import Case, predicted
from benchmarks.turns import order
from orchestra.calibration import calibrate
from orchestra.calibration.timing import Progress
from orchestra.cluster.calibration import Calibration, read_calibration
from orchestra.engines.run import train_run
from orchestra.engines.simulation.training import Pace
from orchestra.engines.simulation.training import train_run as simulated_run
from orchestra.records.record import RunRecord
from orchestra.records.store import RunFolder
from orchestra.trainer.settings import Run

SKIPPED = 4  # the first one of this many parts of a run's steps is not timed
QUIET, ATTEMPTS = 0.03, 3
"""A run of which other programs took a larger part of the machine is repeated, up to this many
attempts in all; the least disturbed one counts."""
EMULATED_QUIET = 0.1
"""The same for an emulated run, in which the kernel's own work for the network counts as that of
others."""
SMOOTHED = 4  # the training loss is a mean over the last one of this many parts of a run's samples
LEAST_PACE = 1e-3
"""The least factor: a step without a gradient of the rank's own takes no time, which no simulation
allows."""
Histogram = Mapping[int, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Observation:
    """One run.

    `others` is the part of the machine's processor time that other programs took, stolen time
    included; None if unknown. `losses` is the smoothed training loss over the seconds of the run.
    """

    step_seconds: float  # of the budget
    bytes_sent: int
    staleness: Histogram  # the share of each
    others: float | None = None
    own: float = 0.0  # processor seconds of the ranks
    stolen: float = 0.0  # processor seconds that the hypervisor gave away
    switches: int = 0  # how often a core was taken from a rank that had work to do
    attempts: int = 1  # how often it was run
    computed: Mapping[int, Sequence[float]] = field(default_factory=dict)  # each step's, by rank
    losses: Floats | None = None  # [steps, 2]

    def seconds_to(self, level: float) -> float:
        """Return the seconds until the training loss is at most `level`."""
        assert self.losses is not None
        return float(self.losses[np.argmax(self.losses[:, 1] <= level), 0])


@dataclass(frozen=True)
class FidelityRow:
    """A case: its predictions, and the results of its real runs.

    Attributes:
        real_seconds: the median of the `runs`, one for each round.
        bytes_difference: predicted less real, of the run that is nearest.
        staleness_distance: half the sum of the differences of the shares (total variation), from
            all runs together; None where nothing can be stale.
        staleness: the mean and the 95th percentile, predicted and real.
        parameters_differ: the largest difference of a parameter; None where the order of arrivals
            decides.
        replayed: predicted by a simulation in which each step's computation takes as long as in the
            first run: what is left is the error of communication. Of emulated clusters only: where
            ranks share cores, their computation takes as long as the others let it.
        to_target: seconds until the training loss is at a level that the prediction and all runs
            reach, predicted and real (the median of the runs).
        others, own, stolen, switches, attempts: see `Observation`: of others the largest, else the
            sum over the runs.
    """

    task: str
    ranks: int
    cluster: str
    label: str
    steps: int
    real_seconds: float
    runs: tuple[float, ...]
    simulated: float
    formula: float
    constant: float
    bytes_difference: int
    staleness_distance: float | None
    parameters_differ: float | None
    staleness: tuple[tuple[float, float], tuple[float, float]] | None = None
    replayed: float | None = None
    to_target: tuple[float, float] | None = None
    others: float | None = None
    own: float = 0.0
    stolen: float = 0.0
    switches: int = 0
    attempts: int = 1

    def error(self, predictor: str) -> float:
        """Return predicted over real, less 1."""
        predicted: float = getattr(self, predictor)
        return predicted / self.real_seconds - 1

    @property
    def target_error(self) -> float | None:
        """Predicted over real, less 1, of the seconds to the target."""
        if self.to_target is None or not self.to_target[1]:
            return None
        return self.to_target[0] / self.to_target[1] - 1


def bench_fidelity(
    chosen: Sequence[Case],
    rounds: int = 4,
    seconds: float = 0.4,
    calibration: Path | None = None,
    on_progress: Progress | None = None,
) -> tuple[list[FidelityRow], Calibration]:
    """Calibrate, then predict and run the chosen cases, block by block.

    With `calibration` that file is used, and nothing is measured. No case is run before it is
    predicted, and nothing is fitted afterwards. Return the rows and the calibration; if the user
    stops it (`KeyboardInterrupt` before the first block is completed), those of completed blocks.
    """
    rows: list[FidelityRow] = []
    with tempfile.TemporaryDirectory(prefix="orchestra-fidelity-") as name:
        path = calibration or Path(name) / "calibration.json"
        if calibration is None:
            subjects = {case.subject.task: case.subject for case in chosen}
            # One calibration before all runs, for emulated ones under the quota of such a node
            works, on = [*subjects.values()], chosen[0].cluster
            path.write_text(calibrate(works, seconds, on_progress, emulated=on).to_json())
        measured = read_calibration(path)
        done = itertools.count(1)

        def tell(what: str) -> None:
            if on_progress is not None:
                on_progress(what, next(done) / (len(chosen) * (1 + rounds)))

        try:
            # A block's runs follow each other, so that runs which are compared lie seconds apart
            # and not minutes.
            for _, block in itertools.groupby(chosen, lambda case: case.block):
                rows += _measured([*block], rounds, measured, path, tell)
        except KeyboardInterrupt:
            # Whatever block was completed is worth its half hour
            if not rows:
                raise
    return rows, measured


def _measured(
    block: list[Case], rounds: int, measured: Calibration, path: Path, tell: Callable[[str], None]
) -> Iterator[FidelityRow]:
    """Predict all cases, then run them in turns for `rounds` rounds, every other one in reverse."""
    with tempfile.TemporaryDirectory(prefix="orchestra-fidelity-") as name:
        folder = Path(name)
        virtual = {}
        real: dict[str, list[Observation]] = defaultdict(list)
        for index, case in enumerate(block):
            tell(f"predicting {case.label}")
            keep = folder / f"{case.label}-predicted"
            seen = observe(case.simulated(measured.cluster, str(path)), keep)
            longer = case.lengthened(seen.step_seconds)
            # Predicted with as many steps as it will run
            if longer.run != case.run:
                seen = observe(longer.simulated(measured.cluster, str(path)), keep)
            block[index], virtual[case.label] = longer, seen
        for number in range(rounds):
            for case in order(block, number):
                tell(f"running {case.label}")
                real[case.label].append(observe(case.run, folder / f"{case.label}-run"))
        for case in block:
            formula, constant = predicted(case, measured)
            differ = None
            if (
                case.run.strategy.traits().lockstep
            ):  # elsewhere the order of arrivals decides on them
                files = (folder / f"{case.label}-{which}" for which in ("predicted", "run"))
                differ = largest_difference(*files)
            row = row_of(case, real[case.label], virtual[case.label], formula, constant, differ)
            if case.cluster is not None:
                run = case.simulated(measured.cluster, str(path))
                # Only emulated nodes have cores of their own; elsewhere the recorded computation
                # has the waiting for a core in it.
                pace = pace_of(real[case.label][0], virtual[case.label])
                again = observe(run, folder / "replayed", pace)
                row = replace(row, replayed=again.step_seconds)
            yield row


def observe(run: Run, keep: Path, pace: Pace | None = None) -> Observation:
    """Carry out `run`, again if other programs disturbed it, and move its final parameters to
    the file `keep`. With `pace` (see `simulated_run`) it is a simulation.

    Raises:
        RunFailed: it failed.
        KeyboardInterrupt: the user stopped it.
    """
    found: list[Observation] = []
    # The kernel's own network work takes more than 3 % in an emulated run, so the limit of other
    # runs would repeat nearly every one three times.
    quiet = EMULATED_QUIET if run.training.engine == "emulation" else QUIET
    while len(found) < ATTEMPTS and (not found or (found[-1].others or 0.0) > quiet):
        with tempfile.TemporaryDirectory(prefix="orchestra-fidelity-") as name:
            folder = Path(name)
            simulate = partial(simulated_run, pace=pace)
            train: Callable[..., RunRecord] = train_run if pace is None else simulate
            record = train(run, folder, quiet=True)
            if record.ending.status == "stopped":
                raise KeyboardInterrupt
            found.append(_observation(record, step_seconds(run, folder), folder))
            # Of synchronous strategies any attempt has the same parameters
            (folder / "parameters.safetensors").replace(keep)
    # Not the fastest one, which would be a choice by the result
    least = min(found, key=lambda one: one.others or 0.0)
    return replace(least, attempts=len(found))


def _observation(record: RunRecord, seconds: float, folder: Path) -> Observation:
    whole = sum(record.updates.histogram.values())
    shares = {int(value): count / whole for value, count in record.updates.histogram.items()}
    usages = [rank.usage for rank in record.machine.by_rank if rank.usage is not None]
    lines = RunFolder(folder).steps
    return Observation(
        seconds,
        record.traffic.sent,
        shares,
        record.machine.busy_with_others,
        own=sum(usage.own for usage in usages),
        # Stolen time is the machine's, and every rank reads it
        stolen=max((usage.stolen or 0.0 for usage in usages), default=0.0),
        switches=sum(usage.switches for usage in usages),
        computed={rank: [line["compute"] for line in own] for rank, own in lines.items()},
        losses=losses_of([*itertools.chain(*lines.values())]),
    )


def losses_of(lines: Sequence[Mapping[str, Any]]) -> Floats | None:
    """Return the seconds and the smoothed training loss of the steps of all ranks, shape
    [steps, 2], in the order in which they ended; None without a step that tells of its loss.
    """
    told = sorted(
        (line["seconds"], line["loss"], line["samples"])
        for line in lines
        if line.get("samples") and None not in (line["seconds"], line.get("loss"))
    )
    if not told:
        return None
    seconds, loss, samples = np.array(told).T
    count = np.concatenate([[0.0], np.cumsum(samples)])
    total = np.concatenate([[0.0], np.cumsum(loss * samples)])
    # A window of samples, not of steps: asynchronous ranks take different numbers of steps
    begin = np.maximum(count[1:] - count[-1] / SMOOTHED, 0.0)
    first = np.searchsorted(count, begin, side="right") - 1
    smoothed = (total[1:] - total[first]) / (count[1:] - count[first])
    full = count[1:] >= count[-1] / SMOOTHED
    curve: Floats = np.stack([seconds, smoothed], axis=1)[full]
    return curve


def pace_of(real: Observation, virtual: Observation) -> Pace:
    """Return by rank the factors from each step's simulated computation to the real one."""
    found = {}
    for rank, seconds in real.computed.items():
        usual = statistics.median(virtual.computed.get(rank) or [0.0])
        # A rank that only served has nothing to be paced
        if usual > 0:
            found[rank] = [max(one / usual, LEAST_PACE) for one in seconds]
    return found


def step_seconds(run: Run, folder: Path) -> float:
    """Return the seconds of a step of the budget, from the steps that the ranks recorded.

    The first quarter, in which memory is taken for the first time, does not count; nor does what
    follows the last step.
    """
    paces: list[float] = []
    for lines in RunFolder(folder).steps.values():
        # A run that hardly has a step says nothing about the pace
        if len(lines) > SKIPPED * 2:
            begin, end = lines[len(lines) // SKIPPED], lines[-1]
            steps = end["step"] - begin["step"]
            # Scaled to all of this rank's steps: asynchronous ranks take different numbers of them
            paces.append((end["seconds"] - begin["seconds"]) / steps * len(lines))
    assert run.training.steps is not None
    # The budget's steps, which the ranks share
    return statistics.mean(paces) / run.training.steps


def row_of(
    case: Case,
    real: Sequence[Observation],
    virtual: Observation,
    formula: float,
    constant: float,
    parameters_differ: float | None,
) -> FidelityRow:
    seconds = tuple(one.step_seconds for one in real)
    differences = [virtual.bytes_sent - one.bytes_sent for one in real]
    together: dict[int, float] = defaultdict(float)
    for one in real:
        for value, share in one.staleness.items():
            together[value] += share / len(real)
    stale = bool(together) or bool(virtual.staleness)
    to_target = None
    curves = [one.losses for one in (virtual, *real) if one.losses is not None]
    if len(curves) == 1 + len(real):
        level = max(float(curve[:, 1].min()) for curve in curves)
        reached = statistics.median(one.seconds_to(level) for one in real)
        to_target = virtual.seconds_to(level), reached
    return FidelityRow(
        *case.block,
        case.label,
        case.run.training.steps or 0,
        statistics.median(seconds),
        seconds,
        virtual.step_seconds,
        formula,
        constant,
        # Asynchronous runs differ in their bytes from one to the next
        min(differences, key=abs),
        distance(together, virtual.staleness) if stale else None,
        parameters_differ,
        (mean_and_tail(virtual.staleness), mean_and_tail(together)) if stale else None,
        None,
        to_target,
        max((one.others for one in real if one.others is not None), default=None),
        sum(one.own for one in real),
        sum(one.stolen for one in real),
        sum(one.switches for one in real),
        sum(one.attempts for one in real),
    )


def distance(one: Histogram, other: Histogram) -> float:
    """Return the total variation distance: 0 for equal shares, 1 if they have no common value."""
    values = one.keys() | other.keys()
    return sum(abs(one.get(v, 0.0) - other.get(v, 0.0)) for v in values) / 2


def mean_and_tail(shares: Histogram) -> tuple[float, float]:
    """Return the mean of the values and their 95th percentile; zeros if there are none."""
    cumulated, tail = 0.0, 0
    for value in sorted(shares):
        cumulated, tail = cumulated + shares[value], value
        # The shares add up to 1 but for rounding
        if cumulated >= 0.95 - 1e-9:
            break
    return sum(value * share for value, share in shares.items()), float(tail)


def largest_difference(one: Path, other: Path) -> float:
    """Return the largest absolute difference of any parameter or buffer in two files."""
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    # In float64: differences in the last bits are what it looks for
    differences = (first[name].double() - second[name].double() for name in first)
    return max(float(difference.abs().max()) for difference in differences if difference.numel())
