"""What a plan knows of its candidates: speeds, curves, and the times that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from orchestra.planning.candidates import Candidate
from orchestra.planning.judging import Reached, reached
from orchestra.records.report import Point
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Target

MISSED = 1.5
"""A seed has missed the target after so many times the samples that others needed."""


@dataclass
class Entry:
    """What is known of a candidate.

    Attributes:
        speed: samples/s, from shapes; None where it is not known.
        seconds: of a step, by what a worker does in them: compute, communicate, wait.
        cost_rate: cost of a second, in the cluster's currency; None without prices.
        curves: by seed, its snapshots, with the seconds of its own run.
        done: the part of its samples that was simulated, with the first seed.
        dropped: why it is out; None while it is not.
        rungs: what each rung saw of it, in words.
    """

    candidate: Candidate
    speed: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    cost_rate: float | None = None
    currency: str | None = None
    curves: dict[int, Sequence[Point]] = field(default_factory=dict)
    done: float = 0.0
    wall: float = 0.0
    dropped: str | None = None
    rungs: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.candidate.name


@dataclass(frozen=True)
class Length:
    """Of a whole run: samples; and snapshots, so that judging takes no longer than learning."""

    samples: int
    snapshots: int


class Standing:
    """How the candidates stand.

    Attributes:
        entries: of all candidates, by name.
        target: what is to be reached; None while none is chosen.
        length: of a whole run.
        seeds: of the runs; the first one decides the race.
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
        """The entry whose runs say what `entry` learns: its own, or that of one process."""
        if not entry.candidate.exact:
            return entry
        key = entry.candidate.learns_as
        return next(
            other
            for other in self.entries.values()
            if other.candidate.learns_as == key and isinstance(other.candidate.run.strategy, Single)
        )

    def times(self, entry: Entry) -> dict[int, Reached]:
        """By seed, when `entry` reached the target."""
        if self.target is None or entry.speed is None:
            return {}
        source, found = self.source(entry), {}
        for seed, points in source.curves.items():
            at = reached(points, self.target)
            if at is not None:
                found[seed] = self._at_speed(at, entry, source)
        return found

    def _at_speed(self, at: Reached, entry: Entry, source: Entry) -> Reached:
        """What `source` reached in the seconds of `entry`, which learns the same."""
        if not entry.candidate.exact:
            return at
        assert entry.speed is not None
        seconds = at.samples / entry.speed
        return Reached(at.samples, seconds, at.spacing * seconds / max(at.seconds, 1e-12))

    def time(self, entry: Entry) -> float | None:
        """Seconds to the target, the mean over the seeds; None where one missed it, though it went
        further than those that reached it."""
        times = self.times(entry)
        if not times:
            return None
        far = MISSED * max(each.samples for each in times.values())
        missed = (
            points[-1].samples >= min(far, self.length.samples)
            for seed, points in self.source(entry).curves.items()
            if seed not in times and points
        )
        return None if any(missed) else fmean(each.seconds for each in times.values())

    def uncertainty(self, entry: Entry) -> float | None:
        """Of the time: the spread over the seeds, or half the spacing of the snapshots if that is
        larger."""
        times = list(self.times(entry).values())
        if not times:
            return None
        spread = stdev(each.seconds for each in times) if len(times) > 1 else 0.0
        return max(spread, fmean(each.spacing for each in times) / 2)

    def best(self) -> Entry | None:
        """The first to reach the target of all."""
        known = [(time, each) for each in self.entries.values() if (time := self.time(each))]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    def elapsed(self, entry: Entry) -> float:
        """Virtual seconds of `entry` up to where its runs went."""
        source = self.source(entry)
        points = source.curves.get(self.seeds[0], ())
        if not points or entry.speed is None:
            return 0.0
        return points[-1].samples / entry.speed if entry.candidate.exact else points[-1].seconds
