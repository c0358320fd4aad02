"""A sketch of a cluster: a tree of switches from left to right, a row for each node or rank.

The figure of a cluster and that of its messages place their parts by `layout`, and draw them on a
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
from orchestra.report.figures.frame import FAINT, Values, marks

MOST_NODES = 64
"""With more, nodes that follow one another and are alike share a row."""


@dataclass(frozen=True)
class Leaf:
    """A row: a node, or several that are alike. `y` counts rows from 0."""

    nodes: tuple[Node, ...]
    y: float


@dataclass(frozen=True)
class Branch:
    """A switch, `depth` switches below the root; `below` are the rows of what hangs on it."""

    switch: Switch
    depth: int
    y: float
    below: tuple[float, ...]


@dataclass(frozen=True)
class TreeLayout:
    """All parts, and how many rows they take."""

    leaves: tuple[Leaf, ...]
    branches: tuple[Branch, ...]
    rows: float

    @property
    def parts(self) -> Iterator[Node | Switch]:
        """A node of each row, and every switch."""
        yield from (leaf.nodes[0] for leaf in self.leaves)
        yield from (branch.switch for branch in self.branches)


def layout(
    cluster: Cluster, alone: Collection[str] = (), sizes: Mapping[str, int] | None = None
) -> TreeLayout:
    """The places of all parts.

    Args:
        alone: nodes that share their row with no other.
        sizes: how many rows a node takes, by its name; nodes without an entry are left out, and
            switches with none of the others below them. One row for each node by default.
    """
    stack = _Stack(cluster, sizes)
    stack.groups = _groups([node for node in cluster.nodes if stack.size(node)], alone)
    if len(stack.groups) > 1 or sizes is None:
        for switch in cluster.switches:
            if switch.to is None:
                stack.switch(switch, 0)
    placed = {leaf.nodes[0].name for leaf in stack.leaves}
    for group in stack.groups:
        if group[0].name not in placed:
            stack.leaf(group)
    return TreeLayout(tuple(stack.leaves), tuple(stack.branches), stack.next)


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


class _Stack:
    """Rows, filled from the top."""

    def __init__(self, cluster: Cluster, sizes: Mapping[str, int] | None) -> None:
        self.groups: list[tuple[Node, ...]] = []
        self.leaves: list[Leaf] = []
        self.branches: list[Branch] = []
        self.next = 0.0
        self._cluster, self._sizes = cluster, sizes

    def size(self, node: Node) -> int:
        """How many rows `node` takes."""
        return 1 if self._sizes is None else self._sizes.get(node.name, 0)

    def leaf(self, group: tuple[Node, ...]) -> float:
        """The next rows are those of `group`; their middle."""
        size = self.size(group[0])
        self.leaves.append(Leaf(group, self.next + (size - 1) / 2))
        self.next += size
        return self.leaves[-1].y

    def switch(self, switch: Switch, depth: int) -> list[float]:
        """Place what is below `switch`, and itself in the middle of that; its row, if any."""
        below = [self.leaf(group) for group in self.groups if group[0].switch == switch.name]
        for inner in self._cluster.switches:
            if inner.to == switch.name:
                if below and self._sizes is None:
                    self.next += 0.5  # sets switches apart
                below += self.switch(inner, depth + 1)
        if not below and self._sizes is not None:
            return []
        if not below:  # a row of its own
            self.next += 1
            below = [self.next - 1]
        branch = Branch(switch, depth, (below[0] + below[-1]) / 2, tuple(below))
        self.branches.append(branch)
        return [branch.y]


def columns(
    branches: Sequence[Branch], words: Callable[[Switch], Iterable[str]], letter: float, gap: float
) -> list[float]:
    """Where the switches of each depth stand: as far right as the `words` before them need.

    Args:
        letter: the width of a letter, in pixels.
        gap: pixels between words and the next column.
    """
    places, x = [], 0.0
    for depth in range(1 + max((branch.depth for branch in branches), default=-1)):
        there = (branch.switch for branch in branches if branch.depth == depth)
        x += letter * max(len(text) for switch in there for text in words(switch)) + gap
        places.append(x)
    return places


@dataclass(frozen=True)
class Canvas:
    """Draws layers of marks at `x` and `y`, in pixels from the upper left corner.

    With a `strategy` they are hidden together with it.
    """

    width: float
    height: float
    strategy: str | None = None

    def layer(
        self, values: Iterable[dict[str, Any]], draw: Callable[[alt.Chart], alt.Chart]
    ) -> Iterator[alt.Chart]:
        """The layer of `values`, unless there are none; `draw` gives it marks and channels."""
        if data := list(values):
            across = alt.Scale(domain=[0, self.width], nice=False)
            down = alt.Scale(domain=[0, self.height], nice=False, reverse=True)
            yield draw(self._chart(data)).encode(
                alt.X("x:Q", axis=None, scale=across), alt.Y("y:Q", axis=None, scale=down)
            )

    def _chart(self, values: Values) -> alt.Chart:
        if self.strategy is None:
            return alt.Chart(alt.InlineData(values=values))
        return marks([{"strategy": self.strategy, **value} for value in values])

    def across(self, values: Iterable[dict[str, Any]], *channels: Any) -> Iterator[alt.Chart]:
        """Horizontal lines, from `x` to `to`."""
        to = alt.X2("to:Q")
        yield from self.layer(values, lambda c: c.mark_rule(color=FAINT).encode(to, *channels))

    def down(self, values: Iterable[dict[str, Any]], **look: Any) -> Iterator[alt.Chart]:
        """Vertical lines, from `y` to `to`."""
        to = alt.Y2("to:Q")
        yield from self.layer(values, lambda c: c.mark_rule(color=FAINT, **look).encode(to))
