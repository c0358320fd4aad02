"""What figures show of the timeline that a run left: a few steps, and the messages of one."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from orchestra.errors import InputError

_STEPS = 3
_ROOM = 1500
"""The most pieces and messages that a window may hold before it is made shorter."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Window:
    """What the ranks did from `start` to `end`, in microseconds of the stopwatch.

    `pieces` are the trace's complete events, `ends` those among them that are ends of steps,
    `messages` the two ends of each arrow; `roles` and `flows` are the names of ranks and of their
    flows. `first` and `last` are steps of the lowest rank that has any.
    """

    start: float
    end: float
    first: int
    last: int
    roles: dict[int, str]
    flows: dict[tuple[int, int], str]
    pieces: list[Event] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)
    messages: list[tuple[Event, Event]] = field(default_factory=list)


def step_windows(path: Path) -> list[Window]:
    """From the middle of each traced part of a run, about three steps.

    A run has several parts where its strategy changed: each began to be traced anew.

    Raises:
        InputError: the file is damaged.
    """
    events = read_events(path)
    return [_window(events, part) for part in parts_of(events)]


def read_events(path: Path) -> list[Event]:
    """All events of a timeline.

    Raises:
        InputError: the file is damaged.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events: list[Event] = json.load(file)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise InputError(f"{path}: is damaged: {error}") from None
    return events


def parts_of(events: Sequence[Event]) -> list[list[Event]]:
    """The steps of the lowest rank that has any, in runs of consecutive numbers."""
    steps = [event for event in events if event["ph"] == "X" and "step" in _own_step(event)]
    lowest = min((event["pid"] for event in steps), default=None)
    parts: list[list[Event]] = []
    for event in sorted((e for e in steps if e["pid"] == lowest), key=lambda e: e["ts"]):
        follows = parts and event["args"]["step"] == parts[-1][-1]["args"]["step"] + 1
        if follows:
            parts[-1].append(event)
        else:
            parts.append([event])
    return parts


def _own_step(event: Event) -> dict[str, Any]:
    """The arguments of an event that is a whole step; of a checkpoint or another, none."""
    return event["args"] if event["cat"] == "step" else {}


def _window(events: Sequence[Event], part: Sequence[Event]) -> Window:
    """The longest window of up to three steps round the middle that has not too much in it."""
    for steps in range(min(_STEPS, len(part)), 0, -1):
        at = (len(part) - steps) // 2
        window = _cut(events, part[at], part[at + steps - 1])
        if len(window.pieces) + len(window.messages) <= _ROOM:
            return window
    return _shortened(window)


def _cut(events: Iterable[Event], first: Event, last: Event) -> Window:
    """What lies at least in part between the beginning of `first` and the end of `last`."""
    start, end = first["ts"], last["ts"] + last["dur"]
    roles, flows = _names(events)
    window = Window(start, end, first["args"]["step"], last["args"]["step"], roles, flows)
    arrows: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event
        elif event["ph"] == "X" and event["ts"] < end and event["ts"] + event["dur"] > start:
            whole_step = event["cat"] == "step"
            (window.ends if whole_step else window.pieces).append(event)
    for pair in arrows.values():
        if len(pair) == 2 and start <= pair["s"]["ts"] and pair["f"]["ts"] <= end:
            window.messages.append((pair["s"], pair["f"]))
    return window


def _names(events: Iterable[Event]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    roles: dict[int, str] = {}
    flows: dict[tuple[int, int], str] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            roles[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            flows[event["pid"], event["tid"]] = event["args"]["name"]
    return roles, flows


def _shortened(window: Window) -> Window:
    """As much of the beginning as there is room for."""
    times = sorted([e["ts"] for e in window.pieces] + [s["ts"] for s, _ in window.messages])
    end = times[_ROOM]
    return Window(
        window.start,
        end,
        window.first,
        window.last,
        window.roles,
        window.flows,
        [event for event in window.pieces if event["ts"] < end],
        window.ends,
        [(sent, got) for sent, got in window.messages if got["ts"] <= end],
    )


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


class _Message(NamedTuple):
    step: int
    source: int
    target: int
    bytes: int
    sent: float  # microseconds
    received: float


def exchanges(path: Path) -> list[Exchange]:
    """Of each traced part of a run the step in its middle, or the nearest one with an exchange.

    A run has several parts where its strategy changed. There is none of a part without messages.

    Raises:
        InputError: the file is damaged.
    """
    events = read_events(path)
    by_step: dict[int, list[_Message]] = defaultdict(list)
    for message in _messages(events):
        by_step[message.step].append(message)
    working = {event["pid"] for event in events if event["ph"] == "X" and event["cat"] == "step"}
    found = []
    for part in parts_of(events):
        step = _middle([event["args"]["step"] for event in part], by_step)
        if step is not None:
            found.append(_exchange(step, by_step[step], working))
    return found


def _messages(events: Iterable[Event]) -> Iterable[_Message]:
    """Those between ranks that belong to a step of the rank that sent or, where that one serves
    and has none, of the rank that received."""
    ends: dict[int, dict[str, Event]] = defaultdict(dict)
    last: Event = {}
    for event in events:
        if event["ph"] == "X":
            last = event
        elif event["ph"] in "sf":  # it stands behind its slice
            ends[event["id"]][event["ph"]] = last
    for both in ends.values():
        if len(both) < 2 or both["s"]["pid"] == both["f"]["pid"]:
            continue
        sent, got = both["s"], both["f"]
        step = sent["args"].get("step", got["args"].get("step"))
        if step is not None:
            end = got["ts"] + got["dur"]
            size = sent["args"]["bytes_sent"]
            yield _Message(step, sent["pid"], got["pid"], size, sent["ts"], end)


def _middle(steps: Sequence[int], by_step: dict[int, list[_Message]]) -> int | None:
    """The middle one of `steps`, of those with about as many bytes as any."""
    size = {step: sum(message.bytes for message in by_step.get(step, ())) for step in steps}
    most, middle = max(size.values()), steps[(len(steps) - 1) // 2]
    if not most:
        return None
    full = [step for step in steps if size[step] >= _FULL * most]
    return min(full, key=lambda step: abs(step - middle))


def _exchange(step: int, messages: Sequence[_Message], working: set[Any]) -> Exchange:
    begin, end = min(m.sent for m in messages), max(m.received for m in messages)
    counts: Counter[tuple[int, int]] = Counter()
    sizes: Counter[tuple[int, int]] = Counter()
    firsts: dict[tuple[int, int], float] = {}
    for message in sorted(messages, key=lambda message: message.sent):
        pair = message.source, message.target
        counts[pair] += 1
        sizes[pair] += message.bytes
        firsts.setdefault(pair, message.sent - begin)
    arrows: list[Arrow] = []
    place, before = 0, float("-inf")
    for pair, first in firsts.items():
        if first - before > _SAME * (end - begin):
            place, before = place + 1, first
        arrows.append(Arrow(*pair, counts[pair], sizes[pair], first / 1e6, place))
    taking_part = {rank for pair in firsts for rank in pair}
    return Exchange(step, (end - begin) / 1e6, arrows, frozenset(taking_part - working))
