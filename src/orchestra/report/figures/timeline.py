"""Figures of a timeline: a few steps rank by rank, with their waits and messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import altair as alt

from orchestra.records.record import RunRecord
from orchestra.records.trace import MAIN, Arrows, Event, TraceFile
from orchestra.report.figures import frame
from orchestra.report.figures.frame import Figure, Values, figure, layer, tips
from orchestra.report.rows import Row
from orchestra.report.study import Study

_STEPS = 3
_ROOM = 1500  # the most pieces and messages that a window may hold before it is made shorter
# Waiting is palest, and its bars are thin, so that it shows without colour, too.
_COLOURS = {
    "compute": "#0072B2", "send": "#D55E00", "receive": "#E9B44C", "native": "#009E73",
    "wait": "#bdbdbd",
}  # fmt: skip
_LANE = 34
Lanes = Mapping[tuple[int, int], str]


@dataclass(frozen=True)
class Window:
    """The activity of the ranks from `start` to `end`, in microseconds of the stopwatch."""

    start: float
    end: float
    first: int  # step of the lowest rank with any
    last: int
    pieces: Sequence[Event]  # the complete events but for steps
    ends: Sequence[Event]  # steps
    messages: Arrows


def step_windows(trace: TraceFile) -> list[Window]:
    """Return three steps from the middle of each traced part, or fewer with too many events."""
    return [_window(trace, part) for part in trace.parts]


def _window(trace: TraceFile, part: Sequence[Event]) -> Window:
    """Return three steps from the middle of `part`, or fewer with too many events."""
    # Thousands of messages in a step would be a grey surface, and megabytes in the page
    for steps in range(min(_STEPS, len(part)), 0, -1):
        at = (len(part) - steps) // 2
        first, last = part[at], part[at + steps - 1]
        window = _cut(trace, first, last, last["ts"] + last["dur"])
        if len(window.pieces) + len(window.messages) <= _ROOM:
            return window
    # as much of the beginning as there is room for
    times = sorted([e["ts"] for e in window.pieces] + [s["ts"] for s, _ in window.messages])
    return _cut(trace, first, last, times[_ROOM])


def _cut(trace: TraceFile, first: Event, last: Event, end: float) -> Window:
    """Return all that overlaps the time between the beginning of the step `first` and `end`."""
    start = first["ts"]
    inside = [e for e in trace.slices if e["ts"] < end and e["ts"] + e["dur"] > start]
    pieces, ends = ([e for e in inside if (e["cat"] == "step") is step] for step in (False, True))
    # Of messages both ends have to lie inside: a line to beyond the edge would lead nowhere
    messages = [
        (sent, got) for sent, got in trace.arrows if start <= sent["ts"] and got["ts"] <= end
    ]
    return Window(start, end, first["args"]["step"], last["args"]["step"], pieces, ends, messages)


def timelines(study: Study) -> Iterator[Figure]:
    """Yield the middle of each strategy's traced steps, with the first seed; two if it switched."""
    for row in study.widest:
        # Lazily: a timeline takes long to read, and the first one is drawn
        found = ((run.record, trace) for run in row.completed if (trace := run.timeline))
        for record, trace in islice(found, 1):
            windows = [window for window in step_windows(trace) if window.pieces]
            for part, window in enumerate(windows, start=1):
                suffix = f"-{part}" if len(windows) > 1 else ""
                yield _timeline(row, record, trace, window, suffix)


def _phase_text(record: RunRecord, step: int) -> str:
    """Return the end of a title: before or after the switch `step` was; empty without a switch."""
    if record.switching.at_step is None:
        return ""
    return f", {'before' if step <= record.switching.at_step else 'after'} the switch"


def _timeline(row: Row, record: RunRecord, trace: TraceFile, window: Window, suffix: str) -> Figure:
    lanes, steps = _lanes(trace, window), f"step {window.first}"
    if window.last > window.first:
        steps = f"steps {window.first} to {window.last}"
    caption = (
        f"What each rank did in {steps} (seed {record.asked.seed}). A line leads from the sending "
        "of a message to its receipt; a thin pale bar is a rank that waits for one. Where ranks "
        "share cores, a piece also lasts while another rank has the core."
    )
    title = f"{row.name}: {steps}{_phase_text(record, window.last)}"
    layers, height = _layers(row.name, window, lanes), _LANE * len({*lanes.values()})
    return figure(f"timeline-{row.name}{suffix}", title, caption, "timeline", layers, height)


def _lanes(trace: TraceFile, window: Window) -> Lanes:
    """Return by rank and flow the name of its lane, from the top.

    Background flows of one name share a lane: many follow each other.
    """
    # A rank may work in one phase and serve in the other
    working = {event["pid"] for event in window.ends}  # in this part of the run
    serving = {rank for rank, role in trace.roles.items() if role.endswith("server")} - working
    names = {}
    for rank, flow in sorted({(event["pid"], event["tid"]) for event in window.pieces}):
        name = trace.flows.get((rank, flow), MAIN)
        role = " server" if rank in serving else ""
        names[rank, flow] = f"{rank}{role}" if name == MAIN else f"{rank} {name}"
    return names


def _layers(strategy: str, window: Window, lanes: Lanes) -> list[alt.Chart]:
    """Draw the pieces, outer ones first, so that inner ones lie on top; the ends of steps; and a
    line from each send to its receipt, with a point at its end."""
    names = list(dict.fromkeys(lanes.values()))
    axis = alt.Axis(ticks=False, domain=False, labelPadding=6, labelLimit=90)
    scale = alt.Scale(domain=names, paddingInner=0.25, paddingOuter=0.1)
    y = alt.Y("lane:N", title="rank", scale=scale, axis=axis)
    title = f"milliseconds after {window.start / 1e6:.4g} s of training"
    across = alt.Scale(nice=False, domain=[0, (window.end - window.start) / 1000])
    x = alt.X("start:Q", title=title, scale=across)
    tooltip = tips(("lane:N", "rank"), "what:N", ("took:Q", "milliseconds", ".3~g"))
    pieces, gaps, messages = _values(strategy, window, lanes)
    columns = alt.ExprRef("max(2, floor(room / 95))")
    colour = frame.kinds("kind", pieces, _COLOURS, columns)
    channels = x, alt.X2("end:Q"), y, colour, tooltip
    waits = layer(pieces, "bar", *channels, clip=True, height=9)
    busy = layer(pieces, "bar", *channels, clip=True)
    line = x, alt.X2("end:Q"), y, alt.Y2("to:N")
    look: dict[str, Any] = {"clip": True, "color": frame.INK_NOW}
    tip = {"filled": True, "size": 12, "opacity": 0.8, **look}
    return [
        frame.zoomable(waits.transform_filter("datum.kind === 'wait'"), ["x"]),
        busy.transform_filter("datum.kind !== 'wait'"),
        layer(gaps, "tick", x, y, clip=True, thickness=2, color=frame.GROUND),
        layer(messages, "rule", *line, strokeWidth=0.9, opacity=0.6, **look),
        layer(messages, "point", alt.X("end:Q"), alt.Y("to:N"), **tip),
    ]


def _values(strategy: str, window: Window, lanes: Lanes) -> tuple[Values, Values, Values]:
    """Return the pieces, the ends of steps and the messages, in milliseconds of the window."""

    def place(begin: Event, start: float, end: float) -> dict[str, Any]:
        lane = lanes[begin["pid"], begin["tid"]]
        at = {"start": (start - window.start) / 1000, "end": (end - window.start) / 1000}
        return {"strategy": strategy, "lane": lane, **at}

    pieces = [
        {
            **place(event, event["ts"], event["ts"] + event["dur"]),
            "kind": event["cat"], "what": event["name"], "took": event["dur"] / 1000,
        }
        for event in window.pieces
    ]  # fmt: skip
    ends = [(str(event["pid"]), event["ts"] + event["dur"]) for event in window.ends]
    gaps = [
        {"strategy": strategy, "lane": lane, "start": (end - window.start) / 1000}
        for lane, end in ends
        # A rank whose main flow did nothing in the window has no lane to mark
        if end <= window.end and lane in lanes.values()
    ]
    messages = [
        {**place(sent, sent["ts"], got["ts"]), "to": lanes[got["pid"], got["tid"]]}
        for sent, got in window.messages
        if (sent["pid"], sent["tid"]) in lanes and (got["pid"], got["tid"]) in lanes
    ]
    return pieces, gaps, messages
