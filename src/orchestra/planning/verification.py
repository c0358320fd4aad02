"""Training the candidates of a plan for real, beside their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from orchestra.cluster import Cluster
from orchestra.engines.run import train_run
from orchestra.errors import InputError, RunFailed
from orchestra.planning.search import Search, Tell
from orchestra.planning.standing import reached
from orchestra.records.record import RunRecord
from orchestra.report.numbers import significant
from orchestra.report.rows import RunData
from orchestra.trainer.settings import Engine, Run, Target

if TYPE_CHECKING:
    from orchestra.planning.answer import Plan

VERIFIED = 3
"""The number of candidates that are trained for real if that is requested."""
SEEDS = 3
"""The most seeds with which each candidate is trained."""
TOLERATED = 0.1
"""A larger relative deviation of the compute time from the prediction is reported: a machine that
others use is not as fast as when it was calibrated."""


@dataclass(frozen=True)
class Verified:
    """A candidate that was trained for real, with seeds that reached the target in simulation.

    Attributes:
        name: of the candidate.
        predicted: by seed, seconds to the target.
        measured: the same, on `engine`; None where the target was not reached.
        failure: why it was not carried out; None where it was.
        computing: how many times as long as predicted a worker computed for each sample; None where
            nothing was carried out.
    """

    name: str
    predicted: Mapping[int, float]
    measured: Mapping[int, float | None]
    engine: Engine
    failure: str | None = None
    computing: float | None = None

    @property
    def mean_predicted(self) -> float:
        """The mean over the seeds, in seconds."""
        return fmean(self.predicted.values())

    @property
    def mean_measured(self) -> float | None:
        """The mean over the seeds, in seconds; None if one missed the target or was not trained."""
        reached = [seconds for seconds in self.measured.values() if seconds is not None]
        return fmean(reached) if len(reached) == len(self.predicted) else None

    @property
    def outcome(self) -> str:
        """The text that stands beside the prediction."""
        if self.failure is not None:
            return f"not measured: {self.failure}"
        if self.mean_measured is not None:
            text = f"measured {significant(self.mean_measured)} s"
            if self.computing is not None and abs(self.computing - 1) > TOLERATED:
                times = significant(self.computing)
                text += f" (computing took {times} times as long as predicted)"
            return text
        missed = sum(seconds is None for seconds in self.measured.values())
        return f"target not reached with {missed} of {len(self.measured)} seeds"


def verify(
    plan: Plan, search: Search, cluster: Cluster, tell: Tell
) -> tuple[Sequence[Verified], bool]:
    """Train the first candidates of `plan` for real; return also whether the user stopped.

    Nodes of a `cluster` are emulated on this machine, which may refuse that; a cluster of one node
    is taken to be this machine.
    """
    # Several nodes of a described cluster cannot be had on one machine otherwise.
    engine: Engine = "emulation" if len(cluster.nodes) > 1 else "processes"
    rows = [row for row in plan.rows if row.seconds is not None][:VERIFIED]
    trials = [
        _Trial(row.name, search, engine, plan.folder / "verified" / str(number))
        for number, row in enumerate(rows, start=1)
    ]
    turns = [(trial, turn) for turn in range(SEEDS) for trial in trials]
    stopped = False
    for number, (trial, turn) in enumerate(turns):
        tell(f"verifying {trial.name}", number / len(turns))
        try:
            trial.take_turn(turn)
        except KeyboardInterrupt:
            stopped = True
            break
    return [trial.verified() for trial in trials if trial.is_known], stopped


class _Trial:
    """The candidate `name` with the first seeds known to reach the target, one in each turn.

    Candidates take turns, so that a machine that becomes slower favours none of them.
    """

    def __init__(self, name: str, search: Search, engine: Engine, folder: Path) -> None:
        self.name = name
        self._entry, self._target = search.entries[name], search.target
        self._snapshots = search.length.snapshots
        self._engine = engine
        self._folder = folder
        # The same seeds: a mean over three simulated ones says nothing of one real run (decision
        # 117).
        known = sorted(search.times(self._entry).items())[:SEEDS]
        self._predicted = {seed: each.seconds for seed, each in known}
        self._measured: dict[int, Measured] = {}
        self._failure: str | None = None

    @property
    def is_known(self) -> bool:
        """True if it has been carried out, or could not be."""
        return bool(self._measured or self._failure)

    def take_turn(self, turn: int) -> None:
        """Train it with the seed of this turn, if it has one."""
        if self._failure is not None or turn >= len(self._predicted):
            return
        assert self._target is not None
        seed = list(self._predicted)[turn]
        run = replace(self._entry.candidate.run, seed=seed)
        try:
            self._measured[seed] = carried_out_for_real(
                run, self._engine, self._snapshots, self._folder / f"seed-{seed}", self._target
            )
        except (InputError, RunFailed) as error:
            self._failure = str(error).splitlines()[0]

    def verified(self) -> Verified:
        """Return the times of those seeds with which it was carried out."""
        assert self._entry.record is not None
        expected, measured = computing(self._entry.record), self._measured
        slower = [each.computing / expected for each in measured.values()] if expected else []
        return Verified(
            self.name,
            {s: time for s, time in self._predicted.items() if s in measured or self._failure},
            {seed: each.seconds for seed, each in measured.items()},
            self._engine,
            self._failure,
            fmean(slower) if slower else None,
        )


class Measured(NamedTuple):
    """A real run: seconds to the target, None if not reached; and seconds that a worker computed
    for each sample of all workers.
    """

    seconds: float | None
    computing: float


def computing(record: RunRecord) -> float:
    """Return the seconds that a worker computed, in the mean, for each sample of all workers."""
    return record.seconds.get("compute", 0.0) / max(record.samples, 1)


def carried_out_for_real(
    run: Run, engine: Engine, snapshots: int, folder: Path, target: Target
) -> Measured:
    """Train a simulated `run` for real.

    Raises:
        InputError, RunFailed: it could not be carried out.
        KeyboardInterrupt: the user stopped it.
    """
    training = replace(run.training, engine=engine, snapshots=snapshots)
    if engine == "processes":
        training = replace(training, cluster="one_host", calibration="auto")
    record = train_run(replace(run, training=training), folder, quiet=True)
    # Ctrl-C ends all verification, and not one run.
    if record.status == "stopped":
        raise KeyboardInterrupt
    at = reached(RunData(record).curve, target)
    return Measured(None if at is None else at.seconds, computing(record))
