"""The messages of one step of a simulated run, between ranks in their places in the cluster."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import altair as alt

from orchestra.cluster import Cluster
from orchestra.report.collect import RunData
from orchestra.report.figures.frame import FAINT, INK_NOW, Figure, Values, figure
from orchestra.report.figures.messages_layout import LETTER, RADIUS, WIDTH, Arc, MessageLayout
from orchestra.report.figures.sketch import Canvas
from orchestra.report.figures.subject import FigureData
from orchestra.report.figures.trace import Arrow, Exchange, exchanges
from orchestra.report.figures.traffic import with_unit
from orchestra.report.numbers import count
from orchestra.report.rows import Row

MOST = 32
"""Ranks that can be drawn; of a strategy, its row on the most ranks up to so many is."""
_THICK = 1.0, 5.0
_EARLY_TO_LATE = ["#0072B2", "#CC79A7", "#E69F00"]  # told apart by all, and from dark to light
_ROOM = 100.0  # for the thickest arrows side by side, in pixels
_WORDY = 48  # arrows that have words
_HEAD = 44.0


def messages(subject: FigureData) -> list[Figure]:
    """For each strategy that was simulated, one step of its first seed; a switch has two parts."""
    lines: dict[str, list[Row]] = {}
    for row in subject.rows:
        if row.ranks <= MOST and row.completed[0].cluster is not None:
            lines.setdefault(subject.lines[row.name], []).append(row)
    return [found for rows in lines.values() for found in _widest(rows)]


def _widest(rows: Sequence[Row]) -> list[Figure]:
    """Of the row on the most ranks that has messages in its timeline."""
    for row in sorted(rows, key=lambda row: -row.ranks):
        run = row.completed[0]
        found = exchanges(run.trace) if run.trace is not None else []
        if found:
            return [
                _drawn(row, run, exchange, part if len(found) > 1 else 0)
                for part, exchange in enumerate(found, start=1)
            ]
    return []


def _drawn(row: Row, run: RunData, exchange: Exchange, part: int) -> Figure:
    assert run.cluster is not None
    record, step = run.record, exchange.step
    sketch = _Sketch(row.name, run.cluster, row.ranks, exchange)
    phase = ""
    if record.switched_at_step is not None:
        phase = f", {'before' if step <= record.switched_at_step else 'after'} the switch"
    texts = [
        f"What the ranks sent each other in step {step} (seed {record.seed}), where they are in "
        f"the cluster: {sketch.summary}. An arrow stands for all messages from one rank to "
        "another: those down the rows are on the right, those up on the left.",
        *sketch.words,
    ]
    suffix = f"-{part}" if part else ""
    return figure(
        f"messages-{row.name}{suffix}",
        f"{row.name}: messages of step {step}{phase}",
        " ".join(texts),
        "timeline",
        sketch.layers(),
        round(sketch.height),
    )


class _Sketch:
    """Every mark of the figure, in pixels from the upper left corner of one `WIDTH` wide."""

    def __init__(self, name: str, cluster: Cluster, ranks: int, exchange: Exchange) -> None:
        self._exchange = exchange
        kinds = {(arrow.count, with_unit(arrow.bytes)) for arrow in exchange.arrows}
        self._alike = len(kinds) == 1
        self._links = _links(_carried(cluster, ranks, exchange.arrows))
        longest = max(map(len, map(self._text, exchange.arrows)))
        self._stage = MessageLayout(cluster, ranks, longest, self._links)
        self._arcs = self._stage.arcs(exchange.arrows)
        self._most = max(arrow.bytes for arrow in exchange.arrows)
        self._thick = min(_THICK[1], max(_THICK[0], _ROOM / len(exchange.arrows)))
        self._texts = list(self._placed_texts())
        self.height = self._stage.height
        self._canvas = Canvas(WIDTH, self.height, name)

    @property
    def summary(self) -> str:
        """All of it in numbers."""
        arrows = self._exchange.arrows
        total = count("message", sum(arrow.count for arrow in arrows))
        return f"{total}, {with_unit(sum(arrow.bytes for arrow in arrows))}"

    @property
    def words(self) -> Iterator[str]:
        """What the marks mean."""
        arrow = self._exchange.arrows[0]
        if self._alike:
            yield f"Each is {count('message', arrow.count)}, {with_unit(arrow.bytes)}."
            if self._texts:
                yield "The numbers are the order in which they began."
        elif not self._texts:
            yield "A thicker one has more bytes; there are too many for words."
        else:
            yield (
                "A thicker one has more bytes. Beside it, where there is room: its place in the "
                "order in which they began, how many messages, and their bytes."
            )
        if self._times:
            yield "The colour tells when the first of them was sent."
        yield "At a link stands what crossed it, up (↑) and down (↓), or stayed inside the node."
        if self._exchange.servers:
            yield "A square is a rank that serves."

    @property
    def _times(self) -> bool:
        """Whether arrows begin at different times."""
        return self._exchange.arrows[-1].place > 1

    def layers(self) -> list[alt.Chart]:
        """Lines, then what stands on them, then words."""
        return [*self._tree(), *self._arrows(), *self._ranks(), *self._words()]

    # Arrows

    def _arrows(self) -> Iterator[alt.Chart]:
        lines: Values = []
        heads: Values = []
        for number, arc in enumerate(self._arcs):
            first = _milliseconds(arc.arrow.first)
            thick = _THICK[0] + (self._thick - _THICK[0]) * arc.arrow.bytes / self._most
            same = {"arc": number, "first": first, "thick": round(thick, 2)}
            lines += [
                {**same, "x": round(x, 1), "y": round(y, 1), "order": order}
                for order, (x, y) in enumerate(arc.points)
            ]
            heads.append(self._head(arc, first, thick))
        colour = self._colour()
        width = alt.StrokeWidth("thick:Q", scale=None)
        yield from self._canvas.layer(
            lines,
            lambda chart: chart.mark_line(interpolate="basis", opacity=0.75).encode(
                colour, width, detail="arc:N", order="order:Q"
            ),
        )
        tooltip = [
            alt.Tooltip("what:N", title="from, to"),
            *(alt.Tooltip(f"{key}:Q", format=",d") for key in ("messages", "bytes")),
            alt.Tooltip("first:Q", title="first, ms", format=".3~g"),
        ]
        shape = alt.Shape("shape:N", scale=None)
        size = alt.Size("area:Q", scale=None)
        yield from self._canvas.layer(
            heads,
            lambda chart: chart.mark_point(filled=True, opacity=1).encode(
                colour, shape, size, tooltip=tooltip
            ),
        )

    def _head(self, arc: Arc, first: float, thick: float) -> dict[str, Any]:
        arrow, (x, y) = arc.arrow, arc.points[-1]
        return {
            "x": round(x, 1),
            "y": round(y, 1),
            "shape": "triangle-left" if arc.down else "triangle-right",
            "area": round(_HEAD + 12 * thick, 1),
            "what": f"{arrow.source} → {arrow.target}",
            "messages": arrow.count,
            "bytes": arrow.bytes,
            "first": first,
        }

    def _colour(self) -> alt.Color:
        if not self._times:
            return alt.Color("first:Q", scale=alt.Scale(range=_EARLY_TO_LATE[:1]), legend=None)
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

    # The cluster

    def _tree(self) -> Iterator[alt.Chart]:
        places = self._stage.places
        yield from self._canvas.across(
            {"x": place.above, "y": place.y, "to": place.x}
            for place in places
            if place.above is not None
        )
        yield from self._canvas.down(
            {"x": place.x, "y": place.span[0], "to": place.span[1]}
            for place in places
            if place.span[0] < place.span[1]
        )
        joints = [{"x": place.x, "y": place.y} for place in places]
        yield from self._canvas.layer(
            joints, lambda chart: chart.mark_square(opacity=1, size=40, color=FAINT).encode()
        )

    def _ranks(self) -> Iterator[alt.Chart]:
        stage, servers = self._stage, self._exchange.servers
        ranks = [
            {
                "x": stage.x,
                "y": y,
                "shape": "square" if rank in servers else "circle",
                "text": str(rank),
            }
            for rank, y in stage.y.items()
        ]
        body: dict[str, Any] = {"filled": True, "size": 3.6 * RADIUS**2, "opacity": 1}
        shape = alt.Shape("shape:N", scale=None)
        ground = alt.ExprRef("ground")
        yield from self._canvas.layer(
            ranks,
            lambda chart: chart.mark_point(
                **body, fill=ground, stroke=INK_NOW, strokeWidth=1.2
            ).encode(shape),
        )
        yield from self._canvas.layer(
            ranks,
            lambda chart: chart.mark_text(baseline="middle", fontSize=10.5, color=INK_NOW).encode(
                text="text:N"
            ),
        )

    # Words

    def _words(self) -> Iterator[alt.Chart]:
        """On a narrow page the names alone; each on a ground that covers what is behind it."""
        words = [*self._names(), *self._texts]
        for align in ("left", "right"):
            for name in (True, False):
                some = [w for w in words if (w["align"], w["name"]) == (align, name)]
                style: dict[str, Any] = {"align": align, "baseline": "middle", "fontSize": 10.5}
                style["opacity"] = 1 if name else alt.ExprRef("room < 460 ? 0 : 1")
                ground = {**style, "stroke": alt.ExprRef("ground"), "strokeWidth": 3}
                for look in (ground, {**style, "color": INK_NOW}):
                    yield from self._canvas.layer(
                        some,
                        lambda chart, look=look: chart.mark_text(**look).encode(text="text:N"),  # type: ignore[misc]
                    )

    def _names(self) -> Iterator[dict[str, Any]]:
        """Of nodes and switches, and what crossed their links."""
        for place in self._stage.places:
            is_node = place.x == self._stage.node_x
            text = self._links.get(place.part.name, "")
            if is_node:
                yield _word(place.x + 8, place.y, place.part.name, "left", name=True)
                on_line = place.above is not None
                yield _word(place.x - 8, place.y - 9 * on_line, text, "right")
            else:
                yield _word(place.x - 8, place.y - 8, place.part.name, "right", name=True)
                yield _word(place.x - 8, place.y + 9, text, "right")

    def _placed_texts(self) -> Iterator[dict[str, Any]]:
        """The words of arrows, the largest first, as far as they do not touch."""
        if len(self._arcs) > _WORDY:
            return
        taken: list[tuple[float, float, float]] = []
        for arc in sorted(self._arcs, key=lambda arc: -arc.arrow.bytes):
            arrow, (x, y) = arc.arrow, arc.apex
            text = self._text(arrow)
            x += 4 if arc.down else -4
            length = LETTER * len(text)
            begin = x if arc.down else x - length
            free = all(
                abs(y - other) >= 11 or begin + length < left or begin > right
                for left, right, other in taken
            )
            if free:
                taken.append((begin, begin + length, y))
                yield _word(x, y, text, "left" if arc.down else "right")

    def _text(self, arrow: Arrow) -> str:
        """The words of an arrow."""
        if self._alike:
            return str(arrow.place)
        return f"{arrow.place}: {arrow.count}, {with_unit(arrow.bytes)}"


def _word(x: float, y: float, text: str, align: str, *, name: bool = False) -> dict[str, Any]:
    return {"x": round(x, 1), "y": round(y, 1), "text": text, "align": align, "name": name}


def _carried(cluster: Cluster, ranks: int, arrows: Iterable[Arrow]) -> Counter[str]:
    """The bytes that crossed each link, by its name."""
    nodes = cluster.nodes_of(ranks)
    found: Counter[str] = Counter()
    for arrow in arrows:
        for channel in cluster.path(nodes[arrow.source], nodes[arrow.target]).channels:
            found[channel.name] += arrow.bytes
    return found


def _links(carried: Mapping[str, int]) -> dict[str, str]:
    """Its words, by the name of the node or switch whose links they are."""
    found: dict[str, list[str]] = defaultdict(list)
    for kind, sign in (("up", "↑"), ("down", "↓"), ("loopback", "inside")):
        for name, size in carried.items():
            owner, _, of = name.rpartition(" ")
            if of == kind:
                found[owner].append(f"{sign} {with_unit(size)}")
    return {owner: " ".join(words) for owner, words in found.items()}


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 4)
