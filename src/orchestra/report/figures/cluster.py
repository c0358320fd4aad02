"""Figures of the clusters that runs were simulated on: trees of nodes, switches, links, faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Unpack

import altair as alt

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.faults import Death, Join, LinkCut, LinkSlow, rank_of
from orchestra.cluster.file import alike, read_cluster
from orchestra.cluster.nodes import Jitter, Link, NetworkSwitch, Node
from orchestra.cluster.presets import CLUSTERS
from orchestra.cluster.units import BANDWIDTH, BYTES, FLOPS, SECONDS
from orchestra.report.figures.frame import FAINT, INK_NOW, Figure, MarkStyle, figure, layer
from orchestra.report.numbers import count, ranges
from orchestra.report.rows import grouped
from orchestra.report.study import COLOURS, Study
from orchestra.settings import write

_ROW, _NARROW_ROW, _TOP = 24.0, 18.0, 34.0  # heights in pixels: of rows, and above them
_MANY = 24  # rows that are narrow
_LETTER, _GAP = 5.7, 26  # widths in pixels
_NODE, _FAULT = COLOURS[0], COLOURS[1]
_LARGEST_SQUARE = 120.0  # square pixels
_CROSS = "M-1,-1L1,1M-1,1L1,-1"
MAX_NODES = 64  # in larger clusters, consecutive nodes that are alike share a row
_STYLES: dict[str, dict[str, Any]] = {
    "plain": {"align": "left", "color": INK_NOW},
    "head": {"align": "left", "color": INK_NOW, "fontWeight": "bold"},
    "switch": {"align": "right", "color": INK_NOW, "fontWeight": "bold"},
    "link": {"align": "right", "color": INK_NOW},
    "fault": {"align": "left", "color": _FAULT},
    "fault of a link": {"align": "right", "color": _FAULT},
}


def clusters(study: Study) -> Iterator[Figure]:
    """Yield one for each cluster, with the ranks of the run that has most there."""
    simulated = [run for run in study.runs if run.record.asked.cluster]
    for runs in grouped(simulated, lambda run: run.record.asked.cluster).values():
        ranks = [  # `Single` has one, whatever the budget
            run.record.asked.ranks if run.record.asked.workers + run.record.asked.servers > 1 else 1
            for run in runs
        ]
        if file := runs[ranks.index(max(ranks))].cluster:
            yield cluster_figure(read_cluster(file), max(ranks))


def cluster_figure(cluster: Cluster, ranks: int | None = None) -> Figure:
    """Return the figure of `cluster`, with the places of `ranks` ranks if they are given; raise
    `InputError` if these cannot be placed."""
    sketch = _Sketch(cluster, ranks)
    title = f"Cluster {cluster.name}" + (f", {ranks} ranks" if ranks else "")
    caption = (
        "Switches and nodes, and the links between them; a thicker line carries more. The area of "
        "a node's square tells its speed beside the fastest one's. A cross is on a link that is "
        "cut or slow for a while, or on a node where ranks die."
    )
    name, height, width = f"cluster-{cluster.name}", round(sketch.height), round(sketch.width)
    return figure(name, title, caption, "cluster", sketch.layers(), height, max(width, 420))


class _Sketch:
    """All marks of the figure, in pixels from the upper left corner."""

    def __init__(self, cluster: Cluster, ranks: int | None) -> None:
        self._cluster = cluster
        self._ranks = cluster.nodes_of(ranks) if ranks else ()
        self._faults = self._faults_by_owner()
        tree = Tree(cluster, self._faults)
        self._row = _ROW if tree.rows <= _MANY else _NARROW_ROW
        self._below = [
            f"{name}: {', '.join(words)}"
            for name, words in self._faults.items()
            if rank_of(name) is not None
        ]
        self.height = _TOP + self._row * (tree.rows + len(self._below))
        self._leaves, self._switches = tree.placed(
            lambda switch: (switch.name, *self._below_line(switch)),
            lambda row: _TOP + self._row * (row + 0.5),
        )
        self._places = {place.part.name: place for place in (*self._leaves, *self._switches)}
        self._table: list[tuple[float, str, list[str]]] = []
        self.width = self._leaves[0].x + 14
        for head, texts in self._filled_columns():
            self._table.append((self.width, head, texts))
            self.width += _LETTER * max(map(len, (head, *texts))) + _GAP

    def _filled_columns(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the heads of the columns that are not empty, and the text of each row."""
        on = grouped(range(len(self._ranks)), lambda rank: self._ranks[rank].name)
        columns: dict[str, Callable[[tuple[Node, ...]], str]] = {
            "node": lambda nodes: (
                nodes[0].name + f" to {nodes[-1].name} ({len(nodes)} nodes)" * (len(nodes) > 1)
            ),
            "link": lambda nodes: link_text(nodes[0]),
            "computes with": lambda nodes: _compute_text(nodes[0]),
            "memory": lambda nodes: BYTES.write(nodes[0].memory) if nodes[0].memory else "",
            "ranks": lambda nodes: ", ".join(ranges(r for n in nodes for r in on.get(n.name, ()))),
            "faults": lambda nodes: ", ".join(self._faults.get(nodes[0].name, ())),
        }
        for head, text in columns.items():
            texts = [text(place.nodes) for place in self._leaves]
            if any(texts):
                yield head, texts

    def _below_line(self, switch: NetworkSwitch) -> list[str]:
        shared = f"shares {BANDWIDTH.write(switch.shared)}" if switch.shared else ""
        texts = [link_text(switch), shared, *self._faults.get(switch.name, ())]
        return [text for text in texts if text]

    def _faults_by_owner(self) -> dict[str, list[str]]:
        """Return the faults of each node and switch in words, and of ranks of unknown nodes."""
        found: dict[str, list[str]] = {}
        for fault in self._cluster.faults:
            for name in fault.names:
                owner = self._owner(name)
                words = fault.words if owner == name else f"{name} {fault.words}"
                found.setdefault(owner, []).append(words)
        return found

    def _owner(self, name: str) -> str:
        rank = rank_of(name)  # of a node, where that is known
        return name if rank is None or not self._ranks else self._ranks[rank].name

    def layers(self) -> Iterator[alt.Chart]:
        """Yield links, switches, nodes, crosses of faults, and words."""
        canvas, places = Canvas(self.width, self.height), [*self._places.values()]
        # Roots and nodes without a switch have no link
        slowest = min(min(_bandwidths(place), default=math.inf) for place in places)

        def thick(place: Place) -> float:
            # By the logarithm: bandwidths of one cluster differ by factors of thousands
            return min(1 + 0.9 * math.log10(min(_bandwidths(place)) / slowest), 6)

        yield from canvas.lines(places, thick)
        joints = [place.at for place in self._switches]
        yield canvas.layer(joints, "circle", opacity=1, size=90, color=INK_NOW)
        area = alt.Size("area:Q", scale=None, legend=None)
        colour = alt.Color("colour:N", scale=None)
        speeds = [place.nodes[0].speed or place.nodes[0].flops or 0.0 for place in self._leaves]
        wrong = {
            self._owner(name)
            for fault in self._cluster.faults
            if not isinstance(fault, Join)
            for name in fault.names
        }
        squares = []
        for place, speed in zip(self._leaves, speeds, strict=True):
            ink = _FAULT if place.part.name in wrong else _NODE
            # A node that is far slower stays visible
            size = max(_LARGEST_SQUARE * speed / max(speeds), 9)
            squares.append({**place.at, "area": size, "colour": ink})
        yield canvas.layer(squares, "square", area, colour, opacity=1)
        cross: dict[str, Any] = {"shape": _CROSS, "size": 110, "strokeWidth": 2, "filled": False}
        yield canvas.layer(self._crosses(), "point", opacity=1, color=INK_NOW, **cross)
        words = [*self._words()]
        for name, style in _STYLES.items():
            some = [word for word in words if word["style"] == name]
            text = alt.Text("text:N")
            yield canvas.layer(some, "text", text, baseline="middle", fontSize=11, **style)

    def _crosses(self) -> Iterator[dict[str, Any]]:
        """Yield where links are cut or slow for a while, and nodes where somebody dies."""
        for fault in self._cluster.faults:
            if not isinstance(fault, LinkCut | LinkSlow | Death):
                continue
            if place := self._places.get(self._owner(fault.of)):
                # A root's link leads nowhere in this figure; ranks die on nodes
                on_node = place.above is None or isinstance(fault, Death)
                x = self._leaves[0].x if on_node else (place.above or 0) + 16
                yield {"x": x, "y": place.y}

    def _words(self) -> Iterator[dict[str, Any]]:
        """Yield the columns next to the nodes, and below them the faults of ranks whose node is
        unknown. Yield the name of each switch above its link, and the texts on that link below it.
        """
        for x, head, texts in self._table:
            yield {"x": x, "y": _TOP - 16, "text": head, "style": "head"}
            style = "fault" if head == "faults" else "plain"
            for place, text in zip(self._leaves, texts, strict=True):
                yield {"x": x, "y": place.y, "text": text, "style": style}
        for index, text in enumerate(reversed(self._below)):
            y = self.height - self._row * (index + 0.5)
            yield {"x": 0, "y": y, "text": text, "style": "fault"}
        for place in self._switches:
            switch, x = place.part, place.x - 9
            assert isinstance(switch, NetworkSwitch)
            yield {"x": x, "y": place.y - 8, "text": switch.name, "style": "switch"}
            faults = self._faults.get(switch.name, ())
            for index, text in enumerate(self._below_line(switch)):
                style = "fault of a link" if text in faults else "link"
                yield {"x": x, "y": place.y + 9 + 13 * index, "text": text, "style": style}


def _bandwidths(place: Place) -> list[float]:
    return [link.bandwidth for link in (place.part.up, place.part.down) if link]


def link_text(part: Node | NetworkSwitch) -> str:
    """Return what the link of a node or switch carries each way, and its latency."""
    up, down = part.up, part.down
    if up is None or down is None:
        loopback = part.loopback if isinstance(part, Node) else None
        return f"loopback {_one_way(loopback)}" if loopback else ""
    if up == down:
        return _one_way(up)
    if up.latency == down.latency:
        both = f"{BANDWIDTH.write(up.bandwidth)} up, {BANDWIDTH.write(down.bandwidth)} down"
        return f"{both}, {SECONDS.write(up.latency)}"
    return f"{_one_way(up)} up; {_one_way(down)} down"


def _one_way(link: Link) -> str:
    return f"{BANDWIDTH.write(link.bandwidth)}, {SECONDS.write(link.latency)}"


def _compute_text(node: Node) -> str:
    units = count("device", node.devices) if node.devices else count("core", node.cores)
    speed = f"speed {node.speed:.3g}" if node.speed is not None else FLOPS.write(node.flops or 0)
    jitter = f", {write(node.jitter, CLUSTERS)}" if isinstance(node.jitter, Jitter) else ""
    return f"{units}, {speed}{jitter}"


# The tree


class _Branch(NamedTuple):
    """A part of the tree: the rows of the parts below it, and the number of switches above it."""

    part: Node | NetworkSwitch
    nodes: tuple[Node, ...]
    first: float
    last: float
    depth: int = 0


@dataclass(frozen=True)
class Place:
    """Where a part is drawn, in pixels: a switch, or the first of `nodes`, which share its rows."""

    part: Node | NetworkSwitch
    nodes: tuple[Node, ...]
    x: float
    y: float  # the middle of its `span`
    above: float | None  # the x of the switch that it hangs on, if any
    span: tuple[float, float]

    @property
    def at(self) -> dict[str, float]:
        return {"x": self.x, "y": self.y}


class Tree:
    """The rows of all parts of a cluster, filled from the top; `rows` is how many they take.

    Nodes that are `alone` share their row with no other.
    """

    def __init__(self, cluster: Cluster, alone: Collection[str] = ()) -> None:
        self.rows = 0.0
        self._nodes: list[_Branch] = []
        self._switches: list[_Branch] = []
        self._cluster = cluster
        self._groups = _groups(cluster.nodes, alone)
        for switch in cluster.switches:
            if switch.to is None:
                self._add_switch(switch, 0)
        placed = {branch.part.name for branch in self._nodes}
        for group in self._groups:
            if group[0].name not in placed:
                self._add_nodes(group)

    def _add_nodes(self, group: tuple[Node, ...]) -> float:
        """Give the next row to `group`, and return it."""
        row = self.rows
        self._nodes.append(_Branch(group[0], group, row, row))
        self.rows += 1
        return row

    def _add_switch(self, switch: NetworkSwitch, depth: int) -> float:
        """Place what is below `switch`, and itself in its middle; return its row."""
        below = [self._add_nodes(group) for group in self._groups if group[0].switch == switch.name]
        for inner in self._cluster.switches:
            if inner.to == switch.name:
                if below:
                    self.rows += 0.5  # sets switches apart
                below.append(self._add_switch(inner, depth + 1))
        if not below:  # a row of its own
            below = [self.rows]
            self.rows += 1
        self._switches.append(_Branch(switch, (), below[0], below[-1], depth))
        return (below[0] + below[-1]) / 2

    def placed(
        self, words: Callable[[NetworkSwitch], Iterable[str]], height_of: Callable[[float], float]
    ) -> tuple[list[Place], list[Place]]:
        """Return the places of nodes and switches, as far right as words before them require.

        `words` are written before a switch. `height_of` is the y of a row.
        """
        at: dict[str, float] = {}
        x = 0.0
        by_depth = grouped(self._switches, lambda branch: branch.depth)
        for _, there in sorted(by_depth.items()):
            parts = [branch.part for branch in there if isinstance(branch.part, NetworkSwitch)]
            x += _LETTER * max(len(text) for part in parts for text in words(part)) + 24
            at |= dict.fromkeys((part.name for part in parts), x)

        def place(branch: _Branch) -> Place:
            part, nodes, first, last, _ = branch
            above = at.get((part.to if isinstance(part, NetworkSwitch) else part.switch) or "")
            span = height_of(first), height_of(last)
            return Place(part, nodes, at.get(part.name, x + 40), sum(span) / 2, above, span)

        return [*map(place, self._nodes)], [*map(place, self._switches)]


def _groups(nodes: Sequence[Node], alone: Collection[str]) -> list[tuple[Node, ...]]:
    # Up to here each node has room for a row of its own
    if len(nodes) <= MAX_NODES:
        return [(node,) for node in nodes]
    # A node with a fault of its own has to be seen
    of_runs = (groupby(run, lambda n: n.name if n.name in alone else "") for run in alike(nodes))
    return [tuple(group) for groups in of_runs for _, group in groups]


@dataclass(frozen=True)
class Canvas:
    """Draws layers of marks at `x` and `y`, in pixels from the upper left corner."""

    width: float
    height: float

    def layer(
        self,
        values: Iterable[Mapping[str, Any]],
        mark: str,
        *channels: Any,
        **style: Unpack[MarkStyle],
    ) -> alt.Chart:
        # Pixels as data, so that all marks share one scale and shrink with a narrow page
        across = alt.Scale(domain=[0, self.width], nice=False)
        down = alt.Scale(domain=[0, self.height], nice=False, reverse=True)
        x, y = alt.X("x:Q", axis=None, scale=across), alt.Y("y:Q", axis=None, scale=down)
        return layer(values, mark, x, y, *channels, **style)

    def lines(self, places: Sequence[Place], thick: Callable[[Place], float]) -> list[alt.Chart]:
        """Return the links of all parts, each as thick as `thick` says, and the lines that join
        the parts of a switch or a node."""
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
