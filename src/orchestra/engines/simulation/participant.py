"""One rank's part in a collective, message by message in virtual time, without a flow of its own.

It takes the steps of transports/collective.py, and is charged for them as a transport charges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from math import inf

from orchestra.engines.simulation.fluid import Fluid
from orchestra.engines.simulation.kernel import Events, Processor
from orchestra.engines.simulation.rounds import ADD, BARRIER, FREE, SEND, PlacedPlan
from orchestra.engines.simulation.shared_memory import Barriers
from orchestra.engines.simulation.stream import Stream

Call = Callable[[], None]

BLOCKED = None
"""In place of seconds of computation: a packet, or a barrier, wakes the participant."""


class Packet:
    """A message without content; times are infinite as long as they are not known.

    Attributes:
        both_ways: whether others of its round go the other way.
        at_begin, at_end: called when the first byte is there, and when the last one is.
    """

    __slots__ = (
        *("_scene", "at_begin", "at_end", "began", "both_ways", "crossed", "ended", "fair"),
        *("frame_bytes", "held_bytes", "left_at"),
    )

    def __init__(self, scene: Scene, frame_bytes: int, both_ways: bool, *, fair: bool) -> None:
        self.frame_bytes = frame_bytes
        self.held_bytes = 0
        self.fair = fair
        self.both_ways: bool | None = both_ways
        self.began = self.ended = self.left_at = inf
        self.crossed = False
        self.at_begin: list[Call] = []
        self.at_end: list[Call] = []
        self._scene = scene

    def begin(self) -> None:
        """Its first byte is there."""
        self.began = self._scene.events.now()
        for call in self.at_begin:
            call()

    def free(self) -> None:
        """Its sender waits for all of it."""

    def end(self) -> None:
        """All of it is there."""
        self.ended = self._scene.events.now()
        for call in self.at_end:
            call()
        self.at_begin.clear()  # cycles would be left to the garbage collector
        self.at_end.clear()

    def fail(self, error: Exception) -> None:
        """Nobody needs to learn of it: who takes part in a collective cannot go on without it."""


class Scene:
    """The events among which a collective is carried out: those of the world, or of a replay.

    A collective whose times were evaluated at once (rounds.py) is replayed from its beginning when
    something comes between, and goes on in the world from where it has come.
    """

    def __init__(self, events: Events, replays: bool = False) -> None:
        self.events = events
        self.replays = replays

    def enter_world(self, world: Events, fluid: Fluid, streams: Collection[Stream]) -> None:
        """Replay up to the present time of `world`, and go on there."""
        self.events.run_until(world.now())
        # Only packets on their way move over. Other events are ends of computations (see below).
        left = [(time, call, packet) for time, call, packet in self.events.left() if packet]
        for stream in streams:  # all of them, before one crosses again: they may share links
            stream.suspend()
        for stream in streams:
            stream.enter(world, fluid)
        for time, call, packet in left:  # computation starts anew: others may compute, too
            world.call_at(time, call, packet)
        self.events, self.replays = world, False


class Messages:
    """The packets between the participants of one collective, by pair, in their order."""

    def __init__(self, placed: PlacedPlan, scene: Scene) -> None:
        self.placed = placed
        self.scene = scene
        self.barriers = Barriers(scene.events)
        self._packets: dict[tuple[int, int], list[Packet]] = defaultdict(list)

    def packet(self, pair: tuple[int, int], number: int, frame_bytes: int) -> Packet:
        """Packet `number` of a pair; either end may be the first to ask for it."""
        packets = self._packets[pair]
        if number == len(packets):
            both_ways = self.placed.plan.goes_both_ways(pair, number)
            fair = self.placed.shares_fairly(pair[0])
            packets.append(Packet(self.scene, frame_bytes, both_ways, fair=fair))
        return packets[number]


class Participant:
    """The rank at place `index`, which computes on `processor`; `then` is called at its end.

    As long as nothing can slow down what it computes it goes ahead of the events, as a flow does,
    and only packets make it wait.

    Attributes:
        waiting, communicating: seconds, as a transport counts them.
    """

    def __init__(
        self,
        messages: Messages,
        index: int,
        processor: Processor,
        then: Callable[[Participant], None],
    ) -> None:
        self.index = index
        self.waiting = self.communicating = 0.0
        self._messages = messages
        self._scene = messages.scene
        self._processor = processor
        self._then = then
        self._steps = self._take_part()
        self._time = 0.0  # its present: now, or ahead of the events
        self._computes_until = 0.0  # in a replay, or ahead of the events

    def go_on(self) -> None:
        """Take steps until one of them takes time."""
        self._time = max(self._time, self._scene.events.now())
        # At most one step: a step that takes time, or waits, calls `go_on` again at its end.
        for seconds in self._steps:
            if seconds is not BLOCKED:
                self._compute(seconds)
            return
        self._then(self)

    def enter_world(self) -> None:
        """After a replay: compute what is left."""
        left = self._computes_until - self._scene.events.now()
        if left > 0:
            # Seconds of this processor into core-seconds, which it may now have to share.
            self._processor.start(left * self._processor.rate, self.go_on)

    def _compute(self, seconds: float) -> None:
        """Compute for `seconds` core-seconds, once the events have caught up with this rank."""
        events = self._scene.events
        if self._time > events.now():
            self._computes_until = self._time
            following = partial(self._compute, seconds) if seconds > 0 else self.go_on
            events.at(self._time, following)
        elif self._scene.replays:
            self._computes_until = events.now() + seconds / self._processor.rate
            events.at(self._computes_until, self.go_on)
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
        streams = messages.placed.streams
        counts: dict[tuple[int, int], int] = defaultdict(int)
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
            if kind is ADD:
                if not self._goes_ahead(seconds):
                    yield seconds
            elif kind is BARRIER:
                if not self._goes_ahead(seconds):
                    yield seconds
                here = self._time
                self.communicating += here - began
                messages.barriers.arrive(number, peer, own, here, rest, self.go_on)
                yield BLOCKED
                self.waiting += self._time - here
                continue
            elif kind is SEND:
                pair = own, peer
                packet = messages.packet(pair, counts[pair], frame_bytes)
                counts[pair] += 1
                leaving[number] = packet
                if not self._goes_ahead(seconds):
                    yield seconds
                streams[pair].send(packet, self._time)
                if not self._goes_ahead(rest):
                    yield rest
                streams[pair].leave(packet, self._time)
            else:
                pair = peer, own
                packet = messages.packet(pair, counts[pair], frame_bytes)
                counts[pair] += 1
                yield from self._take(packet, seconds)
                continue
            self.communicating += self._time - began
        if self._time > self._scene.events.now():
            # `then` has to be called at the time of the end, so wait until the events are there.
            yield 0.0

    def _take(self, packet: Packet, seconds: float) -> Iterator[float | None]:
        """Wait for `packet`, and compute for `seconds` from its first byte on."""
        began, steady = self._time, self._processor.undisturbed()
        # Where others may slow it down it computes from the first byte on, else that follows from a
        # maximum.
        if not steady and packet.began == inf:
            packet.at_begin.append(self.go_on)
            yield BLOCKED
        elif steady and packet.ended == inf:
            packet.at_end.append(self.go_on)
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
