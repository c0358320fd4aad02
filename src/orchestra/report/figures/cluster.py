"""The clusters that runs were simulated on: nodes and switches as a tree, with links and faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import altair as alt

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.faults import Death, LinkCut, LinkSlow, rank_of
from orchestra.cluster.nodes import Jitter, Link, Node, Switch
from orchestra.cluster.presets import CLUSTERS
from orchestra.cluster.units import BANDWIDTH, BYTES, FLOPS, SECONDS
from orchestra.report.collect import RunData
from orchestra.report.figures.frame import INK_NOW, Figure, figure
from orchestra.report.figures.sketch import Canvas, Leaf, columns, layout
from orchestra.report.figures.subject import COLOURS, FigureData
from orchestra.settings import write

_Value = dict[str, Any]

_ROW, _NARROW_ROW, _TOP = 24.0, 18.0, 34.0  # heights in pixels: of rows, and above them
_MANY = 24  # rows that are narrow
_LETTER, _GAP = 5.7, 26  # widths in pixels
_NODE, _FAULT = COLOURS[0], COLOURS[1]
_LARGEST_SQUARE = 120.0  # square pixels
_CROSS = "M-1,-1L1,1M-1,1L1,-1"
_STYLES: dict[str, dict[str, Any]] = {
    "plain": {"align": "left", "color": INK_NOW},
    "head": {"align": "left", "color": INK_NOW, "fontWeight": "bold"},
    "switch": {"align": "right", "color": INK_NOW, "fontWeight": "bold"},
    "link": {"align": "right", "color": INK_NOW},
    "fault": {"align": "left", "color": _FAULT},
    "fault of a link": {"align": "right", "color": _FAULT},
}


def cluster_figure(cluster: Cluster, ranks: int | None = None) -> tuple[Figure, int]:
    """The figure of `cluster`, and how many pixels wide it has to be.

    `ranks` is how many there are, so that they can be shown.

    Raises:
        InputError: so many ranks cannot be placed.
    """
    sketch = _Sketch(cluster, ranks)
    title = f"Cluster {cluster.name}" + (f", {ranks} ranks" if ranks else "")
    caption = (
        "Switches and nodes, and the links between them; a thicker line carries more. The area of "
        "a node's square tells its speed beside the fastest one's. A cross is on a link that is "
        "cut or slow for a while, or on a node where ranks die."
    )
    drawn = figure(
        f"cluster-{cluster.name}", title, caption, "cluster", sketch.layers(), round(sketch.height)
    )
    return drawn, max(round(sketch.width), 420)


class _Sketch:
    """Every mark of the figure, in pixels from the upper left corner."""

    def __init__(self, cluster: Cluster, ranks: int | None) -> None:
        self._cluster = cluster
        self._nodes = cluster.nodes_of(ranks) if ranks else ()
        self._of_node: dict[str, list[int]] = {}
        for rank, node in enumerate(self._nodes):
            self._of_node.setdefault(node.name, []).append(rank)
        self._faults = self._faults_by_owner()
        places = layout(cluster, self._faults)
        self._leaves, self._branches = places.leaves, places.branches
        self._by_name = {branch.switch.name: branch for branch in places.branches}
        links = (link for part in places.parts for link in (part.up, part.down) if link)
        self._slowest = min((link.bandwidth for link in links), default=1.0)
        self._below = [
            f"{name}: {', '.join(words)}"
            for name, words in self._faults.items()
            if rank_of(name) is not None
        ]
        self._row = _ROW if places.rows <= _MANY else _NARROW_ROW
        self.height = _TOP + self._row * (places.rows + len(self._below))
        self._switch_x = columns(
            self._branches,
            lambda switch: (switch.name, *self._below_line(switch)),
            _LETTER,
            24,
        )
        self._node_x = (self._switch_x[-1] if self._switch_x else 0) + 40
        self._columns = self._filled_columns()
        *self._column_x, self.width = self._place_columns()
        self._canvas = Canvas(self.width, self.height)

    def layers(self) -> list[alt.Chart]:
        """Lines, then what stands on them, then words."""
        return [*self._lines(), *self._joints(), *self._crosses(), *self._words()]

    # Layout

    def _filled_columns(self) -> list[tuple[str, list[str]]]:
        """The heads of the columns with the text of each row, but for those that are empty."""
        columns: list[tuple[str, Callable[[Leaf], str]]] = [
            ("node", _name),
            ("link", lambda leaf: link_text(leaf.nodes[0])),
            ("computes with", lambda leaf: _compute_text(leaf.nodes[0])),
            ("memory", lambda leaf: BYTES.write(m) if (m := leaf.nodes[0].memory) else ""),
            ("ranks", self._ranks_text),
            ("faults", lambda leaf: ", ".join(self._faults.get(leaf.nodes[0].name, ()))),
        ]
        filled = [(head, [text(leaf) for leaf in self._leaves]) for head, text in columns]
        return [(head, texts) for head, texts in filled if any(texts)]

    def _place_columns(self) -> list[float]:
        """Where each column begins, and where the last one ends."""
        places = [self._node_x + 14]
        for head, texts in self._columns:
            places.append(places[-1] + _LETTER * max(map(len, (head, *texts))) + _GAP)
        return places

    def _y(self, row: float) -> float:
        return _TOP + self._row * (row + 0.5)

    def _ranks_text(self, leaf: Leaf) -> str:
        return _ranges([rank for node in leaf.nodes for rank in self._of_node.get(node.name, ())])

    def _below_line(self, switch: Switch) -> list[str]:
        """What stands below the line that leads to a switch."""
        shared = f"shares {BANDWIDTH.write(switch.shared)}" if switch.shared else ""
        texts = [link_text(switch), shared, *self._faults.get(switch.name, ())]
        return [text for text in texts if text]

    def _faults_by_owner(self) -> dict[str, list[str]]:
        """What befalls each node and switch, in words; each rank where its node is not known."""
        found: dict[str, list[str]] = {}
        for fault in self._cluster.faults:
            for name in fault.names:
                owner = self._owner(name)
                words = fault.words if owner == name else f"{name} {fault.words}"
                found.setdefault(owner, []).append(words)
        return found

    def _owner(self, name: str) -> str:
        """The node of the rank `name`, if that is known; else `name`."""
        rank = rank_of(name)
        return name if rank is None or not self._nodes else self._nodes[rank].name

    # Marks

    def _lines(self) -> Iterator[alt.Chart]:
        """From each part to the switch above it."""
        values = [
            self._line(leaf.nodes[0], leaf.nodes[0].switch, leaf.y, self._node_x)
            for leaf in self._leaves
        ]
        values += [
            self._line(branch.switch, branch.switch.to, branch.y, self._switch_x[branch.depth])
            for branch in self._branches
        ]
        thick = alt.StrokeWidth("thick:Q", scale=None)
        yield from self._canvas.across((value for value in values if value), thick)
        spines = (
            {
                "x": self._switch_x[branch.depth],
                "y": self._y(min(branch.below)),
                "to": self._y(max(branch.below)),
            }
            for branch in self._branches
        )
        yield from self._canvas.down(spines, strokeWidth=2)

    def _line(self, part: Node | Switch, above: str | None, row: float, to: float) -> _Value:
        if above is None or part.up is None or part.down is None:
            return {}
        slower = min(part.up.bandwidth, part.down.bandwidth)
        x = self._switch_x[self._by_name[above].depth]
        thick = 1 + 0.9 * math.log10(slower / self._slowest)
        return {"x": x, "to": to, "y": self._y(row), "thick": min(thick, 6)}

    def _joints(self) -> Iterator[alt.Chart]:
        """Switches and nodes."""
        switches = (
            {"x": self._switch_x[branch.depth], "y": self._y(branch.y)} for branch in self._branches
        )
        yield from self._canvas.layer(
            switches, lambda chart: chart.mark_circle(opacity=1, size=90, color=INK_NOW).encode()
        )
        speeds = [leaf.nodes[0].speed or leaf.nodes[0].flops or 0.0 for leaf in self._leaves]
        nodes = (
            {
                "x": self._node_x,
                "y": self._y(leaf.y),
                "area": max(_LARGEST_SQUARE * speed / max(speeds), 9),
                "faulty": leaf.nodes[0].name in self._faults,
            }
            for leaf, speed in zip(self._leaves, speeds, strict=True)
        )
        colour = alt.condition("datum.faulty", alt.value(_FAULT), alt.value(_NODE))
        area = alt.Size("area:Q", scale=None, legend=None)
        yield from self._canvas.layer(
            nodes, lambda chart: chart.mark_square(opacity=1).encode(area, color=colour)
        )

    def _crosses(self) -> Iterator[alt.Chart]:
        """On links that are cut or slow for a while, and on nodes where somebody dies."""
        ends = {leaf.nodes[0].name: (leaf.nodes[0].switch, leaf.y) for leaf in self._leaves}
        ends |= {branch.switch.name: (branch.switch.to, branch.y) for branch in self._branches}
        values = []
        for fault in self._cluster.faults:
            owner = self._owner(fault.of) if isinstance(fault, LinkCut | LinkSlow | Death) else ""
            if owner in ends:
                above, row = ends[owner]
                x = self._node_x
                if above is not None and not isinstance(fault, Death):
                    x = self._switch_x[self._by_name[above].depth] + 16
                values.append({"x": x, "y": self._y(row)})
        cross: dict[str, Any] = {"shape": _CROSS, "size": 110, "strokeWidth": 2, "opacity": 1}
        yield from self._canvas.layer(
            values, lambda chart: chart.mark_point(**cross, color=INK_NOW, filled=False)
        )

    def _words(self) -> Iterator[alt.Chart]:
        words = [*self._table(), *self._names()]
        for name, style in _STYLES.items():
            shared: dict[str, Any] = {"baseline": "middle", "fontSize": 11, **style}
            yield from self._canvas.layer(
                (word for word in words if word["style"] == name),
                lambda chart, shared=shared: chart.mark_text(**shared).encode(text="text:N"),  # type: ignore[misc]
            )

    def _table(self) -> Iterator[_Value]:
        """The columns beside the nodes, and what befalls ranks of unknown place below them."""
        for x, (head, texts) in zip(self._column_x, self._columns, strict=True):
            yield {"x": x, "y": _TOP - 16, "text": head, "style": "head"}
            style = "fault" if head == "faults" else "plain"
            for leaf, text in zip(self._leaves, texts, strict=True):
                yield {"x": x, "y": self._y(leaf.y), "text": text, "style": style}
        for index, text in enumerate(reversed(self._below)):
            y = self.height - self._row * (index + 0.5)
            yield {"x": 0, "y": y, "text": text, "style": "fault"}

    def _names(self) -> Iterator[_Value]:
        """The name of a switch above its link, and what concerns the link below it."""
        for branch in self._branches:
            x, y = self._switch_x[branch.depth] - 9, self._y(branch.y)
            yield {"x": x, "y": y - 8, "text": branch.switch.name, "style": "switch"}
            faults = self._faults.get(branch.switch.name, ())
            for index, text in enumerate(self._below_line(branch.switch)):
                style = "fault of a link" if text in faults else "link"
                yield {"x": x, "y": y + 9 + 13 * index, "text": text, "style": style}


def _name(leaf: Leaf) -> str:
    first, last = leaf.nodes[0].name, leaf.nodes[-1].name
    return first if first == last else f"{first} to {last} ({len(leaf.nodes)} nodes)"


def link_text(part: Node | Switch) -> str:
    """What the link of a node or switch carries each way, and its latency."""
    up, down = part.up, part.down
    if up is None or down is None:
        loopback = part.loopback if isinstance(part, Node) else None
        return f"loopback {_one_way(loopback)}" if loopback else ""
    if up == down:
        return _one_way(up)
    if up.latency == down.latency:
        latency = SECONDS.write(up.latency)
        return (
            f"{BANDWIDTH.write(up.bandwidth)} up, {BANDWIDTH.write(down.bandwidth)} down, {latency}"
        )
    return f"{_one_way(up)} up; {_one_way(down)} down"


def _one_way(link: Link) -> str:
    return f"{BANDWIDTH.write(link.bandwidth)}, {SECONDS.write(link.latency)}"


def _compute_text(node: Node) -> str:
    unit, count = ("device", node.devices) if node.devices else ("core", node.cores)
    speed = f"speed {node.speed:.3g}" if node.speed is not None else FLOPS.write(node.flops or 0)
    parts = [f"{count} {unit}{'s' * (count != 1)}", speed]
    parts += [write(node.jitter, CLUSTERS)] if isinstance(node.jitter, Jitter) else []
    return ", ".join(parts)


def _ranges(ranks: Sequence[int]) -> str:
    """Ranks in few words: "0-3, 8"."""
    rising = sorted(ranks)
    breaks = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(rising)) if b != a + 1), len(rising)]
    spans = [(rising[a], rising[b - 1]) for a, b in pairwise(breaks) if b > a]
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def clusters(subject: FigureData) -> list[Figure]:
    """One for each cluster, with the ranks of the run that has most there."""
    widest: dict[str, RunData] = {}
    for run in subject.runs:
        name = run.record.cluster
        if name and (name not in widest or _flows(run) > _flows(widest[name])):
            widest[name] = run
    found = []
    for run in widest.values():
        if run.cluster is not None:
            drawn, width = cluster_figure(run.cluster, _flows(run))
            found.append(replace(drawn, least_width=width))
    return found


def _flows(run: RunData) -> int:
    """Its processes: `Single` is one, whatever the budget."""
    record = run.record
    return record.ranks if record.workers + record.servers > 1 else 1
