"""Finding a map: the samples that strategies take to the target, and their samples/s.

The samples come from simulations with real gradients on the cluster as described. Where they depend
on the workers' speeds, they have to be simulated on the clusters of the map: an asynchronous server
applies pushes in the order of their arrival. So on other links, or together with a slower node, it
needs other numbers of samples to the target. Such a strategy is trained wherever it is first.

The samples/s come from simulations of shapes at every point of the plane. The time to the target
there is the samples divided by the samples/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import dist
from pathlib import Path
from statistics import fmean

from orchestra.cluster import Cluster
from orchestra.engines.processes.system import now
from orchestra.engines.simulation.trials import Tried
from orchestra.errors import InputError, RunFailed
from orchestra.experiments.experiment import ONE_PROCESS, Experiment
from orchestra.experiments.run import folder_for
from orchestra.planning.api import calibrated, carried_out_for_real, emulated_nodes, length_of
from orchestra.planning.candidates import Candidate, NodeSpeeds, Space
from orchestra.planning.map import (
    NAMED,
    Check,
    Map,
    MapPoint,
    Place,
    Plane,
    gap,
    loaded,
    spread,
    to_json,
)
from orchestra.planning.race import PARTS, SearchBudget, TrialRequest
from orchestra.planning.search import Search, Tell, processes
from orchestra.planning.standing import NO_TIME, Contender, Length, Reached, reached
from orchestra.records.files import write_atomically
from orchestra.records.report import Point
from orchestra.report.numbers import count, some
from orchestra.trainer.settings import MEASURED

RECORD = "map.json"
LEARN_PART, SPEEDS_PART = 0.5, 0.8
"""The parts of the budget by which samples to the target, and samples/s, have to be known."""
LAST_PART = 0.03
"""The part of the budget kept for the figure."""
WHOLE = 0.95
"""A run is over if its last snapshot is at this part of its samples or later."""
NEAR = 0.25
"""The distance, in parts of a side, within which what was learned at a point is taken to hold."""

Samples = dict[str, dict[Place, float | None]]
"""Samples to the target, by strategy and place; None if a seed missed it or the run failed."""
Mapped = Callable[[Place, Path], list[Candidate]]
"""Returns the candidates on the cluster of a place, and writes their files into a folder."""


def name_of(candidate: Candidate) -> str:
    """Return the name of a candidate's strategy, without its nodes."""
    by_speed = candidate.run.training.shares == MEASURED
    return candidate.label + ", shares by speed" * by_speed


def mapped(
    experiment: Experiment, cluster: Cluster, folder: Path, speeds: NodeSpeeds | None = None
) -> list[Candidate]:
    """Return one process, and each strategy on all of `cluster`, with the experiment's batch."""
    ranks = sum(max(node.devices, 1) for node in cluster.nodes)
    space = Space(experiment, cluster, folder, speeds=speeds or NodeSpeeds())
    return [
        each
        for each in space.candidates()
        if (each.batch, each.rate) == (1, 1)
        and each.run.training.ranks == (1 if each.label == ONE_PROCESS else ranks)
    ]


def draw_map(
    experiment: Experiment, plane: Plane, out: Path | None, minutes: float, tell: Tell, checks: int
) -> Map:
    """Find the times of all strategies on `plane` within `minutes`, and write them and the figure.

    With `checks` so many points are emulated afterwards, however long that takes.

    Raises:
        InputError: bad input, found before anything is simulated.
    """
    began = now()
    if not 0 < minutes <= 100_000:
        raise InputError(f"minutes: {minutes:g} is not above 0, or above 100000; give 15, or 0.5")
    # All of them first: an impossible value is refused before minutes of simulation
    clusters = {(x, y): plane.cluster(x, y) for x, y in product(plane.x.values, plane.y.values)}
    if all(len(each.nodes) == 1 for each in clusters.values()):
        raise InputError(
            f"cluster: {plane.text} is one node, so that nothing crosses links and no other node "
            "is slower or faster; give several, such as lan_1gbit(nodes=8), or --y nodes=1,2,4"
        )
    tell("loading the task", 0.0)
    length = length_of(experiment)
    folder = folder_for(out, f"map-{experiment.name}", empty=True)
    budget = SearchBudget(began, began + 60 * minutes * (1 - LAST_PART))
    on = emulated_nodes(next(iter(clusters.values()))) if checks else None
    experiment, costs, notes = calibrated(experiment, folder, budget, tell, on)

    speeds = NodeSpeeds()

    def there(place: Place, own: Path) -> list[Candidate]:
        return mapped(experiment, clusters[place], own, speeds)

    def candidate(point: MapPoint, name: str) -> Candidate:
        x, y = point.x, point.y
        every = there((x, y), folder / f"clusters/{x:g}-{y:g}")
        found = next(each for each in every if name_of(each) == name)
        return replace(found, name=f"{found.name} at {x:g}, {y:g}")

    learners = _learners(experiment, plane, folder)
    survey = Survey(
        learners, experiment.training.target, length, folder / "runs", budget, tell,
        seeds=experiment.seeds,
    )  # fmt: skip
    try:
        survey.learn(budget.part(LEARN_PART))
        points = list(_points(survey, list(clusters), there, folder, budget.part(SPEEDS_PART)))
        points, learned = learned_there(survey, points, plane.place, candidate, budget.until)
    except KeyboardInterrupt:
        # Points that were not yet compared could name the wrong strategy
        survey.stopped, points, learned = True, [], []
    drawn = _map_of(survey, experiment, plane, points, folder)
    drawn = replace(drawn, costs=costs, left_out=[*notes, *learned, *drawn.left_out])
    if checks and not drawn.stopped:
        drawn = replace(drawn, checks=list(_checked(drawn, there, length, checks, tell)))
    survey.tidy()
    write_atomically(folder / RECORD, to_json(drawn))
    if drawn.points:
        from orchestra.planning.page import map_figure
        from orchestra.report.figures.frame import save

        save(map_figure(drawn), folder)
    return drawn


def _learners(experiment: Experiment, plane: Plane, folder: Path) -> list[Candidate]:
    """Return the candidates whose samples to the target have to be known: all on the described
    cluster, and where the number of nodes varies, on each number.
    """
    described = loaded(plane.text)
    counts = [axis.values for axis in (plane.x, plane.y) if axis.key == "nodes"]
    clusters = [NAMED["nodes"](described, n) for n in counts[0]] if counts else [described]
    found: dict[str, Candidate] = {}
    for cluster in reversed(clusters):  # the largest first: its strategies have to be known
        for each in mapped(experiment, cluster, folder / f"clusters/{len(cluster.nodes)}"):
            # On several numbers of nodes names of strategies differ; one process is the same on all
            found.setdefault(each.name, each)
    return list(found.values())


def _points(
    survey: Survey, places: Sequence[Place], there: Mapped, folder: Path, until: float
) -> Iterable[MapPoint]:
    """Yield all points for which there is time, those first that are furthest from one another."""
    if survey.target is None:
        return
    # Wherever time ends, the points that are known cover the whole plane.
    order = _coarse_first(places)
    wanted: dict[str, tuple[Place, str, float]] = {}
    jobs = []
    for number, place in enumerate(order):
        for each in there(place, folder / f"clusters/point-{number}"):
            known = survey.entries.get(each.name)
            # Without samples to the target a speed would tell nothing of the time.
            samples = None if known is None else survey.samples_of(known)
            if samples is not None:
                jobs.append(replace(each, name=f"{each.name} at {number}"))
                wanted[jobs[-1].name] = (place, name_of(each), samples)
    speeds = survey.survey(jobs, until)
    unknown = {place for name, (place, *_) in wanted.items() if name not in speeds}
    taken: dict[Place, dict[str, float]] = {place: {} for place in order}
    seconds: dict[Place, dict[str, float]] = {place: {} for place in order}
    for name, speed in speeds.items():
        place, strategy, samples = wanted[name]
        if speed is not None:
            taken[place][strategy], seconds[place][strategy] = samples, samples / speed
    for place, times in seconds.items():
        # A point with a strategy still to be simulated could name the wrong one as the first.
        if times and place not in unknown:
            yield MapPoint(*place, times, taken[place])


def _coarse_first(places: Sequence[Place]) -> list[Place]:
    """Return the corners of the plane first, then points between, ever closer to one another."""
    sides = [sorted({place[side] for place in places}) for side in (0, 1)]

    def level(position: int, size: int) -> int:
        steps = [s for s in (32, 16, 8, 4, 2, 1) if s < size]
        return next((n for n, s in enumerate(steps) if position % s == 0), len(steps))

    levels = [{v: level(i, len(side)) for i, v in enumerate(side)} for side in sides]
    return sorted(places, key=lambda p: max(levels[0][p[0]], levels[1][p[1]]))


def _map_of(
    survey: Survey, experiment: Experiment, plane: Plane, points: Sequence[MapPoint], folder: Path
) -> Map:
    samples: dict[str, float] = {}
    missed, untold = set[str](), set[str]()
    for entry in survey.entries.values() if survey.target is not None else ():
        name = name_of(entry.candidate)
        if (found := survey.samples_of(entry)) is not None:
            samples.setdefault(name, found)
        else:
            # Only a run with all of its samples can be said to have missed the target.
            (missed if survey.fell_short(entry) else untold).add(name)
    left_out = list(survey.notes)
    if missed := missed - set(samples):
        left_out.append(f"{some(sorted(missed))}: did not reach the target with every seed")
    if untold := untold - set(samples) - missed:
        left_out.append(f"{some(sorted(untold))}: there was no time to find what they learn")
    wanted = len(plane.x.values) * len(plane.y.values)
    if len(points) < wanted:
        left_out.append(f"{wanted - len(points)} of {wanted} points: there was no time")
    notations = {
        name_of(e.candidate): repr(e.candidate.run.strategy) for e in survey.entries.values()
    }
    return Map(
        experiment.name, plane, survey.target, samples, notations, points, left_out, "", folder,
        survey.stopped,
    )  # fmt: skip


def _checked(drawn: Map, there: Mapped, length: Length, number: int, tell: Tell) -> Iterable[Check]:
    """Emulate `number` points that are far from one another: train the first two strategies."""
    for place, point in enumerate(spread(drawn, number)):
        # The first two: whether their order is right is the question
        first = sorted(point.seconds, key=lambda name: point.seconds[name])[:2]
        predicted = {name: point.seconds[name] for name in first}
        tell(f"emulating point {place + 1} of {number}", place / number)
        folder = drawn.folder / f"checks/{place + 1}"
        own = {name_of(each): each for each in there((point.x, point.y), folder / "clusters")}
        measured: dict[str, float | None] = {}
        failure = None
        assert drawn.target is not None
        try:
            for turn, name in enumerate(first):
                run, place_of_run = own[name].run, folder / str(turn)
                measured[name] = carried_out_for_real(
                    run, "emulation", length.snapshots, place_of_run, drawn.target
                ).seconds
        except KeyboardInterrupt:
            return
        except (InputError, RunFailed) as error:
            failure = str(error).splitlines()[0]
        yield Check(point.x, point.y, predicted, measured, failure)


class Survey(Search):
    """Finds the samples to the target, and the samples/s, of all candidates of a map."""

    def learn(self, until: float, entries: Sequence[Contender] | None = None) -> None:
        """Train each of `entries` (all candidates by default), or the entry that learns the same,
        until it reaches the target: with the first seed, and where it did, with the others.
        """

        def ask() -> TrialRequest | None:
            return self._next_run(entries) if now() < until else None

        def told(request: TrialRequest, tried: Tried) -> None:
            self.under_way.remove(request)
            self.take_curve(request, tried)

        self.carry_out(ask, told, until)
        if self.target is None:
            self.notes.append("no time to train one process to the target")

    def _next_run(self, entries: Sequence[Contender] | None) -> TrialRequest | None:
        """Return the next run of `entries`; where no target was given, first of one process, whose
        loss will be the target."""
        busy = {request.entry.name for request in self.under_way}
        if self.target is None and not self.reference_is_over():
            reference = self.entries[ONE_PROCESS]
            return None if reference.name in busy else self.request_run(reference, self.seeds[0])
        # All with a seed are trained up to a part before any goes on
        for seed, part in product(self.asked if self.target is not None else (), PARTS):
            for source in self._unlearned(seed, entries or self.alive).values():
                if source.done.get(seed, 0.0) < part and source.name not in busy:
                    return self.request_run(source, seed)
        return None

    def _unlearned(self, seed: int, entries: Sequence[Contender]) -> dict[str, Contender]:
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

    def samples_of(self, entry: Contender, seeds: Sequence[int] | None = None) -> float | None:
        """Return the samples until `entry` reached the target: the mean over those of `seeds`
        (all by default) so far. None if it missed the target with one of them.
        """
        known = [at.samples for _, at in self._curves(entry, seeds) if at is not None]
        # A mean over the lucky seeds would make an unreliable strategy first
        return fmean(known) if known and not self.fell_short(entry, seeds) else None

    def fell_short(self, entry: Contender, seeds: Sequence[int] | None = None) -> bool:
        """Return whether `entry` missed the target with one of `seeds` after all samples."""
        return any(
            # A run that was cut off has not missed the target
            at is None and points and points[-1].samples >= WHOLE * self.length.samples
            for points, at in self._curves(entry, seeds)
        )

    def _curves(
        self, entry: Contender, seeds: Sequence[int] | None
    ) -> Iterator[tuple[Sequence[Point], Reached | None]]:
        """Yield what `entry` learns with each of `seeds`, and when it reached the target."""
        assert self.target is not None
        for seed, points in self.source(entry).curves.items():
            if seeds is None or seed in seeds:
                yield points, reached(points, self.target)

    def survey(self, wanted: Sequence[Candidate], until: float) -> dict[str, float | None]:
        """Return the samples/s of `wanted` by name, as far as time goes; None if one fails."""
        entries = [Contender(each) for each in wanted]
        if not self.stopped:
            self.find_speeds(entries, until)
        known = (entry for entry in entries if entry.speed or entry.dropped not in (None, NO_TIME))
        return {entry.name: entry.speed for entry in known}


def learned_there(
    survey: Survey,
    points: Sequence[MapPoint],
    place_of: Callable[[MapPoint], Place],
    candidate: Callable[[MapPoint, str], Candidate],
    until: float,
) -> tuple[list[MapPoint], list[str]]:
    """Return `points` with the samples that the first strategy takes there or nearby, and notes.

    Where a strategy is first that depends on speeds, it is trained at that point, unless it was at
    one within `NEAR`. Then another one may be first, and so on until nothing changes or `until`.

    Args:
        place_of: a point's place on the plane, whose sides are 1 long.
        candidate: a strategy on the cluster of a point.
    """
    trained: Samples = {}
    found = list(points)

    def untrained() -> list[tuple[MapPoint, str]]:
        return [
            (point, point.winner)
            for point in found
            if candidate(point, point.winner).run.strategy.traits().depends_on_speed
            and gap(place_of(point), trained.get(point.winner, ())) > NEAR
        ]

    # After a strategy was trained at a point, another one may be first there.
    while (left := untrained()) and not survey.stopped and now() < until:
        chosen_now = spread_out(left, trained, place_of, processes())
        entries = [Contender(candidate(point, name)) for point, name in chosen_now]
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


def with_nearest(
    point: MapPoint, trained: Samples, place_of: Callable[[MapPoint], Place]
) -> MapPoint:
    """Return `point` with the samples of the nearest place at which each strategy was trained."""
    for name, places in trained.items():
        if name in point.seconds:
            nearest = min(places, key=lambda place: dist(place, place_of(point)))
            point = point.relearned(name, places[nearest])
    return point


def spread_out(
    left: Sequence[tuple[MapPoint, str]],
    trained: Samples,
    place_of: Callable[[MapPoint], Place],
    most: int,
) -> list[tuple[MapPoint, str]]:
    """Return up to `most` of `left`, each as far as can be from where its strategy was trained."""
    known = {name: list(places) for name, places in trained.items()}
    found: list[tuple[MapPoint, str]] = []
    while len(found) < most:
        gaps = [gap(place_of(point), known.get(name, ())) for point, name in left]
        if not gaps or max(gaps) <= NEAR:
            break
        # The point farthest from all trained ones comes next, so that even an early end covers the
        # plane.
        point, name = left[gaps.index(max(gaps))]
        found.append((point, name))
        known.setdefault(name, []).append(place_of(point))
    return found


def _spread_text(name: str, places: Mapping[Place, float | None]) -> str:
    known = [samples for samples in places.values() if samples is not None]
    where = f"trained at {count('point', len(places))}"
    if not known:
        return f"{name} ({where}): did not reach the target there with every seed"
    takes = f"{min(known):,.0f} to {max(known):,.0f} samples to the target"
    missed = len(places) - len(known)
    return f"{name} ({where}): {takes}" + (f", and missed it at {missed}" if missed else "")
