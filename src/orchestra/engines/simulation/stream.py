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

    def is_over(self, time: float) -> bool:
        """Return whether a message that is sent at `time` has the whole bandwidth."""
        has_started = self._window >= self._bandwidth * self._round_trip
        return has_started and time - self.used_at <= self.pause

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
    back: tuple[Resource, ...] = ()  # that its acknowledgements cross
    wire: float = 1.0  # bytes on each resource for each byte of the message
    acknowledgements: float = 0.0  # bytes on the way back for each of these
    slow_start: SlowStart | None = None  # of the connection, where it takes long
    weight: float = 1.0  # of its shares
    buffer: float = inf  # bytes on the wire that the target's kernel holds while its rank is away
    crosses_trunks: bool = False  # whether others than those of its two nodes may use some
    delay: Callable[[float], float] | None = None  # seconds that one sent at a time takes besides
    draw_share: Callable[[], float] | None = None  # draws the factor on the weight of the next


@dataclass(eq=False, slots=True)
class Load:
    """What a stream carries: a message, or what stands for one.

    Once the first `held_bytes` have crossed, what is left is in the kernel's buffer, and the sender
    is free. One that is `fair` has an equal share of a link, whatever chance says, and room at its
    target.
    """

    frame_bytes: int  # with its header
    both_ways: bool | None  # whether others of its round of a collective, if any, go the other way
    fair: bool
    held_bytes: int = field(default=0, init=False)
    left_at: float = field(default=inf, init=False)  # when its sender has done its part, if known
    crossed: bool = field(default=False, init=False)  # whether the network has

    def begin(self) -> None:
        """Its first byte is there."""

    def free(self) -> None:
        """The kernel has taken the rest of it."""

    def end(self) -> None:
        """All of it is there."""

    def fail(self, error: Exception) -> None:
        """It never arrives."""


class Stream:
    """What one rank sends to another, a message after the other: latency first, then bandwidth.

    `delay(t)` is what a message that is sent at time t takes beyond the latency, in seconds;
    `draw_share()` gives the share of a link that the next one has, where it is not 1.

    Attributes:
        resources: that it crosses.
        latency: seconds until the first byte is there.
        bandwidth: bytes/s, as long as nothing else crosses them.
        slow_start: of the connection, where it takes long.
    """

    def __init__(self, net: Net, route: Route, source: int, target: int) -> None:
        self.route = route
        self.bandwidth = min(resource.nominal for resource in route.resources)
        # Both directions share a resource, as on a radio channel: acknowledgements always compete.
        self._half_duplex = not set(route.resources).isdisjoint(route.back)
        assert len({*route.resources}) == len(route.resources), "a link is crossed twice"
        self._net, self._fluid = net, net.fluid
        self._events: Events = net.kernel
        self._source, self._target = source, target
        self._reader = reader = net.ports[target].reader
        if self.bandwidth:  # else a link on its way is cut just now
            reader.fill_seconds = min(reader.fill_seconds, route.buffer / self.bandwidth)
        self._unread = 0.0  # bytes on the wire, since the target has `_read` for the last time
        self._read = 0
        self._barred = 0.0  # of what crosses, until the target takes it in
        self._full_at = 0.0  # when the target's buffer was full
        self._began = 0.0  # when the first byte of what crosses was there
        self._last = 0.0  # when the last one arrives
        self._queue: deque[Load] = deque()
        self._crossing: Activity | None = None  # of the first of them, once it has begun
        self._after = 0.0  # of it, bytes on the wire that cross once its sender is free
        self._back: tuple[Resource, ...] = ()  # what its acknowledgements cross
        self._weight = route.weight  # of its shares
        self._closed: Exception | None = None

    def send(self, load: Load, time: float) -> None:
        """Send `load` at `time`, now or later, behind those before it.

        Its first byte is there after the latency.
        """
        # A constant latency keeps the order of sending, so that an arrival can be told ahead.
        if self.route.delay is None and self.route.slow_start is None:
            self._events.call_at(time + self.route.latency, self.arrive, load)
        # A flow that is ahead may not fix the arrival yet: others of its rank may still send before
        # it in virtual time (docs/decisions/0105-long-links-in-order.md).
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
            self._net.before_arrival(self.route.resources)  # it matters already now what they carry
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
        if self._queue and not self._is_under_way:
            self._begin(self._queue[0])

    def close(self, error: Exception) -> Load | None:
        """Let nothing arrive any more, and tell senders of `error`.

        Returns the message that this cuts off in the middle, if any.
        """
        self._closed = error
        cut_off = None
        if self._is_under_way:
            self._take_off()
            self._reader.large.pop(self, None)
            cut_off = self._queue[0]
        for load in self._queue:
            load.fail(error)
        self._queue.clear()
        return cut_off

    def moved(self) -> float:
        """Return the bytes on the wire of the message under way that have crossed until now."""
        if not self._is_under_way:
            return 0.0
        load, left = self._queue[0], self._barred + self._after
        if self._crossing is not None:
            left += self._crossing.left_at(self._events.now())
        return self.on_wire(load.frame_bytes, load.both_ways) - left

    # A target that computes

    def resume_at(self, time: float) -> None:
        """The target takes in messages from `time` on, now or later."""
        if time > self._events.now():
            self._events.call_at(time, self._resume, None)
        else:
            self._resume()

    def bar(self) -> None:
        """The target is away: let no more cross than its kernel has room for."""
        crossing = self._crossing
        if crossing is None or self._barred or self._queue[0].crossed:
            return
        now, reader = self._events.now(), self._reader
        # As if it had always crossed at its present rate.
        self._read = reader.period
        self._unread = crossing.present_rate * (now - max(reader.away_since, self._began))
        room = max(self.route.buffer - self._unread, 0.0)
        if crossing.left_at(now) + self._after > room:
            self._cross(self._take_off(), room)

    def _resume(self, _: None = None) -> None:
        if self._barred and self._reader.since() <= self._events.now():
            if self._crossing is None:
                self._began += self._events.now() - self._full_at  # nobody was there to read
            self._cross(self._take_off())

    @property
    def _is_under_way(self) -> bool:
        return self._crossing is not None or self._barred > 0

    def _take_off(self) -> float:
        """Take what crosses off the links; return the bytes left of it."""
        left, self._barred = self._barred, 0.0
        self._reader.barred.pop(self, None)
        if self._crossing is not None:
            left += self._crossing.left_at(self._events.now())
            self._fluid.cancel(self._crossing)
            self._crossing = None
        return left

    def _room(self, load: Load) -> float:
        """Return the bytes on the wire that the target takes in of `load`, if it is known."""
        reader, buffer = self._reader, self.route.buffer
        if load.fair or buffer == inf or not reader.is_away():
            return inf
        if self in reader.large:
            reader.watch()  # it may read again long before its buffer is full
            return inf
        if self._read != reader.period:
            self._read, self._unread = reader.period, 0.0
        return max(buffer - self._unread, 0.0)

    def _fill(self) -> None:
        self._crossing, self._full_at = None, self._events.now()

    def _begin(self, load: Load) -> None:
        if self._target in self._net.kernel.held:
            return  # a rank that stands still takes in nothing
        load.begin()
        self._began = self._events.now()
        # In a collective acknowledgements are counted with the bytes (`on_wire`), by what the
        # schedule sends both ways, as in evaluation over arrays (docs/decisions/0095-tcp.md).
        self._back = self.route.back if load.both_ways is None else ()
        self._weight = self.route.weight
        if self.route.draw_share is not None and not load.fair:
            self._weight *= self.route.draw_share()
        whole = first = self.on_wire(load.frame_bytes, load.both_ways)
        # In two parts: when the first has crossed, the rest is in the sender's kernel.
        if load.held_bytes:
            first *= load.held_bytes / load.frame_bytes
        self._after = whole - first
        if whole > self.route.buffer and not load.fair:
            self._reader.large[self] = None
        self._cross(first, self._room(load))

    def on_wire(self, frame_bytes: int, both_ways: bool | None) -> float:
        """Return the bytes of a frame on each link.

        They include those of acknowledgements if messages go `both_ways`. With None, for a message
        that is none of a collective, acknowledgements are charged where they cross.
        """
        counted = both_ways or (self._half_duplex and both_ways is not None)
        others = self.route.acknowledgements if counted else 0.0
        return frame_bytes * self.route.wire * (1 + others)

    def _cross(self, wire_bytes: float, room: float = inf) -> None:
        """Let `wire_bytes` cross, of which the target has `room` for so many until it reads."""
        then = self._free if self._after else self._crossed
        if wire_bytes > room:
            self._barred, wire_bytes, then = wire_bytes - room, room, self._fill
            self._reader.barred[self] = None
            if self._reader.since() < inf:
                self.resume_at(self._reader.since())
        if room < inf:
            self._unread += wire_bytes
        self._crossing = self._fluid.start(
            wire_bytes, self.route.resources, then, self._back, self._weight
        )

    def _free(self) -> None:
        after, self._after = self._after, 0.0
        load = self._queue[0]
        load.free()
        self._cross(after, self._room(load))

    def _crossed(self) -> None:
        load = self._queue[0]
        load.crossed = True
        self._reader.large.pop(self, None)
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
