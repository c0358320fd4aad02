"""What the links of a simulated cluster carried."""

from __future__ import annotations

from typing import Any

import altair as alt

from orchestra.records.links import Links
from orchestra.report.figures.figure import Figure
from orchestra.report.figures.frame import INK_NOW, Look, Values, figure, marks, numbers
from orchestra.report.figures.lanes import SEPARATOR
from orchestra.report.figures.subject import Subject
from orchestra.report.figures.traffic import with_unit
from orchestra.report.numbers import count, quantity
from orchestra.report.rows import Row

SHOWN = 6
"""Links of each strategy."""
_LANE = 17
_ROOM = "width - 92"
"""For bars: behind the longest are its words."""
_HEAD = ""  # what stands for a link in the lane of a heading


def links(subject: Subject) -> list[Figure]:
    """The busiest links of each strategy, where a cluster was simulated whose links carried any."""
    found = {row.name: (row, carried) for row in subject.widest if (carried := _carried(row))}
    if not found:
        return []
    values = [value for row, carried in found.values() for value in _values(row, carried)]
    heads = [
        {"strategy": name, "lane": _lane(name, _HEAD), "text": _summary(carried)}
        for name, (_, carried) in found.items()
    ]
    domain = [
        _lane(name, link)
        for name, (_, carried) in found.items()
        for link in (_HEAD, *(link.name for link in carried.busiest[:SHOWN]))
    ]
    look = Look({name: subject.styles[name] for name in found})
    layers = [*_bars(values, domain, look), *_headings(heads, domain)]
    caption = (
        "Of what each link could have carried while the stopwatch ran, the part that it did, and "
        "the bytes of the messages that crossed it (first seed). Up leads from a node or switch "
        "to the switch above, down the other way, and loopback joins the ranks of a node. "
        f"Shown are the {SHOWN} busiest links of each strategy. A link that is far from 100 % may "
        "still be what everybody waits for, if it is idle while the ranks compute."
    )
    return [
        figure("link-utilisation", "Busiest links", caption, "traffic", layers, _LANE * len(domain))
    ]


def _carried(row: Row) -> Links | None:
    carried = row.completed[0].links
    return carried if carried is not None and carried.busiest else None


def _lane(name: str, link: str) -> str:
    return f"{name}{SEPARATOR}{link}"


def _values(row: Row, carried: Links) -> Values:
    return [
        {
            "strategy": row.name,
            "lane": _lane(row.name, link.name),
            "link": link.name,
            "percent": numbers(100 * link.share),
            "bytes": link.bytes,
            "text": f"{quantity(100 * link.share, '%', 2)} · {with_unit(link.bytes)}",
        }
        for link in carried.busiest[:SHOWN]
    ]


def _summary(carried: Links) -> str:
    """How the links are that are not shown."""
    rest = carried.count - min(SHOWN, len(carried.busiest))
    if not rest:
        return ""
    idle = f", {carried.unused} of them unused" if carried.unused else ""
    return f"and {count('more link', rest)}{idle}"


def _bars(values: Values, domain: list[str], look: Look) -> list[alt.Chart]:
    most = max(value["percent"] for value in values)
    x = alt.X(
        "percent:Q",
        title="percent of what the link could have carried",
        scale=alt.Scale(domain=[0, most], nice=True, range=[0, alt.ExprRef(_ROOM)]),
    )
    base = marks(values).encode(_y(domain), look.colour(legend=False))
    tooltip = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("link:N"),
        alt.Tooltip("percent:Q", title="percent of its capacity", format=".4~g"),
        alt.Tooltip("bytes:Q", format=",d"),
    ]
    text = marks(values).mark_text(
        align="left", baseline="middle", dx=4, fontSize=10.5, color=INK_NOW
    )
    return [
        base.mark_bar(opacity=0.8, cornerRadiusEnd=2).encode(x, tooltip=tooltip),
        text.encode(x, _y(domain), text="text:N"),
    ]


def _headings(heads: Values, domain: list[str]) -> list[alt.Chart]:
    """The name of each strategy above its links, and what is not shown on the right."""
    base = marks(heads).encode(_y(domain))
    shared: dict[str, Any] = {"baseline": "middle", "fontSize": 11.5, "dy": 3, "color": INK_NOW}
    return [
        base.mark_text(align="left", **shared).encode(x=alt.value(1), text="strategy:N"),
        base.mark_text(align="right", **shared).encode(x=alt.value("width"), text="text:N"),
    ]


def _y(domain: list[str]) -> alt.Y:
    return alt.Y(
        "lane:N",
        title=None,
        scale=alt.Scale(domain=domain, paddingInner=0.15, paddingOuter=0),
        axis=alt.Axis(
            labelExpr=f"split(datum.value, '{SEPARATOR}')[1]",
            ticks=False,
            domain=False,
            labelLimit=110,
        ),
    )
