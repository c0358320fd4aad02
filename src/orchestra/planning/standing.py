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
from orchestra.report.numbers import paired_difference, significant
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Target

MISSED = 1.5
"""A seed has missed the target after this many times the samples that other seeds needed."""
SPARED = 0.02
"""Candidates whose times differ by less count as equal; the one with fewer nodes comes first."""
RUNGS = (0.35, 0.65, 1.0)
"""Parts of the best known time to target after which the race is halved."""
FEWEST_RACING = 4
"""The candidates that enter the next rung in any case."""
NO_TIME = "left out: there was no time to find its speed"
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

    At best one of its updates, of `update` samples, is worth as much as one of a step of `batch`
    samples, of which one process needs `samples` in all. At `speed` samples/s that takes
    samples x update / batch / speed.
    """
    least = samples * min(1.0, update / batch) / speed
    return least if least >= 0.999 * best else None


def halved(scores: Mapping[str, tuple[float, float]], least: int) -> tuple[list[str], list[str]]:
    """Return the names that go on to the next rung, and the others: the better half goes on, and
    at least `least`. Smaller `scores` are better; of equal ones the first stays.
    """
    order = sorted(scores, key=lambda name: scores[name])
    # Successive halving (Jamieson and Talwalkar, AISTATS 2016).
    keep = max(least, (len(order) + 1) // 2)
    return order[:keep], order[keep:]


def chosen(times: Mapping[str, float], nodes: Mapping[str, int]) -> str:
    """Return the name with the shortest time; within `SPARED` of it, one with the fewest nodes."""
    limit = min(times.values()) * (1 + SPARED)
    # More nodes for the same time would be a waste
    near = [name for name in times if times[name] <= limit]
    return min(near, key=lambda name: (nodes[name], times[name]))


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
class Entry:
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

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def speed(self) -> float | None:
        """Samples/s."""
        return None if self.record is None else self.record.samples_per_second

    @property
    def cost_rate(self) -> float | None:
        """Cost of a second, in the cluster's currency; None without prices."""
        record = self.record
        if record is None or record.cost is None or not record.train_seconds:
            return None
        return record.cost / record.train_seconds


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
        self.entries = {each.name: Entry(each) for each in candidates}
        self.target, self.length, self.seeds = target, length, seeds

    @property
    def alive(self) -> list[Entry]:
        """Those that are not out."""
        return [entry for entry in self.entries.values() if entry.dropped is None]

    def source(self, entry: Entry) -> Entry:
        """Return the entry whose runs say what `entry` learns: its own, or that of one process."""
        if not entry.candidate.exact:
            return entry
        alike = self.alike(entry)
        return next(each for each in alike if isinstance(each.candidate.run.strategy, Single))

    def alike(self, entry: Entry) -> Iterable[Entry]:
        """Return all that learn the same as `entry` from each sample, and itself."""
        key = entry.candidate.learns_as
        return (each for each in self.entries.values() if each.candidate.learns_as == key)

    def times(self, entry: Entry) -> dict[int, Reached]:
        """Return when `entry` reached the target, by seed."""
        if self.target is None or entry.speed is None:
            return {}
        curves = self.source(entry).curves.items()
        found = {s: at for s, points in curves if (at := reached(points, self.target)) is not None}
        if entry.candidate.exact:  # the samples of its source, at its speed
            for seed, at in found.items():
                seconds = at.samples / entry.speed
                spacing = at.spacing * seconds / max(at.seconds, 1e-12)
                found[seed] = Reached(at.samples, seconds, spacing)
        return found

    def time(self, entry: Entry) -> float | None:
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
        # A lower bound, but no longer luck (decision 117)
        late = [seconds for seconds in under_way if seconds > mean]
        return fmean([*times.values(), *late])

    def missed(self, entry: Entry) -> list[int]:
        """Return the seeds that went further than those that reached the target, and missed it."""
        times = self.times(entry)
        # A seed that was stopped earlier than the others has not missed the target (decision 98)
        far = MISSED * max((each.samples for each in times.values()), default=math.inf)
        return [
            seed
            for seed, points in self.source(entry).curves.items()
            if seed not in times and points
            and points[-1].samples >= min(far, self.length.samples)
        ]  # fmt: skip

    def uncertainty(self, entry: Entry) -> float | None:
        """Return the time's uncertainty: the spread over seeds, or half the spacing if larger."""
        times = list(self.times(entry).values())
        if not times:
            return None
        spread = stdev(each.seconds for each in times) if len(times) > 1 else 0.0
        # The target lies somewhere between two snapshots, on either side of the middle
        return max(spread, fmean(each.spacing for each in times) / 2)

    def is_close(self) -> bool:
        """Return whether further seeds may change the order of the first two that are left."""
        pair = [entry for entry, _ in self._timed() if entry.dropped is None][:2]
        if len(pair) < 2:
            return False
        first, second = ({seed: at.seconds for seed, at in self.times(e).items()} for e in pair)
        # Paired: seeds share initial parameters and the order of samples, also in the plan
        difference = paired_difference(second, first)
        if difference is None or difference.low is None:
            return True
        # Each time lies somewhere between two snapshots
        spacings = [fmean(at.spacing for at in self.times(each).values()) / 2 for each in pair]
        coarse = 2 * math.hypot(*spacings) / math.sqrt(difference.n)
        return difference.low < 0 or difference.mean < coarse

    def ranking(self) -> list[Entry]:
        """Return those that reach the target, the soonest first; those that are out, too."""
        return [entry for entry, _ in self._timed()]

    def best(self) -> tuple[Entry, float] | None:
        """Return the first to reach the target of all, and its seconds."""
        return next(iter(self._timed()), None)

    def _timed(self) -> list[tuple[Entry, float]]:
        known = [(each, time) for each in self.entries.values() if (time := self.time(each))]
        return sorted(known, key=lambda pair: pair[1])

    def curve(self, entry: Entry, seed: int | None = None) -> Sequence[Point]:
        """Return the snapshots that say what `entry` learns with a seed; None: the first one."""
        return self.source(entry).curves.get(self.seeds[0] if seed is None else seed, ())

    def elapsed(self, entry: Entry, seed: int | None = None) -> float:
        """Return the virtual seconds of `entry`'s run with a seed so far; None: the first one."""
        points = self.curve(entry, seed)
        if not points or entry.speed is None:
            return 0.0
        return points[-1].samples / entry.speed if entry.candidate.exact else points[-1].seconds

    def horizon(self) -> float:
        """Return the virtual seconds after which no candidate can win any more.

        Without a time to target, those of the slowest candidate for all samples.
        """
        if best := self.best():
            # One with fewer nodes may still be chosen within that
            return best[1] * (1 + SPARED)
        seconds = (self.length.samples / entry.speed for entry in self.alive if entry.speed)
        return max(seconds, default=0.0)

    # Who is out

    def drop_slower_twins(self) -> None:
        """Drop all but the fastest of the candidates that learn the same."""
        for entry in self.alive:
            first = max(self.alike(entry), key=lambda each: each.speed or 0.0)
            if entry is not first and entry.speed and first.speed:
                entry.dropped = (
                    f"learns the same as {first.name} from each sample, which has "
                    f"{significant(first.speed / entry.speed)} times the samples/s"
                )

    def drop_by_bound(self) -> None:
        """Drop candidates that cannot be the first, however much their updates are worth."""
        if (found := self.best()) is None:
            return
        best, time = found
        needed = fmean(each.samples for each in self.times(best).values())
        batch = best.candidate.samples
        for entry in self.alive:
            # Whoever has reached the target has a time, which says more than a bound
            if entry is best or not entry.speed or self.times(entry):
                continue
            # Generous, so that nobody is left out by a guess: see `cannot_win` (decision 98). With
            # a larger rate an update goes further; a smaller one may spare steps that overshoot.
            worth = max(entry.candidate.rate, 1 / entry.candidate.rate)
            update = entry.candidate.update_samples / worth
            least = cannot_win(needed, batch, update, entry.speed, time)
            if least is not None:
                entry.dropped = (
                    f"cannot win: {least:.3g} s at least, even if each of its updates were worth "
                    f"one of {best.name} ({time:.3g} s)"
                )

    def judge(self, racing: Sequence[Entry], number: int, seconds: float) -> None:
        """Drop those that cannot win after rung `number`, of `seconds`, then the worse half."""
        assert self.target is not None
        _, limit = self.best() or (None, math.inf)
        last = number == len(RUNGS)
        scores: dict[str, tuple[float, float]] = {}
        for entry in (each for each in racing if each.dropped is None):
            time, penalty = self._score(entry, seconds)
            elapsed = self.elapsed(entry)
            # Within the time of the first it may still come before it
            if time < math.inf or limit == math.inf or (elapsed < limit and not last):
                scores[entry.name] = (time, penalty)
            else:
                value = _text(best_value(self.curve(entry), self.target))
                entry.dropped = (
                    f"rung {number}: {self.target.metric} {value} after {elapsed:.3g} s, when the "
                    "first had reached the target"
                )
        # After the last rung all are known as far as needed
        for name in halved(scores, FEWEST_RACING)[1] if not last else ():
            entry = self.entries[name]
            entry.dropped = f"rung {number}: {entry.rungs[-1]}, in the worse half"

    def _score(self, entry: Entry, seconds: float) -> tuple[float, float]:
        """Return the time, or infinity and a penalty; note the time, else the metric, in words."""
        assert self.target is not None
        time = self.time(entry)
        samples, metric = seconds * (entry.speed or 0.0), self.target.metric
        curves = self.source(entry).curves.values()
        known = [v for points in curves if (v := value_at(points, metric, samples)) is not None]
        value = fmean(known) if known else None
        text = f"{metric} {_text(value)} after {seconds:.3g} s"
        text = text if time is None else f"target after {time:.3g} s"
        entry.rungs += [text] * (text not in entry.rungs)
        if time is not None:
            return time, 0.0
        return math.inf, math.inf if value is None else self.target.penalty(value)


def _text(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"
