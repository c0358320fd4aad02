"""Bytes that the ranks sent, and what the links of a simulated cluster carried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from orchestra.records.record import Links
from orchestra.report.figures.frame import (
    BAR,
    INK_NOW,
    LANE,
    SEPARATOR,
    Figure,
    Look,
    Values,
    figure,
    lane,
    lane_words,
    marks,
    rounded,
)
from orchestra.report.figures.subject import FigureData
from orchestra.report.numbers import count, figure_text
from orchestra.report.rows import Row

_UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}


def traffic(subject: FigureData) -> list[Figure]:
    """Mean bytes of a run, and for each sample, by strategy."""
    rows = subject.rows
    if not any(_sent(row) for row in rows):
        return []
    caption = (
        "Payload and headers that all ranks sent while the stopwatch ran, as the mean of the "
        "seeds, and divided by the samples."
        + (" ≈: by a formula, not counted." if any(map(_estimated, rows)) else "")
    )
    look = Look({row.name: subject.styles[row.name] for row in rows})
    layers = [_bars(rows, look), *lane_words({row.name: _text(row) for row in rows})]
    return [figure("bytes-sent", "Bytes sent", caption, "traffic", layers, LANE * len(rows))]


def _bars(rows: Sequence[Row], look: Look) -> alt.Chart:
    unit = _unit(max(map(_sent, rows)))
    values = [
        {
            "strategy": row.name,
            "sent": rounded(_sent(row) / _UNITS[unit]),
            "per_sample": _per_sample(row),
            "known": "by a formula" if _estimated(row) else "counted",
        }
        for row in rows
    ]
    tooltip = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("sent:Q", title=unit, format=",.4~g"),
        alt.Tooltip("per_sample:Q", title="bytes a sample", format=",.4~g"),
        alt.Tooltip("known:N", title="how it is known"),
    ]
    bars: alt.Chart = marks(values).mark_bar(**BAR, opacity=0.8, cornerRadiusEnd=2)
    x = alt.X("sent:Q", title=f"{unit} sent in a run")
    y = lane([row.name for row in rows])
    return bars.encode(x, y, look.colour(legend=False), tooltip=tooltip)


def _unit(value: float) -> str:
    return next((unit for unit, size in _UNITS.items() if value >= size), "bytes")


def _sent(row: Row) -> float:
    return row.mean(lambda record: float(record.bytes_sent)) or 0.0


def _estimated(row: Row) -> bool:
    return any(run.record.bytes_estimated for run in row.completed)


def _per_sample(row: Row) -> float | None:
    samples = row.mean(lambda record: float(record.samples))
    return rounded(_sent(row) / samples) if samples else None


def _text(row: Row) -> str:
    """Both figures in words, each in a unit of its own."""
    sent, per_sample = _sent(row), _per_sample(row)
    if sent == 0:
        return "none"
    text = ("≈ " if _estimated(row) else "") + with_unit(sent)
    return text if per_sample is None else f"{text} · {with_unit(per_sample)} a sample"


def with_unit(value: float) -> str:
    """So many bytes, in the unit in which they are a short number."""
    unit = _unit(value)
    return figure_text(value / _UNITS[unit], unit)


MOST_LINKS = 6
"""Links of each strategy."""
_LINK_LANE = 17
_LINK_ROOM = "width - 92"
"""For bars: behind the longest are its words."""
_HEAD = ""  # what stands for a link in the lane of a heading


def links(subject: FigureData) -> list[Figure]:
    """The busiest links of each strategy, where a cluster was simulated whose links carried any."""
    found = {row.name: (row, carried) for row in subject.widest if (carried := _carried(row))}
    if not found:
        return []
    values = [value for row, carried in found.values() for value in _link_values(row, carried)]
    heads = [
        {"strategy": name, "lane": _link_lane(name, _HEAD), "text": _links_summary(carried)}
        for name, (_, carried) in found.items()
    ]
    domain = [
        _link_lane(name, link)
        for name, (_, carried) in found.items()
        for link in (_HEAD, *(link.name for link in carried.busiest[:MOST_LINKS]))
    ]
    look = Look({name: subject.styles[name] for name in found})
    layers = [*_link_bars(values, domain, look), *_link_headings(heads, domain)]
    caption = (
        "Of what each link could have carried while the stopwatch ran, the part that it did, and "
        "the bytes of the messages that crossed it (first seed). Up leads from a node or switch "
        "to the switch above, down the other way, and loopback joins the ranks of a node. "
        f"Shown are the {MOST_LINKS} busiest links of each strategy. A link that is far from 100 % "
        "may still be what everybody waits for, if it is idle while the ranks compute."
    )
    return [
        figure(
            "link-utilisation",
            "Busiest links",
            caption,
            "traffic",
            layers,
            _LINK_LANE * len(domain),
        )
    ]


def _carried(row: Row) -> Links | None:
    carried = row.completed[0].links
    return carried if carried is not None and carried.busiest else None


def _link_lane(name: str, link: str) -> str:
    return f"{name}{SEPARATOR}{link}"


def _link_values(row: Row, carried: Links) -> Values:
    return [
        {
            "strategy": row.name,
            "lane": _link_lane(row.name, link.name),
            "link": link.name,
            "percent": rounded(100 * link.share),
            "bytes": link.bytes,
            "text": f"{figure_text(100 * link.share, '%', 2)} · {with_unit(link.bytes)}",
        }
        for link in carried.busiest[:MOST_LINKS]
    ]


def _links_summary(carried: Links) -> str:
    """How the links are that are not shown."""
    rest = carried.count - min(MOST_LINKS, len(carried.busiest))
    if not rest:
        return ""
    idle = f", {carried.unused} of them unused" if carried.unused else ""
    return f"and {count('more link', rest)}{idle}"


def _link_bars(values: Values, domain: list[str], look: Look) -> list[alt.Chart]:
    most = max(value["percent"] for value in values)
    x = alt.X(
        "percent:Q",
        title="percent of what the link could have carried",
        scale=alt.Scale(domain=[0, most], nice=True, range=[0, alt.ExprRef(_LINK_ROOM)]),
    )
    base = marks(values).encode(_link_y(domain), look.colour(legend=False))
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
        text.encode(x, _link_y(domain), text="text:N"),
    ]


def _link_headings(heads: Values, domain: list[str]) -> list[alt.Chart]:
    """The name of each strategy above its links, and what is not shown on the right."""
    base = marks(heads).encode(_link_y(domain))
    shared: dict[str, Any] = {"baseline": "middle", "fontSize": 11.5, "dy": 3, "color": INK_NOW}
    return [
        base.mark_text(align="left", **shared).encode(x=alt.value(1), text="strategy:N"),
        base.mark_text(align="right", **shared).encode(x=alt.value("width"), text="text:N"),
    ]


def _link_y(domain: list[str]) -> alt.Y:
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
