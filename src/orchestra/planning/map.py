"""What a map is: a plane of clusters with two varying quantities, and who is first at its points.

Maps answer which strategy reaches the target first. `map_survey` finds that out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import dist, inf
from pathlib import Path

import numpy as np

from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.file import cluster_document, cluster_in, cluster_text, is_file
from orchestra.cluster.units import BANDWIDTH, BYTES, FLOPS, SECONDS, Unit
from orchestra.engines.simulation.costs import FLOPS as ASSUMED_FLOPS
from orchestra.errors import InputError, nearest
from orchestra.experiments.experiment import ONE_PROCESS
from orchestra.planning.standing import chosen
from orchestra.settings.tree import SettingChange, changed_entry
from orchestra.trainer.settings import Target

UNITS = {"bandwidth": BANDWIDTH, "latency": SECONDS, "memory": BYTES, "flops": FLOPS}
"""The units of settings' values, by the key's last word; other settings are plain numbers."""
SPAN = 30.0
"""Without a given range, bandwidth and latency range from 1/30 of the cluster's to 30 times it."""
SLOWEST = (0.05, 1.0)
MOST_POINTS, MOST_NODES = 64, 1024
ALIKE = 0.05
"""Measured times that differ by less are a tie, for which no prediction is wrong."""

Place = tuple[float, float]

# The sides


@dataclass(frozen=True)
class Axis:
    """A quantity that varies along one side of a map."""

    key: str  # its name ("bandwidth"), or its place in the cluster's file ("nodes.old.speed")
    values: tuple[float, ...]  # that it takes, ascending, in the base of its unit
    unit: Unit | None = None  # None for a plain number

    def text(self, value: float) -> str:
        """Return a value as it is written: "10 Mbit/s"."""
        return f"{value:.3g}" if self.unit is None else self.unit.rounded(value)

    @property
    def title(self) -> str:
        """The title of the axis in a figure."""
        return TITLES.get(self.key, self.key)


def _bandwidth(cluster: Cluster, value: float) -> Cluster:
    return cluster.scaled(bandwidth=value / slowest_link(cluster))


def _latency(cluster: Cluster, value: float) -> Cluster:
    if not (longest := longest_link(cluster)):
        raise InputError("latency: the links of the cluster have none, so it cannot be scaled")
    return cluster.scaled(latency=value / longest)


def _slowest_node(cluster: Cluster, value: float) -> Cluster:
    """Give the slowest node (of equal ones the last) `value` times the speed of the fastest."""
    nodes = list(cluster.nodes)
    speeds = [node.speed_beside(ASSUMED_FLOPS) for node in nodes]
    place = max(range(len(speeds)), key=lambda i: (-speeds[i], i))
    factor, node = value * max(speeds) / speeds[place], nodes[place]
    # A node has one of speed and flops
    speed, flops = (each and each * factor for each in (node.speed, node.flops))
    nodes[place] = replace(node, speed=speed, flops=flops)
    return replace(cluster, nodes=tuple(nodes))


def _nodes(cluster: Cluster, value: float) -> Cluster:
    """Return the first `value` nodes of the file; beyond its last one the nodes repeat."""
    if not isinstance(cluster.placement, str):
        raise InputError(
            "nodes: the cluster places its ranks on nodes by name; write ranks: spread"
        )
    nodes = list(cluster.nodes)
    while len(nodes) < value:
        # Names of nodes are unique
        turn, place = divmod(len(nodes), len(cluster.nodes))
        node = cluster.nodes[place]
        nodes.append(replace(node, name=f"{node.name}-again-{turn}"))
    return replace(cluster, nodes=tuple(nodes[: round(value)]))


NAMED: Mapping[str, Callable[[Cluster, float], Cluster]] = {
    "bandwidth": _bandwidth,
    "latency": _latency,
    "slowest_node": _slowest_node,
    "nodes": _nodes,
}
TITLES = {
    "bandwidth": "bandwidth of the slowest link",
    "latency": "latency of the longest link, one way",
    "slowest_node": "speed of the slowest node, in parts of the fastest",
    "nodes": "nodes",
}


def slowest_link(cluster: Cluster) -> float:
    """Return the least bandwidth of a link, in bytes/s."""
    return min(link.bandwidth for link in cluster.links)


def longest_link(cluster: Cluster) -> float:
    """Return the largest latency of a link, in seconds."""
    return max(link.latency for link in cluster.links)


@dataclass(frozen=True)
class Plane:
    """The clusters of a map."""

    text: str  # names the one that is varied, a preset or a file
    x: Axis
    y: Axis

    def place(self, point: MapPoint) -> Place:
        """Return a point's place on a plane with sides of 1 and equal steps between values."""
        xs, ys = self.x.values, self.y.values
        return xs.index(point.x) / (len(xs) - 1), ys.index(point.y) / (len(ys) - 1)

    def cluster(self, x: float, y: float) -> Cluster:
        """Return the cluster in which the two quantities have these values.

        Raises:
            InputError: there is no such cluster.
        """
        pairs = [(self.x, x), (self.y, y)]
        keys = {axis.key: axis.text(value) for axis, value in pairs if axis.key not in NAMED}
        cluster = _with_keys(self.text, keys) if keys else loaded(self.text)
        for axis, value in pairs:
            if axis.key in NAMED:
                cluster = NAMED[axis.key](cluster, value)
        return cluster


def loaded(text: str) -> Cluster:
    """Return the cluster that `text` names.

    Raises:
        InputError: no cluster has this name, or its nodes have no links.
    """
    cluster = load_cluster(text, where="cluster", folder=Path())
    if not cluster.links:
        raise InputError(
            f"cluster: {cluster.name} has no links between nodes, so that there is nothing to map; "
            "give one of several nodes, such as lan_1gbit(nodes=8)"
        )
    return cluster


def _with_keys(text: str, values: Mapping[str, str]) -> Cluster:
    """SettingChange `values` of the cluster's file, by their place ("nodes.old.speed")."""
    path = Path(text)
    # A preset is changed in the file that says the same.
    own = None if is_file(text) else cluster_text(loaded(text))
    document = cluster_document(path, own)
    for key, value in values.items():
        head, *inside = key.split(".")
        where = f"--cluster {key}"
        if head not in document:
            raise InputError(f"{where}: the cluster has no {head!r}; {nearest(head, document)}")
        change = SettingChange(tuple(inside), _plain(value), where)
        # Any key of the cluster's file can be a side of the map.
        document[head] = changed_entry(document[head], change, head, None)
    return cluster_in(document, path)


def _plain(value: str) -> int | float | str:
    try:
        number = float(value)
    except ValueError:
        return value
    # A whole number where the file wants one, as in `cores`
    return int(number) if number.is_integer() else number


def read_axis(text: str, cluster: Cluster, points: int, *, where: str) -> Axis:
    """Return the axis that `text` says: KEY, KEY=FIRST..LAST, or KEY=VALUE,VALUE,...

    A range has `points` values, in equal ratios. The named keys have ranges of their own.

    Raises:
        InputError: one line with `where`, what is wrong, and the remedy.
    """
    key, given, values = text.partition("=")
    key = key.strip()
    if key not in NAMED and "." not in key:
        raise InputError(
            f"{where}: {key!r} is no quantity; {nearest(key, NAMED)} Or write a place in the "
            "cluster's file, such as nodes.worker.speed=0.1..1"
        )
    unit = UNITS.get(key.rpartition(".")[2])
    if given:
        parts = [_number(part, unit, where) for part in re.split(r"\.\.+|,", values)]
        is_range = ".." in values and len(parts) == 2
    elif key in NAMED:
        parts, is_range = [*_range(key, cluster)], True
    else:
        raise InputError(f"{where}: {key} needs its values; write {key}=FIRST..LAST")
    if is_range:
        low, high = sorted(parts)
        if not 0 < low < high:
            raise InputError(f"{where}: a range goes from one number above 0 to a larger one")
        # Equal ratios, since the axes of the figure are logarithmic.
        parts = [float(value) for value in np.geomspace(low, high, points)]
    if key == "nodes":
        parts = [float(round(value)) for value in parts]
    # Rounded numbers of nodes may coincide
    parts = sorted(set(parts))
    highest = {"nodes": MOST_NODES, "slowest_node": 1.0}.get(key, math.inf)
    if not 2 <= len(parts) <= MOST_POINTS or parts[-1] > highest or parts[0] <= 0:
        raise InputError(
            f"{where}: {text!r}: a side has 2 to {MOST_POINTS} values above 0"
            + (f", up to {highest:g}" if highest < math.inf else "")
        )
    return Axis(key, tuple(parts), unit)


def _range(key: str, cluster: Cluster) -> tuple[float, float]:
    if key == "slowest_node":
        return SLOWEST
    if key == "nodes":
        return 2.0, float(max(8, len(cluster.nodes)))
    # `_latency` refuses links without latency; until then the range needs a number above 0.
    middle = slowest_link(cluster) if key == "bandwidth" else longest_link(cluster) or 1e-4
    return middle / SPAN, middle * SPAN


def _number(text: str, unit: Unit | None, where: str) -> float:
    if unit is not None:
        return unit.read(text, where=where)
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{where}: {text.strip()!r} is no number") from None
    if not math.isfinite(value):
        raise InputError(f"{where}: {text.strip()!r} is no finite number")
    return value


# The points


@dataclass(frozen=True)
class MapPoint:
    """A cluster of the plane: by strategy, the predicted seconds to the target, and its samples."""

    x: float
    y: float
    seconds: Mapping[str, float]
    samples: Mapping[str, float] = field(default_factory=dict)

    @property
    def winner(self) -> str:
        """The fastest strategy; among those within 2 %, one process is preferred."""
        return chosen(self.seconds, {name: name != ONE_PROCESS for name in self.seconds})

    def relearned(self, name: str, samples: float | None) -> MapPoint:
        """Return the same with other `samples` of a strategy, or without it, if it is not alone."""
        left = {key: value for key, value in self.seconds.items() if key != name}
        if samples is None:
            # A point has to have a first one, even if that missed the target with a seed
            return MapPoint(self.x, self.y, left or self.seconds, self.samples)
        # The speed stays, so the time goes with the samples
        left[name] = self.seconds[name] * samples / self.samples[name]
        return MapPoint(self.x, self.y, left, {**self.samples, name: samples})


@dataclass(frozen=True)
class Check:
    """The first two strategies of a point, trained on emulated nodes, and their seconds."""

    x: float
    y: float
    predicted: Mapping[str, float]
    measured: Mapping[str, float | None] = field(default_factory=dict)  # None: not reached
    failure: str | None = None  # why the point could not be emulated; None where it was

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
    points: Sequence[MapPoint]
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


def gap(place: Place, others: Sequence[Place] | Mapping[Place, object]) -> float:
    """Return the distance to the nearest one of `others`."""
    return min((dist(place, other) for other in others), default=inf)


def spread(drawn: Map, number: int) -> list[MapPoint]:
    """Return `number` points of the map that are far from one another."""
    place_of = drawn.plane.place
    # The first is in the middle of the plane; each further one is as far as can be from all before.
    left = sorted(drawn.points, key=lambda point: dist(place_of(point), (0.5, 0.5)))
    found = left[:1]
    while len(found) < min(number, len(left)):
        gaps = [gap(place_of(point), [*map(place_of, found)]) for point in left]  # 0 in `found`
        found.append(left[gaps.index(max(gaps))])
    return found


def to_json(drawn: Map) -> str:
    """Return the record of a map."""
    axes = {
        side: {"key": axis.key, "title": axis.title, "texts": [axis.text(v) for v in axis.values],
               "values": axis.values}
        for side, axis in (("x", drawn.plane.x), ("y", drawn.plane.y))
    }  # fmt: skip
    document = {
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
    }
    return json.dumps(document, indent=1)
