"""What figures show of the timeline that a run left: a few steps rank by rank, who waits for whom;
and who sent whom how much in one step."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import altair as alt

from orchestra.errors import InputError
from orchestra.records.record import RunRecord
from orchestra.report.figures.frame import (
    GROUND,
    INK_NOW,
    Figure,
    Values,
    figure,
    layer,
    tips,
    zoomable,
)
from orchestra.report.rows import Row
from orchestra.report.study import Study

Event = dict[str, Any]
Arrows = Sequence[tuple[Event, Event]]


@dataclass(frozen=True)
class Trace:
    """A timeline, as its file has it; times are microseconds of the stopwatch.

    `slices` are the complete events, `arrows` the two ends of each message, both with the "slice"
    in which they lie; `roles` and `flows` are the names of ranks and of their flows. `parts` are
    the steps of the lowest rank that has any, in runs of consecutive numbers: a run has several
    where its strategy changed, for each began to be traced anew.
    """

    slices: Sequence[Event]
    arrows: Arrows
    roles: Mapping[int, str]
    flows: Mapping[tuple[int, int], str]
    parts: Sequence[Sequence[Event]]


def read_trace(path: Path) -> Trace:
    """Read the timeline in the file at `path`.

    Raises:
        InputError: the file is damaged.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events: list[Event] = json.load(file)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise InputError(f"{path}: is damaged: {error}") from None
    slices: list[Event] = []
    ends: dict[int, dict[str, Event]] = defaultdict(dict)
    roles: dict[int, str] = {}
    flows: dict[tuple[int, int], str] = {}
    for event in events:
        if event["ph"] == "X":
            slices.append(event)
        elif event["ph"] in "sf":  # it stands behind its slice
            ends[event["id"]][event["ph"]] = {**event, "slice": slices[-1]}
        elif event["ph"] == "M" and event["name"] == "process_name":
            roles[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            flows[event["pid"], event["tid"]] = event["args"]["name"]
    arrows = [(both["s"], both["f"]) for both in ends.values() if len(both) == 2]
    return Trace(slices, arrows, roles, flows, _parts(slices))


def _parts(slices: Sequence[Event]) -> list[list[Event]]:
    steps = [event for event in slices if event["cat"] == "step" and "step" in event["args"]]
    lowest = min((event["pid"] for event in steps), default=None)
    parts: list[list[Event]] = []
    for event in sorted((e for e in steps if e["pid"] == lowest), key=lambda e: e["ts"]):
        if parts and event["args"]["step"] == parts[-1][-1]["args"]["step"] + 1:
            parts[-1].append(event)
        else:
            parts.append([event])
    return parts


# A few steps

_STEPS = 3
_ROOM = 1500
"""The most pieces and messages that a window may hold before it is made shorter."""


@dataclass(frozen=True)
class Window:
    """What the ranks did from `start` to `end`, in microseconds of the stopwatch.

    `pieces` are the trace's complete events, `ends` those among them that are ends of steps,
    `messages` the two ends of each arrow. `first` and `last` are steps of the lowest rank that has
    any.
    """

    start: float
    end: float
    first: int
    last: int
    pieces: Sequence[Event] = field(default_factory=list)
    ends: Sequence[Event] = field(default_factory=list)
    messages: Arrows = field(default_factory=list)


def step_windows(trace: Trace) -> list[Window]:
    """From the middle of each traced part of a run, about three steps: the longest window of up to
    so many that has not too much in it."""
    return [_window(trace, part) for part in trace.parts]


def _window(trace: Trace, part: Sequence[Event]) -> Window:
    for steps in range(min(_STEPS, len(part)), 0, -1):
        at = (len(part) - steps) // 2
        window = _cut(trace, part[at], part[at + steps - 1])
        if len(window.pieces) + len(window.messages) <= _ROOM:
            return window
    # as much of the beginning as there is room for
    times = sorted([e["ts"] for e in window.pieces] + [s["ts"] for s, _ in window.messages])
    end = times[_ROOM]
    return replace(
        window,
        end=end,
        pieces=[event for event in window.pieces if event["ts"] < end],
        messages=[(sent, got) for sent, got in window.messages if got["ts"] <= end],
    )


def _cut(trace: Trace, first: Event, last: Event) -> Window:
    """Return what lies at least in part between the beginning of `first` and the end of `last`."""
    start, end = first["ts"], last["ts"] + last["dur"]
    inside = [e for e in trace.slices if e["ts"] < end and e["ts"] + e["dur"] > start]
    return Window(
        start,
        end,
        first["args"]["step"],
        last["args"]["step"],
        [event for event in inside if event["cat"] != "step"],
        [event for event in inside if event["cat"] == "step"],
        [(sent, got) for sent, got in trace.arrows if start <= sent["ts"] and got["ts"] <= end],
    )


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
Lanes = Mapping[tuple[int, int], str]


def timelines(study: Study) -> list[Figure]:
    """For each strategy the middle of what was traced of its first seed; a switch has two parts."""
    found = []
    for row in study.widest:
        for run in [run for run in row.completed if run.trace is not None][:1]:
            assert run.trace is not None
            trace = read_trace(run.trace)
            windows = [window for window in step_windows(trace) if window.pieces]
            for part, window in enumerate(windows, start=1):
                suffix = f"-{part}" if len(windows) > 1 else ""
                found.append(_timeline(row, run.record, trace, window, suffix))
    return found


def phase_text(record: RunRecord, step: int) -> str:
    """Whether `step` was before the switch of a run, behind a title; empty without a switch."""
    if record.switched_at_step is None:
        return ""
    return f", {'before' if step <= record.switched_at_step else 'after'} the switch"


def _timeline(row: Row, record: RunRecord, trace: Trace, window: Window, suffix: str) -> Figure:
    lanes = _lanes(trace, window)
    steps = f"step {window.first}"
    if window.last > window.first:
        steps = f"steps {window.first} to {window.last}"
    caption = (
        f"What each rank did in {steps} (seed {record.seed}). A line leads from the sending of "
        "a message to its receipt; a thin pale bar is a rank that waits for one. Where ranks "
        "share cores, a piece also lasts while another rank has the core."
    )
    return figure(
        f"timeline-{row.name}{suffix}",
        f"{row.name}: {steps}{phase_text(record, window.last)}",
        caption,
        "timeline",
        list(_layers(row.name, window, lanes)),
        _LANE * len({*lanes.values()}),
    )


def _lanes(trace: Trace, window: Window) -> Lanes:
    """Return by rank and flow the name of its lane, from the top.

    Background flows of one name share a lane: many follow each other.
    """
    working = {event["pid"] for event in window.ends}  # in this part of the run
    serving = {rank for rank, role in trace.roles.items() if role.endswith("server")} - working
    names = {}
    for rank, flow in sorted({(event["pid"], event["tid"]) for event in window.pieces}):
        name = trace.flows.get((rank, flow), _MAIN)
        role = " server" if rank in serving else ""
        names[rank, flow] = f"{rank}{role}" if name == _MAIN else f"{rank} {name}"
    return names


def _layers(strategy: str, window: Window, lanes: Lanes) -> Iterator[alt.Chart]:
    """Draw the pieces, outer ones first, so that what happened inside them lies on top; the ends of
    steps; and a line from each sending to its receipt, with a point where it ends."""
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
    used = [kind for kind in _COLOURS if any(event["cat"] == kind for event in window.pieces)]
    legend = alt.Legend(
        title=None, symbolType="square", columns=alt.ExprRef("max(2, floor(room / 95))")
    )
    scale = alt.Scale(domain=used, range=[_COLOURS[kind] for kind in used])
    colour = alt.Color("kind:N", scale=scale, legend=legend)
    tooltip = tips(("lane:N", "rank"), "what:N", ("took:Q", "milliseconds", ".3~g"))
    pieces = _pieces(strategy, window, lanes)
    channels = x, alt.X2("end:Q"), y, colour, tooltip
    waits = layer(pieces, "bar", *channels, clip=True, height=9)
    yield zoomable(waits.transform_filter("datum.kind === 'wait'"), ["x"])
    busy = layer(pieces, "bar", *channels, clip=True)
    yield busy.transform_filter("datum.kind !== 'wait'")
    ends = [(str(event["pid"]), event["ts"] + event["dur"]) for event in window.ends]
    gaps = [
        {"strategy": strategy, "lane": lane, "start": _milliseconds(end - window.start)}
        for lane, end in ends
        if end <= window.end and lane in lanes.values()
    ]
    yield layer(gaps, "tick", x, y, clip=True, thickness=2, color=GROUND)
    if messages := _messages(strategy, window, lanes):
        look: dict[str, Any] = {"clip": True, "color": INK_NOW}
        ends_of_line = x, alt.X2("end:Q"), y, alt.Y2("to:N")
        yield layer(messages, "rule", *ends_of_line, strokeWidth=0.9, opacity=0.6, **look)
        tip = alt.X("end:Q"), alt.Y("to:N")
        yield layer(messages, "point", *tip, filled=True, size=12, opacity=0.8, **look)


def _pieces(strategy: str, window: Window, lanes: Lanes) -> Values:
    return [
        {
            "strategy": strategy,
            "lane": lanes[event["pid"], event["tid"]],
            "kind": event["cat"],
            "what": event["name"],
            "start": _milliseconds(event["ts"] - window.start),
            "end": _milliseconds(event["ts"] + event["dur"] - window.start),
            "took": _milliseconds(event["dur"]),
        }
        for event in window.pieces
    ]


def _messages(strategy: str, window: Window, lanes: Lanes) -> Values:
    return [
        {
            "strategy": strategy,
            "lane": lanes[sent["pid"], sent["tid"]],
            "to": lanes[got["pid"], got["tid"]],
            "start": _milliseconds(sent["ts"] - window.start),
            "end": _milliseconds(got["ts"] - window.start),
        }
        for sent, got in window.messages
        if (sent["pid"], sent["tid"]) in lanes and (got["pid"], got["tid"]) in lanes
    ]


def _milliseconds(micros: float) -> float:
    return round(micros / 1000, 4)


# The messages of one step

_SAME = 0.01
"""Of an exchange: arrows that begin within such a part of it begin together."""
_FULL = 0.9
"""Of the most bytes of a step: one with as many is no step in between two exchanges."""


@dataclass(frozen=True)
class Arrow:
    """All messages from rank `source` to rank `target`.

    `bytes` are those of payload and headers. `first` is when the first one was sent, in seconds
    after the first of all, and `place` that in the order in which arrows begin, from 1; arrows that
    begin together share it.
    """

    source: int
    target: int
    count: int
    bytes: int
    first: float
    place: int


@dataclass(frozen=True)
class Exchange:
    """What the ranks sent each other in their step `step`; `seconds` from the first sending to the
    last receipt. `servers` are ranks that had no step of their own."""

    step: int
    seconds: float
    arrows: Sequence[Arrow]
    servers: frozenset[int]


def exchanges(trace: Trace) -> list[Exchange]:
    """Of each traced part of a run the step in its middle, or the nearest one with about as many
    bytes as any. There is none of a part without messages.

    A message between ranks belongs to a step of the rank that sent or, where that one serves and
    has none, of the rank that received.
    """
    by_step: dict[int, list[tuple[Event, Event]]] = defaultdict(list)
    for arrow in trace.arrows:
        sent, got = arrow[0]["slice"], arrow[1]["slice"]
        step = sent["args"].get("step", got["args"].get("step"))
        if sent["pid"] != got["pid"] and step is not None:
            by_step[step].append((sent, got))
    size = {
        step: sum(sent["args"]["bytes_sent"] for sent, _ in messages)
        for step, messages in by_step.items()
    }
    working = {event["pid"] for event in trace.slices if event["cat"] == "step"}
    found = []
    for part in trace.parts:
        steps = [event["args"]["step"] for event in part]
        most, middle = max(size.get(step, 0) for step in steps), steps[(len(steps) - 1) // 2]
        if most:
            full = [step for step in steps if size.get(step, 0) >= _FULL * most]
            step = min(full, key=lambda step, middle=middle: abs(step - middle))  # type: ignore[misc]
            found.append(_exchange(step, by_step[step], working))
    return found


def _exchange(step: int, messages: Arrows, working: set[int]) -> Exchange:
    begin = min(sent["ts"] for sent, _ in messages)
    end = max(got["ts"] + got["dur"] for _, got in messages)
    counts: Counter[tuple[int, int]] = Counter()
    sizes: Counter[tuple[int, int]] = Counter()
    firsts: dict[tuple[int, int], float] = {}
    for sent, got in sorted(messages, key=lambda message: message[0]["ts"]):
        pair = sent["pid"], got["pid"]
        counts[pair] += 1
        sizes[pair] += sent["args"]["bytes_sent"]
        firsts.setdefault(pair, sent["ts"] - begin)
    arrows: list[Arrow] = []
    place, before = 0, float("-inf")
    for pair, first in firsts.items():
        if first - before > _SAME * (end - begin):
            place, before = place + 1, first
        arrows.append(Arrow(*pair, counts[pair], sizes[pair], first / 1e6, place))
    taking_part = {rank for pair in firsts for rank in pair}
    return Exchange(step, (end - begin) / 1e6, arrows, frozenset(taking_part - working))
