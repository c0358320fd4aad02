"""Stragglers: the ranks that held up others, by each rank's report of its time; without torch.

A rank reads its counters at some sixty moments (`CounterSeries`). `find` cuts the run into windows,
and compares ranks and links with their peers in each of them. docs/how-to/stragglers.md
explains it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from orchestra.records.report import Cause, Counters, StragglerFinding
from orchestra.settings.notation import LazyModule

_Pair = tuple[int, int]  # the source and the target of messages
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    _Arrived = Mapping[_Pair, tuple[Array, Array]]
else:
    np = LazyModule("numpy")  # the command line answers without it

MAX_WINDOWS, LEAST_WINDOWS = 30, 3
STEPS_A_WINDOW = 3  # of the worker with the fewest
LITTLE = 0.25  # the part of a straggler's excess per step: whoever lost less has not waited for it
LEAST_SECONDS = 2.0  # shorter events on real processes are noise of the machine
MATERIAL = 0.05  # the part of the time that the excess has to amount to
CERTAIN = 7.0  # standard errors that the mean logarithm of the ratio has to lie above 0
CLEAR = math.log(4.0)
"""The largest logarithm of a ratio that counts: variation beyond it is no reason for doubt."""
SLOWER = 1.2  # the ratio to the median of the others from which on a rank is a straggler
THINNER = 2.5
"""The ratio of the seconds per byte to those of others from which on a link is a straggler. Two
messages at a time take twice as long."""
FASTEST = 1e-11  # the fewest seconds per byte that count


def find(
    by_rank: Mapping[int, Sequence[Counters]],
    *,
    servers: Collection[int] = (),
    nodes: Mapping[int, str] | None = None,
    least_seconds: float = 0.0,
) -> list[StragglerFinding]:
    """Return the stragglers among the ranks of `by_rank`, the one that cost most first.

    `by_rank` has the points of each rank, `nodes` the node of each where they are known. `servers`
    compute no gradients, and are compared with each other. What lasts less than `least_seconds`
    is left out.
    """
    workers = [r for r in by_rank if r not in servers and by_rank[r] and by_rank[r][-1].steps]
    known = {rank: series for rank, series in by_rank.items() if len(series) > 1}
    if len(known) < 2 or not set(workers) <= known.keys() or not workers:
        return []
    begin = max(series[0].seconds for series in known.values())
    end = min(series[-1].seconds for series in known.values())
    spans = [_steps_at(known[r], end) - _steps_at(known[r], begin) for r in workers]
    count = min(MAX_WINDOWS, int(min(spans) // STEPS_A_WINDOW)) if end > begin else 0
    if count < LEAST_WINDOWS:
        return []
    edges = [begin + (end - begin) * k / count for k in range(count + 1)]
    windows = _windows(known, edges)
    width = edges[1] - edges[0]
    found = [
        *slow_ranks(workers, windows, width),
        *slow_ranks([rank for rank in known if rank in servers], windows, width),
        *slow_links(windows, nodes or {}, width),
    ]
    found = [each for each in found if (each.last - each.first) * width >= least_seconds]
    lost = _lost(found, windows, workers, width)
    told = [_told(*each, edges, known, nodes or {}) for each in zip(found, lost, strict=True)]
    return sorted(told, key=lambda each: (-each.lost_seconds, each.since_seconds, each.ranks))


class Windows(NamedTuple):
    """The work of ranks in windows of the run: see `Counters`.

    The arrays have a row for each of `ranks` and a column for each window. `arrived` has by source
    and target the bytes of large messages in each window, and the seconds that these took.
    """

    ranks: Sequence[int]
    steps: Array
    samples: Array
    compute: Array
    input: Array
    blocked: Array
    arrived: _Arrived


def _windows(by_rank: Mapping[int, Sequence[Counters]], edges: Sequence[float]) -> Windows:
    """Return the windows between rising `edges`; sums are linear between a rank's points."""
    sums, arrived = [], {}
    for target, series in by_rank.items():
        times = [point.seconds for point in series]
        columns = zip(*(point[1:6] for point in series), strict=True)
        sums.append([np.interp(edges, times, column) for column in columns])
        moved = [{source: numbers for source, *numbers in point.arrived} for point in series]
        # Sums begin with the first message; of a rank that stands still nothing is known lately
        for source in (source for source in moved[-1] if source in by_rank):
            both = zip(*(known.get(source, (0.0, 0.0)) for known in moved), strict=True)
            size, seconds = (np.diff(np.interp(edges, times, column)) for column in both)
            if size.any():
                arrived[source, target] = size, np.where(size > 0, seconds, 0.0)
    steps, samples, compute, read, blocked = np.diff(np.array(sums)).swapaxes(0, 1)
    return Windows(list(by_rank), steps, samples, compute, read, blocked, arrived)


class FoundStraggler(NamedTuple):
    """A straggler, and the seconds of excess in each of the windows from `first` to `last`."""

    ranks: tuple[int, ...]
    cause: Cause
    factor: float
    first: int
    last: int
    excess: Array


def others(values: Array) -> Array:
    """Return for each of two or more values the median of the others."""
    order = np.argsort(values)
    place = np.argsort(order)
    rest = len(values) - 1
    # Without the value itself the ranks above it move down by one.
    low, high = (values[order[k + (k >= place)]] for k in ((rest - 1) // 2, rest // 2))
    median: Array = (low + high) / 2
    return median


def noise_of(logarithms: Collection[Array]) -> float:
    """Return the standard deviation of a window, from the differences between one and the next."""
    steps = np.concatenate([np.abs(np.diff(np.clip(row, -CLEAR, CLEAR))) for row in logarithms])
    # The difference of two normal numbers has the mean magnitude 2 sigma / sqrt(pi). Neighbouring
    # windows are compared, since a lasting difference does not change their differences.
    return float(steps.mean()) * math.sqrt(math.pi) / 2 if steps.size else 0.0


def stretches(logs: Array, least: float, noise: float, begin: int = 0) -> Iterator[tuple[int, int]]:
    """Yield where the logarithms of ratios are at least `least` in the mean, for certain.

    A stretch has the largest sum of what exceeds the half of `least`, where each window counts as
    much as another at most.
    """
    logs = np.clip(logs, -CLEAR, CLEAR)
    # The segment with the largest sum (Kadane); its ends are then moved in to where it is clear.
    half, best, total, first = least / 2, 0.0, 0.0, 0
    for index, value in enumerate(logs.tolist()):
        if total <= 0:
            total, first = 0.0, index
        total += min(max(value - half, -half), half)
        if total > best:
            best, low, high = total, first, index + 1
    if not best:
        return
    # It may have begun in the first of these windows, and been over soon in the last.
    clear = low + np.flatnonzero(logs[low:high] >= np.median(logs[low:high]) / 2)
    low, high = int(clear[0]), int(clear[-1]) + 1
    length, mean = high - low, logs[low:high].mean()
    if length < LEAST_WINDOWS or mean < least or mean * math.sqrt(length) < CERTAIN * noise:
        return
    yield from stretches(logs[:low], least, noise, begin)
    yield begin + low, begin + high
    yield from stretches(logs[high:], least, noise, begin + high)


def slow_ranks(ranks: Sequence[int], windows: Windows, width: float) -> Iterator[FoundStraggler]:
    """Yield the `ranks` that took longer than their peers for a sample, and for a step as well.

    A slow rank with a share so small that it is ready with the others holds up nobody, and one with
    a large share is not slow.
    """
    if len(ranks) < 2:
        return
    rows = [windows.ranks.index(rank) for rank in ranks]
    samples, steps = windows.samples[rows], windows.steps[rows]
    compute, read = windows.compute[rows], windows.input[rows]
    work = compute + read
    by_sample = _ratios(work, samples)
    logs = np.minimum(by_sample, _ratios(work, steps))
    noise = noise_of(logs)
    for row, own in enumerate(logs):
        for first, last in stretches(own, math.log(SLOWER), max(noise, noise_of([own]))):
            inside = slice(first, last)
            excess = work[row, inside] * (1 - np.exp(-own[inside]))
            if excess.sum() < MATERIAL * width * (last - first):
                continue
            amount = samples[:, inside].sum(axis=1)
            amount[amount == 0] = 1.0
            rates = (part[:, inside].sum(axis=1) / amount for part in (compute, read))
            computed, waited = ((own - others(own))[row] for own in rates)
            cause: Cause = "input" if waited > computed else "compute"
            factor = math.exp(np.median(by_sample[row, inside]))
            yield FoundStraggler((ranks[row],), cause, factor, first, last, excess)


def _ratios(work: Array, amount: Array) -> Array:
    """Return the logarithms of each rank's work for an amount over the others' median, by window.

    Servers have neither samples nor steps: their amounts are those of equal times.
    """
    if not amount.any():
        amount = np.ones_like(amount)
    logs = np.zeros_like(work)
    for k in range(work.shape[1]):
        known = np.flatnonzero((amount[:, k] > 0) & (work[:, k] > 0))
        if len(known) > 1:
            rates = work[known, k] / amount[known, k]
            logs[known, k] = np.log(rates / others(rates))
    return logs


def slow_links(
    windows: Windows, nodes: Mapping[int, str], width: float
) -> Iterator[FoundStraggler]:
    """Yield ranks, or all those of a node, to and from which bytes take longer than elsewhere.

    If that is half of all, the network is like that, and nobody is slower than others.
    """
    inside: dict[_Pair, tuple[Array, Array]] = {}
    across: dict[_Pair, tuple[Array, Array]] = {}
    for (source, target), moved in windows.arrived.items():
        near = source in nodes and nodes[source] == nodes.get(target)
        (inside if near else across)[source, target] = moved
    for arrived, local in ((inside, {}), (across, nodes)):
        found = list(_slow_pairs(arrived, local, width)) if len(arrived) > 2 else []
        named = {rank for each in found for rank in each.ranks}
        # Half of all ranks behind slow links are the network, not stragglers.
        if len(found) == 1 or 2 * len(named) < len(windows.ranks):
            yield from found


def _slow_pairs(
    arrived: _Arrived, nodes: Mapping[int, str], width: float
) -> Iterator[FoundStraggler]:
    logs, excess = _byte_ratios(arrived)
    noise = noise_of([row[~np.isnan(row)] for row in logs.values()])
    slow: list[tuple[float, _Pair, int, int]] = []
    for pair, row in logs.items():
        used = np.flatnonzero(~np.isnan(row))
        known = row[used]
        for begin, end in stretches(known, math.log(THINNER), max(noise, noise_of([known]))):
            first, last = int(used[begin]), int(used[end - 1]) + 1
            more = float(excess[pair][first:last].sum())
            if more >= MATERIAL * width * (last - first):
                slow.append((more, pair, first, last))
    ends = {rank: nodes.get(rank, rank) for pair in arrived for rank in pair}
    while slow:
        _, worst, first, last = max(slow)
        rates = _rates(arrived, first, last)
        thin = {pair: rates[pair] >= THINNER * usual for pair, usual in _usual(rates).items()}
        blamed = _blamed(worst, thin, ends)
        own = {pair for _, pair, *_ in slow if pair == worst or {*map(ends.get, pair)} & blamed}
        factor = math.exp(np.nanmedian(logs[worst][first:last]))
        beyond = np.max([excess[pair][first:last] for pair in own], axis=0)
        ranks = tuple(sorted(rank for rank, end in ends.items() if end in blamed))
        yield FoundStraggler(ranks, "link", factor, first, last, beyond)
        slow = [each for each in slow if each[1] not in own or each[2] >= last or each[3] <= first]


def _byte_ratios(arrived: _Arrived) -> tuple[dict[_Pair, Array], dict[_Pair, Array]]:
    """Return by window the logarithm of the seconds a byte over the others' median, NaN where
    there were no messages, and the seconds beyond it."""
    logs = {pair: np.full_like(size, np.nan) for pair, (size, _) in arrived.items()}
    excess = {pair: np.zeros_like(size) for pair, (size, _) in arrived.items()}
    for k in range(len(next(iter(logs.values())))):
        rates = _rates(arrived, k, k + 1)
        for pair, usual in _usual(rates).items():
            logs[pair][k] = math.log(rates[pair] / usual)
            excess[pair][k] = max(rates[pair] - usual, 0.0) * arrived[pair][0][k]
    return logs, excess


def _rates(arrived: _Arrived, first: int, last: int) -> dict[_Pair, float]:
    """Return the mean seconds a byte of each pair that was used in these windows."""
    return {
        pair: max(float(seconds[first:last].sum()) / total, FASTEST)
        for pair, (size, seconds) in arrived.items()
        if (total := float(size[first:last].sum())) > 0
    }


def _usual(rates: Mapping[_Pair, float]) -> dict[_Pair, float]:
    """Return the rate that each pair is compared with: the median of the other pairs with this
    source, or with this target, whichever is faster. A pair without such pairs is compared with the
    median of all others.

    All messages from a server share its link, and so do all messages to it. So it is no sign of a
    straggler if one direction takes longer than the other.
    """
    values = np.array([*rates.values()])
    found = dict(zip(rates, (others(values) if len(rates) > 2 else values).tolist(), strict=True))
    groups: dict[tuple[int, int], list[_Pair]] = defaultdict(list)
    for pair in rates:
        for end in enumerate(pair):
            groups[end].append(pair)
    akin: dict[_Pair, float] = {}
    for members in groups.values():
        if len(members) > 1:
            medians = others(np.array([rates[pair] for pair in members])).tolist()
            for pair, median in zip(members, medians, strict=True):
                akin[pair] = min(akin.get(pair, math.inf), median)
    return found | akin


def _blamed(
    worst: _Pair, slow: Mapping[_Pair, bool], ends: Mapping[int, int | str]
) -> set[int | str]:
    """Return the end of the `worst` pair with the larger part of `slow` pairs; both if equal."""

    def part(end: int | str) -> float:
        own = [slow[pair] for pair in slow if end in (ends[pair[0]], ends[pair[1]])]
        return sum(own) / len(own)

    parts = {end: part(end) for end in (ends[worst[0]], ends[worst[1]])}
    return {end for end, own in parts.items() if own == max(parts.values())}


def _lost(
    found: Sequence[FoundStraggler], windows: Windows, workers: Sequence[int], width: float
) -> list[float]:
    """Return the seconds that the other workers lost to each of `found`.

    In a step a worker lost what the straggler took beyond it, less what the straggler's steps are
    longer than its own, and at most what it was blocked. If several stragglers claim more than it
    was blocked they share that.
    """
    rows = [windows.ranks.index(rank) for rank in workers]
    steps, blocked = windows.steps[rows], windows.blocked[rows]
    claims = np.zeros((len(found), *steps.shape))
    for each, claim in zip(found, claims, strict=True):
        inside = slice(each.first, each.last)
        held_up = [i for i, rank in enumerate(workers) if rank not in each.ranks]
        own = steps[held_up, inside]
        slow = windows.steps[windows.ranks.index(each.ranks[0]), inside]
        with np.errstate(divide="ignore", invalid="ignore"):  # in a window without a step
            beyond = each.excess / slow
            more = beyond - (width / slow - width / own)
            of_steps = np.where(more < LITTLE * beyond, 0.0, more * own)
        claimed = np.where(slow > 0, of_steps, each.excess)  # of a server all of it
        claim[held_up, inside] = np.where(own > 0, np.minimum(claimed, blocked[held_up, inside]), 0)
    total = claims.sum(axis=0)
    part = np.divide(blocked, total, out=np.zeros_like(total), where=total > 0)
    lost: list[float] = (claims * np.minimum(part, 1.0)).sum(axis=(1, 2)).tolist()
    return lost


def _steps_at(series: Sequence[Counters], seconds: float) -> float:
    """Return the steps at a moment between two points."""
    return float(np.interp(seconds, [p.seconds for p in series], [p.steps for p in series]))


def _told(
    found: FoundStraggler,
    lost: float,
    edges: Sequence[float],
    by_rank: Mapping[int, Sequence[Counters]],
    nodes: Mapping[int, str],
) -> StragglerFinding:
    own = by_rank[found.ranks[0]]
    to_the_end = found.last >= len(edges) - 2  # the last window may hold no more than the end
    # Servers have no steps
    moments = [edges[found.first]] if to_the_end else [edges[found.first], edges[found.last]]
    steps = [int(_steps_at(own, at)) + 1 if own[-1].steps else None for at in moments]
    named = dict.fromkeys(nodes[rank] for rank in found.ranks if rank in nodes)
    return StragglerFinding(
        ranks=found.ranks,
        nodes=tuple(named),
        cause=found.cause,
        factor=round(found.factor, 3),
        since_seconds=round(moments[0], 6),
        since_step=steps[0],
        until_seconds=None if to_the_end else round(moments[1], 6),
        until_step=None if to_the_end else steps[1],
        lost_seconds=round(lost, 6),
    )
