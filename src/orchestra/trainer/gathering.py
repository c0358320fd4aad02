"""After the run: the chief takes the other ranks' parts of snapshots, one at a time.

First every rank hands in what it has, without values; so the chief knows that all have ended, and
nothing of what follows takes time from one that still trains. From then on the others answer the
chief's requests. So no rank ever holds more than its own snapshots and one part of another's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from orchestra.collectives import Group, gather_objects
from orchestra.errors import PeerLost
from orchestra.transports.tags import Tag
from orchestra.worker.snapshots import Part
from orchestra.worker.worker import Worker

Figures = dict[int, dict[str, float]]
"""By the index of a snapshot, its loss and metrics."""

_JUDGE, _DONE = -1, -2
"""Requests that are not the number of a part."""


@dataclass(frozen=True)
class Held:
    """A part that lies on `rank`, `number` in its list; `head` has no values where it is away."""

    rank: int
    number: int
    head: Part


def hand_in(worker: Worker, chief: int, *, tolerant: bool) -> list[Held]:
    """On the chief, all ranks' parts, its own first; nothing on the others. Collective.

    With `tolerant` a rank that is lost meanwhile is left out.
    """
    own = worker.snapshots.parts
    if worker.rank != chief:
        heads = [{**asdict(replace(part, values=torch.empty(0))), "values": None} for part in own]
        gather_objects(worker.transport, heads, Group((worker.rank, chief)), chief)
        return []
    held = [Held(chief, number, part) for number, part in enumerate(own)]
    for rank in worker.everyone.ranks:
        if rank == chief:
            continue
        try:
            _, heads = gather_objects(worker.transport, None, Group((chief, rank)), chief)
        except PeerLost:
            if not tolerant:
                raise
            continue
        held += [Held(rank, n, Part(**{**head, "values": torch.empty(0)}))
                 for n, head in enumerate(heads)]  # fmt: skip
    return held


def answer(worker: Worker, chief: int, judge: Callable[[], Figures]) -> None:
    """On the others, after `hand_in`: do as the chief requests, until it needs nothing more.

    Args:
        judge: the figures of this rank's own snapshots.
    """
    parts = worker.snapshots.parts
    while parts:
        wanted = int(worker.transport.receive(chief, Tag.PARTS).wait())
        if wanted == _DONE:
            return
        if wanted == _JUDGE:
            figures = list(judge().items())
            gather_objects(worker.transport, figures, Group((worker.rank, chief)), chief)
        else:
            worker.transport.send(parts[wanted].values, chief, Tag.PARTS).wait()


class Gathered:
    """The parts of all ranks, on the chief; those that lie elsewhere come when they are read."""

    def __init__(self, worker: Worker, held: Sequence[Held], *, tolerant: bool) -> None:
        self.held = held
        self._worker = worker
        self._tolerant = tolerant
        self._lost: set[int] = set()

    @property
    def indices(self) -> list[int]:
        """The snapshots that there is a part of."""
        return sorted({held.head.index for held in self.held})

    def parts(self, index: int) -> Iterator[Part]:
        """Those of snapshot `index`, with their values; of what was lost, the mirrors."""
        there = set()
        of_index = [held for held in self.held if held.head.index == index]
        for held in sorted(of_index, key=lambda held: held.head.mirror):
            key = held.head.kind, held.head.offset
            if held.head.mirror and key in there:
                continue
            values = self._values(held)
            if values is not None:
                there.add(key)
                yield replace(held.head, values=values)

    def replicas(self, index: int) -> list[int]:
        """The ranks that had replicas of their own at snapshot `index`; none where all had one."""
        of_index = [held for held in self.held if held.head.index == index]
        apart = [held for held in of_index if held.head.kind == "replica"]
        apart = apart or [
            held for held in of_index if held.head.kind == "parameters" and not held.head.mirror
        ]
        overlapping = len({held.head.offset for held in apart}) < len(apart)
        return sorted({held.rank for held in apart}) if overlapping else []

    def judged(self, ranks: Collection[int], own: Callable[[], Figures]) -> dict[int, Figures]:
        """What each of `ranks` finds its snapshots to be worth; all of them look at once.

        Args:
            own: finds it for this rank.
        """
        others = [rank for rank in ranks if rank != self._worker.rank]
        for rank in others:
            self._ask(rank, _JUDGE)
        found = {self._worker.rank: own()} if self._worker.rank in ranks else {}
        for rank in others:
            if rank in self._lost:
                continue
            group = Group((self._worker.rank, rank))
            try:
                _, figures = gather_objects(self._worker.transport, None, group, self._worker.rank)
            except PeerLost as lost:
                self._lose(lost)
            else:
                found[rank] = {int(index): metrics for index, metrics in figures}
        return found

    def close(self) -> None:
        """Nothing more is needed of the others."""
        for rank in {held.rank for held in self.held} - {self._worker.rank} - self._lost:
            self._ask(rank, _DONE)

    def _values(self, held: Held) -> Tensor | None:
        if held.rank == self._worker.rank:
            return held.head.values
        self._ask(held.rank, held.number)
        if held.rank in self._lost:
            return None
        try:
            return self._worker.transport.receive(held.rank, Tag.PARTS).wait()
        except PeerLost as lost:
            self._lose(lost)
            return None

    def _ask(self, rank: int, request: int) -> None:
        if rank in self._lost:
            return
        try:
            self._worker.transport.send(torch.tensor([request]), rank, Tag.PARTS).wait()
        except PeerLost as lost:
            self._lose(lost)

    def _lose(self, lost: PeerLost) -> None:
        if not self._tolerant:
            raise lost
        self._lost.add(lost.rank)
