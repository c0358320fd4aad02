"""Maps: which strategy reaches the target first on a plane of clusters with two varying quantities.

The samples that a strategy takes to the target come from simulations with real gradients on the
cluster as described; where they depend on speeds, also at the points at which it is first. Its
samples/s come from simulations of shapes at every point of the plane. The time to the target there
is the samples divided by the samples/s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import dist
from pathlib import Path

from orchestra.cluster import Cluster
from orchestra.engines.processes.system import now
from orchestra.errors import InputError, RunFailed
from orchestra.experiments.experiment import ONE_PROCESS, Experiment
from orchestra.experiments.run import folder_for
from orchestra.planning.api import (
    calibrated,
    carried_out_for_real,
    emulated_nodes,
    length_of,
)
from orchestra.planning.axes import NAMED, Plane, loaded
from orchestra.planning.candidates import Candidate, Space
from orchestra.planning.map_survey import Place, Point, Survey, gap, learned_there
from orchestra.planning.search import Budget, Tell
from orchestra.planning.standing import Length
from orchestra.records.record import write_atomically
from orchestra.report.numbers import count, some
from orchestra.trainer.settings import MEASURED, Target

RECORD = "map.json"
LEARN_PART, SPEEDS_PART = 0.5, 0.8
"""The parts of the budget by which samples to the target, and samples/s, have to be known."""
LAST_PART = 0.03
"""The part of the budget kept for the figure."""
ALIKE = 0.05
"""Measured times that differ by less are a tie, for which no prediction is wrong."""

Mapped = Callable[[Place, Path], list[Candidate]]
"""Returns the candidates on the cluster of a place, of which files go into a folder."""


@dataclass(frozen=True)
class Check:
    """The first two strategies of a point, trained on emulated nodes.

    Attributes:
        measured: seconds to the target; None for one that did not reach it.
        failure: why the point could not be emulated; None where it was.
    """

    x: float
    y: float
    predicted: Mapping[str, float]
    measured: Mapping[str, float | None] = field(default_factory=dict)
    failure: str | None = None

    @property
    def agrees(self) -> bool | None:
        """True if the predicted first one was first, or as good as; None where nobody can tell."""
        times = {name: value for name, value in self.measured.items() if value is not None}
        if self.failure is not None or not times:
            return None
        first = min(self.predicted, key=lambda name: self.predicted[name])
        return first in times and times[first] <= (1 + ALIKE) * min(times.values())


@dataclass(frozen=True)
class Map:
    """The result of a map.

    Attributes:
        samples: by strategy, those that it takes to the target, the mean over the seeds; where that
            depends on the number of nodes, with the most of them.
        strategies: the notation of each.
        points: those whose times are known.
        checks: points that were emulated.
        left_out: what there was no time for, or what the target is out of reach of.
        costs: where the durations of the simulation come from.
        stopped: the user ended it.
    """

    experiment: str
    plane: Plane
    target: Target | None
    samples: Mapping[str, float]
    strategies: Mapping[str, str]
    points: Sequence[Point]
    left_out: Sequence[str]
    costs: str
    folder: Path
    stopped: bool = False
    checks: Sequence[Check] = ()

    @property
    def winners(self) -> list[str]:
        """The strategies that are first at some point, the most frequent one first."""
        first = [point.winner for point in self.points]
        return sorted(set(first), key=lambda name: (-first.count(name), name))


def name_of(candidate: Candidate) -> str:
    """Return the name of a candidate's strategy, without its nodes."""
    by_speed = candidate.run.training.shares == MEASURED
    return candidate.label + ", shares by speed" * by_speed


def mapped(experiment: Experiment, cluster: Cluster, folder: Path) -> list[Candidate]:
    """Return one process, and each strategy on all of `cluster`, with the experiment's batch."""
    ranks = sum(max(node.devices, 1) for node in cluster.nodes)
    return [
        each
        for each in Space(experiment, cluster, folder).candidates()
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
    budget = Budget(began, began + 60 * minutes * (1 - LAST_PART))
    on = emulated_nodes(next(iter(clusters.values()))) if checks else None
    experiment, costs, notes = calibrated(experiment, folder, budget, tell, on)

    def there(place: Place, own: Path) -> list[Candidate]:
        return mapped(experiment, clusters[place], own)

    def candidate(point: Point, name: str) -> Candidate:
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
        points, learned = learned_there(
            survey, points, lambda point: plane.place(point.x, point.y), candidate, budget.until
        )
    except KeyboardInterrupt:
        # Points that were not yet compared could name the wrong strategy
        survey.stopped, points, learned = True, [], []
    drawn = _map_of(survey, experiment, plane, points, folder)
    drawn = replace(drawn, costs=costs, left_out=[*notes, *learned, *drawn.left_out])
    if checks and not drawn.stopped:
        drawn = replace(drawn, checks=list(_checked(drawn, there, length, checks, tell)))
    write_atomically(folder / RECORD, to_json(drawn))
    if drawn.points:
        from orchestra.planning.map_figure import map_figure
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
) -> Iterable[Point]:
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
                job = replace(each, name=f"{each.name} at {number}")
                wanted[job.name] = (place, name_of(each), samples)
                jobs.append(job)
    survey._what = f"speeds at {count('point', len(order))}"
    speeds = survey.survey(jobs, until)
    seconds: dict[Place, dict[str, float]] = {place: {} for place in order}
    taken: dict[Place, dict[str, float]] = {place: {} for place in order}
    unknown = {place for name, (place, *_) in wanted.items() if name not in speeds}
    for name, speed in speeds.items():
        place, strategy, samples = wanted[name]
        if speed is not None:
            seconds[place][strategy] = samples / speed
            taken[place][strategy] = samples
    for (x, y), times in seconds.items():
        # A point with a strategy still to be simulated could name the wrong one as the first.
        if times and (x, y) not in unknown:
            yield Point(x, y, times, taken[x, y])


def _coarse_first(places: Sequence[Place]) -> list[Place]:
    """Return the corners of the plane first, then points between, ever closer to one another."""
    sides = [sorted({place[side] for place in places}) for side in (0, 1)]

    def level(position: int, size: int) -> int:
        steps = [s for s in (32, 16, 8, 4, 2, 1) if s < size]
        return next((n for n, s in enumerate(steps) if position % s == 0), len(steps))

    levels = [{v: level(i, len(side)) for i, v in enumerate(side)} for side in sides]
    return sorted(places, key=lambda p: max(levels[0][p[0]], levels[1][p[1]]))


def _map_of(
    survey: Survey, experiment: Experiment, plane: Plane, points: Sequence[Point], folder: Path
) -> Map:
    samples: dict[str, float] = {}
    missed: set[str] = set()
    untold: set[str] = set()
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


def spread(drawn: Map, number: int) -> list[Point]:
    """Return `number` points far from one another, each beside the others' regions as they are."""

    def at(point: Point) -> Place:
        return drawn.plane.place(point.x, point.y)

    # The first is in the middle of the plane; each further one is as far as can be from all before.
    left = sorted(drawn.points, key=lambda point: dist(at(point), (0.5, 0.5)))
    found = left[:1]
    while len(found) < min(number, len(left)):
        gaps = [gap(at(point), [*map(at, found)]) for point in left]  # 0 of those in `found`
        found.append(left[gaps.index(max(gaps))])
    return found


def to_json(drawn: Map) -> str:
    """Return the record of a map."""
    axes = {
        side: {"key": axis.key, "title": axis.title, "texts": [axis.text(v) for v in axis.values],
               "values": axis.values}
        for side, axis in (("x", drawn.plane.x), ("y", drawn.plane.y))
    }  # fmt: skip
    return json.dumps(
        {
            "schema": 1,
            "experiment": drawn.experiment,
            "cluster": drawn.plane.text,
            **axes,
            "target": None if drawn.target is None else asdict(drawn.target),
            "strategies": drawn.strategies,
            "samples_to_target": drawn.samples,
            "points": [{**asdict(point), "winner": point.winner} for point in drawn.points],
            "checks": [{**asdict(check), "agrees": check.agrees} for check in drawn.checks],
            "left_out": drawn.left_out,
            "costs": drawn.costs,
            "stopped": drawn.stopped,
        },
        indent=1,
    )
