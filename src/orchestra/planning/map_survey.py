"""The samples that the strategies of a map take to the target, and their samples/s.

Where it depends on who is faster, learning has to be simulated on the clusters of the map: an
asynchronous server applies whatever push comes first, so on other links, or beside a slower node,
it needs other numbers of samples to the target. Such a strategy is trained wherever it is first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import dist, inf
from statistics import fmean

from orchestra.engines.processes.system import now
from orchestra.experiments.experiment import ONE_PROCESS
from orchestra.planning.candidates import Candidate
from orchestra.planning.search import PARTS, Search, processes
from orchestra.planning.standing import NO_TIME, Entry, chosen, reached
from orchestra.report.numbers import count

WHOLE = 0.95
"""A run is over if its last snapshot is at this part of its samples or later."""
CHUNK = 96
"""The simulations between two looks at the clock."""
NEAR = 0.25
"""The distance, in parts of a side, within which what was learned at a point is taken to hold."""

Place = tuple[float, float]
Samples = dict[str, dict[Place, float | None]]
"""Samples to the target, by strategy and place; None if a seed missed it or the run failed."""


@dataclass(frozen=True)
class Point:
    """A cluster of the plane: by strategy, the predicted seconds to the target, and its samples."""

    x: float
    y: float
    seconds: Mapping[str, float]
    samples: Mapping[str, float] = field(default_factory=dict)

    @property
    def winner(self) -> str:
        """The fastest strategy; among those within 2 %, one process is preferred."""
        return chosen(self.seconds, {name: name != ONE_PROCESS for name in self.seconds})

    def relearned(self, name: str, samples: float | None) -> Point:
        """Return the same with other `samples` of a strategy, or without it, if it is not alone."""
        left = {key: value for key, value in self.seconds.items() if key != name}
        if samples is None:
            # A point has to have a first one, even if that missed the target with a seed
            return Point(self.x, self.y, left or self.seconds, self.samples)
        # The speed stays, so the time goes with the samples
        left[name] = self.seconds[name] * samples / self.samples[name]
        return Point(self.x, self.y, left, {**self.samples, name: samples})


class Survey(Search):
    """Finds the samples to the target, and the samples/s, of all candidates of a map."""

    def learn(self, until: float, entries: Sequence[Entry] | None = None) -> None:
        """Train each of `entries` (all candidates by default), or the entry that learns the same,
        until it reaches the target: with the first seed, and where it did, with the others.
        """
        if entries is None:
            self._reference()
        for seed, part in product(self.seeds if self.target is not None else (), PARTS):
            wanted = self._unlearned(seed, self.alive if entries is None else entries)
            self._what = f"{count('run', len(wanted))}, {part:.0%} of the samples, seed {seed}"
            if wanted and not self.stopped and now() < until:
                self._learn([(source, seed, part) for source in wanted.values()], until)

    def _unlearned(self, seed: int, entries: Sequence[Entry]) -> dict[str, Entry]:
        """Return the entries by name that may still reach the target with `seed`, but have not."""
        first = self.seeds[:1]
        return {
            source.name: source
            for entry in entries
            if entry.dropped is None
            for source in (self.source(entry),)
            # A strategy that missed the target with the first seed need not be tried with others
            if seed in first or self.samples_of(source, first) is not None
            if self.samples_of(source, [seed]) is None
        }

    def samples_of(self, entry: Entry, seeds: Sequence[int] | None = None) -> float | None:
        """Return the samples until `entry` reached the target: the mean over those of `seeds`
        (all by default) so far.

        None if it missed the target with one of them.
        """
        assert self.target is not None
        found = [
            reached(points, self.target)
            for seed, points in self.source(entry).curves.items()
            if seeds is None or seed in seeds
        ]
        known = [at.samples for at in found if at is not None]
        # A mean over the lucky seeds would make an unreliable strategy first
        return fmean(known) if known and not self.fell_short(entry, seeds) else None

    def fell_short(self, entry: Entry, seeds: Sequence[int] | None = None) -> bool:
        """Return whether `entry` missed the target with one of `seeds` after all samples."""
        assert self.target is not None
        return any(
            reached(points, self.target) is None
            for seed, points in self.source(entry).curves.items()
            if (seeds is None or seed in seeds) and points
            # A run that was cut off has not missed the target
            if points[-1].samples >= WHOLE * self.length.samples
        )

    def survey(self, wanted: Sequence[Candidate], until: float) -> dict[str, float | None]:
        """Return the samples/s of `wanted` by name, as far as time goes; None if one fails."""
        entries = [Entry(each) for each in wanted]
        for first in range(0, len(entries), CHUNK):
            if self.stopped or now() > until:
                break
            self._find_speeds(entries[first : first + CHUNK], until)
        known = (entry for entry in entries if entry.speed or entry.dropped not in (None, NO_TIME))
        return {entry.name: entry.speed for entry in known}


def learned_there(
    survey: Survey,
    points: Sequence[Point],
    place_of: Callable[[Point], Place],
    candidate: Callable[[Point, str], Candidate],
    until: float,
) -> tuple[list[Point], list[str]]:
    """Return `points` with the samples that the first strategy takes there or nearby, and notes.

    Where a strategy is first that depends on speeds, it is trained at that point, unless it was at
    one within `NEAR`. Then another one may be first, and so on until nothing changes or `until`.

    Args:
        place_of: a point's place on the plane, whose sides are 1 long.
        candidate: a strategy on the cluster of a point.
    """
    trained: Samples = {}
    found = list(points)

    def untrained() -> list[tuple[Point, str]]:
        return [
            (point, point.winner)
            for point in found
            if candidate(point, point.winner).run.strategy.depends_on_speed
            and gap(place_of(point), trained.get(point.winner, ())) > NEAR
        ]

    # With its samples another strategy may be first at a point (decision 106)
    while (left := untrained()) and not survey.stopped and now() < until:
        chosen_now = spread_out(left, trained, place_of, processes())
        entries = [Entry(candidate(point, name)) for point, name in chosen_now]
        survey.learn(until, entries)
        for (point, name), entry in zip(chosen_now, entries, strict=True):
            samples = survey.samples_of(entry)
            # Only what is decided: a run that was cut off leaves the place untrained
            if samples is not None or entry.dropped or survey.fell_short(entry):
                trained.setdefault(name, {})[place_of(point)] = samples
        if not trained.keys() >= {name for _, name in chosen_now}:
            break  # there was no time for them
        # From `points`, not the last round: a strategy that was left out may come back elsewhere.
        found = [with_nearest(point, trained, place_of) for point in points]
    lacking = [name for _, name in left]
    notes = [
        f"{name}: there was no time to find what it learns at {count('point', lacking.count(name))}"
        " where it is first; its samples are from further away"
        for name in dict.fromkeys(lacking)
    ]
    return found, notes + [_spread_text(name, places) for name, places in trained.items()]


def with_nearest(point: Point, trained: Samples, place_of: Callable[[Point], Place]) -> Point:
    """Return `point` with the samples of the nearest place at which each strategy was trained."""
    for name, places in trained.items():
        if name in point.seconds:
            nearest = min(places, key=lambda place: dist(place, place_of(point)))
            point = point.relearned(name, places[nearest])
    return point


def spread_out(
    left: Sequence[tuple[Point, str]],
    trained: Samples,
    place_of: Callable[[Point], Place],
    most: int,
) -> list[tuple[Point, str]]:
    """Return up to `most` of `left`, each as far as can be from where its strategy was trained."""
    known = {name: list(places) for name, places in trained.items()}
    found: list[tuple[Point, str]] = []
    while len(found) < most:
        gaps = [gap(place_of(point), known.get(name, ())) for point, name in left]
        if not gaps or max(gaps) <= NEAR:
            break
        # As far as can be from what is known: an early end still covers the plane (decision 106)
        point, name = left[gaps.index(max(gaps))]
        found.append((point, name))
        known.setdefault(name, []).append(place_of(point))
    return found


def gap(place: Place, others: Sequence[Place] | Mapping[Place, object]) -> float:
    """Return the distance to the nearest one of `others`."""
    return min((dist(place, other) for other in others), default=inf)


def _spread_text(name: str, places: Mapping[Place, float | None]) -> str:
    known = [samples for samples in places.values() if samples is not None]
    where = f"trained at {count('point', len(places))}"
    if not known:
        return f"{name} ({where}): did not reach the target there with every seed"
    takes = f"{min(known):,.0f} to {max(known):,.0f} samples to the target"
    missed = len(places) - len(known)
    return f"{name} ({where}): {takes}" + (f", and missed it at {missed}" if missed else "")
