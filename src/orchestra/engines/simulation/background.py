"""Collectives beside the flows of a rank, one after the other on a thread of their own.

No flow is needed for them: their times follow from when each was begun.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestra.engines.simulation.collective import Part, PlacedCall, Sent
from orchestra.engines.simulation.kernel import Flow
from orchestra.engines.simulation.network import Port
from orchestra.engines.simulation.placed import PlacedPlan
from orchestra.engines.simulation.rendezvous import Rendezvous
from orchestra.transports.protocol import Traffic

if TYPE_CHECKING:
    from orchestra.engines.simulation.transport import SimulatedTransport


@dataclass(eq=False)
class Queued(Part):
    """A collective that waits for its turn, or is under way: a task of the flow that began it."""

    queue: BackgroundQueue

    def done(self) -> bool:
        """Return whether `wait` would return at once."""
        kernel = self.queue.kernel
        kernel.catch_up()
        return self.ended <= kernel.now()

    def wait(self) -> int:
        """Let virtual time pass until it is done; returns the bytes of buffer used."""
        self.queue.traffic.seconds_waiting += self.pass_time()
        return self.buffer_bytes


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

    def begin(self, given: PlacedCall) -> Queued:
        """Queue a collective behind the others, at the present time of the flow that begins it."""
        part = Queued(
            given, self._port, self._processor, self.kernel.here(),
            self._parts[-1] if self._parts else None,
            self._caches.warm_up() + given.placed.beginning,
            self._signal_seconds,
            self,
        )  # fmt: skip
        self._parts.append(part)
        collective = self._rendezvous.collective(given, self._port.rank, self._processor)
        if isinstance(collective, Sent):
            part.send = self._send
        collective.begin(part)
        return part

    def settle(self) -> None:
        """Count the seconds of collectives that have ended by the present of the current flow."""
        here = self.kernel.here()
        while self._parts and self._parts[0].ended <= here:
            part = self._parts.popleft()
            if part.sent:
                self._uncounted[part.given.placed, part.at_once] += 1
            seconds = part.joined - part.started + part.communicating
            self.traffic.seconds_in_background += seconds

    def _count(self) -> None:
        """Count the bytes and messages of these collectives, before the counters are read."""
        self.settle()
        for (placed, at_once), times in self._uncounted.items():
            placed.count(placed.place[self._port.rank], self._port, times, arriving=at_once)
        self._uncounted.clear()

    def _send(self, part: Part) -> None:
        """A flow sends the messages of `part`, whose turn it is: somebody wants to see them."""
        kernel, transport = self.kernel, self._new_transport()
        part.sent = False  # the flow counts them
        part.joined = kernel.now()

        def live() -> None:
            transport.exchange(part.given.call)

        def ended(flow: Flow) -> None:
            if flow.error is not None:
                kernel.fail(flow.error)
            part.communicating = transport.traffic.seconds_communicating
            part.compute(part.signalling, lambda part: part.end(kernel.now()))

        kernel.start(self._port.rank, live, self._processor).on_end.append(ended)
