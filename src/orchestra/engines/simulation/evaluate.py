"""Computes the times of a collective for all of its ranks at once, if its links are its own.

In a round, each rank sends to at most one rank and receives from at most one. A message costs its
sender and its receiver what a message costs that is followed by events (participant.py). Messages
that share a link cross it in the order of the rows. A message that fits on the link before the last
one of the collective passes it, unless both belong to one connection.

`evaluate.c` computes the times if a C compiler was available when Orchestra was installed.
`in_numpy` executes the same operations round by round, with the same bits, 30 times more slowly.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestra.transports.compiled import library

NAME = "orchestra.engines.simulation._evaluate"

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

KIND = np.dtype(
    [(name, "f8") for name in ("setup", "rest", "receive", "add", "bytes")]
    + [(name, "i4") for name in ("held", "whole", "of", "unused")]
)
"""The cost of a message of one size. In seconds of a core of speed 1: `setup` until its first byte
leaves, `rest` until its last byte leaves, `receive`, `add`. `held` says whether its sender waits
until it has arrived. The message is the last of a transfer, after `whole` messages of kind `of`.
`unused` pads it."""
PAIR = np.dtype([("latency", "f8"), ("per_byte", "f8")])
"""The route of a message: latency in seconds, and seconds per byte."""
RANK = np.dtype([(name, "f8") for name in ("clock", "waiting", "slowness", "up", "down")])
"""The state of a rank: its time, the seconds it has waited, and its seconds per second of a core of
speed 1; when its last message has crossed its outgoing links (`up`), and the last message to it has
crossed its incoming links (`down`)."""
LAST_BYTES = 32  # of `struct last`
NOBODY = -1
REDUCES, FREED = 1, 2
"""Flags of a transfer: its target adds it; and sends the same pieces in the same round."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The transfers of a collective, in the order of their rounds.

    All columns have the shape [transfers], except `begin`, [rounds + 1]: the first transfer of each
    round, and the number of all. `kind_of` and `pair_of` index `kinds` and `pairs`.
    """

    ranks: int
    begin: Integers
    source: NDArray[np.uint16]
    target: NDArray[np.uint16]
    flags: NDArray[np.uint8]
    kind_of: NDArray[np.uint16]
    pair_of: NDArray[np.uint32]
    kinds: NDArray[Any]
    pairs: NDArray[Any]

    @functools.cached_property
    def most(self) -> int:
        """The largest number of messages in a transfer."""
        return int(self.kinds["whole"].max(initial=0)) + 1

    @functools.cached_property
    def held(self) -> bool:
        """True if the sender of any message waits until it has arrived."""
        used = np.bincount(self.kind_of, minlength=len(self.kinds)) > 0
        return bool(self.kinds["held"][used].any())

    @functools.cached_property
    def mixed(self) -> bool:
        """True if any rank sends to several ranks, or receives from several."""
        to, by = np.empty((2, self.ranks), np.uint16)
        to[self.source], by[self.target] = self.target, self.source
        kept = (to[self.source] == self.target) & (by[self.target] == self.source)
        return not kept.all()

    def slowed(self, factor: float) -> Rows:
        """Return the same transfers, each `factor` times as long on its links."""
        pairs = self.pairs.copy()
        pairs["per_byte"] *= factor
        return replace(self, pairs=pairs)


def idle(count: int) -> NDArray[Any]:
    """Return the state of `count` ranks at time 0 whose links are idle."""
    ranks = np.zeros(count, RANK)
    ranks["up"] = ranks["down"] = -inf
    return ranks


def evaluate(rows: Rows, ranks: NDArray[Any]) -> None:
    """Advance `ranks`, of dtype `RANK`, from their arrival to the end of the collective."""
    compiled = library(NAME)
    if compiled is None:
        in_numpy(rows, ranks)
        return
    assert ranks.flags.c_contiguous
    last = np.empty(rows.ranks * LAST_BYTES, np.uint8)
    sent = np.empty((rows.ranks * rows.most, 3))  # `struct message`
    row_of = np.empty(rows.ranks, np.int64)
    given = _Rows(
        rows.ranks, len(rows.begin) - 1, rows.most, rows.held, rows.mixed,
        *(column.ctypes.data for column in (
            rows.begin, rows.source, rows.target, rows.kind_of, rows.pair_of, rows.flags,
            rows.kinds, rows.pairs,
        )),
    )  # fmt: skip
    compiled.evaluate(
        ctypes.byref(given),
        *(ctypes.c_void_p(each.ctypes.data) for each in (ranks, last, sent, row_of)),
    )


def is_compiled() -> bool:
    """Return whether `evaluate` runs compiled code."""
    return library(NAME) is not None


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("ranks", "rounds", "most", "held", "mixed")),
        *((name, ctypes.c_void_p) for name in (
            "begin", "source", "target", "kind_of", "pair_of", "flags", "kinds", "pairs",
        )),
    ]  # fmt: skip


def in_numpy(rows: Rows, ranks: NDArray[Any]) -> None:
    """Do the same as `evaluate`, round by round."""
    columns, kinds, pairs = (_columns(table) for table in (ranks, rows.kinds, rows.pairs))
    # When the last message from a rank began to cross the links, and the last one to it; and the
    # ranks at their other ends.
    columns |= {name: np.full(rows.ranks, -inf) for name in ("up_from", "down_from")}
    columns |= {name: np.full(rows.ranks, NOBODY) for name in ("to", "by")}
    for first, end in zip(rows.begin[:-1].tolist(), rows.begin[1:].tolist(), strict=True):
        if first < end:
            _Round(rows, slice(first, end), columns, kinds, pairs).execute()
    for name in RANK.names or ():
        ranks[name] = columns[name]


Columns = dict[str, NDArray[Any]]


def _columns(table: NDArray[Any]) -> Columns:
    return {name: np.ascontiguousarray(table[name]) for name in table.dtype.names or ()}


class _Round:
    """The transfers `here` of `rows`, which are one round, and all `ranks`."""

    def __init__(
        self, rows: Rows, here: slice, ranks: Columns, kinds: Columns, pairs: Columns
    ) -> None:
        self.ranks, self.kinds, self.kind_of = ranks, kinds, rows.kind_of[here]
        pair_of = rows.pair_of[here]
        self.latency, self.per_byte = pairs["latency"][pair_of], pairs["per_byte"][pair_of]
        self.flags, self.source, self.target = (
            rows.flags[here], rows.source[here], rows.target[here],
        )  # fmt: skip
        self.mixed, self.any_held = rows.mixed, rows.held  # without them much changes nothing
        self.whole = kinds["whole"][self.kind_of]
        self.most = int(self.whole.max()) + 1
        # By number of the message in its transfer.
        self.began, self.ended = np.empty((2, self.most, len(self.source)))
        self.held = np.zeros((self.most, len(self.source)), np.bool_)
        self.gone = np.full(len(ranks["clock"]), -inf)

    def execute(self) -> None:
        for number in range(self.most):
            self._cross(number, *self._messages(number))
        for number in range(self.most):
            self._take(number, *self._messages(number))
        if self.any_held:
            self._wait(self.source, self.gone[self.source])

    def _messages(self, number: int) -> tuple[slice | Integers, NDArray[Any]]:
        """Return the transfers that have a message of this number, and the kinds of these."""
        if self.most == 1:
            return slice(None), self.kind_of
        some = np.flatnonzero(number <= self.whole)
        last = self.kind_of[some]
        return some, np.where(number < self.whole[some], self.kinds["of"][last], last)

    def _cross(self, number: int, some: slice | Integers, kind: NDArray[Any]) -> None:
        ranks, kinds, source, target = self.ranks, self.kinds, self.source[some], self.target[some]
        slowness, clock, setup = ranks["slowness"][source], ranks["clock"], kinds["setup"][kind]
        leaving = clock[source]
        there = leaving + setup * slowness + self.latency[some]
        crossing = kinds["bytes"][kind] * self.per_byte[some]
        left = leaving + (setup + kinds["rest"][kind]) * slowness
        clock[source] = left
        busy = np.maximum(ranks["up"][source], ranks["down"][target])
        start, queued = np.maximum(there, busy), slice(None)
        if self.mixed:
            alone = there + crossing
            passes = (alone <= ranks["up_from"][source]) & (alone <= ranks["down_from"][target])
            passes &= (ranks["to"][source] != target) | (ranks["by"][target] != source)
            if passes.any():
                start = np.where(passes, there, start)
                queued = ~passes
        until = np.maximum(start + crossing, left)
        self.began[number, some], self.ended[number, some] = start, until
        if self.any_held:
            held = kinds["held"][kind] > 0
            self.held[number, some] = held
            own = self.gone[source]
            self.gone[source] = np.where(held, np.maximum(own, until), own)
        source, target = source[queued], target[queued]
        ranks["up"][source] = ranks["down"][target] = until[queued]
        if self.mixed:
            ranks["up_from"][source] = ranks["down_from"][target] = start[queued]
            ranks["to"][source], ranks["by"][target] = target, source

    def _take(self, number: int, some: slice | Integers, kind: NDArray[Any]) -> None:
        target, clock, slowness = self.target[some], self.ranks["clock"], self.ranks["slowness"]
        self._wait(target, self.began[number, some])
        slow = slowness[target]
        moving = clock[target] + self.kinds["receive"][kind] * slow
        clock[target] = np.maximum(moving, self.ended[number, some])
        flags = self.flags[some]
        if self.any_held and (freed := flags & FREED > 0).any():
            row_of = np.full(len(clock), NOBODY)
            row_of[self.source] = np.arange(len(self.source))
            receiver = target[freed]
            sent = row_of[receiver]
            self._wait(receiver, np.where(self.held[number, sent], self.ended[number, sent], -inf))
        adds = flags & REDUCES > 0
        if adds.any():
            taken = clock[target]
            adding = taken + self.kinds["add"][kind] * slow
            clock[target] = np.where(adds, adding, taken)

    def _wait(self, places: NDArray[Any], until: Floats) -> None:
        clock, waiting = self.ranks["clock"], self.ranks["waiting"]
        before = clock[places]
        later = np.maximum(before, until)
        waiting[places] += later - before
        clock[places] = later
