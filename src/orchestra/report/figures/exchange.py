"""The messages of one step, out of the timeline that a run left."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from orchestra.report.figures.trace_window import Event, parts_of, read_events

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
