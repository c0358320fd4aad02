"""The form of a schedule: rounds of transfers as integer arrays, free of any transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Round = NDArray[np.int64]
"""One round: [transfers, 4] with the columns source, target, piece, operation.

All transfers of a round may be under way together; a rank begins a round when it has finished
its part of the one before. A target reduces the pieces of one round in the order of the rows.
"""

REDUCE = 0
"""The target adds the arriving piece to its own."""
COPY = 1
"""The target overwrites its own piece with the arriving one."""


@dataclass(frozen=True)
class Schedule:
    """A collective over `ranks` ranks.

    With `slots` false the vector is cut into `pieces` contiguous parts. With `slots` true every
    rank keeps a buffer of `pieces` whole vectors, slot r holding the vector of rank r; when the
    last round is over they are added in the order of the ranks.
    """

    name: str
    ranks: int
    pieces: int
    rounds: Callable[[], Iterator[Round]]
    slots: bool = False

    def cut(self, piece: int, length: int) -> tuple[int, int]:
        """First element and end of `piece` in a vector (or buffer of slots) of `length`."""
        if self.slots:
            return piece * length, (piece + 1) * length
        return length * piece // self.pieces, length * (piece + 1) // self.pieces

    def elements_sent(self, length: int) -> NDArray[np.int64]:
        """How many elements each rank sends for a vector of `length`: shape [ranks]."""
        sizes = np.array([end - first for first, end in self._cuts(length)], dtype=np.int64)
        sent = np.zeros(self.ranks, dtype=np.int64)
        for transfers in self.rounds():
            np.add.at(sent, transfers[:, 0], sizes[transfers[:, 2]])
        return sent

    def buffer_elements(self, rank: int, length: int) -> int:
        """Elements of extra memory that `rank` needs beside its own vector of `length`."""
        if self.slots:
            return self.pieces * length if self.ranks > 1 else 0
        sizes = [end - first for first, end in self._cuts(length)]
        peak = 0
        for transfers in self.rounds():
            mine = (transfers[:, 1] == rank) & (transfers[:, 3] == REDUCE)
            peak = max(peak, sum(sizes[piece] for piece in transfers[mine, 2]))
        return peak

    def _cuts(self, length: int) -> list[tuple[int, int]]:
        return [self.cut(piece, length) for piece in range(self.pieces)]


def transfers(*rows: tuple[int, int, int, int]) -> Round:
    """A round from its rows; an empty one keeps its four columns."""
    return np.array(rows, dtype=np.int64).reshape(-1, 4)
