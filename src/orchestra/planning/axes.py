"""The two sides of a map: quantities of a cluster that take other values than it has."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.file import cluster_text, is_file, read_cluster
from orchestra.cluster.units import BANDWIDTH, BYTES, FLOPS, SECONDS, Unit
from orchestra.engines.simulation.costs import FLOPS as ASSUMED_FLOPS
from orchestra.errors import InputError, nearest
from orchestra.settings.reading import yaml_text

UNITS = {"bandwidth": BANDWIDTH, "latency": SECONDS, "memory": BYTES, "flops": FLOPS}
"""The units of settings' values, by the key's last word; other settings are plain numbers."""
SPAN = 30.0
"""Without a given range, bandwidth and latency range from 1/30 of the cluster's to 30 times it."""
SLOWEST = (0.05, 1.0)
MOST_POINTS, MOST_NODES = 64, 1024

Change = Callable[[Cluster, float], Cluster]


@dataclass(frozen=True)
class Axis:
    """A quantity that varies along one side of a map.

    Attributes:
        key: its name ("bandwidth"), or its place in the cluster's file ("nodes.old.speed").
        values: that it takes, ascending, in the base of its unit.
        unit: None for a plain number.
    """

    key: str
    values: tuple[float, ...]
    unit: Unit | None = None

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
    longest = longest_link(cluster)
    if not longest:
        raise InputError("latency: the links of the cluster have none, so it cannot be scaled")
    return cluster.scaled(latency=value / longest)


def _slowest_node(cluster: Cluster, value: float) -> Cluster:
    """Give the slowest node (of equal ones the last) `value` times the speed of the fastest."""
    speeds = [node.speed_beside(ASSUMED_FLOPS) for node in cluster.nodes]
    place = max(range(len(speeds)), key=lambda i: (-speeds[i], i))
    factor = value * max(speeds) / speeds[place]
    node = cluster.nodes[place]
    # A node has one of speed and flops
    speed = node.speed and node.speed * factor
    slow = replace(node, speed=speed, flops=node.flops and node.flops * factor)
    return replace(cluster, nodes=(*cluster.nodes[:place], slow, *cluster.nodes[place + 1 :]))


def _nodes(cluster: Cluster, value: float) -> Cluster:
    """Return the first `value` nodes of the file; beyond its last one the nodes repeat."""
    if not isinstance(cluster.placement, str):
        raise InputError(
            "nodes: the cluster places its ranks on nodes by name; write ranks: spread"
        )
    known = len(cluster.nodes)
    nodes = tuple(
        # Names of nodes are unique
        node if place < known else replace(node, name=f"{node.name}-again-{place // known}")
        for place in range(round(value))
        for node in (cluster.nodes[place % known],)
    )
    return replace(cluster, nodes=nodes)


NAMED: Mapping[str, Change] = {
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
    """The clusters of a map: `text` names the one that is varied, a preset or a file."""

    text: str
    x: Axis
    y: Axis

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return a point's place on a plane with sides of 1 and equal steps between values."""
        xs, ys = self.x.values, self.y.values
        return xs.index(x) / (len(xs) - 1), ys.index(y) / (len(ys) - 1)

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
        InputError: there is none, or its nodes have no links.
    """
    cluster = load_cluster(text, where="cluster", folder=Path())
    if not cluster.links:
        raise InputError(
            f"cluster: {cluster.name} has no links between nodes, so that there is nothing to map; "
            "give one of several nodes, such as lan_1gbit(nodes=8)"
        )
    return cluster


def _with_keys(text: str, values: Mapping[str, str]) -> Cluster:
    """Change `values` of the cluster's file, by their place ("nodes.old.speed")."""
    source = Path(text).read_text() if is_file(text) else cluster_text(loaded(text))
    # Plain values, without lines for messages: these would be of no file of the user's
    document = yaml.safe_load(source)
    for key, value in values.items():
        *above, last = key.split(".")
        inside: Any = document
        for word in above:
            known = inside if isinstance(inside, dict) else {}
            if word not in known:
                raise InputError(
                    f"{key}: the cluster has no {word!r} there; {nearest(word, known)}"
                )
            inside = known[word]
        if not isinstance(inside, dict):
            raise InputError(f"{key}: {'.'.join(above)} has no keys; give the place of a number")
        # Through the file's own reader, so that any key of it can be a side (decision 104).
        inside[last] = _plain(value)
    with tempfile.TemporaryDirectory(prefix="orchestra-map-") as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(yaml_text(document))
        try:
            return read_cluster(path)
        except InputError as error:
            reason = str(error).replace(f"{path}, ", "").replace(f"{path}: ", "")
            raise InputError(f"{', '.join(values)}: {reason}") from None


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
