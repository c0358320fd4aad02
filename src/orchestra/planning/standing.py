"""The standing of a plan's candidates: speeds and curves, times that follow, and who is out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import NamedTuple

import numpy

from orchestra.planning.candidates import Candidate
from orchestra.records.record import RunRecord
from orchestra.records.report import Point
from orchestra.report.numbers import significant
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Target

OF_SEEDS = 0.15
"""The standard deviation of the logarithm of a time to the target over seeds."""
SPARED = 0.02
"""Candidates whose times differ by less count as equal; the one with fewer nodes is preferred."""
NO_TIME = "left out: there was no time to find its speed"
FEWEST_SEEDS = 4
"""The seeds that confirm a winner."""
TWIN = "learns the same as"
CUT_OFF = "left out: there was no time for the race"

# Decisions on plain figures


class Reached(NamedTuple):
    """The samples and seconds after which a target was reached, known to `spacing` seconds."""

    samples: float
    seconds: float
    spacing: float


def reached(points: Sequence[Point], target: Target) -> Reached | None:
    """Return when the curve first crosses the target, on a straight line between two snapshots.

    None where no snapshot reaches it. `spacing` are the seconds between the two.
    """
    before: Point | None = None
    for point in points:
        value = point.metrics.get(target.metric)
        if value is not None and target.reached(value):
            if before is None:
                return Reached(point.samples, point.seconds, point.seconds)
            first = before.metrics[target.metric]
            # Snapshots are far apart, and their spacing would decide between candidates.
            part = (target.bound - first) / (value - first)
            return Reached(
                before.samples + part * (point.samples - before.samples),
                before.seconds + part * (point.seconds - before.seconds),
                point.seconds - before.seconds,
            )
        # A run that diverges may come back; nothing lies on a line from what is not a number
        if value is not None and math.isfinite(value):
            before = point
    return None


def value_at(points: Sequence[Point], metric: str, samples: float) -> float | None:
    """Return the metric after `samples`, on a straight line between the two nearest snapshots.

    The last snapshot's value beyond it, the first one's before it; None without snapshots.
    """
    known = [point for point in points if metric in point.metrics]
    values = [point.metrics[metric] for point in known]
    places = [point.samples for point in known]
    return float(numpy.interp(samples, places, values)) if known else None


def best_value(points: Sequence[Point], target: Target) -> float | None:
    """Return the best that the target's metric was at any snapshot."""
    values = (p.metrics[target.metric] for p in points if target.metric in p.metrics)
    return min(values, key=target.penalty, default=None)


def cannot_win(
    samples: float, batch: float, update: float, speed: float, best: float
) -> float | None:
    """Return the least seconds that a candidate needs, if 99.9 % of the `best` or more, or None.

    One process needs `samples` in all, in steps of `batch` samples. At best an update of the
    candidate, of `update` samples, is worth as much as such a step. At `speed` samples/s that
    takes samples x update / batch / speed.
    """
    least = samples * min(1.0, update / batch) / speed
    return least if least >= 0.999 * best else None


def chosen(times: Mapping[str, float], nodes: Mapping[str, int]) -> str:
    """Return the name with the shortest time; within `SPARED` of it, one with the fewest nodes."""
    limit = min(times.values()) * (1 + SPARED)
    # More nodes for the same time would be a waste
    near = [name for name in times if times[name] <= limit]
    return min(near, key=lambda name: (nodes[name], times[name]))


def pessimistic(times: Mapping[str, float], seeds: Mapping[str, int]) -> dict[str, float]:
    """Return `times`, each longer by one standard error of a mean over its seeds.

    The shortest of many times is too easily one of luck, most of all where it has few seeds.
    """
    return {
        name: time * math.exp(OF_SEEDS / math.sqrt(seeds[name])) for name, time in times.items()
    }


def bottleneck(seconds: Mapping[str, float]) -> str:
    """Return what most of a worker's time is, "computing", "messages" or "waiting", and its share.

    `seconds` are those of a record: compute, communicate and wait, of a worker in the mean.
    """
    words = {"compute": "computing", "communicate": "messages", "wait": "waiting"}
    whole = sum(seconds.get(part, 0.0) for part in words)
    if not whole:
        return "not known"
    most = max(words, key=lambda part: seconds.get(part, 0.0))
    return f"{words[most]} {100 * seconds[most] / whole:.0f} %"


# The candidates


@dataclass
class Contender:
    """All that is known about a candidate."""

    candidate: Candidate
    # Of some steps, from shapes: its speed and what workers did; None while unknown
    record: RunRecord | None = None
    # By seed, its snapshots, with the seconds of its own run
    curves: dict[int, Sequence[Point]] = field(default_factory=dict)
    # By seed, the part of its samples that was simulated
    done: dict[int, float] = field(default_factory=dict)
    wall: float = 0.0  # seconds that its simulations took
    dropped: str | None = None  # why it is out; None while it is not
    rungs: list[str] = field(default_factory=list)  # what each rung saw of it, in words
    steps: int = 0  # over which its speed was measured
    speed_wall: float | None = None  # seconds that this took for each rank
    needs_values: bool = False  # its speed cannot be measured from shapes

    @property
    def name(self) -> str:
        return self.candidate.name

    def is_over(self, seed: int) -> bool:
        """Return whether it was simulated with a seed for all of its samples."""
        return self.done.get(seed, 0.0) >= 1

    @property
    def seconds_of_all(self) -> float:
        """Seconds on the clock that a simulation of all its samples takes, 0 where not known."""
        done = sum(self.done.values())
        return self.wall / done if done else 0.0

    @property
    def speed(self) -> float | None:
        """Samples/s."""
        return None if self.record is None else self.record.time.samples_per_second

    @property
    def cost_rate(self) -> float | None:
        """Cost of a second, in the cluster's currency; None without prices."""
        record = self.record
        if record is None or record.spending.cost is None or not record.time.training:
            return None
        return record.spending.cost / record.time.training


@dataclass(frozen=True)
class Length:
    """A whole run's samples, and so many snapshots that judging takes no longer than learning."""

    samples: int
    snapshots: int

    def part(self, samples: float) -> float:
        """Return the part of a run that ends at the first snapshot after `samples`, at most 1.

        A target that is reached between two snapshots is only seen at the second.
        """
        return min(1.0, math.ceil(self.snapshots * samples / self.samples) / self.snapshots)

    def is_whole(self, samples: float) -> bool:
        """Return whether a run of `samples` has had all, but for the rounding of steps."""
        return samples > (1 - 0.5 / self.snapshots) * self.samples

    def following(self, done: float, parts: Iterable[float]) -> float | None:
        """Return the first of `parts` that a run which has come as far as `done` has not reached;
        None where it has reached all."""
        # Steps may not divide a part evenly
        least = done + 0.5 / self.snapshots
        return next((part for part in parts if part > least), None)


class Standing:
    """The standing of all candidates.

    Attributes:
        entries: of all candidates, by name.
        target: what is to be reached; None while none is chosen.
        length: of a whole run.
        seeds: of the runs.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        target: Target | None,
        length: Length,
        seeds: Sequence[int],
    ) -> None:
        self.entries = {each.name: Contender(each) for each in candidates}
        self.target, self.length, self.seeds = target, length, seeds
        self._sources: dict[str, Contender] = {}  # by what they learn
        # By the identity of a curve, which is kept beside what is read from it
        self._read: dict[int, tuple[Sequence[Point], Reached | None]] = {}

    @property
    def alive(self) -> list[Contender]:
        """Those that are not out."""
        return [entry for entry in self.entries.values() if entry.dropped is None]

    def source(self, entry: Contender) -> Contender:
        """Return the entry whose runs say what `entry` learns: its own, or that of one process."""
        if not entry.candidate.exact:
            return entry
        key = entry.candidate.learns_as
        if key not in self._sources:
            alike = (e for e in self.alike(entry) if isinstance(e.candidate.run.strategy, Single))
            self._sources[key] = next(alike)
        return self._sources[key]

    def alike(self, entry: Contender) -> Iterable[Contender]:
        """Return all that learn the same as `entry` from each sample, and itself."""
        key = entry.candidate.learns_as
        return (each for each in self.entries.values() if each.candidate.learns_as == key)

    def times(self, entry: Contender) -> dict[int, Reached]:
        """Return when `entry` reached the target, by seed."""
        if self.target is None or entry.speed is None:
            return {}
        curves = self.source(entry).curves.items()
        found = {s: at for s, points in curves if (at := self.reached_by(points)) is not None}
        if entry.candidate.exact:  # the samples of its source, at its speed
            for seed, at in found.items():
                seconds = at.samples / entry.speed
                spacing = at.spacing * seconds / max(at.seconds, 1e-12)
                found[seed] = Reached(at.samples, seconds, spacing)
        return found

    def reached_by(self, points: Sequence[Point]) -> Reached | None:
        """Return when a curve reaches the target, which is looked for once."""
        known = self._read.get(id(points))
        if known is None and self.target is not None:
            known = self._read[id(points)] = points, reached(points, self.target)
        return None if known is None else known[1]

    def time(self, entry: Contender) -> float | None:
        """Return the seconds to the target, the mean over the seeds; None where one missed it.

        One that has not reached it yet counts with its seconds so far, where these are more than
        others needed: else a candidate would be as good as its luckiest seed.
        """
        times = {seed: each.seconds for seed, each in self.times(entry).items()}
        if not times or self.missed(entry):
            return None
        mean = fmean(times.values())
        others = self.source(entry).curves.keys() - times.keys()
        under_way = (self.elapsed(entry, seed) for seed in sorted(others))
        # The seconds so far are a lower bound, but they no longer favour a candidate whose first
        # seed was lucky.
        late = [seconds for seconds in under_way if seconds > mean]
        return fmean([*times.values(), *late])

    def missed(self, entry: Contender) -> list[int]:
        """Return the seeds that missed the target with all samples.

        A run that was stopped earlier may still reach it, so its seconds are a lower bound.
        """
        times, curves = self.times(entry), self.source(entry).curves
        return [
            seed
            for seed, points in curves.items()
            if seed not in times and points and self.length.is_whole(points[-1].samples)
        ]

    def uncertainty(self, entry: Contender) -> float | None:
        """Return the time's uncertainty: the spread over seeds, or half the spacing if larger."""
        times = list(self.times(entry).values())
        if not times:
            return None
        spread = stdev(each.seconds for each in times) if len(times) > 1 else 0.0
        # The target lies somewhere between two snapshots, on either side of the middle
        return max(spread, fmean(each.spacing for each in times) / 2)

    def ranking(self) -> list[Contender]:
        """Return those that reach the target, the soonest first; those that are out, too."""
        return [entry for entry, _ in self._timed()]

    def best(self) -> tuple[Contender, float] | None:
        """Return the first to reach the target of all, and its seconds."""
        return next(iter(self._timed()), None)

    def _timed(self) -> list[tuple[Contender, float]]:
        known = [(each, time) for each in self.entries.values() if (time := self.time(each))]
        return sorted(known, key=lambda pair: pair[1])

    def curve(self, entry: Contender, seed: int | None = None) -> Sequence[Point]:
        """Return the snapshots that say what `entry` learns with a seed; None: the first one."""
        return self.source(entry).curves.get(self.seeds[0] if seed is None else seed, ())

    def elapsed(self, entry: Contender, seed: int | None = None) -> float:
        """Return the virtual seconds of `entry`'s run with a seed so far; None: the first one."""
        points = self.curve(entry, seed)
        if not points or entry.speed is None:
            return 0.0
        return points[-1].samples / entry.speed if entry.candidate.exact else points[-1].seconds

    # Who is out

    def drop_slower_twins(self) -> None:
        """Drop all but the fastest of the candidates that learn the same; one that was dropped
        comes back if the speed of the fastest was measured again, and was less.
        """
        for entry in self.entries.values():
            first = max(self.alike(entry), key=lambda each: each.speed or 0.0)
            if (entry.dropped or TWIN).startswith(TWIN) and entry.speed and first.speed:
                entry.dropped = None if entry is first else (
                    f"{TWIN} {first.name} from each sample, which has "
                    f"{significant(first.speed / entry.speed)} times the samples/s"
                )  # fmt: skip

    def drop_by_bound(self, best: Contender, time: float) -> None:
        """Drop candidates that cannot be before the best, which has this time, however much their
        updates are worth."""
        needed = fmean(each.samples for each in self.times(best).values())
        batch = best.candidate.samples
        for entry in self.alive:
            # Whoever has reached the target has a time, which says more than a bound
            if entry is best or not entry.speed or self.times(entry):
                continue
            # The bound is generous, so that no candidate is dropped by a guess: see `cannot_win`.
            # With a larger rate an update goes further; a smaller one may spare steps that
            # overshoot.
            worth = max(entry.candidate.rate, 1 / entry.candidate.rate)
            update = entry.candidate.update_samples / worth
            least = cannot_win(needed, batch, update, entry.speed, time)
            if least is not None:
                entry.dropped = (
                    f"cannot win: {least:.3g} s at least, even if each of its updates were worth "
                    f"one of {best.name} ({time:.3g} s)"
                )
