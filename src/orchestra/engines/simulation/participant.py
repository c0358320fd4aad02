"""One rank's part in a collective in virtual time: message by message, or in shared memory.

`Participant` takes the steps of transports/collective.py without a flow of its own, and is charged
for them as a transport charges. `carry_out` does what a flow does in the memory that ranks of one
node share. Long vectors go through it chunk by chunk. Of their barriers only the first and the last
one are carried out; what happens in between, the other barriers included, takes its time in one go.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor

from orchestra.engines.simulation.barriers import Barriers
from orchestra.engines.simulation.kernel import Call, Events
from orchestra.engines.simulation.network import Port
from orchestra.engines.simulation.placed import BARRIER, FREE, SEND, TAKE, PlacedPlan
from orchestra.engines.simulation.plan import NodeStage
from orchestra.engines.simulation.processor import Thread
from orchestra.engines.simulation.stream import Load
from orchestra.errors import PeerLost
from orchestra.schedules.sums import SumStage
from orchestra.transports.collective import StepKind, cuts_in_memory, steps_of
from orchestra.transports.framing import header_bytes
from orchestra.transports.protocol import CollectiveCall, Traffic

Pair = tuple[int, int]
"""The places of a sender and its receiver."""

BLOCKED = None
"""In place of seconds of computation: a packet, or a barrier, wakes the participant."""


class Packet(Load):
    """A message without content; times are infinite as long as they are not known.

    A collective cannot go on without any of its packets, so no rank has to learn that one is lost.
    The sender decides whether a packet is `fair`.
    """

    __slots__ = ("_events", "at_begin", "at_end", "began", "ended")

    def __init__(self, events: Events, frame_bytes: int, both_ways: bool) -> None:
        super().__init__(frame_bytes, both_ways, fair=True)
        self.began = self.ended = inf
        self.at_begin: list[Call] = []  # called when the first byte is there
        self.at_end: list[Call] = []  # and when the last one is
        self._events = events

    def begin(self) -> None:
        self.began = self._events.now()
        for call in self.at_begin:
            call()

    def end(self) -> None:
        self.ended = self._events.now()
        for call in self.at_end:
            call()
        self.at_begin.clear()  # cycles would be left to the garbage collector
        self.at_end.clear()


class Messages:
    """The packets between the participants of one collective, by pair, in their order."""

    def __init__(self, placed: PlacedPlan, events: Events) -> None:
        self.placed, self.events = placed, events
        self.barriers = Barriers(events)
        self._packets: dict[Pair, list[Packet]] = defaultdict(list)

    def packet(self, pair: Pair, counts: Counter[Pair], frame_bytes: int) -> Packet:
        """The next packet of a pair by `counts`; either end may be the first to ask for it."""
        packets, number = self._packets[pair], counts[pair]
        counts[pair] += 1
        if number == len(packets):
            both_ways = self.placed.plan.goes_both_ways(pair, number)
            packets.append(Packet(self.events, frame_bytes, both_ways))
        return packets[number]


class Participant:
    """The rank at place `index`, which computes on `processor`; `then` is called at its end.

    As long as nothing can slow down what it computes it goes ahead of the events, as a flow does,
    and only packets make it wait.
    """

    def __init__(
        self, messages: Messages, index: int, processor: Thread, then: Callable[[Participant], None]
    ) -> None:
        self.index = index
        self.waiting = self.communicating = 0.0  # seconds, as a transport counts them
        self._messages, self._events = messages, messages.events
        self._processor, self._then = processor, then
        self._steps = self._take_part()
        self._time = 0.0  # its present: now, or ahead of the events

    def go_on(self) -> None:
        """Take steps until one of them takes time."""
        self._time = max(self._time, self._events.now())
        # At most one step: a step that takes time, or waits, calls `go_on` again at its end.
        for seconds in self._steps:
            if seconds is not BLOCKED:
                self._compute(seconds)
            return
        self._then(self)

    def _compute(self, seconds: float) -> None:
        """Compute for `seconds` core-seconds, once the events have caught up with this rank."""
        if self._time > self._events.now():
            call = partial(self._compute, seconds) if seconds > 0 else self.go_on
            self._events.at(self._time, call)
        else:
            self._processor.start(seconds, self.go_on)

    def _goes_ahead(self, seconds: float) -> bool:
        """Go ahead of the events by `seconds` of computation; False if it has to wait instead."""
        if self._processor.undisturbed():
            self._time += seconds / self._processor.rate
            return True
        return seconds == 0

    def _take_part(self) -> Iterator[float | None]:
        """Take the executor's steps; yield seconds of computation to wait for, or `BLOCKED`."""
        messages, own = self._messages, self.index
        counts: Counter[Pair] = Counter()
        leaving: dict[int, Packet] = {}
        for kind, number, peer, frame_bytes, seconds, rest in messages.placed.steps(own):
            began = self._time
            if kind is FREE:
                packet = leaving[number]
                if packet.ended == inf:
                    packet.at_end.append(self.go_on)
                    yield BLOCKED
                self.waiting += self._time - began
                continue
            if kind is TAKE:
                packet = messages.packet((peer, own), counts, frame_bytes)
                yield from self._take(packet, seconds)
                continue
            if kind is SEND:
                packet = leaving[number] = messages.packet((own, peer), counts, frame_bytes)
                # Not before: the receiver may ask for it before this rank starts its stopwatch.
                packet.fair = messages.placed.shares_fairly(own)
            if not self._goes_ahead(seconds):
                yield seconds
            if kind is BARRIER:
                here = self._time
                self.communicating += here - began
                messages.barriers.arrive(number, peer, own, here, rest, self.go_on)
                yield BLOCKED
                self.waiting += self._time - here
                continue
            if kind is SEND:
                stream = messages.placed.streams[own, peer]
                stream.send(packet, self._time)
                if not self._goes_ahead(rest):
                    yield rest
                stream.leave(packet, self._time)
            self.communicating += self._time - began
        if self._time > self._events.now():
            # `then` has to be called at the time of the end, so wait until the events are there.
            yield 0.0

    def _take(self, packet: Packet, seconds: float) -> Iterator[float | None]:
        """Wait for `packet`, and compute for `seconds` from its first byte on."""
        began, steady = self._time, self._processor.undisturbed()
        # Where others may slow it down it computes from the first byte on; else see the maximum.
        if (packet.ended if steady else packet.began) == inf:
            (packet.at_end if steady else packet.at_begin).append(self.go_on)
            yield BLOCKED
        arrived = max(began, packet.began)
        self.waiting += arrived - began
        if steady:
            self._time = max(arrived + seconds / self._processor.rate, packet.ended)
        else:
            if seconds > 0:
                yield seconds
            if packet.ended == inf:
                packet.at_end.append(self.go_on)
                yield BLOCKED
        self.communicating += self._time - arrived


def carry_out(stage: SumStage, call: CollectiveCall, port: Port, traffic: Traffic) -> None:
    """Let the present flow, of the rank of `port`, do its part of a stage of `call`.

    Raises:
        PeerLost: one of the others is gone.
    """
    vector, ranks, cuts = call.vector, call.group.ranks, cuts_in_memory(call)
    place = ranks.index(port.rank)
    together = NodeStage(stage.ranks, stage.rounds, stage)
    key = tuple(ranks[each] for each in stage.ranks), call.tag, stage.rounds
    shown = port.net.shown.setdefault(key, {})
    shown[place] = vector
    port.keep_order()
    port.spend(port.warm_up(), traffic)
    costs = port.net.overhead.in_memory
    for part, (seconds, wake) in enumerate(together.phases(place, cuts, vector.itemsize, costs)):
        port.spend(seconds, traffic)
        if wake is not None:
            _wait(port, (key, part), key[0], wake, traffic)
        # The first to go on sees to the values of all. It may be in the next collective already,
        # which some have not begun.
        if part == 0 and len(port.net.shown.get(key, ())) == len(key[0]):
            _form(stage, port.net.shown.pop(key), cuts)
    for kind, _, peer, first, end, _ in steps_of(call, port.rank, *stage.rounds):
        if kind is StepKind.SEND:
            size = (end - first) * vector.itemsize + header_bytes(1)
            port.bytes_sent += size
            port.meter.count(port.net.members[ranks[peer]], size)


def _wait(
    port: Port,
    key: Hashable,
    ranks: Sequence[int],
    wake: float,
    traffic: Traffic,
) -> None:
    passed: list[bool] = []
    kernel, gone = port.net.kernel, port.mailbox.gone
    others = tuple(rank for rank in ranks if rank != port.rank)

    def go_on() -> None:
        passed.append(True)
        port.wake(go_on)

    port.net.barriers.arrive(key, len(ranks), ranks.index(port.rank), kernel.here(), wake, go_on)
    traffic.seconds_waiting += port.sleep_until(
        lambda: bool(passed) or not gone.keys().isdisjoint(others),
        lambda: (port.net.slots(others), "to add up in shared memory"),
        go_on,
    )
    if not passed:
        lost = next(rank for rank in others if rank in gone)
        raise PeerLost(lost, gone[lost])


def _form(stage: SumStage, vectors: Mapping[int, Tensor], cuts: Sequence[int]) -> None:
    """Give each rank's vector the values that `stage` leaves it with."""
    if next(iter(vectors.values())).is_meta:
        return  # shapes only
    with torch.no_grad():
        # Copies, since sums of one rank read the vectors of the others as they were.
        results = {place: vector.clone() for place, vector in vectors.items()}
        for place, result in results.items():
            stage.whole[place].form(vectors, result, cuts, 0, cuts[-1])
        for place, vector in vectors.items():
            vector.copy_(results[place])
