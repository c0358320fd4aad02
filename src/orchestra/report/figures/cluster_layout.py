"""Where the parts of a cluster stand in its figure: a tree from left to right, a row a node."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.nodes import Node, Switch
from orchestra.cluster.writing import alike

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
class Layout:
    """All parts, and how many rows they take."""

    leaves: tuple[Leaf, ...]
    branches: tuple[Branch, ...]
    rows: float

    @property
    def parts(self) -> Iterator[Node | Switch]:
        """A node of each row, and every switch."""
        yield from (leaf.nodes[0] for leaf in self.leaves)
        yield from (branch.switch for branch in self.branches)


def layout(cluster: Cluster, alone: Collection[str]) -> Layout:
    """The places of all parts; nodes named in `alone` share their row with no other."""
    stack = _Stack(cluster, _groups(cluster.nodes, alone))
    for switch in cluster.switches:
        if switch.to is None:
            stack.switch(switch, 0)
    for group in stack.groups:
        if group[0].switch is None:
            stack.leaf(group)
    return Layout(tuple(stack.leaves), tuple(stack.branches), stack.next)


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

    def __init__(self, cluster: Cluster, groups: list[tuple[Node, ...]]) -> None:
        self.groups = groups
        self.leaves: list[Leaf] = []
        self.branches: list[Branch] = []
        self.next = 0.0
        self._cluster = cluster

    def leaf(self, group: tuple[Node, ...]) -> float:
        """The next row is that of `group`; which one."""
        self.leaves.append(Leaf(group, self.next))
        self.next += 1
        return self.leaves[-1].y

    def switch(self, switch: Switch, depth: int) -> float:
        """What is below `switch`, and itself in the middle of that; its place."""
        below = [self.leaf(group) for group in self.groups if group[0].switch == switch.name]
        for inner in self._cluster.switches:
            if inner.to == switch.name:
                self.next += 0.5 if below else 0.0  # sets switches apart
                below.append(self.switch(inner, depth + 1))
        if not below:  # a row of its own
            self.next += 1
            below = [self.next - 1]
        branch = Branch(switch, depth, (below[0] + below[-1]) / 2, tuple(below))
        self.branches.append(branch)
        return branch.y
