"""A sketch of a cluster: a tree of switches from left to right, a row for each node or rank.

The figure of a cluster and that of its messages place their parts by a `Tree`, and draw them on a
`Canvas`, in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.file import alike
from orchestra.cluster.nodes import Node, Switch
from orchestra.report.figures.frame import FAINT, layer

MOST_NODES = 64
"""With more, nodes that follow one another and are alike share a row."""


@dataclass(frozen=True)
class Branch:
    """A part of the tree: `nodes` that share rows, or the switch `part`, `depth` below the root.

    `first` and `last` are the rows that it takes, or those of what hangs on it, counted from 0.
    """

    part: Node | Switch
    first: float
    last: float
    nodes: tuple[Node, ...] = ()
    depth: int = 0


@dataclass(frozen=True)
class Place:
    """Where a branch stands, in pixels: at `x` and `y`, which are the middle of its `span`.

    `above` is the x of the switch that it hangs on, if any.
    """

    branch: Branch
    x: float
    y: float
    above: float | None
    span: tuple[float, float]


class Tree:
    """The rows of all parts of a cluster, filled from the top.

    Args:
        alone: nodes that share their row with no other.
        sizes: how many rows a node takes, by its name; nodes without an entry are left out, and
            switches with none of the others below them. One row for each node by default.

    Attributes:
        nodes, switches: of each kind the branches.
        rows: how many they take.
    """

    def __init__(
        self,
        cluster: Cluster,
        alone: Collection[str] = (),
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.nodes: list[Branch] = []
        self.switches: list[Branch] = []
        self.rows = 0.0
        self._cluster, self._sizes = cluster, sizes
        self._groups = _groups([node for node in cluster.nodes if self._size(node)], alone)
        if len(self._groups) > 1 or sizes is None:
            for switch in cluster.switches:
                if switch.to is None:
                    self._add_switch(switch, 0)
        placed = {branch.part.name for branch in self.nodes}
        for group in self._groups:
            if group[0].name not in placed:
                self._add_nodes(group)

    def _size(self, node: Node) -> int:
        return 1 if self._sizes is None else self._sizes.get(node.name, 0)

    def _add_nodes(self, group: tuple[Node, ...]) -> float:
        """Give the next rows to `group`; return their middle."""
        last = self.rows + self._size(group[0]) - 1
        self.nodes.append(Branch(group[0], self.rows, last, group))
        middle = (self.rows + last) / 2
        self.rows = last + 1
        return middle

    def _add_switch(self, switch: Switch, depth: int) -> list[float]:
        """Place what is below `switch`, and itself in its middle; return its row, if any."""
        below = [self._add_nodes(group) for group in self._groups if group[0].switch == switch.name]
        for inner in self._cluster.switches:
            if inner.to == switch.name:
                if below and self._sizes is None:
                    self.rows += 0.5  # sets switches apart
                below += self._add_switch(inner, depth + 1)
        if not below and self._sizes is not None:
            return []
        if not below:  # a row of its own
            below = [self.rows]
            self.rows += 1
        self.switches.append(Branch(switch, below[0], below[-1], depth=depth))
        return [(below[0] + below[-1]) / 2]

    def columns(
        self, words: Callable[[Switch], Iterable[str]], letter: float, gap: float
    ) -> list[float]:
        """Where the switches of each depth stand: as far right as the `words` before them need.

        Args:
            letter: the width of a letter, in pixels.
            gap: pixels between words and the next column.
        """
        places, x = [], 0.0
        for depth in range(1 + max((branch.depth for branch in self.switches), default=-1)):
            there = (branch.part for branch in self.switches if branch.depth == depth)
            texts = (text for part in there if isinstance(part, Switch) for text in words(part))
            x += letter * max(map(len, texts)) + gap
            places.append(x)
        return places

    def placed(
        self, columns: Sequence[float], node_x: float, height_of: Callable[[float], float]
    ) -> list[Place]:
        """Where the nodes stand, and then the switches.

        Args:
            columns: where the switches of each depth stand.
            height_of: the y of a row.
        """
        x = {branch.part.name: columns[branch.depth] for branch in self.switches}
        places = []
        for branch in (*self.nodes, *self.switches):
            part = branch.part
            above = x.get((part.to if isinstance(part, Switch) else part.switch) or "")
            span = height_of(branch.first), height_of(branch.last)
            y = height_of((branch.first + branch.last) / 2)
            places.append(Place(branch, x.get(part.name, node_x), y, above, span))
        return places


def _groups(nodes: Sequence[Node], alone: Collection[str]) -> list[tuple[Node, ...]]:
    if len(nodes) <= MOST_NODES:
        return [(node,) for node in nodes]
    groups: list[tuple[Node, ...]] = []
    for run in alike(nodes):
        for node in run:
            last = groups[-1] if groups else ()
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
    ) -> Iterator[alt.Chart]:
        """The layer of `values`, unless there are none."""
        data = [dict(value) for value in values]
        if not data:
            return
        if self.strategy is not None:
            data = [{"strategy": self.strategy, **value} for value in data]
        across = alt.Scale(domain=[0, self.width], nice=False)
        down = alt.Scale(domain=[0, self.height], nice=False, reverse=True)
        x, y = alt.X("x:Q", axis=None, scale=across), alt.Y("y:Q", axis=None, scale=down)
        yield layer(data, mark, x, y, *channels, **look)

    def across(self, values: Iterable[Mapping[str, Any]], *channels: Any) -> Iterator[alt.Chart]:
        """Horizontal lines, from `x` to `to`."""
        yield from self.layer(values, "rule", alt.X2("to:Q"), *channels, color=FAINT)

    def down(self, places: Iterable[Place], **look: Any) -> Iterator[alt.Chart]:
        """Vertical lines, along the spans of `places`."""
        values = ({"x": place.x, "y": place.span[0], "to": place.span[1]} for place in places)
        yield from self.layer(values, "rule", alt.Y2("to:Q"), color=FAINT, **look)
