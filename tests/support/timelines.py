"""Timelines that runs left, and what holds for all of them."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.training import settings, train_processes

from orchestra.records.files import TRACE
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES

OTHERS = "move other messages"
Event = dict[str, Any]
REQUIRED = {
    "M": {"pid", "tid", "name", "args"},
    "X": {"pid", "tid", "name", "cat", "ts", "dur", "args"},
    "s": {"pid", "tid", "name", "cat", "ts", "id"},
    "f": {"pid", "tid", "name", "cat", "ts", "id", "bp"},
    "i": {"pid", "tid", "name", "cat", "ts", "s"},
}
CATEGORIES = {"compute", "send", "receive", "wait", "native", "step"}


@dataclass(frozen=True)
class Trace:
    """A trace as its file has it."""

    events: list[Event]

    def slices(self, *categories: str, rank: int | None = None) -> list[Event]:
        return [
            event
            for event in self.events
            if event["ph"] == "X"
            and event["cat"] in (categories or CATEGORIES)
            and rank in (None, event["pid"])
        ]

    def received(self, rank: int | None = None) -> list[Event]:
        """The receives of messages."""
        receives = self.slices("receive", rank=rank)
        return [event for event in receives if event["name"] != OTHERS]

    def names(self, what: str) -> set[str]:
        """Of the processes or threads."""
        return {e["args"]["name"] for e in self.events if e["name"] == f"{what}_name"}

    def arrows(self) -> Iterator[tuple[Event, Event]]:
        """The slices that each arrow comes from and goes to."""
        ends: dict[int, dict[str, Event]] = defaultdict(dict)
        for event in self.events:
            if event["ph"] in "sf":
                assert event["ph"] not in ends[event["id"]], "an arrow has two ends"
                ends[event["id"]][event["ph"]] = self._around(event)
        return ((both["s"], both["f"]) for both in ends.values())

    def _around(self, point: Event) -> Event:
        """The innermost slice that a viewer binds the end of an arrow to."""
        around = [
            event
            for event in self.slices()
            if (event["pid"], event["tid"]) == (point["pid"], point["tid"])
            and event["ts"] <= point["ts"] < event["ts"] + max(event["dur"], 0.001)
        ]
        return max(around, key=lambda event: (event["ts"], -event["dur"]))


def traced(strategy: str, ranks: int, folder: Path, **training: Any) -> Trace:
    """The trace of a training on real processes."""
    chosen = parse(strategy, STRATEGIES, where="test")
    training = {"steps": 12, "trace_steps": 5, **training}
    train_processes(settings(chosen, ranks, "images(samples=400, model='cnn')", **training), folder)
    return read(folder)


def read(folder: Path) -> Trace:
    content = json.loads(gzip.decompress((folder / TRACE).read_bytes()))
    return Trace(content["traceEvents"])


def assert_well_formed(trace: Trace) -> None:
    """By the rules of the format, and readable: slices of a thread lie in each other or apart."""
    for event in trace.events:
        assert event.keys() - {"ph"} == REQUIRED[event["ph"]], event
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in trace.slices():
        assert event["cat"] in CATEGORIES
        assert event["dur"] >= 0
        threads[event["pid"], event["tid"]].append(event)
    assert len({tid for _, tid in threads}) == len(threads), "Perfetto mixes them up otherwise"
    named = {(e["pid"], e["tid"]) for e in trace.events if e["name"] == "thread_name"}
    assert named == set(threads)
    for thread in threads.values():
        assert_nested(thread)


def assert_nested(thread: list[Event]) -> None:
    """In the order of the file, which has to be that of the beginnings, outer slices first."""
    open_until = [float("inf")]
    last = float("-inf")
    for event in thread:
        start, end = event["ts"], event["ts"] + event["dur"]
        assert start >= last
        last = start
        while start >= open_until[-1] - 0.001:
            open_until.pop()
        assert end <= open_until[-1] + 0.001, f"{event} overlaps another slice"
        open_until.append(end)


def assert_matched(trace: Trace, *, all_of_them: bool) -> None:
    """Every receive has one send with as many bytes, and no arrow goes back in time."""
    arrows = list(trace.arrows())
    for send, receive in arrows:
        assert (send["cat"], receive["cat"]) == ("send", "receive")
        assert send["args"]["peer"] == receive["pid"]
        assert receive["args"]["peer"] == send["pid"]
        for what in ("payload_bytes", "tag"):
            assert send["args"][what] == receive["args"][what]
        assert send["ts"] <= receive["ts"]
    if all_of_them:
        begun = [event for event in trace.slices("send") if "bytes_sent" in event["args"]]
        assert len(arrows) == len(trace.received()) == len(begun)
