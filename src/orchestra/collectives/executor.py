"""One executor for every schedule, over any transport, among any group of ranks."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestra.schedules import ALL_REDUCE, REDUCE, Schedule
from orchestra.schedules import broadcast as broadcast_schedule
from orchestra.transports.protocol import Handle, Transport
from orchestra.transports.tags import Tag

SEGMENT_BYTES = 4 << 20  # measured: below the cost of missing the cache, above that of a message


@dataclass(frozen=True)
class Group:
    """The ranks that take part, in the order that a schedule numbers them."""

    ranks: tuple[int, ...]

    def index(self, rank: int) -> int:
        """The place of `rank` in this group."""
        return self.ranks.index(rank)

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Part:
    """What one rank does in one round; pieces go from the first to before the end."""

    sends: tuple[tuple[int, int, int], ...]  # (target, first, end)
    receives: tuple[tuple[int, int, int, int], ...]  # (source, first, end, operation)


@functools.cache
def _broadcast_schedule(ranks: int, root: int) -> Schedule:
    return broadcast_schedule(ranks, root)


@functools.lru_cache(maxsize=256)
def _parts(schedule: Schedule, index: int) -> tuple[Part, ...]:
    """The rounds of `schedule` as one rank sees them."""
    parts = []
    for transfers in schedule.rounds():
        sends = transfers[transfers[:, 0] == index][:, [1, 2, 3]]
        receives = transfers[transfers[:, 1] == index][:, [0, 2, 3, 4]]
        if len(sends) or len(receives):
            parts.append(
                Part(tuple(map(tuple, sends.tolist())), tuple(map(tuple, receives.tolist())))
            )
    return tuple(parts)


def all_reduce(transport: Transport, vector: Tensor, algorithm: str, group: Group, tag: int) -> int:
    """Replace `vector` (flat, contiguous) by its sum over `group`, on every rank of it.

    Returns the bytes of buffer that this rank needed beside the vector.
    """
    return execute(transport, vector, ALL_REDUCE[algorithm](len(group)), group, tag)


def broadcast(transport: Transport, vector: Tensor, root: int, group: Group, tag: int) -> None:
    """Replace `vector` (flat, contiguous) by that of rank `root`, on every rank of `group`."""
    execute(transport, vector, _broadcast_schedule(len(group), group.index(root)), group, tag)


def execute(
    transport: Transport,
    vector: Tensor,
    schedule: Schedule,
    group: Group,
    tag: int,
    edges: Sequence[int] | None = None,
) -> int:
    """Take this rank's part in `schedule`; returns the bytes of buffer used beside `vector`.

    `edges`, the same on all ranks, says where its pieces begin, and ends with the length of
    `vector`; without them the pieces are as equal as can be.
    """
    assert vector.dim() == 1
    assert vector.is_contiguous()
    at_once = transport.all_reduce_at_once
    if at_once is not None and (schedule.all_reduce or schedule.joint):
        moves_values = not (schedule.all_reduce or vector.is_meta)
        buffer = at_once(vector, schedule, group.ranks, tag, edges, message_by_message=moves_values)
        if buffer is not None:
            return buffer
    index, length = group.index(transport.rank), vector.numel()
    memory = vector
    if schedule.slots and len(group) > 1:
        memory = vector.new_empty(schedule.pieces * length)
        memory[index * length : (index + 1) * length].copy_(vector)
    cuts = schedule.edges(length) if edges is None else edges
    assert cuts[-1] == memory.numel()
    peak = 0
    for part in _parts(schedule, index):
        peak = max(peak, _round(transport, memory, cuts, part, group, tag))
    if memory is vector:
        return peak
    slots = memory.view(schedule.pieces, length)
    vector.copy_(slots[0])
    transport.add(vector, *slots[1:])
    return memory.nbytes


def _round(
    transport: Transport,
    memory: Tensor,
    edges: Sequence[int],
    part: Part,
    group: Group,
    tag: int,
) -> int:
    """Exchange one round's pieces; an empty run makes no message. Returns scratch bytes."""

    def segments(first: int, end: int) -> Sequence[Tensor]:
        values = memory[edges[first] : edges[end]]
        parts = torch.split(values, SEGMENT_BYTES // memory.element_size())
        return [segment for segment in parts if segment.numel()]

    arriving = [
        Arrival(transport, segments(first, end), group.ranks[source], tag, operation)
        for source, first, end, operation in part.receives
    ]
    leaving: dict[tuple[int, int], list[list[Handle]]] = {}
    for target, first, end in part.sends:
        to = group.ranks[target]
        sending = [transport.send(segment, to, tag) for segment in segments(first, end)]
        leaving.setdefault((first, end), []).append(sending)
    for arrival, (_, first, end, _) in zip(arriving, part.receives, strict=True):
        arrival.finish(leaving.get((first, end), []))
    for sendings in leaving.values():
        for handle in itertools.chain(*sendings):
            handle.wait()
    return sum(arrival.scratch_bytes for arrival in arriving)


class Arrival:
    """A run of pieces on its way in, segment by segment.

    A segment is small enough to be still in the processor's cache when it is added, and while
    one is added the next one is on its way: two segments of scratch are enough.
    """

    def __init__(
        self, transport: Transport, own: Sequence[Tensor], source: int, tag: int, operation: int
    ) -> None:
        self._own = own
        self._add = transport.add
        self._receive = functools.partial(transport.receive, source, tag)
        self._scratch: list[Tensor] = []
        if operation == REDUCE:
            self._scratch = [torch.empty_like(segment) for segment in self._own[:2]]
        self._handles = [self._start(index) for index in range(min(2, len(self._own)))]
        self.scratch_bytes = sum(scratch.nbytes for scratch in self._scratch)

    def _start(self, index: int) -> Handle:
        own = self._own[index]
        if not self._scratch:
            return self._receive(own)
        return self._receive(self._scratch[index % 2][: own.numel()])

    def finish(self, leaving: Sequence[Sequence[Handle]]) -> None:
        """Take in every segment, in order; `leaving` are sends of the same ones in this round.

        What leaves is what was there when the round began: it has to be gone before the sum.
        """
        for index, own in enumerate(self._own):
            arrived = self._handles[index].wait()
            if self._scratch:
                for sending in leaving:
                    sending[index].wait()
                self._add(own, arrived)
            if index + 2 < len(self._own):
                self._handles.append(self._start(index + 2))


def gather_objects(transport: Transport, value: Any, group: Group, root: int) -> Sequence[Any]:
    """Plain JSON data of every rank of `group`, in its order, on `root` (empty elsewhere)."""
    text = json.dumps(value).encode()
    if transport.rank != root:
        message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        transport.send(message, root, Tag.OBJECTS).wait()
        return ()
    gathered = []
    for rank in group.ranks:
        if rank == root:
            gathered.append(json.loads(text))
        else:
            message = transport.receive(rank, Tag.OBJECTS).wait()
            gathered.append(json.loads(message.numpy().tobytes()))
    return gathered
