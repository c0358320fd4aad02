"""Background collectives of a rank, which run one after the other on a thread of their own.

They need no flow, unless their messages are sent: their times follow from when each was begun.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestra.engines.simulation.collective import ByRank, Collective, Part
from orchestra.engines.simulation.kernel import Flow
from orchestra.engines.simulation.network import Port
from orchestra.engines.simulation.placed import PlacedPlan
from orchestra.engines.simulation.rendezvous import Rendezvous
from orchestra.transports.protocol import CollectiveCall, Traffic

if TYPE_CHECKING:
    from orchestra.engines.simulation.transport import SimulatedTransport


class Queued(Part):
    """A collective that waits for its turn, or is under way: a task of the flow that began it."""

    __slots__ = ("error", "queue")

    def __init__(self, collective: Collective, place: int, queue: BackgroundQueue) -> None:
        self.collective, self.place, self.queue = collective, place, queue
        self.error: BaseException | None = None  # that the flow which sends its messages raised

    def done(self) -> bool:
        """Return whether `wait` would return at once."""
        kernel = self.queue.kernel
        kernel.catch_up()
        return self.ended <= kernel.now()

    def wait(self) -> int:
        """Let virtual time pass until it is done; returns the bytes of buffer used."""
        self.queue.traffic.seconds_waiting += self.pass_time()
        if self.error is not None:
            raise self.error
        return self.buffer_bytes

    def send(self, collective: ByRank) -> None:
        """Start a flow that sends the messages: somebody wants to see them."""
        self.queue.send(self, collective)


class BackgroundQueue:
    """Executes the collectives of the rank of `port` in the order in which they were begun.

    The caches are those of `caches`, the same rank's. The thread takes `signal_seconds` to tell of
    each that is done. What they communicate, and how long flows wait for them, counts in `traffic`.
    `new_transport` makes a transport for one more flow.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        port: Port,
        caches: Port,
        new_transport: Callable[[], SimulatedTransport],
        traffic: Traffic,
        signal_seconds: float = 0.0,
    ) -> None:
        self.kernel, self.traffic = port.net.kernel, traffic
        self._rendezvous, self._port, self._caches = rendezvous, port, caches
        self._new_transport, self._signal_seconds = new_transport, signal_seconds
        self._processor = port.new_processor()
        self._parts: deque[Queued] = deque()  # that are not over, or not counted yet
        self._uncounted: Counter[tuple[PlacedPlan, bool]] = Counter()  # how often each was executed
        port.meter.uncounted.append(self._count)

    def begin(self, placed: PlacedPlan, call: CollectiveCall) -> Queued:
        """Queue a collective behind the others, at the present time of the flow that begins it."""
        place, processor = placed.place[self._port.rank], self._processor
        collective = self._rendezvous.collective(placed, call, place, processor)
        before = self._parts[-1] if self._parts else None
        part = Queued(collective, place, self)
        self._parts.append(part)
        beginning = self._caches.warm_up() + placed.beginning
        began = self.kernel.here()
        collective.begin(part, call, processor, began, before, beginning, self._signal_seconds)
        return part

    def settle(self) -> None:
        """Count the seconds of collectives that have ended by the present of the current flow."""
        here, parts = self.kernel.here(), self._parts
        while parts:
            part = parts[0]
            collective, place = part.collective, part.place
            if collective.ended[place] > here:
                break
            parts.popleft()
            if not collective.is_sent:
                self._uncounted[collective.placed, collective.at_once] += 1
            self.traffic.seconds_in_background += collective.busy[place]

    def _count(self) -> None:
        """Count the bytes and messages of these collectives, before the counters are read."""
        self.settle()
        for (placed, at_once), times in self._uncounted.items():
            placed.count(placed.place[self._port.rank], self._port, times, arriving=at_once)
        self._uncounted.clear()

    def send(self, part: Queued, collective: ByRank) -> None:
        """Start a flow that sends the messages of `part` of `collective`, whose turn it is."""
        kernel, transport = self.kernel, self._new_transport()
        call = collective.calls[part.place]
        assert call is not None
        collective.join(part)

        def live() -> None:
            transport.exchange(call)

        def ended(flow: Flow) -> None:
            part.error = flow.error
            collective.end(part, transport.traffic.seconds_communicating)

        kernel.start(self._port.slot, live, self._processor).on_end.append(ended)
