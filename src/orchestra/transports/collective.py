"""`Transport.collective`: collectives in this flow, behind it, or by torch.distributed.

`steps` states what a rank does in a schedule and in which order, in numbers alone. `execute` does
it over a transport, blocking; the simulation does the same steps by events, without a flow for each
rank. A flow that begins collectives has two queues (`CollectiveMixin`). Those of the foreground are
executed by the flow itself, when it waits for one of them; those of the background by one more
flow, which is made for the first of them.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from orchestra.errors import InputError
from orchestra.schedules import REDUCE, Schedule
from orchestra.schedules.sums import Stage, local_stages
from orchestra.transports.framing import header_bytes
from orchestra.transports.protocol import (
    CollectiveCall,
    Group,
    Handle,
    HandOver,
    SharedTensor,
    Task,
    Traffic,
    Transport,
)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
SEGMENT_BYTES = 4 << 20  # measured: below the cost of missing the cache, above that of a message


@dataclass(frozen=True)
class RoundPart:
    """What one rank does in one round; pieces go from the first to before the end."""

    sends: Sequence[tuple[int, int, int]]  # (target, first, end)
    receives: Sequence[tuple[int, int, int, int]]  # (source, first, end, operation)


@functools.lru_cache(maxsize=256)
def _parts(schedule: Schedule, index: int, first: int, end: int | None) -> tuple[RoundPart, ...]:
    """The rounds from `first` to before `end` as one rank sees them."""
    parts = []
    for transfers in itertools.islice(schedule.rounds(), first, end):
        sends = transfers[transfers[:, 0] == index][:, [1, 2, 3]]
        receives = transfers[transfers[:, 1] == index][:, [0, 2, 3, 4]]
        if len(sends) or len(receives):
            parts.append(
                RoundPart(tuple(map(tuple, sends.tolist())), tuple(map(tuple, receives.tolist())))
            )
    return tuple(parts)


class StepKind(Enum):
    """Kinds of `Step`."""

    SEND = auto()  # begin to send elements
    POST = auto()  # begin to receive elements
    TAKE = auto()  # wait for a message that was posted
    FREE = auto()  # wait until a message that was sent may be changed
    ADD = auto()  # a message that was taken to the rank's own elements
    NEXT = auto()  # the round is over


class Step(NamedTuple):
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


def steps(parts: Iterable[RoundPart], edges: Sequence[int], segment: int) -> Iterator[Step]:
    """What a rank does in its `parts` of the rounds, with messages of at most `segment` elements.

    All that a round receives is posted, at most two messages a run of pieces, then all is sent,
    then the messages are taken in the order of the schedule. A message is small enough to be still
    in the processor's cache when it is added, and while one is added the next is on its way: two
    of scratch are enough. A send has to complete before the rank adds to the elements that it
    sends. An empty run of pieces makes no message.
    """
    sent, received = itertools.count(), itertools.count()
    for part in parts:
        yield from _round(part, edges, segment, sent, received)
        yield Step(StepKind.NEXT)


def _round(
    part: RoundPart,
    edges: Sequence[int],
    segment: int,
    sent: Iterator[int],
    received: Iterator[int],
) -> Iterator[Step]:
    arriving = []
    for run, (source, first, end, operation) in enumerate(part.receives):
        scratch = 2 * run if operation == REDUCE else -3
        spans = _cut(edges[first], edges[end], segment)
        arriving.append(
            [
                Step(StepKind.POST, next(received), source, *span, scratch + number % 2)
                for number, span in enumerate(spans)
            ]
        )
    for messages in arriving:
        yield from messages[:2]
    leaving: dict[Span, list[list[Step]]] = {}
    for target, first, end in part.sends:
        spans = _cut(edges[first], edges[end], segment)
        sending = [Step(StepKind.SEND, next(sent), target, *span) for span in spans]
        yield from sending
        leaving.setdefault((first, end), []).append(sending)
    for (_, first, end, _), messages in zip(part.receives, arriving, strict=True):
        for place, message in enumerate(messages):
            yield message._replace(kind=StepKind.TAKE)
            if message.scratch >= 0:
                for sending in leaving.get((first, end), ()):
                    yield sending[place]._replace(kind=StepKind.FREE)
                yield message._replace(kind=StepKind.ADD)
            yield from messages[place + 2 : place + 3]
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
) -> tuple[Step, ...]:
    """The steps of one rank in some rounds, for a vector of `length` elements."""
    edges = schedule.edges(length) if edges is None else edges
    assert edges[-1] == (schedule.pieces * length if schedule.slots else length)
    return tuple(steps(_parts(schedule, index, first, end), edges, segment))


def steps_of(
    call: CollectiveCall, rank: int, first: int = 0, end: int | None = None
) -> tuple[Step, ...]:
    """The steps of `rank` in a collective, in the rounds from `first` to before `end`."""
    assert call.schedule is not None
    assert call.vector.dim() == 1
    assert call.vector.is_contiguous()
    edges = None if call.edges is None else tuple(call.edges)
    segment = SEGMENT_BYTES // call.vector.element_size()
    index, length = call.group.index(rank), call.vector.numel()
    return _steps_of(call.schedule, index, length, edges, segment, first, end)


def execute(transport: Transport, call: CollectiveCall) -> int:
    """Take this rank's part in a collective over `transport`; the bytes of buffer used."""
    schedule, vector, group = call.schedule, call.vector, call.group
    assert schedule is not None
    order = steps_of(call, transport.rank)
    if not schedule.slots or len(group) == 1:
        return exchange(transport, call, order)
    index, length = group.index(transport.rank), vector.numel()
    slots = vector.new_empty(schedule.pieces, length)
    slots[index].copy_(vector)
    exchange(transport, replace(call, vector=slots.view(-1)), order)
    vector.copy_(slots[0])
    transport.add(vector, *slots[1:])
    return slots.nbytes


def exchange(transport: Transport, call: CollectiveCall, order: Iterable[Step]) -> int:
    """Carry out steps on the vector of `call`; the most bytes of scratch that a round needed."""
    memory, ranks, tag = call.vector, call.group.ranks, call.tag
    peak = 0
    sends: dict[int, Handle] = {}
    receives: dict[int, Handle] = {}
    scratch: dict[int, Tensor] = {}
    for kind, number, peer, first, end, place in order:
        if kind is StepKind.SEND:
            sends[number] = transport.send(memory[first:end], ranks[peer], tag)
        elif kind is StepKind.POST:
            into = memory[first:end]
            if place >= 0:
                if place not in scratch:
                    scratch[place] = torch.empty_like(into)
                into = scratch[place][: end - first]
            receives[number] = transport.receive(ranks[peer], tag, into)
        elif kind is StepKind.TAKE:
            receives[number].wait()
        elif kind is StepKind.ADD:
            transport.add(memory[first:end], scratch[place][: end - first])
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
    carry_out: Callable[[Stage], int | None],
) -> int:
    """`execute` a collective of which the places `local` share memory with this rank.

    Args:
        carry_out: does this rank's part in a stage; the bytes of buffer used. None: it is to be
            done by messages.
    """
    schedule, rank = call.schedule, transport.rank
    assert schedule is not None
    if len(local) < 2 or not call.vector.numel():
        return execute(transport, call)
    peak, place = 0, call.group.index(rank)
    for stage in local_stages(schedule, local):
        used = None
        if isinstance(stage, Stage) and place in stage.ranks:
            used = carry_out(stage)
        if used is None and schedule.slots:
            used = execute(transport, call)
        elif used is None:
            rounds = stage.rounds if isinstance(stage, Stage) else stage
            used = exchange(transport, call, steps_of(call, rank, *rounds))
        peak = max(peak, used)
    return peak


def stage_traffic(call: CollectiveCall, rank: int, stage: Stage) -> Traffic:
    """What the messages of a stage would have counted."""
    traffic = Traffic()
    size, header = call.vector.element_size(), header_bytes(1)
    for kind, _, _, first, end, _ in steps_of(call, rank, *stage.rounds):
        if kind is StepKind.SEND:
            traffic.messages_sent += 1
            traffic.bytes_sent += (end - first) * size + header
        elif kind is StepKind.POST:
            traffic.messages_received += 1
            traffic.bytes_received += (end - first) * size + header
    traffic.bytes_in_memory = traffic.bytes_sent
    return traffic


class ThreadHandOver:
    """Between two threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def look(self) -> None:
        """What was told is seen at once."""

    def wait_until(self, condition: Callable[[], bool], traffic: Traffic) -> None:
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(condition)
        traffic.seconds_waiting += time.perf_counter() - started

    def tell(self, change: Callable[[], None], traffic: Traffic) -> None:
        with self._changed:
            change()
            self._changed.notify_all()


@dataclass(eq=False)
class Begun:
    """A `function` of a transport that was begun; `finish` blocks until it was executed.

    Attributes:
        flow: the background flow that executes it.
        look: is called before it is said whether it is done.
        result: what the function returned.
    """

    function: Callable[[Transport], Any]
    finish: Callable[[Begun], None]
    flow: Task[None] | None = None
    look: Callable[[], object] = lambda: None
    finished: bool = False
    error: BaseException | None = None
    result: Any = None

    def wait(self) -> Any:
        """Block until it is done: what it returned. Raises what it raised."""
        if not self.finished:
            self.finish(self)
        if self.error is not None:
            raise self.error
        return self.result

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        self.look()
        return self.finished

    def execute(self, transport: Transport) -> None:
        """Carry it out, or note what it raised; it counts as finished once that is said."""
        try:
            self.result = self.function(transport)
        except BaseException as error:
            self.error = error


def labelled(label: str) -> Callable[[F], F]:
    """What a flow that runs the function is called in a timeline, in place of its name."""

    def label_it(function: F) -> F:
        vars(function)["flow_label"] = label
        return function

    return label_it


class Background:
    """What a flow behind `owner` executes, one function after the other."""

    def __init__(self, owner: Transport) -> None:
        self._owner = owner
        self._hand_over = owner.new_hand_over()
        self._waiting: deque[Begun] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._flow: Task[None] | None = None

    def begin(self, function: Callable[[Transport], Any]) -> Begun:
        """One more, behind the others; the first of them makes the flow."""
        if self._flow is None:
            self._ended = False
            self._flow = self._owner.spawn(self.execute_in_background)
        begun = Begun(function, self._finish, self._flow, self._hand_over.look)
        self._hand_over.tell(lambda: self._waiting.append(begun), self._owner.traffic)
        return begun

    def end(self) -> None:
        """Let the flow end once all is done; whatever failed has been raised by `wait`."""
        if self._flow is not None:
            self._hand_over.tell(lambda: setattr(self, "_ended", True), self._owner.traffic)
            self._flow.wait()
            self._flow = None

    def _finish(self, begun: Begun) -> None:
        """Wait until the flow has executed it, or has failed before."""
        self._hand_over.wait_until(
            lambda: begun.finished or self._error is not None, self._owner.traffic
        )
        if not begun.finished:
            begun.error = self._error

    @labelled("background")
    def execute_in_background(self, transport: Transport) -> None:
        """The flow, on its `transport`."""
        traffic = transport.traffic
        while self._error is None:
            self._hand_over.wait_until(lambda: bool(self._waiting) or self._ended, traffic)
            if not self._waiting:
                return
            begun = self._waiting[0]
            before = traffic.seconds_communicating
            begun.execute(transport)
            self._error = begun.error
            self._owner.traffic.seconds_in_background += traffic.seconds_communicating - before
            self._waiting.popleft()
            self._hand_over.tell(functools.partial(setattr, begun, "finished", True), traffic)


class CollectiveMixin:
    """`Transport.collective` for every transport.

    An interceptor's transport has queues of its own, so that the flow behind them is intercepted.
    """

    _foreground: deque[Begun] | None = None
    _background: dict[int, Background] | None = None  # by lane

    def collective(self, call: CollectiveCall) -> Task[int]:
        """Begin this rank's part in a collective; see `Transport.collective`."""
        this: Transport = self  # type: ignore[assignment]
        if call.schedule is None:
            return this.native_all_reduce(call.vector)
        if call.background:
            return self.in_background(lambda transport: transport.execute(call))
        self._foreground = deque() if self._foreground is None else self._foreground
        begun = Begun(lambda transport: transport.execute(call), self._execute_up_to)
        self._foreground.append(begun)
        return begun

    def in_background(self, function: Callable[[Transport], T], lane: int = 0) -> Task[T]:
        """Run `function` on the background flow; see `Transport.in_background`."""
        lanes = self._background = {} if self._background is None else self._background
        if lane not in lanes:
            lanes[lane] = Background(self)  # type: ignore[arg-type]
        return lanes[lane].begin(function)

    def _execute_up_to(self, last: Begun) -> None:
        assert self._foreground is not None
        while not last.finished:
            begun = self._foreground.popleft()
            begun.execute(self)  # type: ignore[arg-type]
            begun.finished = True
            if begun.error is not None:
                raise begun.error

    def end_background(self) -> None:
        """End the background flows, if there are any."""
        lanes, self._background = self._background or {}, None
        for background in lanes.values():
            background.end()

    def execute(self, call: CollectiveCall, over: Transport | None = None) -> int:
        """Carry out `call` now, message by message; see `Transport.execute`."""
        return execute(over or self, call)  # type: ignore[arg-type]

    def executed(self, call: CollectiveCall, start: float, moving: float, sent: int) -> None:
        """Do nothing: nobody looks; see `Transport.executed`."""

    def share(self, like: Tensor, group: Group, tag: int) -> SharedTensor:
        """Refuse: only some transports have memory to share."""
        raise InputError("this engine has no memory that ranks share")

    def native_all_reduce(self, vector: Tensor) -> Task[int]:
        """Refuse: only some transports have a backend."""
        raise InputError("this engine has no native collectives: name a schedule instead")

    def new_hand_over(self) -> HandOver:
        """Make what two threads wait on."""
        return ThreadHandOver()
