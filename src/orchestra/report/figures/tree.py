"""Where the parts of a cluster stand in a figure, and how they are drawn.

It is a tree of switches from left to right, with a row for each node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import altair as alt

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.file import alike
from orchestra.cluster.nodes import Node, Switch
from orchestra.report.figures.frame import FAINT, layer

MAX_NODES = 64
"""In larger clusters, consecutive nodes that are alike share a row."""


class _Branch(NamedTuple):
    """A part of the tree: the rows of the parts below it, and the number of switches above it."""

    part: Node | Switch
    nodes: tuple[Node, ...]
    first: float
    last: float
    depth: int = 0


@dataclass(frozen=True)
class Place:
    """Where a part is drawn: a switch, or the first of `nodes`, which share its rows.

    It is at `x` and `y`, in pixels, in the middle of its `span`; `above` is the x of the switch
    that it hangs on, if any.
    """

    part: Node | Switch
    nodes: tuple[Node, ...]
    x: float
    y: float
    above: float | None
    span: tuple[float, float]

    @property
    def at(self) -> dict[str, float]:
        return {"x": self.x, "y": self.y}


class Tree:
    """The rows of all parts of a cluster, filled from the top; `rows` is how many they take.

    Args:
        alone: nodes that share their row with no other.
        sizes: how many rows a node takes, by its name; nodes without an entry are left out, and
            switches with none of the others below them. One row for each node by default.
    """

    def __init__(
        self, cluster: Cluster, alone: Collection[str] = (), sizes: Mapping[str, int] | None = None
    ) -> None:
        self.rows = 0.0
        self._nodes: list[_Branch] = []
        self._switches: list[_Branch] = []
        self._cluster, self._whole = cluster, sizes is None
        self._sizes = {node.name: 1 for node in cluster.nodes} if sizes is None else sizes
        self._groups = _groups([node for node in cluster.nodes if node.name in self._sizes], alone)
        # Ranks that are all on one node have no message that leaves it
        if len(self._groups) > 1 or self._whole:
            for switch in cluster.switches:
                if switch.to is None:
                    self._add_switch(switch, 0)
        placed = {branch.part.name for branch in self._nodes}
        for group in self._groups:
            if group[0].name not in placed:
                self._add_nodes(group)

    def _add_nodes(self, group: tuple[Node, ...]) -> float:
        """Give the next rows to `group`; return their middle."""
        last = self.rows + self._sizes[group[0].name] - 1
        self._nodes.append(_Branch(group[0], group, self.rows, last))
        middle = (self.rows + last) / 2
        self.rows = last + 1
        return middle

    def _add_switch(self, switch: Switch, depth: int) -> list[float]:
        """Place what is below `switch`, and itself in its middle; return its row, if any."""
        below = [self._add_nodes(group) for group in self._groups if group[0].switch == switch.name]
        for inner in self._cluster.switches:
            if inner.to == switch.name:
                if below and self._whole:
                    self.rows += 0.5  # sets switches apart
                below += self._add_switch(inner, depth + 1)
        if not below and not self._whole:
            return []
        if not below:  # a row of its own
            below = [self.rows]
            self.rows += 1
        self._switches.append(_Branch(switch, (), below[0], below[-1], depth))
        return [(below[0] + below[-1]) / 2]

    def placed(
        self,
        words: Callable[[Switch], Iterable[str]],
        letter: float,
        gap: float,
        beside: float,
        height_of: Callable[[float], float],
    ) -> tuple[list[Place], list[Place]]:
        """Return the places of nodes and switches, as far right as words before them require.

        Args:
            words: what is written before a switch.
            letter, gap: pixels of a letter, and between words and the next column.
            beside: pixels between the last switches and the nodes.
            height_of: the y of a row.
        """
        columns, x = [], 0.0
        for depth in range(1 + max((branch.depth for branch in self._switches), default=-1)):
            there = (branch.part for branch in self._switches if branch.depth == depth)
            texts = (text for part in there if isinstance(part, Switch) for text in words(part))
            x += letter * max(map(len, texts)) + gap
            columns.append(x)
        at = {branch.part.name: columns[branch.depth] for branch in self._switches}

        def place(branch: _Branch) -> Place:
            part, nodes, first, last, _ = branch
            above = at.get((part.to if isinstance(part, Switch) else part.switch) or "")
            span = height_of(first), height_of(last)
            return Place(part, nodes, at.get(part.name, x + beside), sum(span) / 2, above, span)

        return [*map(place, self._nodes)], [*map(place, self._switches)]


def _groups(nodes: Sequence[Node], alone: Collection[str]) -> list[tuple[Node, ...]]:
    # Up to here each node has room for a row of its own
    if len(nodes) <= MAX_NODES:
        return [(node,) for node in nodes]
    groups: list[tuple[Node, ...]] = []
    for run in alike(nodes):
        for node in run:
            last = groups[-1] if groups else ()
            # A node with a fault of its own has to be seen
            joins = last and last[-1] in run and not {last[-1].name, node.name} & {*alone}
            groups[len(groups) - bool(joins) :] = [(*last, node) if joins else (node,)]
    return groups


@dataclass(frozen=True)
class Canvas:
    """Draws layers of marks at `x` and `y`, in pixels from the upper left corner.

    With a `strategy` they are hidden together with it.
    """

    width: float
    height: float
    strategy: str | None = None

    def layer(
        self, values: Iterable[Mapping[str, Any]], mark: str, *channels: Any, **look: Any
    ) -> alt.Chart:
        """Return the layer of `values`."""
        about = {} if self.strategy is None else {"strategy": self.strategy}
        # Pixels as data, so that all marks share one scale and shrink with a narrow page
        across = alt.Scale(domain=[0, self.width], nice=False)
        down = alt.Scale(domain=[0, self.height], nice=False, reverse=True)
        x, y = alt.X("x:Q", axis=None, scale=across), alt.Y("y:Q", axis=None, scale=down)
        return layer([{**about, **value} for value in values], mark, x, y, *channels, **look)

    def lines(
        self, places: Sequence[Place], thick: Callable[[Place], float] = lambda _: 1.0
    ) -> list[alt.Chart]:
        """Return the links of all parts, each as thick as `thick` says, and the lines that join
        the parts of a switch or a node.
        """
        across = [
            {"x": place.above, "y": place.y, "to": place.x, "thick": thick(place)}
            for place in places
            if place.above is not None
        ]
        spans = [place for place in places if place.span[0] < place.span[1]]
        down = [{"x": place.x, "y": place.span[0], "to": place.span[1]} for place in spans]
        width = alt.StrokeWidth("thick:Q", scale=None)
        return [
            self.layer(across, "rule", alt.X2("to:Q"), width, color=FAINT),
            self.layer(down, "rule", alt.Y2("to:Q"), color=FAINT, strokeWidth=2),
        ]
