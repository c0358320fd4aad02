"""Where ranks, nodes and switches stand in the figure of an exchange, and the arcs between ranks.

The tree of the cluster grows from the left (sketch.py); each rank has a row beside its node. What
is sent down the rows goes by the right, what is sent up by the left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestra.cluster import Cluster, Node, Switch
from orchestra.report.figures.sketch import columns, layout
from orchestra.report.figures.trace import Arrow

WIDTH = 680.0
LETTER = 5.3
TOP = 16.0
RADIUS = 10.0
_MANY = 16  # rows that are narrow
_ROW, _NARROW_ROW = 30.0, 22.0
_NEAREST = 26.0  # how far an arc reaches at the least
_LEFT = 0.45  # of the room for arcs


@dataclass(frozen=True)
class PartPlace:
    """A part of the cluster: `x`, `y` in pixels; `above` is the x of the switch it hangs on.

    `span` are the heights of the first and last rank of a node, or of what hangs on a switch.
    """

    part: Node | Switch
    x: float
    y: float
    above: float | None
    span: tuple[float, float]


@dataclass(frozen=True)
class Arc:
    """Of an arrow: points that a curve goes along, and where its words begin or end."""

    arrow: Arrow
    points: tuple[tuple[float, float], ...]
    down: bool
    apex: tuple[float, float]


class MessageLayout:
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
        tree = layout(cluster, on, {name: len(ranks_of) for name, ranks_of in on.items()})
        order = [leaf.nodes[0] for leaf in tree.leaves]
        self._row = _ROW if ranks <= _MANY else _NARROW_ROW
        self.height = TOP + self._row * ranks
        self.rows = [rank for node in order for rank in on[node.name]]
        self.y = {rank: self._height_of(row) for row, rank in enumerate(self.rows)}
        depths = columns(
            tree.branches, lambda switch: (switch.name, carried.get(switch.name, "")), LETTER, 22
        )
        switch_x = {branch.switch.name: depths[branch.depth] for branch in tree.branches}
        beside = max(len(carried.get(node.name, "")) for node in order) * LETTER
        self.node_x = max(depths, default=0.0) + beside + 18
        names = max(len(node.name) for node in order) * LETTER
        left = self.node_x + 10 + names
        words = LETTER * letters + 8
        for_arcs = max(WIDTH - left - 2 * words - 2 * RADIUS, 4 * _NEAREST)
        self._reach = for_arcs * _LEFT, for_arcs * (1 - _LEFT)
        self.x = left + words + self._reach[0] + RADIUS
        self.places = [
            *(
                PartPlace(
                    node,
                    self.node_x,
                    self._height_of(leaf.y),
                    switch_x.get(node.switch or ""),
                    (self.y[on[node.name][0]], self.y[on[node.name][-1]]),
                )
                for leaf, node in zip(tree.leaves, order, strict=True)
            ),
            *(
                PartPlace(
                    branch.switch,
                    depths[branch.depth],
                    self._height_of(branch.y),
                    switch_x.get(branch.switch.to or ""),
                    (self._height_of(branch.below[0]), self._height_of(branch.below[-1])),
                )
                for branch in tree.branches
            ),
        ]

    def _height_of(self, row: float) -> float:
        return TOP + self._row * (row + 0.5)

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
