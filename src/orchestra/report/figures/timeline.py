"""A few steps of each strategy, rank by rank: who waits for whom."""

from __future__ import annotations

import altair as alt

from orchestra.records.record import RunRecord
from orchestra.report.figures.frame import INK_NOW, Figure, Values, figure, marks, zoomable
from orchestra.report.figures.subject import FigureData
from orchestra.report.figures.trace import Window, step_windows
from orchestra.report.rows import Row

# Waiting is palest, and its bars are thin, so that it shows without colour, too.
_COLOURS = {
    "compute": "#0072B2",
    "send": "#D55E00",
    "receive": "#E9B44C",
    "native": "#009E73",
    "wait": "#bdbdbd",
}
_LANE = 34
_MAIN = "main"
"""The flow of a rank that computes; the others are background flows."""


def timelines(subject: FigureData) -> list[Figure]:
    """For each strategy the middle of what was traced of its first seed; a switch has two parts."""
    return [found for row in subject.widest for found in _of_row(row)]


def _of_row(row: Row) -> list[Figure]:
    traced = [run for run in row.completed if run.trace is not None]
    if not traced:
        return []
    assert traced[0].trace is not None
    found = [window for window in step_windows(traced[0].trace) if window.pieces]
    return [
        _timeline(row, traced[0].record, window, part if len(found) > 1 else 0)
        for part, window in enumerate(found, start=1)
    ]


def _timeline(row: Row, record: RunRecord, window: Window, part: int) -> Figure:
    lanes = _lanes(window)
    steps = f"step {window.first}"
    if window.last > window.first:
        steps = f"steps {window.first} to {window.last}"
    suffix = f"-{part}" if part else ""
    phase = ""
    if record.switched_at_step is not None:
        phase = f", {'before' if window.last <= record.switched_at_step else 'after'} the switch"
    return figure(
        f"timeline-{row.name}{suffix}",
        f"{row.name}: {steps}{phase}",
        (
            f"What each rank did in {steps} (seed {record.seed}). A line leads from the sending of "
            "a message to its receipt; a thin pale bar is a rank that waits for one. Where ranks "
            "share cores, a piece also lasts while another rank has the core."
        ),
        "timeline",
        _layers(row, window, lanes),
        _LANE * len({*lanes.values()}),
    )


def _layers(row: Row, window: Window, lanes: dict[tuple[int, int], str]) -> list[alt.Chart]:
    y = alt.Y(
        "lane:N",
        title="rank",
        scale=alt.Scale(
            domain=[*dict.fromkeys(lanes.values())], paddingInner=0.25, paddingOuter=0.1
        ),
        axis=alt.Axis(ticks=False, domain=False, labelPadding=6, labelLimit=90),
    )
    x = alt.X(
        "start:Q",
        title=f"milliseconds after {window.start / 1e6:.4g} s of training",
        scale=alt.Scale(nice=False, domain=[0, _milliseconds(window.end - window.start)]),
    )
    tooltip = [
        alt.Tooltip("lane:N", title="rank"),
        alt.Tooltip("what:N"),
        alt.Tooltip("took:Q", title="milliseconds", format=".3~g"),
    ]
    pieces = marks(_pieces(row, window, lanes)).encode(
        x, alt.X2("end:Q"), y, _colour(window), tooltip=tooltip
    )
    busy = pieces.transform_filter("datum.kind !== 'wait'").mark_bar(clip=True)
    waits = pieces.transform_filter("datum.kind === 'wait'").mark_bar(clip=True, height=9)
    ends = marks(_ends(row, window, lanes)).encode(x, y)
    gaps = ends.mark_tick(clip=True, thickness=2, color=alt.ExprRef("ground"))
    return [zoomable(waits, ["x"]), busy, gaps, *_arrows(row, window, lanes, x, y)]


def _colour(window: Window) -> alt.Color:
    """By category, for those that occur."""
    used = [kind for kind in _COLOURS if any(event["cat"] == kind for event in window.pieces)]
    columns = alt.ExprRef("max(2, floor(room / 95))")
    return alt.Color(
        "kind:N",
        scale=alt.Scale(domain=used, range=[_COLOURS[kind] for kind in used]),
        legend=alt.Legend(title=None, symbolType="square", columns=columns),
    )


def _arrows(
    row: Row, window: Window, lanes: dict[tuple[int, int], str], x: alt.X, y: alt.Y
) -> list[alt.Chart]:
    """From each sending to its receipt; a point is where it ends."""
    values = _messages(row, window, lanes)
    if not values:
        return []
    base = marks(values)
    line = base.mark_rule(clip=True, strokeWidth=0.9, opacity=0.6, color=INK_NOW)
    point = base.mark_point(clip=True, filled=True, size=12, opacity=0.8, color=INK_NOW)
    return [
        line.encode(x, alt.X2("end:Q"), y, alt.Y2("to:N")),
        point.encode(alt.X("end:Q"), alt.Y("to:N")),
    ]


def _lanes(window: Window) -> dict[tuple[int, int], str]:
    """By rank and flow, the name of its lane, from the top.

    Background flows of one name share a lane: many follow each other.
    """
    working = {event["pid"] for event in window.ends}  # in this part of the run
    serving = {rank for rank, role in window.roles.items() if role.endswith("server")} - working
    names = {}
    for rank, flow in sorted({(event["pid"], event["tid"]) for event in window.pieces}):
        name = window.flows.get((rank, flow), _MAIN)
        role = " server" if rank in serving else ""
        names[rank, flow] = f"{rank}{role}" if name == _MAIN else f"{rank} {name}"
    return names


def _pieces(row: Row, window: Window, lanes: dict[tuple[int, int], str]) -> Values:
    """Outer ones come first, so that what happened inside them lies on top."""
    return [
        {
            "strategy": row.name,
            "lane": lanes[event["pid"], event["tid"]],
            "kind": event["cat"],
            "what": event["name"],
            "start": _at(event["ts"], window),
            "end": _at(event["ts"] + event["dur"], window),
            "took": _milliseconds(event["dur"]),
        }
        for event in window.pieces
    ]


def _ends(row: Row, window: Window, lanes: dict[tuple[int, int], str]) -> Values:
    """The ends of the steps, in the lanes of their ranks."""
    ends = [(str(event["pid"]), event["ts"] + event["dur"]) for event in window.ends]
    return [
        {"strategy": row.name, "lane": lane, "start": _at(end, window)}
        for lane, end in ends
        if end <= window.end and lane in lanes.values()
    ]


def _messages(row: Row, window: Window, lanes: dict[tuple[int, int], str]) -> Values:
    return [
        {
            "strategy": row.name,
            "lane": lanes[sent["pid"], sent["tid"]],
            "to": lanes[got["pid"], got["tid"]],
            "start": _at(sent["ts"], window),
            "end": _at(got["ts"], window),
        }
        for sent, got in window.messages
        if (sent["pid"], sent["tid"]) in lanes and (got["pid"], got["tid"]) in lanes
    ]


def _at(micros: float, window: Window) -> float:
    return _milliseconds(micros - window.start)


def _milliseconds(micros: float) -> float:
    return round(micros / 1000, 4)
