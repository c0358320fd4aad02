"""The order of the ranks in a ring, from the costs of the links between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestra.errors import InputError

Costs = NDArray[np.float64]
Order = tuple[int, ...]

EXACT = 12
"""The most ranks for which the best order is found for certain: the work doubles with each rank."""
STARTS = 4
"""First guesses that are improved if there are more ranks; each may end at another order."""


def ring_order(costs: Sequence[Sequence[float]]) -> Order:
    """Return the order in which N ranks should pass pieces on in a ring, beginning with rank 0.

    `costs[i][j]` is what a transfer from rank i to rank j costs, in any unit (seconds, or ping);
    the diagonal does not count. All links of a ring work at the same time, so the slowest one
    sets its pace: the order has the cheapest slowest link there can be, and among those orders the
    smallest sum. Exact up to 12 ranks; beyond, the best that exchanges of stretches find.

    Raises:
        InputError: the matrix is not square, or has entries that are negative or not finite.
    """
    matrix = _checked(costs)
    if len(matrix) < 3:
        return tuple(range(len(matrix)))
    return _best(matrix) if len(matrix) <= EXACT else _improved(matrix)


def _checked(costs: Sequence[Sequence[float]]) -> Costs:
    ranks = len(costs)
    for rank, row in enumerate(costs):
        if len(row) != ranks:
            raise InputError(
                f"ring_order: row {rank} of the costs has {len(row)} entries, but there are "
                f"{ranks} rows: give the cost from each rank to each"
            )
    matrix = np.array(costs, dtype=np.float64).reshape(ranks, ranks)
    np.fill_diagonal(matrix, 0.0)
    bad = np.argwhere(~np.isfinite(matrix) | (matrix < 0))
    if len(bad):
        source, target = bad[0].tolist()
        raise InputError(
            f"ring_order: the cost from rank {source} to rank {target} is "
            f"{matrix[source, target]}: give a number from 0 on"
        )
    return matrix


def _best(costs: Costs) -> Order:
    """Return the order with the smallest slowest link and, among these, the smallest sum."""
    # Two passes: the best beginning of a path depends on whether a slow link follows, so that one
    # dynamic program cannot find the smallest sum among the smallest maxima.
    _, slowest = _shortest_cycle(costs, np.maximum)
    order, _ = _shortest_cycle(np.where(costs <= slowest, costs, np.inf), np.add)
    return order


def _shortest_cycle(costs: Costs, join: Callable[..., Any]) -> tuple[Order, float]:
    """Held and Karp (1962): the best path from rank 0 over each set of ranks to each end in it.

    `join` makes the cost of a path of that of a shorter one and of its last link.
    """
    count = len(costs) - 1  # bit i of a set stands for rank i + 1
    best = np.full((1 << count, count), np.inf)
    before = np.zeros((1 << count, count), dtype=np.int64)
    for end in range(count):
        best[1 << end, end] = costs[0, end + 1]
    inner = costs[1:, 1:]
    for chosen in range(1, 1 << count):
        paths = join(best[chosen][:, None], inner)  # [last, next]
        last = paths.argmin(axis=0)
        for end in range(count):
            longer = chosen | 1 << end
            if longer != chosen and paths[last[end], end] < best[longer, end]:
                best[longer, end] = paths[last[end], end]
                before[longer, end] = last[end]
    closed = join(best[-1], costs[1:, 0])
    end = int(closed.argmin())
    price, chosen, backwards = float(closed[end]), len(before) - 1, []
    while chosen:
        backwards.append(end + 1)
        chosen, end = chosen & ~(1 << end), int(before[chosen, end])
    return (0, *backwards[::-1]), price


def _improved(costs: Costs) -> Order:
    """Return the best of the nearest neighbours' orders, exchanging stretches while it helps."""

    def price(order: Order) -> tuple[float, float]:
        """Return the slowest link of a ring, and the sum of all."""
        # The link back to the first rank belongs to the ring.
        links = costs[order, order[1:] + order[:1]]
        return float(links.max()), float(links.sum())

    found = []
    starts = sorted((_nearest(costs, start) for start in range(len(costs))), key=price)
    for order in starts[:STARTS]:
        better: Order | None = order
        while better is not None:
            order, least = better, price(better)
            better = next((other for other in _neighbours(order) if price(other) < least), None)
        found.append(order)
    order = min(found, key=price)
    first = order.index(0)
    return order[first:] + order[:first]


def _nearest(costs: Costs, start: int) -> Order:
    """Return the order that goes on to the nearest rank that was not visited yet."""
    order = [start]
    left = set(range(len(costs))) - {start}
    while left:
        # Sorted, as a set has no order: of equal costs the lowest rank is taken.
        order.append(min(sorted(left), key=lambda rank: costs[order[-1], rank]))
        left.remove(order[-1])
    return tuple(order)


def _neighbours(order: Order) -> Iterator[Order]:
    """Yield orders with one stretch reversed, or with one of up to three ranks moved elsewhere."""
    count = len(order)
    for first in range(count - 1):
        for end in range(first + 2, count + 1):
            yield order[:first] + order[first:end][::-1] + order[end:]
    for length in (1, 2, 3):
        for first in range(count - length + 1):
            stretch, rest = order[first : first + length], order[:first] + order[first + length :]
            yield from (rest[:at] + stretch + rest[at:] for at in range(1, len(rest) + 1))
