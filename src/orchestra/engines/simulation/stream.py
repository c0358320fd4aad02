"""The stream of messages from one rank to another, in the order of sending, and its route.

The first byte of a message is there after the latency; on a link that is fast and long a TCP
connection starts slowly. Then the message crosses the links of its way, behind those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from orchestra.cluster.nodes import Tcp
from orchestra.engines.simulation.fluid import Activity, Resource
from orchestra.engines.simulation.kernel import Events

if TYPE_CHECKING:
    from orchestra.engines.simulation.network import Net


LONG = 1 << 17
"""Bytes: a connection that needs fewer in flight has started within three round trips."""

IDLE = 0.2
"""Seconds beyond a round trip without a message after which a connection starts again: Linux's
least retransmission timeout (RFC 2861; net.ipv4.tcp_slow_start_after_idle)."""


class SlowStart:
    """What one connection may have in flight: at first little, then more with each byte that has
    been acknowledged (RFC 5681, section 3.1).

    `bandwidth` are bytes/s of its way, `round_trip` the seconds until a byte is acknowledged.
    """

    def __init__(self, tcp: Tcp, bandwidth: float, round_trip: float) -> None:
        self._first = self._window = tcp.first_window
        self._bandwidth, self._round_trip = bandwidth, round_trip
        self.pause = round_trip + IDLE  # seconds without a message after which it starts again
        self.used_at = -inf  # until when it has carried something

    def stall(self, size: float, time: float) -> float:
        """Send `size` bytes (on the wire) at `time`.

        Returns the seconds that they wait for acknowledgements, in all.
        """
        if time - self.used_at > self.pause:
            self._window = self._first
        self.use(time)
        window, seconds, rest = self._window, 0.0, size
        # Each round trip: a window's bytes leave, then the sender waits for the first
        # acknowledgement. Every byte acknowledged lets two follow, until the window is bandwidth x
        # round trip, from where on acknowledgements come in time.
        while window < self._bandwidth * self._round_trip and rest > window:
            seconds += self._round_trip - window / self._bandwidth
            rest -= window
            window *= 2
        # It grows by each byte that was acknowledged: by all of this message's, once it is through.
        self._window = min(self._window + size, self._bandwidth * self._round_trip)
        return seconds

    def use(self, time: float) -> None:
        """Note that the connection carries something until `time`."""
        self.used_at = max(self.used_at, time)


@dataclass(frozen=True)
class Route:
    """The way of a message: the resources that it crosses, and what TCP adds."""

    resources: Sequence[Resource]
    latency: float  # seconds that its first byte takes
    bandwidth: float  # bytes/s, as long as nothing else crosses the resources
    back: tuple[Resource, ...] = ()  # that its acknowledgements cross
    wire: float = 1.0  # bytes on each resource for each byte of the message
    acknowledgements: float = 0.0  # bytes on the way back for each of these
    slow_start: SlowStart | None = None  # of the connection, where it takes long
    weight: float = 1.0  # of its shares
    crosses_trunks: bool = False  # whether others than those of its two nodes may use some
    delay: Callable[[float], float] | None = None  # seconds that one sent at a time takes besides
    draw_share: Callable[[], float] | None = None  # draws the factor on the weight of the next


@dataclass(eq=False, slots=True)
class Load:
    """What a stream carries: a message, or what stands for one.

    One that is `fair` has an equal share of a link, whatever chance says.
    """

    frame_bytes: int  # with its header
    both_ways: bool | None  # whether others of its round of a collective, if any, go the other way
    fair: bool
    left_at: float = field(default=inf, init=False)  # when its sender has done its part, if known
    crossed: bool = field(default=False, init=False)  # whether the network has

    def begin(self) -> None:
        """Its first byte is there."""

    def end(self) -> None:
        """All of it is there."""

    def fail(self, error: Exception) -> None:
        """It never arrives."""


class Stream:
    """What one rank sends to another, a message after the other: latency first, then bandwidth.

    Attributes:
        route: the way of all of them.
        bandwidth: bytes/s, as long as nothing else crosses its links.
        cut_off: the message that was crossing when it was closed, if any.
    """

    def __init__(self, net: Net, route: Route, source: int, target: int) -> None:
        self.route = route
        self.bandwidth = route.bandwidth
        # Both directions share a resource, as on a radio channel: acknowledgements always compete.
        self._half_duplex = not set(route.resources).isdisjoint(route.back)
        assert len({*route.resources}) == len(route.resources), "a link is crossed twice"
        self._net, self._fluid = net, net.fluid
        self._events: Events = net.kernel
        self._source, self._target = source, target
        self._began = 0.0  # when the first byte of what crosses was there
        self._last = 0.0  # when the last one arrives
        self._queue: deque[Load] = deque()
        self._crossing: Activity | None = None  # of the first of them, once it has begun
        self._closed: Exception | None = None
        self.cut_off: Load | None = None

    def send(self, load: Load, time: float) -> None:
        """Send `load` at `time`, now or later, behind those before it.

        Its first byte is there after the latency.
        """
        # A constant latency keeps the order of sending, so that an arrival can be told ahead.
        if self.route.delay is None and self.route.slow_start is None:
            self._events.call_at(time + self.route.latency, self.arrive, load)
        # A flow that is ahead may not fix the arrival yet: others of its rank may still send before
        # it in virtual time, and what slow start takes depends on their order.
        elif time > self._events.now():
            self._events.call_at(time, self._depart, load)  # behind others that are sent before
        else:
            self._depart(load)

    def _depart(self, load: Load) -> None:
        """Send `load` now, on a route whose latency is not the same for all messages."""
        time = self._events.now()
        arrival = time + self.route.latency
        if self.route.delay is not None:
            arrival += self.route.delay(time)
        if self.route.slow_start is not None:
            arrival += self.route.slow_start.stall(self.on_wire(load.frame_bytes, None), time)
        # A TCP connection keeps the order: a delayed message holds up those behind it.
        self._last = arrival = max(self._last, arrival)
        self._events.call_at(arrival, self.arrive, load)

    def arrive(self, load: Load) -> None:
        """Queue `load`: its first byte has arrived, or would have if nothing were before it."""
        if self._closed is not None:
            load.fail(self._closed)
            return
        self._net.before_arrival(self.route.resources)
        self._queue.append(load)
        if len(self._queue) == 1:
            self._begin(load)

    def leave(self, load: Load, time: float) -> None:
        """Note that the sender has done its part of `load` at `time`, now or later."""
        load.left_at = time
        if load.crossed:
            self._end_once_left(load)

    def go_on(self) -> None:
        """Continue after the target was held: it takes in messages again."""
        if self._queue and self._crossing is None:
            self._begin(self._queue[0])

    def close(self, error: Exception) -> None:
        """Let nothing arrive any more, and tell senders of `error`."""
        self._closed = error
        if self._crossing is not None:
            self._fluid.cancel(self._crossing)
            self._crossing = None
            self.cut_off = self._queue[0]
        for load in self._queue:
            load.fail(error)
        self._queue.clear()

    def moved(self) -> float:
        """Return the bytes on the wire of the message under way that have crossed until now."""
        if self._crossing is None:
            return 0.0
        load, left = self._queue[0], self._crossing.left_at(self._events.now())
        return self.on_wire(load.frame_bytes, load.both_ways) - left

    def _begin(self, load: Load) -> None:
        if self._net.members[self._target] in self._net.kernel.held:
            return  # a rank that stands still takes in nothing
        load.begin()
        self._began = self._events.now()
        # In a collective, acknowledgements are part of the bytes (`on_wire`), by what the schedule
        # sends in both directions, so that followed and evaluated collectives agree.
        back = self.route.back if load.both_ways is None else ()
        weight = self.route.weight
        if self.route.draw_share is not None and not load.fair:
            weight *= self.route.draw_share()
        wire_bytes = self.on_wire(load.frame_bytes, load.both_ways)
        self._crossing = self._fluid.start(
            wire_bytes, self.route.resources, self._crossed, back, weight
        )

    def on_wire(self, frame_bytes: int, both_ways: bool | None) -> float:
        """Return the bytes of a frame on each link.

        They include those of acknowledgements if messages go `both_ways`. With None, for a message
        that is none of a collective, acknowledgements are charged where they cross.
        """
        counted = both_ways or (self._half_duplex and both_ways is not None)
        others = self.route.acknowledgements if counted else 0.0
        return frame_bytes * self.route.wire * (1 + others)

    def _crossed(self) -> None:
        load = self._queue[0]
        load.crossed = True
        seconds = self._events.now() - self._began
        self._net.ports[self._target].mailbox.count(self._source, load.frame_bytes, seconds)
        self._end_once_left(load)

    def _end_once_left(self, load: Load) -> None:
        # The sender's processor and the network work at the same time: the later one decides.
        if load.left_at <= self._events.now():
            self._end(load)
        elif load.left_at < inf:
            self._events.call_at(load.left_at, self._end, load)

    def _end(self, load: Load) -> None:
        if self._closed is not None:
            return
        self._crossing = None
        self._queue.popleft()
        if self.route.slow_start is not None:
            self.route.slow_start.use(self._events.now())
        load.end()
        if self._queue:
            self._begin(self._queue[0])
