"""The oracle of the race: what every candidate of the pairs learns, how fast it is, and what it
costs to find that out.

Both are appended to files, a line for each simulation, so that a recording goes on where it ended.
Candidates that learn alike share a recording, across pairs as well: what averages all gradients
learns as one process does on any cluster, and what does not depend on speeds learns the same on
every cluster with as many nodes. Its seconds are its samples over its speed.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.race.pairs import SEEDS, RacePair
from orchestra.engines.processes.system import now
from orchestra.engines.simulation.training import assigned
from orchestra.engines.simulation.trials import Trial, Tried, tried
from orchestra.errors import InputError
from orchestra.experiments.experiment import ONE_PROCESS
from orchestra.planning.api import length_of
from orchestra.planning.candidates import Candidate, Space, short, with_rates
from orchestra.planning.race import ANYWHERE, CONFIRMED_STEPS
from orchestra.planning.standing import Length
from orchestra.trainer.settings import Run
from orchestra.worker.runtime import SilentReporter

MOST_SNAPSHOTS = 20
SPEEDS, CURVES = "speeds.jsonl", "curves.jsonl"
"""The files of a recording."""
LIMIT = 600.0
"""The most seconds of one simulation, on the clock."""


@dataclass(frozen=True)
class RecordedSpeed:
    """A candidate's samples/s over some steps, 0 where it fails; the processor's seconds for it."""

    key: str
    speed: float
    wall: float
    failure: str | None = None


@dataclass(frozen=True)
class RecordedCurve:
    """What a candidate learns with a seed in a whole run; the processor's seconds for it.

    `points` are samples, seconds of the cluster, and the target's metric.
    """

    key: str
    points: Sequence[tuple[float, float, float]]
    wall: float
    failure: str | None = None


def speed_key(pair: RacePair, candidate: Candidate, steps: int) -> str:
    """Return the key of a speed that is measured over `steps`, 0 for the few of a first look."""
    return f"{pair.number}|{candidate.name}|{steps}"


def curve_key(pair: RacePair, candidate: Candidate, seed: int) -> str:
    """Return the key of what a candidate of a pair learns."""
    if candidate.exact:
        return f"{pair.task}|{candidate.learns_as}|{seed}"
    if candidate.run.strategy.traits().depends_on_speed:
        return f"{pair.number}|{candidate.name}|{seed}"
    return f"{pair.task}|{candidate.name}|{seed}"


def candidates_of(pair: RacePair, folder: Path) -> list[Candidate]:
    """Return all candidates of a pair, one process with other learning rates among them."""
    found = Space(pair.experiment, pair.on.cluster, folder).candidates()
    alone = next(each for each in found if each.name == ONE_PROCESS)
    return [*found, *with_rates(alone)]


@dataclass
class Oracle:
    """What is recorded, by key."""

    speeds: dict[str, RecordedSpeed] = field(default_factory=dict)
    curves: dict[str, RecordedCurve] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Oracle:
        """Read what the files of `folder` hold; an empty oracle where there are none."""
        oracle = cls()
        for line in lines_of(folder / SPEEDS):
            speed = RecordedSpeed(**line)
            oracle.speeds[speed.key] = speed
        for line in lines_of(folder / CURVES):
            curve = RecordedCurve(**line)
            oracle.curves[curve.key] = curve
        return oracle

    def knows(self, pair: RacePair, candidates: Sequence[Candidate]) -> bool:
        """Return whether everything about these candidates of a pair is recorded."""
        return all(
            speed_key(pair, each, steps) in self.speeds
            for each in candidates
            for steps in steps_of(each)
        ) and all(
            curve_key(pair, each, seed) in self.curves for each in candidates for seed in SEEDS
        )


def length_of_pair(pair: RacePair) -> Length:
    """Return the samples of a run of a pair, and the snapshots that are recorded."""
    length = length_of(pair.experiment)
    return replace(length, snapshots=min(length.snapshots, MOST_SNAPSHOTS))


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents of a file of lines, without a last one that was cut off; those of its
    compressed part, which is kept with the source, come first."""
    packed = path.with_name(f"{path.name}.gz")
    text = gzip.decompress(packed.read_bytes()).decode() if packed.exists() else ""
    text += path.read_text() if path.exists() else ""
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def steps_of(candidate: Candidate) -> tuple[int, ...]:
    """Return over how many steps a candidate's speed is wanted; a rate does not change it."""
    if candidate.rate != 1 and candidate.batch == 1:
        return ()
    return (0, CONFIRMED_STEPS)


def record(pairs: Sequence[RacePair], folder: Path, until: float) -> bool:
    """Record what is missing of `pairs`, in their order, until a moment; return whether all is
    there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    oracle = Oracle.read(folder)
    with tempfile.TemporaryDirectory(prefix="orchestra-race-") as place:
        for pair in pairs:
            candidates = candidates_of(pair, Path(place) / f"clusters-{pair.number}")
            for entry in missing_of(pair, candidates, oracle, Path(place) / "run"):
                with (folder / (SPEEDS if isinstance(entry, RecordedSpeed) else CURVES)).open(
                    "a"
                ) as file:
                    file.write(json.dumps(asdict(entry)) + "\n")
                if now() > until:
                    return False
            print(f"recorded: {pair.title}", flush=True)
    return True


def missing_of(
    pair: RacePair, candidates: Sequence[Candidate], oracle: Oracle, folder: Path
) -> Iterator[RecordedSpeed | RecordedCurve]:
    """Simulate what `oracle` lacks of a pair, and yield it."""
    snapshots = length_of_pair(pair).snapshots
    target = pair.experiment.training.target
    assert target is not None
    for candidate in candidates:
        for steps in steps_of(candidate):
            key = speed_key(pair, candidate, steps)
            if key not in oracle.speeds:
                found = simulated(short(candidate.run, steps), folder)
                time = 0.0 if found.record is None else found.record.time.samples_per_second or 0.0
                oracle.speeds[key] = RecordedSpeed(key, time, found.seconds, found.failure)
                yield oracle.speeds[key]
    for seed in SEEDS:
        for candidate in candidates:
            key = curve_key(pair, candidate, seed)
            if key in oracle.curves:
                continue
            training = replace(candidate.run.training, snapshots=snapshots)
            if candidate.exact:
                # Of those that learn alike one process learns for all.
                alike = (c for c in candidates if c.learns_as == candidate.learns_as)
                alone = next(c for c in alike if c.label == ONE_PROCESS)
                training = replace(alone.run.training, snapshots=snapshots, cluster=ANYWHERE)
                candidate = alone
            run = replace(candidate.run, training=training, seed=seed)
            found = simulated(run, folder)
            points = [
                (point.samples, round(point.seconds, 6), round(point.metrics[target.metric], 5))
                for point in found.points
            ]
            oracle.curves[key] = RecordedCurve(key, points, found.seconds, found.failure)
            yield oracle.curves[key]


def simulated(run: Run, folder: Path) -> Tried:
    """Simulate a run to its end in this process; its seconds are those of the processor."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        try:
            assignment = assigned(run, Path(place))
        except InputError as error:
            return Tried(failure=str(error))
        began = time.process_time()
        found = tried(SilentReporter(), Trial(assignment), now() + LIMIT)
        # Other programs lengthen the time on the clock, and budgets would not fit it any more
        return replace(found, seconds=time.process_time() - began)
