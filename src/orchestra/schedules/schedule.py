"""The form of a schedule: rounds of transfers as integer arrays, free of any transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Round = NDArray[np.int64]
"""One round: [transfers, 5] with the columns source, target, first, end, operation.

A transfer is one message: the pieces from `first` to before `end`, which lie side by side. All
transfers of a round may be under way together, and carry what their source held when the round
began; a rank begins a round when it has finished its part of the one before. A target reduces
what arrives in one round in the order of the rows.
"""

REDUCE = 0
"""The target adds the arriving pieces to its own."""
COPY = 1
"""The target overwrites its own pieces with the arriving ones."""


@dataclass(frozen=True)
class Schedule:
    """A collective over `ranks` ranks.

    With `slots` false the vector is cut into `pieces` contiguous parts. With `slots` true every
    rank keeps a buffer of `pieces` whole vectors, slot r holding the vector of rank r; when the
    last round is over they are added in the order of the ranks.

    With `all_reduce` true every rank ends with the sum over the ranks, bit for bit the same; so
    no rank is through before all have begun. With `joint` true that holds for another schedule,
    too, if no piece is empty.
    """

    name: str
    ranks: int
    pieces: int
    rounds: Callable[[], Iterator[Round]]
    slots: bool = False
    all_reduce: bool = False
    joint: bool = False

    def edges(self, length: int) -> tuple[int, ...]:
        """Where each piece of a vector (or buffer of slots) of `length` begins, and the end."""
        if self.slots:
            return tuple(piece * length for piece in range(self.pieces + 1))
        return tuple(length * piece // self.pieces for piece in range(self.pieces + 1))

    def elements_sent(self, length: int) -> NDArray[np.int64]:
        """How many elements each rank sends for a vector of `length`: shape [ranks]."""
        edges = np.array(self.edges(length), dtype=np.int64)
        sent = np.zeros(self.ranks, dtype=np.int64)
        for transfers in self.rounds():
            np.add.at(sent, transfers[:, 0], edges[transfers[:, 3]] - edges[transfers[:, 2]])
        return sent

    def buffer_elements(self, rank: int, length: int) -> int:
        """Elements of extra memory that `rank` needs beside its own vector of `length`."""
        if self.slots:
            return self.pieces * length if self.ranks > 1 else 0
        edges = np.array(self.edges(length), dtype=np.int64)
        peak = 0
        for transfers in self.rounds():
            mine = transfers[(transfers[:, 1] == rank) & (transfers[:, 4] == REDUCE)]
            peak = max(peak, int((edges[mine[:, 3]] - edges[mine[:, 2]]).sum()))
        return peak


def transfers(*rows: tuple[int, int, int, int, int]) -> Round:
    """A round from its rows; an empty one keeps its five columns."""
    return np.array(rows, dtype=np.int64).reshape(-1, 5)
