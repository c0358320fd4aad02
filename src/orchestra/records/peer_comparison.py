"""Ranks and links beside their peers, window by window: which were slower for certain."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from orchestra.records.report import Counters
from orchestra.settings.registry import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")  # the command line answers without it

Cause = Literal["compute", "link", "input"]

LEAST_WINDOWS = 3
MATERIAL = 0.05
"""Part of the time that the excess has to make up."""
CERTAIN = 7.0
"""Standard errors that the mean logarithm of the ratio has to be above 0."""
CLEAR = math.log(4.0)
"""Logarithms of ratios count as this at most: what varies beyond is no doubt."""
SLOWER = 1.2
"""Of the median of the others: less is no straggler."""
THINNER = 2.5
"""Times the seconds of others for a byte: less is no straggler. Two at a time take twice them."""
FASTEST = 1e-11
"""Seconds a byte: what is faster counts as this."""

_Pair = tuple[int, int]
"""Source and target of messages."""


class Window(NamedTuple):
    """What one rank did in a window: see `Counters`."""

    steps: float
    samples: float
    compute: float
    input: float
    blocked: float
    arrived: Mapping[int, tuple[float, float]]

    @property
    def work(self) -> float:
        return self.compute + self.input


def steps_at(series: Sequence[Counters], seconds: float) -> float:
    """The steps at a moment between two points."""
    return float(np.interp(seconds, [p.seconds for p in series], [p.steps for p in series]))


def windows_of(series: Sequence[Counters], edges: Sequence[float]) -> list[Window]:
    """What one rank did between each two of the rising `edges`: sums are linear between points."""
    times = [point.seconds for point in series]

    def between(sums: Sequence[float]) -> list[float]:
        return np.diff(np.interp(edges, times, sums)).tolist()

    sums = zip(*(point[1:6] for point in series), strict=True)
    moved = [{source: numbers for source, *numbers in point.arrived} for point in series]
    arrived = {}
    for source in moved[-1]:  # the sums of a source begin with its first message
        both = zip(*(known.get(source, (0.0, 0.0)) for known in moved), strict=True)
        arrived[source] = [*zip(*map(between, both), strict=True)]
    return [
        Window._make([*numbers, {s: own[k] for s, own in arrived.items() if own[k][0] > 0}])
        for k, numbers in enumerate(zip(*map(between, sums), strict=True))
    ]


class Found(NamedTuple):
    """A straggler, and the seconds of excess in each window from `first` to `last`."""

    ranks: tuple[int, ...]
    cause: Cause
    factor: float
    first: int
    last: int
    excess: Mapping[int, float]


def others(values: Sequence[float]) -> list[float]:
    """For each of two or more values the median of the others."""
    order = sorted(range(len(values)), key=values.__getitem__)
    place = {index: k for k, index in enumerate(order)}
    rest = len(values) - 1
    low, high = (rest - 1) // 2, rest // 2

    def nth(k: int, without: int) -> float:
        return values[order[k + (k >= without)]]

    return [(nth(low, place[i]) + nth(high, place[i])) / 2 for i in range(len(values))]


def noise_of(logarithms: Collection[Sequence[float]]) -> float:
    """The standard deviation of a window, from the differences between one and the next."""
    steps = [abs(b - a) for row in logarithms for a, b in itertools.pairwise(_clipped(row))]
    return sum(steps) / len(steps) * math.sqrt(math.pi) / 2 if steps else 0.0


def _clipped(logs: Sequence[float]) -> list[float]:
    return [max(-CLEAR, min(CLEAR, value)) for value in logs]


def stretches(
    logs: Sequence[float], least: float, noise: float, begin: int = 0
) -> Iterator[tuple[int, int]]:
    """From where to where the logarithms of ratios are at least `least` in the mean, for certain.

    A stretch has the largest sum of what exceeds the half of `least`, where each window counts as
    much as another at most.
    """
    logs = _clipped(logs)
    half, best, total, first, span = least / 2, 0.0, 0.0, 0, (0, 0)
    for index, value in enumerate(logs):
        if total <= 0:
            total, first = 0.0, index
        total += min(max(value - half, -half), half)
        if total > best:
            best, span = total, (first, index + 1)
    low, high = span
    clear = statistics.median(logs[low:high]) / 2 if high else 0.0
    while low < high and logs[low] < clear:  # it began in this window, or was over soon
        low += 1
    while low < high and logs[high - 1] < clear:
        high -= 1
    length = high - low
    mean = sum(logs[low:high]) / length if length else 0.0
    if length < LEAST_WINDOWS or mean < least or mean * math.sqrt(length) < CERTAIN * noise:
        return
    yield from stretches(logs[:low], least, noise, begin)
    yield begin + low, begin + high
    yield from stretches(logs[high:], least, noise, begin + high)


# Ranks


def slow_ranks(windows: Mapping[int, Sequence[Window]], width: float) -> Iterator[Found]:
    """Ranks that took longer than their peers for a sample, and for a step as well.

    A slow rank with a share so small that it is ready with the others holds up nobody.
    """
    if len(windows) < 2:
        return
    by_sample = _ratios(windows, lambda window: window.samples)
    by_step = _ratios(windows, lambda window: window.steps)
    logs = {
        rank: [min(pair) for pair in zip(by_sample[rank], by_step[rank], strict=True)]
        for rank in windows
    }
    noise = noise_of(logs.values())
    for rank, own in logs.items():
        for first, last in stretches(own, math.log(SLOWER), max(noise, noise_of([own]))):
            inside = range(first, last)
            excess = {k: windows[rank][k].work * (1 - math.exp(-own[k])) for k in inside}
            if sum(excess.values()) < MATERIAL * width * (last - first):
                continue
            factor = math.exp(statistics.median(by_sample[rank][first:last]))
            yield Found((rank,), _cause(windows, rank, inside), factor, first, last, excess)


def _ratios(
    windows: Mapping[int, Sequence[Window]], amount: Callable[[Window], float]
) -> dict[int, list[float]]:
    """The logarithm of each rank's work for an amount over the median of the others, by window.

    Servers have neither samples nor steps: their amounts are those of equal times.
    """
    serving = not any(amount(window) for own in windows.values() for window in own)
    logs: dict[int, list[float]] = {rank: [] for rank in windows}
    for k in range(len(next(iter(windows.values())))):
        rates = {}
        for rank, own in windows.items():
            divisor = 1.0 if serving else amount(own[k])
            if divisor > 0 and own[k].work > 0:
                rates[rank] = own[k].work / divisor
        medians = others(list(rates.values())) if len(rates) > 1 else list(rates.values())
        for (rank, rate), median in zip(rates.items(), medians, strict=True):
            logs[rank].append(math.log(rate / median))
        for rank in windows.keys() - rates.keys():
            logs[rank].append(0.0)
    return logs


def _cause(
    windows: Mapping[int, Sequence[Window]], rank: int, inside: Collection[int]
) -> Literal["compute", "input"]:
    """Which of both took more beyond what the others took."""

    def beyond(part: Callable[[Window], float]) -> float:
        rates = []
        for own in windows.values():
            samples = sum(own[k].samples for k in inside)
            rates.append(sum(part(own[k]) for k in inside) / (samples or 1.0))
        place = list(windows).index(rank)
        return rates[place] - others(rates)[place]

    computed, read = beyond(lambda window: window.compute), beyond(lambda window: window.input)
    return "input" if read > computed else "compute"


# Links


def slow_links(
    windows: Mapping[int, Sequence[Window]],
    nodes: Mapping[int, str],
    width: float,
) -> Iterator[Found]:
    """Ranks, or all those of a node, to and from which bytes take longer than elsewhere.

    If that is half of all, the network is like that, and nobody is slower than others.
    """
    inside: dict[_Pair, None] = {}
    across: dict[_Pair, None] = {}
    for target, own in windows.items():
        for source in {source for window in own for source in window.arrived}:
            near = source in nodes and nodes[source] == nodes.get(target)
            (inside if near else across)[source, target] = None
    for pairs in (inside, across):
        local = nodes if pairs is across else {}
        found = list(_slow_pairs(list(pairs), windows, local, width))
        named = {rank for each in found for rank in each.ranks}
        if len(found) == 1 or 2 * len(named) < len(windows):
            yield from found


def _slow_pairs(
    pairs: Sequence[_Pair],
    windows: Mapping[int, Sequence[Window]],
    nodes: Mapping[int, str],
    width: float,
) -> Iterator[Found]:
    if len(pairs) < 3:
        return
    logs, excess = _byte_ratios(pairs, windows)
    noise = noise_of([list(own.values()) for own in logs.values()])
    slow: list[tuple[float, _Pair, int, int]] = []
    for pair, own in logs.items():
        used, values = list(own), list(own.values())
        for begin, end in stretches(values, math.log(THINNER), max(noise, noise_of([values]))):
            first, last = used[begin], used[end - 1] + 1
            more = sum(excess[pair][first:last])
            if more >= MATERIAL * width * (last - first):
                slow.append((more, pair, first, last))
    ends = {rank: nodes.get(rank, rank) for pair in pairs for rank in pair}
    while slow:
        _, worst, first, last = max(slow)
        blamed = _blamed(worst, _slow_within(pairs, windows, first, last), ends)
        own_pairs = [
            pair for _, pair, *_ in slow if pair == worst or {ends[end] for end in pair} & blamed
        ]
        inside = [value for k, value in logs[worst].items() if first <= k < last]
        factor = math.exp(statistics.median(inside))
        excesses = {k: max(excess[pair][k] for pair in own_pairs) for k in range(first, last)}
        ranks = tuple(sorted(rank for rank, end in ends.items() if end in blamed))
        yield Found(ranks, "link", factor, first, last, excesses)
        slow = [
            each for each in slow if each[1] not in own_pairs or each[2] >= last or each[3] <= first
        ]


def _byte_ratios(
    pairs: Sequence[_Pair], windows: Mapping[int, Sequence[Window]]
) -> tuple[dict[_Pair, dict[int, float]], dict[_Pair, list[float]]]:
    """By window: the logarithm of the seconds a byte over the others' median, where there were
    messages; seconds beyond it."""
    count = len(next(iter(windows.values())))
    logs: dict[_Pair, dict[int, float]] = {pair: {} for pair in pairs}
    excess = {pair: [0.0] * count for pair in pairs}
    for k in range(count):
        moved = {pair: each for pair in pairs if (each := windows[pair[1]][k].arrived.get(pair[0]))}
        rates = {pair: max(seconds / size, FASTEST) for pair, (size, seconds) in moved.items()}
        for pair, usual in _usual(rates).items():
            logs[pair][k] = math.log(rates[pair] / usual)
            excess[pair][k] = max(rates[pair] - usual, 0.0) * moved[pair][0]
    return logs, excess


def _usual(rates: Mapping[_Pair, float]) -> dict[_Pair, float]:
    """What the rate of a pair is compared with: the median of the other pairs with this source, or
    with this target, whichever is faster; where there are none, of all others.

    All that a server sends, or gets, shares its link: it says nothing that this takes longer than
    in the other direction.
    """
    found = dict(zip(rates, others(list(rates.values())) if len(rates) > 2 else rates.values(),
                     strict=True))  # fmt: skip
    groups: dict[tuple[int, int], list[_Pair]] = {}
    for pair in rates:
        for end in enumerate(pair):
            groups.setdefault(end, []).append(pair)
    akin: dict[_Pair, float] = {}
    for members in groups.values():
        if len(members) > 1:
            medians = others([rates[pair] for pair in members])
            for pair, median in zip(members, medians, strict=True):
                akin[pair] = min(akin.get(pair, math.inf), median)
    return found | akin


def _slow_within(
    pairs: Sequence[_Pair], windows: Mapping[int, Sequence[Window]], first: int, last: int
) -> dict[_Pair, bool]:
    """Whether each pair that was used in these windows was slow, in the mean over them."""
    rates = {}
    for source, target in pairs:
        moved = [w.arrived[source] for w in windows[target][first:last] if source in w.arrived]
        if size := sum(each[0] for each in moved):
            rates[source, target] = max(sum(each[1] for each in moved) / size, FASTEST)
    return {pair: rates[pair] >= THINNER * usual for pair, usual in _usual(rates).items()}


def _blamed(
    worst: _Pair, slow: Mapping[_Pair, bool], ends: Mapping[int, int | str]
) -> set[int | str]:
    """The end of the `worst` pair of which the larger part of the pairs is `slow`; both where that
    does not tell."""

    def part(end: int | str) -> float:
        own = [slow[pair] for pair in slow if end in (ends[pair[0]], ends[pair[1]])]
        return sum(own) / len(own)

    parts = {end: part(end) for end in (ends[worst[0]], ends[worst[1]])}
    return {end for end, own in parts.items() if own == max(parts.values())}
