"""Links that bytes take longer to cross than others, and whose they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from orchestra.records.counters import Window
from orchestra.records.stretches import MATERIAL, Found, noise_of, others, stretches

THINNER = 2.5
"""Times the seconds of others for a byte: less is no straggler. Two at a time take twice them."""
FASTEST = 1e-11
"""Seconds a byte: what is faster counts as this."""

_Pair = tuple[int, int]
"""Source and target of messages."""


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
