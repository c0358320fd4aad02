"""Where to cut a chain of operations into stages: a problem of numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

SLACK = 0.05  # the largest stage may be so much above the best if less crosses the cuts


@dataclass(frozen=True)
class Chain:
    """`costs` of operations in a row; place p lies before operation p.

    `crossing` has for each place the elements that a cut there sends, None where none can be, and
    `trained` tells of each operation whether it has parameters of its own to train.
    """

    costs: Sequence[int]
    crossing: Sequence[int | None]
    trained: Sequence[bool]


def balanced_cuts(chain: Chain, stages: int) -> tuple[int, ...] | None:
    """The places of `stages` - 1 cuts, None if there are not so many.

    The dearest stage costs as little as can be; among the cuts for which that is true to within
    `SLACK`, those that send the least. Every stage has something to train.
    """
    found = _best(chain, stages, max, lambda _: 0.0, math.inf)
    if found is None:
        return None
    limit = found[0] * (1 + SLACK)
    cheapest = _best(chain, stages, _plus, lambda place: float(chain.crossing[place] or 0), limit)
    assert cheapest is not None
    return cheapest[1]


def _plus(a: float, b: float) -> float:
    return a + b


def _best(
    chain: Chain,
    stages: int,
    combine: Callable[[float, float], float],
    price: Callable[[int], float],
    limit: float,
) -> tuple[float, tuple[int, ...]] | None:
    """Dynamic program over the places: the least of all stages' costs, combined, and its cuts.

    Without a `limit` a stage costs what its operations do. With one no stage may cost more, and
    what counts is the `price` of the cuts.
    """
    end = len(chain.costs)
    sums = [0, *accumulate(chain.costs)]
    trained = [0, *accumulate(map(int, chain.trained))]
    places = [place for place in range(1, end) if chain.crossing[place] is not None]

    def cost(first: int, last: int) -> float:
        inside = sums[last] - sums[first]
        if trained[last] == trained[first] or inside > limit:
            return math.inf
        return float(inside) if limit == math.inf else price(first)

    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(1, stages + 1):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for last in places if stage < stages else [end]:
            options = [
                (combine(so_far, cost(first, last)), (*cuts, first))
                for first, (so_far, cuts) in best.items()
                if first < last
            ]
            finite = [option for option in options if option[0] < math.inf]
            if finite:
                reached[last] = min(finite)
        best = reached
    if end not in best:
        return None
    value, cuts = best[end]
    return value, cuts[1:]
