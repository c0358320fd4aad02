"""Where ranks, nodes and switches stand in the figure of an exchange, and the arcs between ranks.

The tree of the cluster grows from the left as in the figure of a cluster (cluster_layout.py); each
rank has a row beside its node. What is sent down the rows goes by the right, what is sent up by the
left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestra.cluster import Cluster, Node, Switch
from orchestra.report.figures.cluster_layout import layout
from orchestra.report.figures.exchange import Arrow

WIDTH = 680.0
LETTER = 5.3
TOP = 16.0
RADIUS = 10.0
_MANY = 16  # rows that are narrow
_ROW, _NARROW_ROW = 30.0, 22.0
_NEAREST = 26.0  # how far an arc reaches at the least
_LEFT = 0.45  # of the room for arcs


@dataclass(frozen=True)
class Place:
    """A part of the cluster: `x`, `y` in pixels; `above` is the x of the switch it hangs on.

    `rows` are the heights of the first and last rank of a node, equal for a switch.
    """

    part: Node | Switch
    x: float
    y: float
    above: float | None
    rows: tuple[float, float]


@dataclass(frozen=True)
class Arc:
    """Of an arrow: points that a curve goes along, and where its words begin or end."""

    arrow: Arrow
    points: tuple[tuple[float, float], ...]
    down: bool
    apex: tuple[float, float]


class Stage:
    """The places of everything for `ranks` ranks on `cluster`.

    `letters` is how long the words of an arc may be; `carried` has those of each link, by the name
    of the node or switch below it.
    """

    def __init__(
        self, cluster: Cluster, ranks: int, letters: int, carried: Mapping[str, str]
    ) -> None:
        nodes = cluster.nodes_of(ranks)
        on: dict[str, list[int]] = {}
        for rank, node in enumerate(nodes):
            on.setdefault(node.name, []).append(rank)
        rows = layout(cluster, on).leaves
        order = [leaf.nodes[0] for leaf in sorted(rows, key=lambda leaf: leaf.y)]
        order = [node for node in order if node.name in on]
        self._row = _ROW if ranks <= _MANY else _NARROW_ROW
        self.height = TOP + self._row * ranks
        self.rows = [rank for node in order for rank in on[node.name]]
        self.y = {rank: TOP + self._row * (row + 0.5) for row, rank in enumerate(self.rows)}
        self._cluster, self._on, self._carried = cluster, on, carried
        self._switch_x = self._place_switches()
        beside = max(len(carried.get(node.name, "")) for node in order) * LETTER
        self.node_x = max(self._switch_x.values(), default=0.0) + beside + 18
        names = max(len(node.name) for node in order) * LETTER
        left = self.node_x + 10 + names
        words = LETTER * letters + 8
        for_arcs = max(WIDTH - left - 2 * words - 2 * RADIUS, 4 * _NEAREST)
        self._reach = for_arcs * _LEFT, for_arcs * (1 - _LEFT)
        self.x = left + words + self._reach[0] + RADIUS
        self.places = [*self._places(order)]

    def _place_switches(self) -> dict[str, float]:
        """Where the switches with ranks below them stand, by name."""
        if len(self._on) < 2:
            return {}
        depths: dict[int, list[str]] = {}
        for switch in self._cluster.switches:
            if self._nodes_below(switch.name):
                depths.setdefault(self._depth(switch), []).append(switch.name)
        found, x = {}, 0.0
        for depth in sorted(depths):
            names = depths[depth]
            longest = max(max(len(name), len(self._carried.get(name, ""))) for name in names)
            x += longest * LETTER + 22
            found.update(dict.fromkeys(depths[depth], x))
        return found

    def _depth(self, switch: Switch) -> int:
        above = {each.name: each.to for each in self._cluster.switches}
        depth, name = 0, switch.to
        while name is not None:
            depth, name = depth + 1, above[name]
        return depth

    def _nodes_below(self, switch: str) -> list[str]:
        """The nodes with ranks below a switch."""
        found = [n.name for n in self._cluster.nodes if n.switch == switch and n.name in self._on]
        for inner in self._cluster.switches:
            if inner.to == switch:
                found += self._nodes_below(inner.name)
        return found

    def _places(self, order: Sequence[Node]) -> Iterator[Place]:
        middle = {}
        for node in order:
            ys = [self.y[rank] for rank in self._on[node.name]]
            middle[node.name] = sum(ys) / len(ys)
            above = self._switch_x.get(node.switch or "")
            yield Place(node, self.node_x, middle[node.name], above, (min(ys), max(ys)))
        for switch in self._cluster.switches:
            if switch.name in self._switch_x:
                ys = [middle[name] for name in self._nodes_below(switch.name)]
                above = self._switch_x.get(switch.to or "")
                x = self._switch_x[switch.name]
                y = (min(ys) + max(ys)) / 2
                yield Place(switch, x, y, above, (y, y))

    def arcs(self, arrows: Sequence[Arrow]) -> list[Arc]:
        """The way of each arrow."""
        ends = self._ends(arrows)
        rows = {rank: row for row, rank in enumerate(self.rows)}
        widest = max(abs(rows[a.source] - rows[a.target]) for a in arrows)
        found = []
        for arrow in arrows:
            span = abs(rows[arrow.source] - rows[arrow.target])
            down = rows[arrow.source] < rows[arrow.target]
            reach = self._reach[down] - _NEAREST
            depth = _NEAREST + reach * (span - 1) / max(widest - 1, 1)
            side = 1 if down else -1
            begin, end = ends[arrow.source, arrow.target]
            x, away = self.x + side * RADIUS, self.x + side * (RADIUS + depth)
            tip = x + side * 6  # the head of the arrow covers the rest
            points = ((x, begin), (away, begin), (away, end), (tip, end))
            found.append(Arc(arrow, points, down, (away, (begin + end) / 2)))
        return found

    def _ends(self, arrows: Sequence[Arrow]) -> Mapping[tuple[int, int], tuple[float, float]]:
        """At what height each arrow leaves and arrives: spread over the circle of its rank.

        Nearer ends lie towards the side that they come from, so that arcs cross seldom.
        """
        rows = {rank: row for row, rank in enumerate(self.rows)}
        touching: dict[tuple[int, bool], list[tuple[int, bool, Arrow]]] = {}
        for arrow in arrows:
            down = rows[arrow.source] < rows[arrow.target]
            there, here = rows[arrow.target], rows[arrow.source]
            touching.setdefault((arrow.source, down), []).append((there, True, arrow))
            touching.setdefault((arrow.target, down), []).append((here, False, arrow))
        heights: dict[tuple[int, int, bool], float] = {}
        for (rank, _), members in touching.items():
            row = rows[rank]
            # from the top: what comes from above, the nearest first; what goes below, the farthest
            members.sort(key=lambda member: (member[0] > row, -member[0]))
            for place, (_, leaving, arrow) in enumerate(members):
                part = (place + 0.5) / len(members) - 0.5
                heights[arrow.source, arrow.target, leaving] = self.y[rank] + part * 1.2 * RADIUS
        return {
            (a.source, a.target): (
                heights[a.source, a.target, True],
                heights[a.source, a.target, False],
            )
            for a in arrows
        }
