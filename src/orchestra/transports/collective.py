"""One rank's part in a collective, message by message.

`steps` states what a rank does in a schedule and in which order, in numbers alone. `exchange` does
it over a transport, blocking; the simulation does the same steps by events, without a flow for each
rank. `lanes.py` has the same exchange without messages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchestra.schedules import REDUCE, Schedule
from orchestra.schedules.sums import SumStage, local_stages
from orchestra.schedules.table import RoundPart, table_of
from orchestra.transports.framing import header_bytes
from orchestra.transports.protocol import CollectiveCall, Handle, Traffic, Transport
from orchestra.transports.shared_memory import buffer_bytes

SEGMENT_BYTES = 4 << 20  # measured: below the cost of missing the cache, above that of a message


class StepKind(Enum):
    SEND = auto()  # begin to send elements
    POST = auto()  # begin to receive elements
    TAKE = auto()  # wait for a message that was posted
    FREE = auto()  # wait until a message that was sent may be changed
    ADD = auto()  # a message that was taken to the rank's own elements
    NEXT = auto()  # the round is over


class ScheduleStep(NamedTuple):
    """One verb, about a message of the elements [first, end) to or from `peer`.

    `number` counts the messages that the rank sends (SEND, FREE), or numbers those that it receives
    (POST, TAKE, ADD). `scratch` names the memory that a message lands in before it is added; it is
    negative for one that lands in its place.
    """

    kind: StepKind
    number: int = -1
    peer: int = -1
    first: int = 0
    end: int = 0
    scratch: int = -1


Span = tuple[int, int]
IN_PLACE = -3
"""A `scratch` that stays negative for the second of two messages."""


def steps(parts: Iterable[RoundPart], edges: Sequence[int], segment: int) -> Iterator[ScheduleStep]:
    """Yield what a rank does in its `parts` of the rounds, `segment` elements a message at most.

    All that a round receives is posted, at most two messages a run of pieces, then all is sent,
    then the messages are taken in the order of the schedule. A message is small enough to be still
    in the processor's cache when it is added, and while one is added the next is on its way: two
    of scratch are enough. A send has to complete before the rank adds to the elements that it
    sends. An empty run of pieces makes no message.
    """
    sent, received = itertools.count(), itertools.count()
    for part in parts:
        yield from _round(part, edges, segment, sent, received)
        yield ScheduleStep(StepKind.NEXT)


def _round(
    part: RoundPart,
    edges: Sequence[int],
    segment: int,
    sent: Iterator[int],
    received: Iterator[int],
) -> Iterator[ScheduleStep]:
    arriving = []
    for run, (source, first, end, operation) in enumerate(part.receives):
        scratch = 2 * run if operation == REDUCE else IN_PLACE
        spans = _cut(edges[first], edges[end], segment)
        arriving.append(
            [
                # Two of scratch for each run: one is filled while the other is added.
                ScheduleStep(StepKind.POST, next(received), source, *span, scratch + number % 2)
                for number, span in enumerate(spans)
            ]
        )
    for messages in arriving:
        # Receives come before sends, so that what arrives early lands in place and is not copied
        # again.
        yield from messages[:2]  # the others are posted once these have been taken
    leaving: dict[Span, list[list[ScheduleStep]]] = {}
    for target, first, end in part.sends:
        spans = _cut(edges[first], edges[end], segment)
        sending = [ScheduleStep(StepKind.SEND, next(sent), target, *span) for span in spans]
        yield from sending
        # By run of pieces: whoever adds to a run has to wait until it has left.
        leaving.setdefault((first, end), []).append(sending)
    for (_, first, end, _), messages in zip(part.receives, arriving, strict=True):
        for place, message in enumerate(messages):
            yield message._replace(kind=StepKind.TAKE)
            if message.scratch >= 0:
                for sending in leaving.get((first, end), ()):
                    # In a butterfly both partners send what they add to: the partner has to get the
                    # values from the beginning of the round.
                    yield sending[place]._replace(kind=StepKind.FREE)
                yield message._replace(kind=StepKind.ADD)
            yield from messages[place + 2 : place + 3]
    # A round ends when all that was sent is free, since the next one may change it.
    for sending in itertools.chain(*leaving.values()):
        for step in sending:
            yield step._replace(kind=StepKind.FREE)


def _cut(first: int, end: int, segment: int) -> list[Span]:
    if end - first <= segment:
        return [(first, end)] if end > first else []
    return [(start, min(start + segment, end)) for start in range(first, end, segment)]


@functools.lru_cache(maxsize=256)
def _steps_of(
    schedule: Schedule,
    index: int,
    length: int,
    edges: Sequence[int] | None,
    segment: int,
    first: int,
    end: int | None,
) -> tuple[ScheduleStep, ...]:
    """Return the steps of one rank in some rounds, for a vector of `length` elements."""
    edges = schedule.edges(length) if edges is None else edges
    assert edges[-1] == (schedule.pieces * length if schedule.slots else length)
    return tuple(steps(table_of(schedule).parts(index, first, end), edges, segment))


def steps_of(
    call: CollectiveCall, rank: int, first: int = 0, end: int | None = None
) -> tuple[ScheduleStep, ...]:
    """Return the steps of `rank` in a collective, in the rounds from `first` to before `end`."""
    return _steps_of(*_key(call, rank, first, end))


_Key = tuple[Schedule, int, int, Sequence[int] | None, int, int, int | None]


def _key(call: CollectiveCall, rank: int, first: int, end: int | None) -> _Key:
    """Return the arguments of `_steps_of` for a rank's part in a collective."""
    assert call.schedule is not None
    assert call.vector.dim() == 1
    assert call.vector.is_contiguous()
    edges = None if call.edges is None else tuple(call.edges)
    segment = SEGMENT_BYTES // call.vector.element_size()
    index, length = call.group.index(rank), call.vector.numel()
    return call.schedule, index, length, edges, segment, first, end


Exchange = Callable[[Transport, CollectiveCall, Tensor, int, int | None], int]
"""Takes the part of the transport's rank in the rounds from the first to before the end (None: all)
of a call, on a memory: the vector of the call, or its slots. Returns the bytes of scratch used."""


def execute(transport: Transport, call: CollectiveCall, exchange: Exchange | None = None) -> int:
    """Take this rank's part in a collective over `transport`; return the bytes of buffer used.

    Args:
        exchange: what moves the elements; None: messages.
    """
    schedule, vector, group = call.schedule, call.vector, call.group
    assert schedule is not None
    exchange = exchange or exchange_messages
    if not schedule.slots or len(group) == 1:
        return exchange(transport, call, vector, 0, None)
    index, length = group.index(transport.rank), vector.numel()
    slots = vector.new_empty(schedule.pieces, length)
    slots[index].copy_(vector)
    exchange(transport, call, slots.view(-1), 0, None)
    # In the order of the ranks on every rank, so that all get the same bits.
    vector.copy_(slots[0])
    transport.add(vector, *slots[1:])
    return slots.nbytes


def exchange_messages(
    transport: Transport, call: CollectiveCall, memory: Tensor, first: int, end: int | None
) -> int:
    """Carry out the steps of this rank; return the peak bytes of scratch of a round."""
    ranks, tag = call.group.ranks, call.tag
    peak = 0
    sends: dict[int, Handle] = {}
    receives: dict[int, Handle] = {}
    scratch: dict[int, Tensor] = {}
    for kind, number, peer, start, stop, place in steps_of(call, transport.rank, first, end):
        if kind is StepKind.SEND:
            sends[number] = transport.send(memory[start:stop], ranks[peer], tag)
        elif kind is StepKind.POST:
            into = memory[start:stop]
            if place >= 0:
                if place not in scratch:
                    scratch[place] = torch.empty_like(into)
                into = scratch[place][: stop - start]
            receives[number] = transport.receive(ranks[peer], tag, into)
        elif kind is StepKind.TAKE:
            receives[number].wait()
        elif kind is StepKind.ADD:
            transport.add(memory[start:stop], scratch[place][: stop - start])
        elif kind is StepKind.FREE:
            sends[number].wait()
        else:
            peak = max(peak, sum(each.nbytes for each in scratch.values()))
            sends.clear()
            receives.clear()
            scratch.clear()
    return peak


def execute_in_stages(
    transport: Transport,
    call: CollectiveCall,
    local: frozenset[int],
    carry_out: Callable[[SumStage], tuple[float, float] | None],
    exchange: Exchange | None = None,
) -> int:
    """`execute` a collective in which the ranks at the places `local` share memory with this one.

    Args:
        carry_out: does this rank's part in a stage; when it began, and until when it waited for
            other ranks. None: it is to be done by `exchange`.
        exchange: what moves the elements between ranks that share no memory; None: messages.
    """
    schedule, rank = call.schedule, transport.rank
    assert schedule is not None
    if len(local) < 2 or not call.vector.numel():
        return execute(transport, call, exchange)
    peak, place = 0, call.group.index(rank)
    for stage in local_stages(schedule, local):
        used = None
        if isinstance(stage, SumStage) and place in stage.ranks:
            times = carry_out(stage)
            if times is not None:
                moved = messages_of(call, rank, *stage.rounds)
                moved.bytes_in_memory = moved.bytes_sent
                transport.traffic.add(moved)
                transport.executed(call, *times, moved.bytes_sent)
                used = buffer_bytes(call.vector.nbytes)
        if used is None and schedule.slots:
            # With slots a schedule is one stage: there is no part of it to exchange.
            used = execute(transport, call, exchange)
        elif used is None:
            rounds = stage.rounds if isinstance(stage, SumStage) else stage
            used = (exchange or exchange_messages)(transport, call, call.vector, *rounds)
        peak = max(peak, used)
    return peak


def cuts_in_memory(call: CollectiveCall) -> Sequence[int]:
    """Return where the pieces begin of a vector that ranks add up in shared memory."""
    schedule, length = call.schedule, call.vector.numel()
    assert schedule is not None
    if schedule.slots:
        return (0, length)  # every rank shows its vector, and nobody needs slots
    return schedule.edges(length) if call.edges is None else call.edges


def messages_of(call: CollectiveCall, rank: int, first: int = 0, end: int | None = None) -> Traffic:
    """Return the traffic of the messages of `rank` in some rounds, as if they had been sent."""
    sent, elements_sent, received, elements_received = _counts(*_key(call, rank, first, end))
    size, header = call.vector.element_size(), header_bytes(1)
    return Traffic(
        bytes_sent=elements_sent * size + sent * header,
        bytes_received=elements_received * size + received * header,
        messages_sent=sent,
        messages_received=received,
    )


@functools.lru_cache(maxsize=256)
def _counts(*key: Any) -> tuple[int, int, int, int]:
    """Return the messages and elements that are sent, and those that are received."""
    sent = elements_sent = received = elements_received = 0
    for kind, _, _, start, stop, _ in _steps_of(*key):
        if kind is StepKind.SEND:
            sent += 1
            elements_sent += stop - start
        elif kind is StepKind.POST:
            received += 1
            elements_received += stop - start
    return sent, elements_sent, received, elements_received
