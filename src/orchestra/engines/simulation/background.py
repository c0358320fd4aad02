"""Collectives beside the flows of a rank, one after the other on a thread of their own.

No flow is needed for them: their times follow from when each was begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestra.engines.simulation.kernel import Flow, Wait
from orchestra.engines.simulation.network import Port
from orchestra.engines.simulation.rendezvous import Contribution, Member, Rendezvous
from orchestra.transports.protocol import Traffic

if TYPE_CHECKING:
    from orchestra.engines.simulation.transport import SimulatedTransport


class Queued:
    """A collective that waits for its turn, or is under way.

    Attributes:
        begun: when its flow began it.
        finished_at: when it is done, once that is known.
    """

    def __init__(self, queue: BackgroundQueue, given: Contribution, begun: float) -> None:
        self.given = given
        self.begun = begun
        self.finished_at: float | None = None
        self.buffer_bytes = 0
        self._queue = queue
        self._waiting: list[Flow] = []

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        kernel = self._queue.kernel
        kernel.catch_up()
        return self.finished_at is not None and self.finished_at <= kernel.now()

    def wait(self) -> int:
        """Let virtual time pass until it is done; the bytes of buffer used."""
        kernel = self._queue.kernel
        flow, started = kernel.current, kernel.here()
        while self.finished_at is None:
            self._waiting.append(flow)
            flow.waits = self._queue.waits
            kernel.park()
            flow.waits = None
        flow.ahead = max(kernel.here(), self.finished_at)
        self._queue.traffic.seconds_waiting += kernel.here() - started
        return self.buffer_bytes

    def finish(self, time: float) -> None:
        """It is done at `time`, now or later."""
        self.finished_at = time
        for flow in self._waiting:
            self._queue.kernel.resume(flow)


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
        self.kernel = port.net.kernel
        self._rendezvous = rendezvous
        self._port = port
        self._caches = caches
        self._new_transport = new_transport
        self._signal_seconds = signal_seconds
        self.traffic = traffic
        self._processor = port.new_processor()
        self._tasks: deque[Queued] = deque()
        self._member: Member | None = None
        self._started = self._joined = 0.0  # the first of them

    def begin(self, given: Contribution) -> Queued:
        """One more, behind the others, at the present of the flow that begins it."""
        task = Queued(self, given, self.kernel.here())
        self._tasks.append(task)
        if len(self._tasks) == 1:
            self._start(task.begun)
        return task

    def waits(self) -> Wait:
        """Whom the first of them waits for, and for what."""
        if self._member is None:
            return (self._port.rank,), "a collective in the background"
        return self._member.waits()

    def _start(self, time: float) -> None:
        """Let the first of them begin at `time`, now or later."""
        self._started = time
        steady = self._processor.undisturbed() and not self._caches.is_cold
        if time > self.kernel.now() and not steady:
            self.kernel.call_at(time, self._start, time)
        else:
            beginning = self._tasks[0].given.placed.beginning
            self._compute(time, self._caches.warm_up() + beginning, self._join)

    def _compute(self, time: float, seconds: float, then: Callable[[float], None]) -> None:
        """Let the thread compute from `time` on; `then` is called with the time of its end."""
        if self._processor.undisturbed():
            then(time + seconds / self._processor.rate)
        else:
            self._processor.start(seconds, lambda: then(self.kernel.now()))

    def _join(self, time: float) -> None:
        port, given = self._port, self._tasks[0].given
        self._joined = time
        if len(given.placed.ranks) == 1 or not given.placed.plan.length:
            self._end(time)
            return
        self._member = self._rendezvous.join(
            given, port.rank, self._processor, self._through, arrived=time
        )
        if self._member is None:
            self.kernel.at(time, self._exchange_messages)

    def _through(self) -> None:
        """The first of them has been executed."""
        assert self._member is not None
        self._member.count(self._port)
        _, communicating = self._member.seconds
        self._tasks[0].buffer_bytes = self._member.buffer_bytes
        self._member = None
        self.traffic.seconds_in_background += self._joined - self._started + communicating
        self._compute(self.kernel.now(), self._signal_seconds, self._end)

    def _end(self, time: float) -> None:
        self._tasks.popleft().finish(time)
        if self._tasks:
            self._start(max(time, self._tasks[0].begun))

    def _exchange_messages(self) -> None:
        """Another rank, the first to come, wants to see the messages: a flow sends them."""
        port, kernel, given = self._port, self.kernel, self._tasks[0].given
        transport = self._new_transport()

        def live() -> None:
            self._tasks[0].buffer_bytes = transport.exchange(given.call)

        def ended(flow: Flow) -> None:
            if flow.error is not None:
                kernel.fail(flow.error)
            self.traffic.seconds_in_background += transport.traffic.seconds_communicating
            self._compute(kernel.now(), self._signal_seconds, self._end)

        kernel.start(port.rank, live, self._processor).on_end.append(ended)
