"""The way of a message between two ranks, and the states of its ends: what TCP adds to links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from orchestra.cluster.nodes import Tcp
from orchestra.engines.simulation.fluid import Resource
from orchestra.engines.simulation.kernel import Events

if TYPE_CHECKING:
    from orchestra.engines.simulation.stream import Stream

LONG = 1 << 17
"""Bytes: a connection that needs fewer in flight has started within three round trips."""

IDLE = 0.2
"""Seconds beyond a round trip without a message after which a connection starts again: Linux's
least retransmission timeout (RFC 2861; net.ipv4.tcp_slow_start_after_idle)."""


class SlowStart:
    """What one connection may have in flight: at first little, then more with each byte that has
    been acknowledged (RFC 5681, section 3.1).

    Args:
        bandwidth: bytes/s of its way.
        round_trip: seconds until a byte is acknowledged.

    Attributes:
        pause: seconds without a message after which it starts again.
        used_at: until when it has carried something.
    """

    def __init__(self, tcp: Tcp, bandwidth: float, round_trip: float) -> None:
        self._first = tcp.first_window
        self._bandwidth = bandwidth
        self._round_trip = round_trip
        self._window = tcp.first_window
        self.pause = round_trip + IDLE
        self.used_at = -inf

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
    """The way of a message.

    Attributes:
        resources: that it crosses.
        latency: seconds that its first byte takes.
        back: the resources that its acknowledgements cross.
        wire: bytes on each resource for each byte of the message.
        acknowledgements: bytes on the way back for each of these.
        slow_start: of the connection, where it takes long.
        weight: of its shares.
        tcp: whether it is a TCP connection between nodes.
        buffer: bytes on the wire that the target's kernel takes in while its rank does not.
    """

    resources: Sequence[Resource]
    latency: float
    back: tuple[Resource, ...] = ()
    wire: float = 1.0
    acknowledgements: float = 0.0
    slow_start: SlowStart | None = None
    weight: float = 1.0
    tcp: bool = False
    buffer: float = inf


class Reader:
    """Whether a rank takes in what arrives: only while one of its flows waits for messages.

    Meanwhile its kernel takes in what the buffer of a connection holds. A server turns away for
    each message and comes back soon, with a thousand connections: nothing is done for these until a
    buffer might be full.

    Attributes:
        period: a number for each time for which nobody waits.
        away_since: when the last of them began.
        large: streams with a message under way that is larger than the buffer.
        barred: streams that wait until the rank reads.
        fill_seconds: in which no buffer of its connections can be filled.
    """

    def __init__(self, events: Events) -> None:
        self.period = 0
        self.away_since = 0.0
        self.large: dict[Stream, None] = {}
        self.barred: dict[Stream, None] = {}
        self.fill_seconds = inf
        self._events = events
        self._since: dict[object, float] = {}
        self._will_look = False

    def begin(self, who: object, time: float) -> None:
        """Note that `who` waits from `time` on, now or later."""
        self._since[who] = time
        for stream in list(self.barred):
            stream.resume_at(time)

    def end(self, who: object) -> None:
        """Note that `who` has what it waited for."""
        del self._since[who]
        if not self._since:
            self.period += 1
            self.away_since = self._events.now()
            if self.large:
                self.watch()

    def glance(self) -> None:
        """Note that somebody reads what is there, and does not wait."""
        if self.large or self.barred:
            self.begin(self, self._events.now())
            self.end(self)

    def watch(self) -> None:
        """Look again when the buffer of a message that is under way by now might be full."""
        # One call for all streams, whatever the rank does until then.
        if not self._will_look and self.fill_seconds < inf:
            self._will_look = True
            self._events.call_at(self._events.now() + self.fill_seconds, self._look, None)

    def since(self) -> float:
        """Return from when on the rank takes in messages; infinite as long as that is not known."""
        return min(self._since.values(), default=inf)

    def is_away(self) -> bool:
        """Return whether nobody reads at the present time."""
        return self.since() > self._events.now()

    def _look(self, _: None) -> None:
        self._will_look = False
        if self.large and self.is_away():
            full_at = self.away_since + self.fill_seconds
            if full_at > self._events.now():  # it has read since `watch`
                self._will_look = True
                self._events.call_at(full_at, self._look, None)
            else:
                for stream in list(self.large):
                    stream.bar()
