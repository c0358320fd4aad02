"""The messages of one step of a simulated run, between ranks in their places in the cluster.

The tree of the cluster grows from the left (sketch.py); each rank has a row beside its node. What
is sent down the rows goes by the right, what is sent up by the left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from orchestra.cluster import Cluster
from orchestra.report.collect import RunData
from orchestra.report.figures.bars import bytes_text
from orchestra.report.figures.frame import FAINT, GROUND, INK_NOW, Figure, Values, figure, tips
from orchestra.report.figures.sketch import Canvas, Tree
from orchestra.report.figures.timeline import Arrow, Exchange, exchanges, phase_text, read_trace
from orchestra.report.numbers import count
from orchestra.report.rows import Row
from orchestra.report.study import Study

MOST = 32
"""Ranks that can be drawn; of a strategy, its row on the most ranks up to so many is."""
WIDTH = 680.0
_LETTER = 5.3
_TOP = 16.0
_RADIUS = 10.0
_MANY = 16  # rows that are narrow
_ROW, _NARROW_ROW = 30.0, 22.0
_NEAREST = 26.0  # how far an arc reaches at the least
_LEFT = 0.45  # of the room for arcs
_THICK = 1.0, 5.0
_EARLY_TO_LATE = ["#0072B2", "#CC79A7", "#E69F00"]  # told apart by all, and from dark to light
_ROOM = 100.0  # for the thickest arrows side by side, in pixels
_WORDY = 48  # arrows that have words
_HEAD = 44.0


def messages(study: Study) -> list[Figure]:
    """For each strategy that was simulated, one step of its first seed; a switch has two parts."""
    lines: dict[str, list[Row]] = {}
    for row in study.completed:
        if row.ranks <= MOST and row.completed[0].cluster is not None:
            lines.setdefault(study.lines[row.name], []).append(row)
    return [found for rows in lines.values() for found in _widest(rows)]


def _widest(rows: Sequence[Row]) -> list[Figure]:
    """Draw the row on the most ranks that has messages in its timeline."""
    for row in sorted(rows, key=lambda row: -row.ranks):
        run = row.completed[0]
        found = exchanges(read_trace(run.trace)) if run.trace is not None else []
        if found:
            return [
                _drawn(row, run, exchange, f"-{part}" if len(found) > 1 else "")
                for part, exchange in enumerate(found, start=1)
            ]
    return []


def _drawn(row: Row, run: RunData, exchange: Exchange, suffix: str) -> Figure:
    assert run.cluster is not None
    record, step, arrows = run.record, exchange.step, exchange.arrows
    sketch = _Sketch(row.name, run.cluster, row.ranks, exchange)
    total = count("message", sum(arrow.count for arrow in arrows))
    texts = [
        f"What the ranks sent each other in step {step} (seed {record.seed}), where they are in "
        f"the cluster: {total}, {bytes_text(sum(arrow.bytes for arrow in arrows))}. An arrow "
        "stands for all messages from one rank to another: those down the rows are on the right, "
        "those up on the left.",
        *sketch.caption(),
    ]
    return figure(
        f"messages-{row.name}{suffix}",
        f"{row.name}: messages of step {step}{phase_text(record, step)}",
        " ".join(texts),
        "timeline",
        [*sketch.tree(), *sketch.arrows(), *sketch.ranks(), *sketch.words()],
        round(sketch.stage.height),
    )


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

    Attributes:
        rows: the ranks in their order from the top.
        x, y: where the ranks are, in pixels, the latter by rank.
        places: those of nodes and switches.
        node_x: where all nodes are.
    """

    def __init__(
        self, cluster: Cluster, ranks: int, letters: int, carried: Mapping[str, str]
    ) -> None:
        on: dict[str, list[int]] = {}
        for rank, node in enumerate(cluster.nodes_of(ranks)):
            on.setdefault(node.name, []).append(rank)
        tree = Tree(cluster, on, {name: len(ranks_of) for name, ranks_of in on.items()})
        names = [branch.part.name for branch in tree.nodes]
        row_height = _ROW if ranks <= _MANY else _NARROW_ROW
        self.height = _TOP + row_height * ranks
        self.rows = [rank for name in names for rank in on[name]]

        def height_of(row: float) -> float:
            return _TOP + row_height * (row + 0.5)

        self._row = {rank: row for row, rank in enumerate(self.rows)}
        self.y = {rank: height_of(row) for rank, row in self._row.items()}
        columns = tree.columns(lambda s: (s.name, carried.get(s.name, "")), _LETTER, 22)
        beside = max(len(carried.get(name, "")) for name in names) * _LETTER
        self.node_x = max(columns, default=0.0) + beside + 18
        self.places = tree.placed(columns, self.node_x, height_of)
        left = self.node_x + 10 + max(map(len, names)) * _LETTER
        words = _LETTER * letters + 8
        for_arcs = max(WIDTH - left - 2 * words - 2 * _RADIUS, 4 * _NEAREST)
        self._reach = for_arcs * _LEFT, for_arcs * (1 - _LEFT)
        self.x = left + words + self._reach[0] + _RADIUS

    def arcs(self, arrows: Sequence[Arrow]) -> list[Arc]:
        """The way of each arrow."""
        heights, row = self._heights(arrows), self._row
        widest = max(abs(row[a.source] - row[a.target]) for a in arrows)
        found = []
        for arrow in arrows:
            span = abs(row[arrow.source] - row[arrow.target])
            down = row[arrow.source] < row[arrow.target]
            reach = self._reach[down] - _NEAREST
            depth = _NEAREST + reach * (span - 1) / max(widest - 1, 1)
            side = 1 if down else -1
            begin, end = (heights[arrow, leaving] for leaving in (True, False))
            x, away = self.x + side * _RADIUS, self.x + side * (_RADIUS + depth)
            tip = x + side * 6  # the head of the arrow covers the rest
            points = ((x, begin), (away, begin), (away, end), (tip, end))
            found.append(Arc(arrow, points, down, (away, (begin + end) / 2)))
        return found

    def _heights(self, arrows: Sequence[Arrow]) -> dict[tuple[Arrow, bool], float]:
        """Return at what height each arrow leaves (True) and arrives: spread over the circle of its
        rank.

        Nearer ends lie towards the side that they come from, so that arcs cross seldom.
        """
        touching: dict[tuple[int, bool], list[tuple[int, bool, Arrow]]] = defaultdict(list)
        for arrow in arrows:
            here, there = self._row[arrow.source], self._row[arrow.target]
            touching[arrow.source, here < there].append((there, True, arrow))
            touching[arrow.target, here < there].append((here, False, arrow))
        heights = {}
        for (rank, _), members in touching.items():
            row = self._row[rank]
            # from the top: what comes from above, the nearest first; what goes below, the farthest
            members.sort(key=lambda member, row=row: (member[0] > row, -member[0]))  # type: ignore[misc]
            for place, (_, leaving, arrow) in enumerate(members):
                part = (place + 0.5) / len(members) - 0.5
                heights[arrow, leaving] = self.y[rank] + part * 1.2 * _RADIUS
        return heights


class _Sketch:
    """Every mark of the figure, in pixels from the upper left corner of one `WIDTH` wide."""

    def __init__(self, name: str, cluster: Cluster, ranks: int, exchange: Exchange) -> None:
        self._exchange = exchange
        arrows = exchange.arrows
        self._alike = len({(arrow.count, bytes_text(arrow.bytes)) for arrow in arrows}) == 1
        self._links = _links(cluster, ranks, arrows)
        longest = max(map(len, map(self._text, arrows)))
        self.stage = MessageLayout(cluster, ranks, longest, self._links)
        self._arcs = self.stage.arcs(arrows)
        self._texts = list(self._placed_texts())
        self._timed = arrows[-1].place > 1  # they begin at different times
        self._canvas = Canvas(WIDTH, self.stage.height, name)

    def caption(self) -> Iterator[str]:
        """What the marks mean."""
        arrow = self._exchange.arrows[0]
        if self._alike:
            yield f"Each is {count('message', arrow.count)}, {bytes_text(arrow.bytes)}."
            if self._texts:
                yield "The numbers are the order in which they began."
        elif not self._texts:
            yield "A thicker one has more bytes; there are too many for words."
        else:
            yield (
                "A thicker one has more bytes. Beside it, where there is room: its place in the "
                "order in which they began, how many messages, and their bytes."
            )
        if self._timed:
            yield "The colour tells when the first of them was sent."
        yield "At a link stands what crossed it, up (↑) and down (↓), or stayed inside the node."
        if self._exchange.servers:
            yield "A square is a rank that serves."

    def tree(self) -> Iterator[alt.Chart]:
        """The cluster."""
        places = self.stage.places
        yield from self._canvas.across(
            {"x": place.above, "y": place.y, "to": place.x}
            for place in places
            if place.above is not None
        )
        yield from self._canvas.down(place for place in places if place.span[0] < place.span[1])
        joints = [{"x": place.x, "y": place.y} for place in places]
        yield from self._canvas.layer(joints, "square", opacity=1, size=40, color=FAINT)

    def arrows(self) -> Iterator[alt.Chart]:
        """The arcs, and their heads."""
        lines: Values = []
        heads: Values = []
        most = max(arrow.bytes for arrow in self._exchange.arrows)
        thickest = min(_THICK[1], max(_THICK[0], _ROOM / len(self._arcs)))
        for number, arc in enumerate(self._arcs):
            arrow, first = arc.arrow, _milliseconds(arc.arrow.first)
            thick = _THICK[0] + (thickest - _THICK[0]) * arrow.bytes / most
            points = [{"x": round(x, 1), "y": round(y, 1)} for x, y in arc.points]
            same = {"arc": number, "first": first, "thick": round(thick, 2)}
            lines += [{**same, **point, "order": order} for order, point in enumerate(points)]
            heads.append(
                {
                    **points[-1],
                    "shape": "triangle-left" if arc.down else "triangle-right",
                    "area": round(_HEAD + 12 * thick, 1),
                    "what": f"{arrow.source} → {arrow.target}",
                    "messages": arrow.count,
                    "bytes": arrow.bytes,
                    "first": first,
                }
            )
        colour = self._colour()
        thick_line = alt.StrokeWidth("thick:Q", scale=None)
        of_line = [thick_line, alt.Detail("arc:N"), alt.Order("order:Q")]
        look: dict[str, Any] = {"interpolate": "basis", "opacity": 0.75}
        yield from self._canvas.layer(lines, "line", colour, *of_line, **look)
        tooltip = tips(
            ("what:N", "from, to"), ("messages:Q", "", ",d"), ("bytes:Q", "", ",d"),
            ("first:Q", "first, ms", ".3~g"),
        )  # fmt: skip
        shape, size = alt.Shape("shape:N", scale=None), alt.Size("area:Q", scale=None)
        of_head = [colour, shape, size, tooltip]
        yield from self._canvas.layer(heads, "point", *of_head, filled=True, opacity=1)

    def _colour(self) -> alt.Color | alt.ColorValue:
        if not self._timed:
            return alt.ColorValue(_EARLY_TO_LATE[0])
        scale = alt.Scale(
            domain=[0, _milliseconds(self._exchange.seconds)], range=_EARLY_TO_LATE, clamp=True
        )
        legend = alt.Legend(
            title="milliseconds after the first message",
            titleLimit=400,
            titleFontWeight="normal",
            symbolType="square",
        )
        return alt.Color("first:Q", scale=scale, legend=legend)

    def ranks(self) -> Iterator[alt.Chart]:
        """The ranks, round or square, with their numbers."""
        servers = self._exchange.servers
        ranks = [
            {
                "x": self.stage.x,
                "y": y,
                "shape": "square" if rank in servers else "circle",
                "text": str(rank),
            }
            for rank, y in self.stage.y.items()
        ]
        body: dict[str, Any] = {"filled": True, "size": 3.6 * _RADIUS**2, "opacity": 1}
        edge: dict[str, Any] = {"fill": GROUND, "stroke": INK_NOW, "strokeWidth": 1.2}
        shape = alt.Shape("shape:N", scale=None)
        yield from self._canvas.layer(ranks, "point", shape, **body, **edge)
        style: dict[str, Any] = {"baseline": "middle", "fontSize": 10.5, "color": INK_NOW}
        yield from self._canvas.layer(ranks, "text", alt.Text("text:N"), **style)

    def words(self) -> Iterator[alt.Chart]:
        """On a narrow page the names alone; each on a ground that covers what is behind it."""
        words = [*self._names(), *self._texts]
        for align in ("left", "right"):
            for name in (True, False):
                some = [w for w in words if (w["align"], w["name"]) == (align, name)]
                style: dict[str, Any] = {"align": align, "baseline": "middle", "fontSize": 10.5}
                style["opacity"] = 1 if name else alt.ExprRef("room < 460 ? 0 : 1")
                for look in ({"stroke": GROUND, "strokeWidth": 3}, {"color": INK_NOW}):
                    yield from self._canvas.layer(some, "text", alt.Text("text:N"), **style, **look)

    def _names(self) -> Iterator[dict[str, Any]]:
        """Yield the names of nodes and switches, and what crossed their links."""
        for place in self.stage.places:
            name = place.branch.part.name
            text = self._links.get(name, "")
            if place.branch.nodes:
                yield _word(place.x + 8, place.y, name, "left", name=True)
                on_line = place.above is not None
                yield _word(place.x - 8, place.y - 9 * on_line, text, "right")
            else:
                yield _word(place.x - 8, place.y - 8, name, "right", name=True)
                yield _word(place.x - 8, place.y + 9, text, "right")

    def _placed_texts(self) -> Iterator[dict[str, Any]]:
        """Yield the words of arrows, the largest first, as far as they do not touch."""
        if len(self._arcs) > _WORDY:
            return
        taken: list[tuple[float, float, float]] = []
        for arc in sorted(self._arcs, key=lambda arc: -arc.arrow.bytes):
            arrow, (x, y) = arc.arrow, arc.apex
            text = self._text(arrow)
            x += 4 if arc.down else -4
            length = _LETTER * len(text)
            begin = x if arc.down else x - length
            free = all(
                abs(y - other) >= 11 or begin + length < left or begin > right
                for left, right, other in taken
            )
            if free:
                taken.append((begin, begin + length, y))
                yield _word(x, y, text, "left" if arc.down else "right")

    def _text(self, arrow: Arrow) -> str:
        if self._alike:
            return str(arrow.place)
        return f"{arrow.place}: {arrow.count}, {bytes_text(arrow.bytes)}"


def _word(x: float, y: float, text: str, align: str, *, name: bool = False) -> dict[str, Any]:
    return {"x": round(x, 1), "y": round(y, 1), "text": text, "align": align, "name": name}


def _links(cluster: Cluster, ranks: int, arrows: Iterable[Arrow]) -> dict[str, str]:
    """Return what crossed each link in words, by the name of the node or switch below it."""
    nodes = cluster.nodes_of(ranks)
    carried: Counter[str] = Counter()
    for arrow in arrows:
        for channel in cluster.path(nodes[arrow.source], nodes[arrow.target]).channels:
            carried[channel.name] += arrow.bytes
    found: dict[str, list[str]] = defaultdict(list)
    for kind, sign in (("up", "↑"), ("down", "↓"), ("loopback", "inside")):
        for name, size in carried.items():
            owner, _, of = name.rpartition(" ")
            if of == kind:
                found[owner].append(f"{sign} {bytes_text(size)}")
    return {owner: " ".join(words) for owner, words in found.items()}


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 4)
