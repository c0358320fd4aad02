"""The table of a schedule's transfers, which executors and the simulation read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestra.schedules import COPY, REDUCE, Integers, Schedule

Narrow = NDArray[np.uint16]
MOST = 1 << 16
"""More ranks or pieces than this have no room in its columns."""


class RoundPart(NamedTuple):
    """What one rank does in one round; pieces go from the first to before the end."""

    sends: list[tuple[int, int, int]]  # (target, first, end)
    receives: list[tuple[int, int, int, int]]  # (source, first, end, operation)


@dataclass(frozen=True, eq=False)
class Table:
    """The transfers of a schedule in the order of their rounds, as columns of shape [transfers].

    Attributes:
        ranks: of the schedule.
        begin: shape [rounds + 1]: the first transfer of each round, and the number of all.
        source, target: ranks.
        first, end: the pieces from the first to before the end.
        reduces: whether the target adds them to its own, and does not copy them.
    """

    ranks: int
    begin: Integers
    source: Narrow
    target: Narrow
    first: Narrow
    end: Narrow
    reduces: NDArray[np.bool_]

    @property
    def rounds(self) -> int:
        return len(self.begin) - 1

    @property
    def round_of(self) -> Integers:
        """The number of each transfer's round."""
        return np.repeat(np.arange(self.rounds), np.diff(self.begin))

    def parts(self, rank: int, first: int = 0, end: int | None = None) -> Iterator[RoundPart]:
        """Yield what `rank` does in the rounds from `first` to before `end`, but for idle ones."""
        own = self._rows_of(rank)
        begin, stop = np.searchsorted(own, self.begin[[first, -1 if end is None else end]])
        own = own[begin:stop]
        number = np.searchsorted(self.begin, own, side="right")
        columns = (self.source, self.target, self.first, self.end, self.reduces)
        rows = zip(number.tolist(), *(column[own].tolist() for column in columns), strict=True)
        for _, group in groupby(rows, itemgetter(0)):
            part = RoundPart([], [])
            for _, source, target, piece, past, reduces in group:
                if source == rank:
                    part.sends.append((target, piece, past))
                if target == rank:
                    part.receives.append((source, piece, past, REDUCE if reduces else COPY))
            yield part

    def _rows_of(self, rank: int) -> Integers:
        """Return the transfers from or to `rank`, in their order."""
        found = []
        for order, begin in self._by_rank:
            found.append(order[begin[rank] : begin[rank + 1]])
        return np.union1d(*found)

    @functools.cached_property
    def _by_rank(self) -> list[tuple[Integers, Integers]]:
        """By source and by target: the transfers in the order of these, and where each begins."""
        index = []
        for column in (self.source, self.target):
            order = np.argsort(column, kind="stable")
            index.append((order, np.searchsorted(column[order], np.arange(self.ranks + 1))))
        return index

    def only(self, chosen: NDArray[np.bool_]) -> Table:
        """Return a table of the transfers that are `chosen`, in as many rounds."""
        begin = np.concatenate([[0], np.cumsum(chosen)])[self.begin]
        source, target, first, end = (
            column[chosen] for column in (self.source, self.target, self.first, self.end)
        )
        return Table(self.ranks, begin, source, target, first, end, self.reduces[chosen])


@functools.lru_cache(maxsize=16)
def table_of(schedule: Schedule) -> Table:
    """Return all transfers of `schedule`."""
    assert schedule.ranks <= MOST, f"{schedule.ranks} ranks are too many"
    assert schedule.pieces < MOST, f"{schedule.pieces} pieces are too many"
    # Narrow at once: a ring of a thousand ranks has two million.
    rounds = [transfers.astype(np.uint16) for transfers in schedule.rounds()]
    begin = np.cumsum([0, *(len(each) for each in rounds)], dtype=np.int64)
    rows = np.concatenate([np.empty((0, 5), np.uint16), *rounds])
    source, target, first, end, operation = np.ascontiguousarray(rows.T)
    return Table(schedule.ranks, begin, source, target, first, end, operation == REDUCE)
