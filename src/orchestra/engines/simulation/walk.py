"""One rank's way through an all-reduce, message by message, without a thread.

It takes the steps of transports/collective.py, at the times that a transport would take: in the
world, where its messages share links with others and its processor time shares cores; or ahead of
the world, for a time in which nobody else had to do with either.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING

from orchestra.cluster.costs import Overhead
from orchestra.engines.simulation.kernel import Kernel, Processor
from orchestra.engines.simulation.plan import Plan
from orchestra.transports import collective

if TYPE_CHECKING:
    from orchestra.engines.simulation.streams import Stream

Pair = tuple[int, int]


class Parcel:
    """A message without content.

    `sent`, `began`, `crossed_at` and `ended` are times, infinite as long as they are not known.
    """

    __slots__ = (
        *("frame_bytes", "sent", "began", "crossed_at", "ended", "left_at", "crossed"),
        *("_kernel", "_once_begun", "_once_ended"),
    )

    def __init__(self, kernel: Kernel, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self.sent = self.began = self.crossed_at = self.ended = self.left_at = inf
        self.crossed = False
        self._kernel = kernel
        self._once_begun: list[Callable[[], None]] = []
        self._once_ended: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Its first byte is there."""
        self.began = self._kernel.now()
        _call(self._once_begun)

    def end(self) -> None:
        """All of it is there."""
        self.ended = self._kernel.now()
        _call(self._once_ended)

    def fail(self, error: Exception) -> None:
        """Nobody needs to learn of it: who takes part in a collective cannot go on without it."""

    def once_begun(self, call: Callable[[], None]) -> None:
        """Call `call` when its first byte is there."""
        self._once_begun.append(call)

    def once_ended(self, call: Callable[[], None]) -> None:
        """Call `call` when all of it is there."""
        self._once_ended.append(call)


def _call(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
    calls.clear()


class Paths:
    """What the ranks of one all-reduce send each other: the parcels of each pair, in their order.

    `free` says until when a stream is taken by what was sent before.
    """

    def __init__(
        self,
        kernel: Kernel,
        plan: Plan,
        overhead: Overhead,
        streams: Mapping[Pair, Stream],
        free: Mapping[Pair, float],
    ) -> None:
        self.kernel = kernel
        self.plan = plan
        self.overhead = overhead
        self.free = dict(free)
        self.ready: deque[int] = deque()  # whom something was sent to ahead of the world
        self._streams = streams
        self._parcels: dict[Pair, list[Parcel]] = defaultdict(list)

    def parcel(self, pair: Pair, number: int, elements: int) -> Parcel:
        """Parcel `number` of a pair; either end may be the first to ask for it."""
        parcels = self._parcels[pair]
        if number == len(parcels):
            parcels.append(Parcel(self.kernel, self.plan.frame_bytes(elements)))
        return parcels[number]

    def stream(self, pair: Pair) -> Stream:
        """The stream of a pair."""
        return self._streams[pair]

    def send_ahead(self, pair: Pair, parcel: Parcel, time: float, left: float) -> None:
        """Sent at `time`, and has left at `left`: where nothing else is on the way, the rest
        is known."""
        stream = self._streams[pair]
        parcel.sent = time
        parcel.began = max(time + stream.latency, self.free[pair])
        wire_bytes = parcel.frame_bytes * self.overhead.wire
        parcel.crossed_at = parcel.began + wire_bytes / stream.bandwidth
        parcel.ended = self.free[pair] = max(parcel.crossed_at, left)
        self.ready.append(pair[1])

    def enter_world(self) -> None:
        """What is on its way ahead of the world goes on in it."""
        now = self.kernel.now()
        for pair, parcels in self._parcels.items():
            stream = self._streams[pair]
            for parcel in parcels:
                if not now < parcel.ended < inf:
                    continue
                parcel.ended = inf
                if parcel.began <= now:
                    left = max(parcel.crossed_at - now, 0.0) * stream.bandwidth
                    stream.carry_on(parcel, left)
                    continue
                parcel.began = inf
                if parcel.sent + stream.latency <= now:
                    stream.arrive(parcel)
                else:
                    arrive = functools.partial(stream.arrive, parcel)
                    self.kernel.at(parcel.sent + stream.latency, arrive)


class Verb(Enum):
    """What a rank does next."""

    SPEND = auto()  # processor time
    SEND = auto()  # a parcel's first byte leaves
    LEAVE = auto()  # its last byte has left
    BEGIN = auto()  # to take in a parcel, once its first byte is there
    END = auto()  # taking it in, once all of it is there
    BE_RID = auto()  # of a parcel of its own, once it may be changed again


SPEND, SEND, LEAVE, BEGIN, END, BE_RID = Verb  # an attribute of an Enum is slow to look up
WAITS = (BEGIN, BE_RID)
Deed = tuple[Verb, float, Parcel | None, Pair]
NOBODY = (-1, -1)


class Walk:
    """Of rank `index`, from its part in round `number` on.

    Attributes:
        clock: how far it has come ahead of the world.
        waiting, communicating: seconds, as a transport counts them.
        over: whether it has come to its end.
    """

    def __init__(
        self,
        paths: Paths,
        index: int,
        processor: Processor,
        then: Callable[[Walk], None],
        *,
        number: int = 0,
        clock: float = 0.0,
        waiting: float = 0.0,
        communicating: float = 0.0,
    ) -> None:
        self.index = index
        self.clock = clock
        self.waiting = waiting
        self.communicating = communicating
        self.over = False
        self._paths = paths
        self._kernel = paths.kernel
        self._processor = processor
        self._then = then
        self._deeds = self._way(number)
        self._deed: Deed | None = None
        self._began = clock

    # What it does

    def _way(self, number: int) -> Iterator[Deed]:
        """The executor's steps from round `number` on, with what a SimulatedTransport charges."""
        paths, plan, overhead = self._paths, self._paths.plan, self._paths.overhead
        counts: Counter[Pair] = Counter()
        leaving: list[Parcel] = []
        first = overhead.send.at(0)
        for verb, place, peer, begin, end, _ in plan.steps(self.index, number):
            if verb is collective.Verb.SEND:
                pair = (self.index, peer)
                parcel = paths.parcel(pair, counts[pair], end - begin)
                counts[pair] += 1
                leaving.append(parcel)
                rest = overhead.send.at(parcel.frame_bytes) - first
                yield SPEND, first, None, NOBODY
                yield SEND, rest, parcel, pair
                yield SPEND, rest, None, NOBODY
                yield LEAVE, 0.0, parcel, pair
            elif verb is collective.Verb.TAKE:
                pair = (peer, self.index)
                parcel = paths.parcel(pair, counts[pair], end - begin)
                counts[pair] += 1
                yield BEGIN, 0.0, parcel, NOBODY
                yield SPEND, overhead.receive.at(parcel.frame_bytes), None, NOBODY
                yield END, 0.0, parcel, NOBODY
            elif verb is collective.Verb.FREE:
                yield BE_RID, 0.0, leaving[place], NOBODY
            elif verb is collective.Verb.ADD:
                yield SPEND, overhead.add * (end - begin) * plan.itemsize, None, NOBODY
        yield SPEND, overhead.add * plan.added_slots_bytes, None, NOBODY

    # Ahead of the world

    def go_ahead(self, until: float) -> None:
        """As far as it gets up to the time `until`, with what the others have sent so far."""
        while True:
            if self._deed is None:
                self._deed = next(self._deeds, None)
                self._began = self.clock
                if self._deed is None:
                    self.over = True
                    return
            end = self._end_ahead(*self._deed)
            if end > until or end == inf:
                return
            self._settle(end)
            self.clock = end
            self._deed = None

    def _end_ahead(self, verb: Verb, seconds: float, parcel: Parcel | None, pair: Pair) -> float:
        """When the present deed will be done; infinite where that is not known yet."""
        taken = seconds / self._processor.rate
        if verb is SPEND:
            return self._began + taken
        assert parcel is not None
        if verb is SEND:
            self._paths.send_ahead(pair, parcel, self._began, self._began + taken)
        elif verb is LEAVE:
            parcel.left_at = self._began
        elif verb is BEGIN:
            return max(self._began, parcel.began)
        elif verb is END or self._is_held(parcel):
            return max(self._began, parcel.ended)
        return self._began

    # In the world

    def enter_world(self) -> None:
        """Go on from where it has come ahead."""
        self.clock = self._kernel.now()
        if self.over:
            self._then(self)
        elif self._deed is None:
            self._go_on()
        else:
            verb, seconds, parcel, _ = self._deed
            if verb is SPEND:
                left = self._began + seconds / self._processor.rate - self._kernel.now()
                self._processor.start(left * self._processor.rate, self._spent)
            else:
                assert parcel is not None
                if self._may_go_on(verb, parcel):
                    self._go_on()

    def _go_on(self) -> None:
        for deed in self._deeds:
            self._deed = deed
            self._began = began = self.clock = self._kernel.now()
            verb, seconds, parcel, pair = deed
            if verb is SPEND:
                if seconds > 0:
                    self._processor.start(seconds, self._spent)
                    return
                continue
            assert parcel is not None
            if verb is SEND:
                self._paths.stream(pair).send(parcel, began)
            elif verb is LEAVE:
                self._paths.stream(pair).leave(parcel, began)
            elif not self._may_go_on(verb, parcel):
                return
        self.over = True
        self._then(self)

    def _spent(self) -> None:
        self.communicating += self._kernel.now() - self._began
        self._go_on()

    def _may_go_on(self, verb: Verb, parcel: Parcel) -> bool:
        """Whether what `parcel` is waited for has happened; else it goes on when it does."""
        if verb is BEGIN and parcel.began == inf:
            parcel.once_begun(self._woken)
            return False
        if (verb is END or (verb is BE_RID and self._is_held(parcel))) and parcel.ended == inf:
            parcel.once_ended(self._woken)
            return False
        return True

    def _woken(self) -> None:
        self._settle(self._kernel.now())
        self._go_on()

    def _settle(self, end: float) -> None:
        """Count the time that the present deed took."""
        assert self._deed is not None
        if self._deed[0] in WAITS:
            self.waiting += end - self._began
        else:
            self.communicating += end - self._began

    def _is_held(self, parcel: Parcel) -> bool:
        """Whether the memory is needed until all is there."""
        return parcel.frame_bytes > self._paths.overhead.buffer_bytes
