"""One rank's part in a collective, message by message in virtual time, without a flow of its own.

It takes the steps of transports/collective.py, and is charged for them as a transport charges.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from math import inf

from orchestra.engines.simulation.fluid import Fluid
from orchestra.engines.simulation.kernel import Events, Processor
from orchestra.engines.simulation.network import Stream
from orchestra.engines.simulation.rounds import PlacedPlan
from orchestra.transports.collective import StepKind

Call = Callable[[], None]

# Attributes of an Enum are slow to look up.
SEND, TAKE, FREE, ADD = StepKind.SEND, StepKind.TAKE, StepKind.FREE, StepKind.ADD
BLOCKED = None
"""In place of seconds of computation: a packet wakes the participant."""


class Packet:
    """A message without content; times are infinite as long as they are not known."""

    __slots__ = ("_scene", "_then", "began", "crossed", "ended", "frame_bytes", "left_at")

    def __init__(self, scene: Scene, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self.began = self.ended = self.left_at = inf
        self.crossed = False
        self._scene = scene
        self._then: list[Call] = []

    def begin(self) -> None:
        """Its first byte is there."""
        self.began = self._scene.events.now()
        self._wake()

    def end(self) -> None:
        """All of it is there."""
        self.ended = self._scene.events.now()
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nobody needs to learn of it: who takes part in a collective cannot go on without it."""

    def then(self, call: Call) -> None:
        """Call `call` when the next of the two happens."""
        self._then.append(call)

    def _wake(self) -> None:
        calls, self._then = self._then, []
        for call in calls:
            call()


class Scene:
    """The events among which a collective is carried out: those of the world, or of a replay.

    A collective whose times were evaluated at once (rounds.py) is replayed from its beginning when
    something comes between, and goes on in the world from where it has come.
    """

    def __init__(self, events: Events, replays: bool = False) -> None:
        self.events = events
        self.replays = replays

    def enter_world(self, world: Events, fluid: Fluid, streams: Collection[Stream]) -> None:
        """Go on at the present time of the `world`."""
        self.events.run_until(world.now())
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
        self._packets: dict[tuple[int, int], list[Packet]] = defaultdict(list)

    def packet(self, pair: tuple[int, int], number: int, elements: int) -> Packet:
        """Packet `number` of a pair; either end may be the first to ask for it."""
        packets = self._packets[pair]
        if number == len(packets):
            packets.append(Packet(self.scene, self.placed.plan.frame_bytes(elements)))
        return packets[number]


class Participant:
    """The rank at place `index`, which computes on `processor`; `then` is called at its end.

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
        self._computes_until = 0.0  # in a replay

    def go_on(self) -> None:
        """Take steps, until one takes time."""
        for seconds in self._steps:
            if seconds is BLOCKED:
                return
            if seconds > 0:
                self._compute(seconds)
                return
        self._then(self)

    def enter_world(self) -> None:
        """After a replay: compute what is left."""
        left = self._computes_until - self._scene.events.now()
        if left > 0:
            self._processor.start(left * self._processor.rate, self.go_on)

    def _compute(self, seconds: float) -> None:
        if self._scene.replays:
            events = self._scene.events
            self._computes_until = events.now() + seconds / self._processor.rate
            events.at(self._computes_until, self.go_on)
        else:
            self._processor.start(seconds, self.go_on)

    def _take_part(self) -> Iterator[float | None]:
        """The executor's steps, with the seconds of computation that each takes."""
        messages, scene, own = self._messages, self._scene, self.index
        placed = messages.placed
        plan, overhead, streams = placed.plan, placed.net.overhead, placed.streams
        counts: Counter[tuple[int, int]] = Counter()
        leaving: list[Packet] = []
        for kind, number, peer, first, end, _ in plan.steps(own):
            began = scene.events.now()
            if kind is SEND:
                pair = own, peer
                packet = messages.packet(pair, counts[pair], end - first)
                counts[pair] += 1
                leaving.append(packet)
                cost = overhead.message(packet.frame_bytes)
                yield cost.send_setup
                streams[pair].send(packet, scene.events.now())
                yield cost.send_rest
                streams[pair].leave(packet, scene.events.now())
            elif kind is TAKE:
                pair = peer, own
                packet = messages.packet(pair, counts[pair], end - first)
                counts[pair] += 1
                while packet.began == inf:
                    packet.then(self.go_on)
                    yield BLOCKED
                now = scene.events.now()
                self.waiting += now - began
                began = now
                yield overhead.message(packet.frame_bytes).receiving
                while packet.ended == inf:
                    packet.then(self.go_on)
                    yield BLOCKED
            elif kind is FREE:
                packet = leaving[number]
                while packet.frame_bytes > overhead.buffer and packet.ended == inf:
                    packet.then(self.go_on)
                    yield BLOCKED
                self.waiting += scene.events.now() - began
                continue
            elif kind is ADD:
                yield overhead.add * (end - first) * plan.itemsize
            self.communicating += scene.events.now() - began
        began = scene.events.now()
        yield overhead.add * plan.added_slots_bytes
        self.communicating += scene.events.now() - began
