"""Which ranks held up the others: from what each rank reports of its time, without torch.

A rank reads its counters at some sixty moments (`CounterSeries`). `find` cuts the run
into windows and compares ranks with their peers in each of them. docs/stragglers.md explains it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestra.records.peer_comparison import (
    LEAST_WINDOWS,
    Cause,
    Found,
    Window,
    slow_links,
    slow_ranks,
    steps_at,
    windows_of,
)
from orchestra.records.report import Counters

MAX_WINDOWS = 30
STEPS_A_WINDOW = 3
"""Of the worker with the fewest steps; a run of less than three times as many tells nothing."""
LITTLE = 0.25
"""Of what a straggler takes beyond others in a step: who lost less has not waited for it."""
LEAST_SECONDS = 2.0
"""What lasts less on real processes is noise of the machine."""


@dataclass(frozen=True)
class Straggler:
    """Who was slower than its peers, and what that cost; docs/records.md has the fields."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    cause: Cause
    factor: float
    since_seconds: float
    since_step: int | None
    until_seconds: float | None
    until_step: int | None
    lost_seconds: float

    @property
    def key(self) -> tuple[tuple[int, ...], Cause]:
        """The same for the same ranks and cause."""
        return self.ranks, self.cause

    @property
    def who(self) -> str:
        """In words: "rank 2 (node-2)", "a link of rank 2 or 3"."""
        *most, last = map(str, self.ranks)
        joined = " or " if len(self.nodes) != 1 else " and "
        text = f"rank {', '.join(most)}{joined * bool(most)}{last}"
        if len(self.nodes) == 1:
            text += f" ({self.nodes[0]})"
        return f"a link of {text}" if self.cause == "link" else text

    @property
    def text(self) -> str:
        """In a line: "rank 2 is 3.9x slower (compute), 41 s lost to it"."""
        lost = f", {self.lost_seconds:.0f} s lost to it" if self.lost_seconds >= 1 else ""
        return f"{self.who} is {self.factor:.1f}x slower ({self.cause}){lost}"


def find(
    by_rank: Mapping[int, Sequence[Counters]],
    *,
    servers: Collection[int] = (),
    nodes: Mapping[int, str] | None = None,
    least_seconds: float = 0.0,
) -> list[Straggler]:
    """The stragglers among the ranks of `by_rank`, the one that cost most first.

    Args:
        by_rank: the points of each rank.
        servers: ranks that compute no gradients; they are compared with each other.
        nodes: the node of each rank, where they are known.
        least_seconds: what lasts less is not told.
    """
    workers = [r for r in by_rank if r not in servers and by_rank[r] and by_rank[r][-1].steps]
    known = {rank: series for rank, series in by_rank.items() if len(series) > 1}
    if len(known) < 2 or not set(workers) <= known.keys() or not workers:
        return []
    begin = max(series[0].seconds for series in known.values())
    end = min(series[-1].seconds for series in known.values())
    spans = [steps_at(known[r], end) - steps_at(known[r], begin) for r in workers]
    count = min(MAX_WINDOWS, int(min(spans) // STEPS_A_WINDOW)) if end > begin else 0
    if count < LEAST_WINDOWS:
        return []
    edges = [begin + (end - begin) * k / count for k in range(count + 1)]
    windows = {rank: windows_of(series, edges) for rank, series in known.items()}
    width = edges[1] - edges[0]
    found = [
        *slow_ranks({r: windows[r] for r in workers}, width),
        *slow_ranks({r: windows[r] for r in known if r in servers}, width),
        *slow_links(windows, nodes or {}, width),
    ]
    found = [each for each in found if (each.last - each.first) * width >= least_seconds]
    lost = _lost(found, windows, workers, width)
    told = [
        _told(each, seconds, edges, known, nodes or {})
        for each, seconds in zip(found, lost, strict=True)
    ]
    return sorted(told, key=lambda each: (-each.lost_seconds, each.since_seconds, each.ranks))


# What it cost


def _lost(
    found: Sequence[Found],
    windows: Mapping[int, Sequence[Window]],
    workers: Sequence[int],
    width: float,
) -> list[float]:
    """The seconds that the other workers lost to each of `found`.

    In a step a worker lost what the straggler took beyond it, less what the straggler's steps are
    longer than its own, and at most what it was blocked. If several stragglers claim more than it
    was blocked they share that.
    """
    lost = [0.0] * len(found)
    for k in range(len(next(iter(windows.values())))):
        active = [i for i, each in enumerate(found) if each.first <= k < each.last]
        for rank in workers if active else ():
            own = windows[rank][k]
            claims = {i: _claim(found[i], k, rank, own, windows, width) for i in active}
            total = sum(claims.values())
            part = min(1.0, own.blocked / total) if total > 0 else 0.0
            for i, claim in claims.items():
                lost[i] += claim * part
    return lost


def _claim(
    found: Found,
    k: int,
    rank: int,
    own: Window,
    windows: Mapping[int, Sequence[Window]],
    width: float,
) -> float:
    slow = windows[found.ranks[0]][k]
    if rank in found.ranks or own.steps <= 0:
        return 0.0
    if slow.steps <= 0:  # a server
        return min(found.excess[k], own.blocked)
    longer = width / slow.steps - width / own.steps
    beyond = found.excess[k] / slow.steps
    if beyond - longer < LITTLE * beyond:
        return 0.0
    return min((beyond - longer) * own.steps, own.blocked)


def _told(
    found: Found,
    lost: float,
    edges: Sequence[float],
    by_rank: Mapping[int, Sequence[Counters]],
    nodes: Mapping[int, str],
) -> Straggler:
    own = by_rank[found.ranks[0]]
    to_the_end = found.last >= len(edges) - 2  # the last window may hold no more than the end
    since, until = edges[found.first], edges[found.last]
    named = dict.fromkeys(nodes[rank] for rank in found.ranks if rank in nodes)
    return Straggler(
        ranks=found.ranks,
        nodes=tuple(named),
        cause=found.cause,
        factor=round(found.factor, 3),
        since_seconds=round(since, 6),
        since_step=int(steps_at(own, since)) + 1 if own[-1].steps else None,
        until_seconds=None if to_the_end else round(until, 6),
        until_step=int(steps_at(own, until)) + 1 if own[-1].steps and not to_the_end else None,
        lost_seconds=round(lost, 6),
    )
