"""The timeline of a run, in the trace format of Chrome, which Perfetto opens too: `trace.json.gz`.

Each rank is a process of the trace, each of its flows a thread; times are in microseconds. The
format is described in "Trace Event Format", a document of the Chromium project.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestra.records.record import write_atomically
from orchestra.records.report import Message, RankReport, Slice, Timeline

FILE = "trace.json.gz"
NANOSECOND = 0.001  # in microseconds
THREADS = 1000  # more than a rank has flows

Event = dict[str, Any]


def write_trace(folder: Path, reports: Sequence[RankReport]) -> None:
    """Write `trace.json.gz` into `folder`, unless the ranks kept no timeline."""
    events = trace_events(reports)
    if events:
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
        write_atomically(folder / FILE, gzip.compress(text.encode(), mtime=0))


def trace_events(reports: Sequence[RankReport]) -> list[Event]:
    """All events of the trace; of each flow in the order of their beginnings, outer ones first."""
    traced = _on_one_clock([(r.rank, r.timeline) for r in reports if r.timeline is not None])
    sent = _sent(traced.values())
    numbers = {message: number for number, message in enumerate(sorted(sent), start=1)}
    events: list[Event] = []
    for report in reports:
        if report.rank not in traced:
            continue
        timeline = traced[report.rank]
        events += _names(report, timeline)
        slices = [part for piece in timeline.slices for part in _without_others(piece, sent)]
        for piece in sorted(slices, key=lambda piece: (piece.start, -piece.end)):
            events += _slice_events(report.rank, piece, numbers)
        for name, at, whole_run in timeline.instants:
            scope, where = "g" if whole_run else "p", _where(report.rank, 0)
            event = {"ph": "i", "cat": "run", "name": name, "s": scope, "ts": _micros(at)}
            events.append({**event, **where})
    return events


def _on_one_clock(timelines: Sequence[tuple[int, Timeline]]) -> dict[int, Timeline]:
    """Return them by rank, in seconds since the first stopwatch on their clocks began.

    The stopwatches of a run begin together, behind a barrier: so different clocks are compared.
    """
    zeros: dict[str, float] = {}
    for _, timeline in timelines:
        zeros[timeline.clock] = min(timeline.began, zeros.get(timeline.clock, timeline.began))
    found = {}
    for rank, timeline in timelines:
        zero = zeros[timeline.clock]
        found[rank] = replace(
            timeline,
            began=timeline.began - zero,
            slices=[s._replace(start=s.start - zero, end=s.end - zero) for s in timeline.slices],
            instants=[i._replace(at=i.at - zero) for i in timeline.instants],
        )
    return found


def _sent(timelines: Iterable[Timeline]) -> dict[Message, float]:
    """Return when each message was sent, of those of which both ends were written down."""
    ends: dict[str, dict[Message, float]] = {"send": {}, "receive": {}}
    for timeline in timelines:
        for piece in timeline.slices:
            if piece.message is not None:
                ends[piece.category][piece.message] = piece.start
    return {message: at for message, at in ends["send"].items() if message in ends["receive"]}


def _without_others(piece: Slice, sent: Mapping[Message, float]) -> Iterator[Slice]:
    """Yield the slice, split where a receive began before its message was sent: until then the rank
    moved something else."""
    at = piece.start if piece.message is None else sent.get(piece.message, piece.start)
    if piece.category == "receive" and piece.start < at <= piece.end:
        step = {name: value for name, value in piece.args.items() if name == "step"}
        if _micros(piece.start) < _micros(at):  # in virtual time a rounding may lie between
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
    """Return process and thread numbers; those of threads have to be unique in Perfetto."""
    return {"pid": rank, "tid": THREADS * (rank + 1) + flow}


def _slice_events(rank: int, piece: Slice, numbers: Mapping[Message, int]) -> Iterator[Event]:
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
        inside = round(max(start, end - NANOSECOND), 3)
        yield {"ph": "f", "bp": "e", "ts": inside, **arrow}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
