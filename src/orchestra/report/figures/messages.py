"""The messages of one step of a simulated run, between ranks in their places in the cluster.

The tree of the cluster grows from the left (cluster.py); each rank has a row beside its node. What
is sent down the rows goes by the right, what is sent up by the left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from orchestra.cluster import Cluster
from orchestra.records.exports import read_trace
from orchestra.records.record import RunRecord
from orchestra.report.figures.cluster import Canvas, Tree
from orchestra.report.figures.frame import FAINT, GROUND, INK_NOW, Figure, Values, figure, tips
from orchestra.report.figures.timeline import Arrow, Exchange, exchanges, phase_text
from orchestra.report.numbers import bytes_text, count
from orchestra.report.rows import Row, grouped
from orchestra.report.study import Study

MOST = 32  # the most ranks in a figure; each strategy's row with the most ranks up to that is drawn
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
_WORDS: dict[str, Any] = {"baseline": "middle", "fontSize": 10.5}


def messages(study: Study) -> Iterator[Figure]:
    """Yield one step of each simulated strategy's first seed; two if the strategy switched."""
    for rows in study.by_line.values():
        # The most ranks that still have room
        for row in sorted(rows, key=lambda row: -row.ranks):
            run = row.completed[0]
            if row.ranks > MOST or run.cluster is None or run.trace is None:
                continue
            found = exchanges(read_trace(run.trace))
            for part, exchange in enumerate(found, start=1):
                suffix = f"-{part}" if len(found) > 1 else ""
                yield _drawn(row, run.record, run.cluster, exchange, suffix)
            if found:
                break


def _drawn(
    row: Row, record: RunRecord, cluster: Cluster, exchange: Exchange, suffix: str
) -> Figure:
    step, arrows = exchange.step, exchange.arrows
    sketch = _Sketch(row.name, cluster, row.ranks, exchange)
    total = count("message", sum(arrow.count for arrow in arrows))
    caption = (
        f"What the ranks sent each other in step {step} (seed {record.seed}), where they are in "
        f"the cluster: {total}, {bytes_text(sum(arrow.bytes for arrow in arrows))}. An arrow "
        "stands for all messages from one rank to another: those down the rows are on the right, "
        f"those up on the left. {' '.join(sketch.caption())}"
    )
    title = f"{row.name}: messages of step {step}{phase_text(record, step)}"
    name, height = f"messages-{row.name}{suffix}", round(sketch.stage.height)
    return figure(name, title, caption, "timeline", sketch.layers(), height)


@dataclass(frozen=True)
class Arc:
    """The course of an arrow: the points of its curve, and where its words begin or end."""

    arrow: Arrow
    points: tuple[tuple[float, float], ...]
    down: bool
    apex: tuple[float, float]


class MessageLayout:
    """The positions of all marks for `ranks` ranks on `cluster`.

    `letters` is the length of the longest words of an arc; `carried` has the words of each link,
    by the name of the node or switch below it.

    `rows` are the ranks in their order from the top, `x` and `y` (by rank) their positions in
    pixels, and `places` those of nodes and switches.
    """

    def __init__(
        self, cluster: Cluster, ranks: int, letters: int, carried: Mapping[str, str]
    ) -> None:
        nodes_of = cluster.nodes_of(ranks)
        on = grouped(range(ranks), lambda rank: nodes_of[rank].name)
        tree = Tree(cluster, on, {name: len(ranks_of) for name, ranks_of in on.items()})
        row_height = _ROW if ranks <= _MANY else _NARROW_ROW
        self.height = _TOP + row_height * ranks
        beside = max(len(carried.get(name, "")) for name in on) * _LETTER
        nodes, switches = tree.placed(
            lambda switch: (switch.name, carried.get(switch.name, "")),
            _LETTER, 22, beside + 18, lambda row: _TOP + row_height * (row + 0.5),
        )  # fmt: skip
        self.places = [*nodes, *switches]
        self.rows = [rank for place in nodes for rank in on[place.part.name]]
        self._row = {rank: row for row, rank in enumerate(self.rows)}
        self.y = {rank: _TOP + row_height * (row + 0.5) for rank, row in self._row.items()}
        left = nodes[0].x + 10 + max(map(len, on)) * _LETTER
        words = _LETTER * letters + 8
        # A deep tree with long names must leave something for the arcs
        for_arcs = max(WIDTH - left - 2 * words - 2 * _RADIUS, 4 * _NEAREST)
        self._reach = for_arcs * _LEFT, for_arcs * (1 - _LEFT)
        self.x = left + words + self._reach[0] + _RADIUS

    def arcs(self, arrows: Sequence[Arrow]) -> list[Arc]:
        """Return the course of each arrow."""
        heights, row = self._heights(arrows), self._row
        widest = max(abs(row[a.source] - row[a.target]) for a in arrows)
        found = []
        for arrow in arrows:
            span = abs(row[arrow.source] - row[arrow.target])
            down = row[arrow.source] < row[arrow.target]
            reach = self._reach[down] - _NEAREST
            # Those that go farther reach farther out, so that arcs nest instead of crossing
            depth = _NEAREST + reach * (span - 1) / max(widest - 1, 1)
            side = 1 if down else -1
            begin, end = heights[arrow, True], heights[arrow, False]
            x, away = self.x + side * _RADIUS, self.x + side * (_RADIUS + depth)
            tip = x + side * 6  # the head of the arrow covers the rest
            points = ((x, begin), (away, begin), (away, end), (tip, end))
            found.append(Arc(arrow, points, down, (away, (begin + end) / 2)))
        return found

    def _heights(self, arrows: Sequence[Arrow]) -> dict[tuple[Arrow, bool], float]:
        """Return the heights at which each arrow leaves (True) and arrives (False), spread over
        the circle of its rank.

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
                # Over a bit more than half of the circle: farther out an arc would begin beside it
                part = (place + 0.5) / len(members) - 0.5
                heights[arrow, leaving] = self.y[rank] + part * 1.2 * _RADIUS
        return heights


class _Sketch:
    """All marks of the figure, in pixels from the upper left corner of one `WIDTH` wide."""

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
        """Yield the meaning of the marks."""
        if self._alike:
            arrow = self._exchange.arrows[0]
            yield f"Each is {count('message', arrow.count)}, {bytes_text(arrow.bytes)}."
            if self._texts:
                yield "The numbers are the order in which they began."
        elif self._texts:
            yield (
                "A thicker one has more bytes. Beside it, where there is room: its place in the "
                "order in which they began, how many messages, and their bytes."
            )
        else:
            yield "A thicker one has more bytes; there are too many for words."
        if self._timed:
            yield "The colour tells when the first of them was sent."
        yield "At a link stands what crossed it, up (↑) and down (↓), or stayed inside the node."
        if self._exchange.servers:
            yield "A square is a rank that serves."

    def layers(self) -> Iterator[alt.Chart]:
        """Yield the cluster, the arrows, the ranks, and the words."""
        places, canvas, servers = self.stage.places, self._canvas, self._exchange.servers
        yield from canvas.lines(places)
        joints = [place.at for place in places]
        yield canvas.layer(joints, "square", opacity=1, size=40, color=FAINT)
        yield from self._arrows()
        ranks = [
            {"x": self.stage.x, "y": y, "shape": "square" if rank in servers else "circle",
             "text": str(rank)}
            for rank, y in self.stage.y.items()
        ]  # fmt: skip
        body: dict[str, Any] = {"filled": True, "size": 3.6 * _RADIUS**2, "opacity": 1}
        edge: dict[str, Any] = {"fill": GROUND, "stroke": INK_NOW, "strokeWidth": 1.2}
        yield canvas.layer(ranks, "point", alt.Shape("shape:N", scale=None), **body, **edge)
        yield canvas.layer(ranks, "text", alt.Text("text:N"), **_WORDS, color=INK_NOW)
        words = [*self._names(), *self._texts]
        for align in ("left", "right"):
            for name in (True, False):  # on a narrow page the names alone
                some = [w for w in words if (w["align"], w["name"]) == (align, name)]
                shown = 1 if name else alt.ExprRef("room < 460 ? 0 : 1")
                style: dict[str, Any] = {**_WORDS, "align": align, "opacity": shown}
                # The halo first, so that no arc runs through a word
                for look in ({"stroke": GROUND, "strokeWidth": 3}, {"color": INK_NOW}):
                    yield canvas.layer(some, "text", alt.Text("text:N"), **style, **look)

    def _arrows(self) -> Iterator[alt.Chart]:
        """Draw the arcs, and their heads."""
        lines: Values = []
        heads: Values = []
        most = max(arrow.bytes for arrow in self._exchange.arrows)
        # Arrows that stand side by side at a rank share its room
        thickest = min(_THICK[1], max(_THICK[0], _ROOM / len(self._arcs)))
        for number, arc in enumerate(self._arcs):
            arrow = arc.arrow
            thick = _THICK[0] + (thickest - _THICK[0]) * arrow.bytes / most
            same = {"first": 1000 * arrow.first, "arc": number, "thick": thick}
            points = [{**same, "x": x, "y": y} for x, y in arc.points]
            lines += [{**point, "order": order} for order, point in enumerate(points)]
            shape = "triangle-left" if arc.down else "triangle-right"
            look = {"shape": shape, "area": _HEAD + 12 * thick}
            what = {"what": f"{arrow.source} → {arrow.target}", "messages": arrow.count}
            heads.append({**points[-1], **look, **what, "bytes": arrow.bytes})
        colour = self._colour()
        along = alt.StrokeWidth("thick:Q", scale=None), alt.Detail("arc:N"), alt.Order("order:Q")
        # Lines of four points, which Vega rounds: they arrive level, so that heads need no angle at
        # any width of the page (decision 34).
        yield self._canvas.layer(lines, "line", colour, *along, interpolate="basis", opacity=0.75)
        tooltip = tips(
            ("what:N", "from, to"), ("messages:Q", "", ",d"), ("bytes:Q", "", ",d"),
            ("first:Q", "first, ms", ".3~g"),
        )  # fmt: skip
        of_head = colour, alt.Shape("shape:N", scale=None), alt.Size("area:Q", scale=None), tooltip
        yield self._canvas.layer(heads, "point", *of_head, filled=True, opacity=1)

    def _colour(self) -> alt.Color | alt.ColorValue:
        # Vega stops at a scale whose ends are one moment (decision 63)
        if not self._timed:
            return alt.ColorValue(_EARLY_TO_LATE[0])
        domain = [0, 1000 * self._exchange.seconds]
        scale = alt.Scale(domain=domain, range=_EARLY_TO_LATE, clamp=True)
        title: dict[str, Any] = {"titleLimit": 400, "titleFontWeight": "normal"}
        name = "milliseconds after the first message"
        legend = alt.Legend(title=name, symbolType="square", **title)
        return alt.Color("first:Q", scale=scale, legend=legend)

    def _names(self) -> Iterator[dict[str, Any]]:
        """Yield the names of nodes and switches, and the traffic of their links."""
        for place in self.stage.places:
            name, x, y = place.part.name, place.x, place.y
            if place.nodes:
                yield _word(x + 8, y, name, "left", name=True)
                off = -9 * (place.above is not None)
            else:
                yield _word(x - 8, y - 8, name, "right", name=True)
                off = 9
            yield _word(x - 8, y + off, self._links.get(name, ""), "right")

    def _placed_texts(self) -> Iterator[dict[str, Any]]:
        """Yield the words of arrows, the largest first, as far as they do not touch."""
        # So many could not be told apart even where they do not touch
        if len(self._arcs) > _WORDY:
            return
        taken: list[tuple[float, float, float]] = []
        # Where words would touch, those of the most bytes are the ones to read
        for arc in sorted(self._arcs, key=lambda arc: -arc.arrow.bytes):
            text, (x, y) = self._text(arc.arrow), arc.apex
            x += 4 if arc.down else -4
            length = _LETTER * len(text)
            begin = x if arc.down else x - length
            if all(
                abs(y - other) >= 11 or begin + length < left or begin > right
                for left, right, other in taken
            ):
                taken.append((begin, begin + length, y))
                yield _word(x, y, text, "left" if arc.down else "right")

    def _text(self, arrow: Arrow) -> str:
        if self._alike:
            return str(arrow.place)
        return f"{arrow.place}: {arrow.count}, {bytes_text(arrow.bytes)}"


def _word(x: float, y: float, text: str, align: str, *, name: bool = False) -> dict[str, Any]:
    return {"x": x, "y": y, "text": text, "align": align, "name": name}


def _links(cluster: Cluster, ranks: int, arrows: Iterable[Arrow]) -> dict[str, str]:
    """Return the traffic of each link in words, by the name of the node or switch below it."""
    nodes = cluster.nodes_of(ranks)
    carried: Counter[str] = Counter()
    for arrow in arrows:
        # By the route, as the simulation sends them: a link's bytes are those of all that cross it
        for channel in cluster.path(nodes[arrow.source], nodes[arrow.target]).channels:
            carried[channel.name] += arrow.bytes
    found: dict[str, list[str]] = defaultdict(list)
    for kind, sign in (("up", "↑"), ("down", "↓"), ("loopback", "inside")):
        for name, size in carried.items():
            owner, _, of = name.rpartition(" ")
            if of == kind:
                found[owner].append(f"{sign} {bytes_text(size)}")
    return {owner: " ".join(words) for owner, words in found.items()}
