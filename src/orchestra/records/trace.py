"""The timeline of a run: `trace.json.gz`, in the trace format of Chrome, which Perfetto opens too.

Each rank is a process of the trace, each of its flows a thread; times are in microseconds. The
format is described in "TraceFile Event Format", a document of the Chromium project.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestra.errors import InputError
from orchestra.records.files import TRACE, write_atomically
from orchestra.records.report import MessageKey, RankReport, Timeline, TimelineSlice
from orchestra.settings.reading import read_json

NANOSECOND = 0.001  # in microseconds
THREADS = 1000  # more than a rank has flows
MAIN = "main"  # the flow of a rank that computes; the others are background flows
Event = dict[str, Any]
Arrows = Sequence[tuple[Event, Event]]


def write_trace(folder: Path, reports: Sequence[RankReport]) -> None:
    """Write `trace.json.gz` into `folder`, unless the ranks kept no timeline."""
    events = trace_events(reports)
    if events:
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
        # Without the time of writing, equal timelines are equal files.
        write_atomically(folder / TRACE, gzip.compress(text.encode(), mtime=0))


def trace_events(reports: Sequence[RankReport]) -> list[Event]:
    """Return all events of the trace; each flow's in the order of beginnings, outer ones first."""
    traced = _on_one_clock([(r.rank, r.timeline) for r in reports if r.timeline is not None])
    sent = _sent(traced.values())
    numbers = {message: number for number, message in enumerate(sorted(sent), start=1)}
    events: list[Event] = []
    for report in reports:
        if (timeline := traced.get(report.rank)) is None:
            continue
        events += _names(report, timeline)
        slices = [part for piece in timeline.slices for part in _without_others(piece, sent)]
        for piece in sorted(slices, key=lambda piece: (piece.start, -piece.end)):
            events += _slice_events(report.rank, piece, numbers)
        for name, at, whole_run in timeline.instants:
            event = {"ph": "i", "cat": "run", "name": name, "s": "g" if whole_run else "p"}
            events.append({**event, "ts": _micros(at), **_where(report.rank, 0)})
    return events


def _on_one_clock(timelines: Sequence[tuple[int, Timeline]]) -> dict[int, Timeline]:
    """Return them by rank, in seconds since the first stopwatch on their clocks began.

    The stopwatches of a run begin together, behind a barrier: so different clocks are compared.
    """
    found = {}
    for rank, timeline in timelines:
        zero = min(other.began for _, other in timelines if other.clock == timeline.clock)
        found[rank] = replace(
            timeline,
            began=timeline.began - zero,
            slices=[s._replace(start=s.start - zero, end=s.end - zero) for s in timeline.slices],
            instants=[i._replace(at=i.at - zero) for i in timeline.instants],
        )
    return found


def _sent(timelines: Iterable[Timeline]) -> dict[MessageKey, float]:
    """Return when each message was sent, for the messages whose both ends were recorded."""
    ends: dict[str, dict[MessageKey, float]] = {"send": {}, "receive": {}}
    for timeline in timelines:
        for piece in timeline.slices:
            if piece.message is not None:
                ends[piece.category][piece.message] = piece.start
    return {message: at for message, at in ends["send"].items() if message in ends["receive"]}


def _without_others(
    piece: TimelineSlice, sent: Mapping[MessageKey, float]
) -> Iterator[TimelineSlice]:
    """Yield the slice, split where a receive began before its message was sent: until then the rank
    moved something else."""
    at = piece.start if piece.message is None else sent.get(piece.message, piece.start)
    if piece.category == "receive" and piece.start < at <= piece.end:
        step = {name: value for name, value in piece.args.items() if name == "step"}
        # In virtual time both may be rounded to the same microseconds.
        if _micros(piece.start) < _micros(at):
            yield piece._replace(name="move other messages", end=at, args=step, message=None)
        piece = piece._replace(start=at)
    yield piece


def _names(report: RankReport, timeline: Timeline) -> Iterator[Event]:
    """Yield what the rank and its flows are called, in their order, but for idle flows."""
    rank = report.rank
    about: list[tuple[int, str, dict[str, Any]]] = [
        (0, "process_name", {"name": f"rank {rank}: {report.role}"}),
        (0, "process_sort_index", {"sort_index": rank}),
    ]
    for flow in sorted({piece.flow for piece in timeline.slices}):
        about.append((flow, "thread_name", {"name": timeline.flows[flow]}))
        about.append((flow, "thread_sort_index", {"sort_index": flow}))
    for flow, name, args in about:
        yield {"ph": "M", **_where(rank, flow), "name": name, "args": args}


def _where(rank: int, flow: int) -> Event:
    """Return the numbers of process and thread.

    Thread numbers are unique in the file: Perfetto takes a thread whose number is that of its
    process for the main thread, and would mix rows of two flows.
    """
    return {"pid": rank, "tid": THREADS * (rank + 1) + flow}


def _slice_events(
    rank: int, piece: TimelineSlice, numbers: Mapping[MessageKey, int]
) -> Iterator[Event]:
    """Yield the slice, and the end of an arrow that is bound to it by lying inside."""
    where, start, end = _where(rank, piece.flow), _micros(piece.start), _micros(piece.end)
    yield {
        "ph": "X", "cat": piece.category, "name": piece.name, "ts": start,
        "dur": round(end - start, 3), "args": piece.args, **where,
    }  # fmt: skip
    if piece.message is None or piece.message not in numbers:
        return
    arrow = {"cat": "message", "name": "message", "id": numbers[piece.message], **where}
    if piece.category == "send":
        yield {"ph": "s", "ts": start, **arrow}
    else:
        # An arrow binds to the slice around its moment, and a slice does not hold its own end.
        yield {"ph": "f", "bp": "e", "ts": round(max(start, end - NANOSECOND), 3), **arrow}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


@dataclass(frozen=True)
class TraceFile:
    """A timeline, as its file has it; times are microseconds of the stopwatch.

    `parts` are the steps of the lowest rank that has any, in runs of consecutive numbers: a run has
    several where its strategy changed, for each began to be traced anew.
    """

    slices: Sequence[Event]  # the complete events
    arrows: Arrows  # the two ends of each message, both with the "slice" in which they lie
    roles: Mapping[int, str]  # the names of ranks
    flows: Mapping[tuple[int, int], str]  # and of their flows
    parts: Sequence[Sequence[Event]]


def read_trace(path: Path) -> TraceFile:
    """Read the timeline in the file at `path`; raise `InputError` if it is damaged."""
    events: list[Event] = read_json(path, dict[str, Any]).get("traceEvents", [])
    try:
        return _trace(events)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{path}: is damaged: an event lacks {error}") from None


def _trace(events: Sequence[Event]) -> TraceFile:
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
    return TraceFile(slices, arrows, roles, flows, _parts(slices))


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


def longest_waits(trace: TraceFile) -> dict[int, str]:
    """Return whom each rank's main flow waited for longest, with the part of the time it did so.

    The time is that of the steps that the timeline shows. A rank that came to serve has whom it
    waited for meanwhile, without a part.
    """
    waited: dict[int, Counter[str]] = defaultdict(Counter)
    serving: dict[int, Counter[str]] = defaultdict(Counter)
    spans: Counter[int] = Counter()
    for event in trace.slices:
        rank = event["pid"]
        if event["cat"] == "step":
            spans[rank] += event["dur"]
        elif event["cat"] == "wait" and trace.flows.get((rank, event["tid"])) == MAIN:
            whom = event["name"].removeprefix("wait for ").removeprefix("rank ")
            (waited if "step" in event["args"] else serving)[rank][whom] += event["dur"]
    found = {}
    for rank, whoms in waited.items():
        whom, most = whoms.most_common(1)[0]
        found[rank] = f"{whom} ({most / spans[rank]:.0%})" if spans[rank] else whom
    return found | {rank: whoms.most_common(1)[0][0] for rank, whoms in serving.items()}
