"""Collectives beside the flows of a rank, one after the other on a thread of their own.

No flow is needed for them: their times follow from when each was begun.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from orchestra.engines.simulation.collective import CollectivePart, Participation
from orchestra.engines.simulation.kernel import Flow, Wait
from orchestra.engines.simulation.network import Port
from orchestra.engines.simulation.rendezvous import GroupQueue, Rendezvous
from orchestra.engines.simulation.rounds import PlacedPlan
from orchestra.transports.protocol import Traffic

if TYPE_CHECKING:
    from orchestra.engines.simulation.transport import SimulatedTransport


@dataclass(eq=False, slots=True)
class Queued:
    """A collective that waits for its turn, or is under way."""

    queue: BackgroundQueue
    given: CollectivePart
    begun: float  # when its flow began it
    finished_at: float = inf  # when it is done, which is certain from the time `through` on
    through: float = inf
    follows: bool = False  # whether another one was not through when it was begun
    buffer_bytes: int = 0
    seconds: float = 0.0  # for which it has communicated
    waiting: tuple[Flow, ...] = ()  # flows that wait for it

    def done(self) -> bool:
        """Return whether `wait` would return at once."""
        kernel = self.queue.kernel
        kernel.catch_up()
        return self.finished_at <= kernel.now()

    def wait(self) -> int:
        """Let virtual time pass until it is done; returns the bytes of buffer used."""
        queue = self.queue
        kernel = queue.kernel
        flow, started = kernel.current, kernel.here()
        # Again: a group's queue that is taken back makes `through` infinite once more.
        while self.through > kernel.now():
            self.waiting = *self.waiting, flow
            if queue.group is not None and self.through < inf:
                kernel.call_at(self.through, Queued.resume, self)
            flow.waits = queue.waits
            kernel.park()
            flow.waits = None
        queue.settle()
        here = kernel.here()
        if here < self.finished_at or here > started:
            here = flow.ahead = max(here, self.finished_at)
            queue.traffic.seconds_waiting += here - started
        return self.buffer_bytes

    def finish(self, time: float) -> None:
        """Note that it is done at `time`, now or later."""
        self.finished_at, self.through = time, self.queue.kernel.now()
        self.resume()

    def resume(self) -> None:
        """Resume the flows that wait for it."""
        waiting, self.waiting = self.waiting, ()
        for flow in waiting:
            self.queue.kernel.resume(flow)


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
        self.rank = port.rank
        self.group: GroupQueue | None = None  # of all ranks, as long as it executes them
        self.place = self.position = 0  # of the rank in it, and the number of its next task
        self._rendezvous, self._port, self._caches = rendezvous, port, caches
        self._new_transport = new_transport
        self.signal_seconds, self.traffic = signal_seconds, traffic
        self.processor = port.new_processor()
        self.tasks: deque[Queued] = deque()  # that are not through, or not counted yet
        self._member: Participation | None = None
        self._started = self._joined = 0.0  # the first of them
        self._uncounted: Counter[PlacedPlan] = Counter()  # how often each was executed
        port.meter.uncounted.append(self._count)

    def begin(self, given: CollectivePart) -> Queued:
        """Queue a collective behind the others, at the present time of the flow that begins it."""
        task = Queued(self, given, self.kernel.here())
        if given.placed.goes_ahead and given.call.vector.is_meta:
            if self._rendezvous.group_queue(given.placed).add(self, task):
                return task
        elif self.group is not None:
            self.group.rewind()
        self.tasks.append(task)
        if len(self.tasks) == 1:
            self._start(task.begun)
        return task

    @property
    def is_steady(self) -> bool:
        """True if its computations take exactly the seconds that are known beforehand."""
        return self.processor.undisturbed() and not self._caches.is_cold

    def settle(self) -> None:
        """Remove tasks that are through by now, and count their seconds."""
        now = self.kernel.now()
        while self.tasks and self.tasks[0].through <= now:
            task = self.tasks.popleft()
            placed = task.given.placed
            self._uncounted[placed] += 1
            task.buffer_bytes = placed.plan.buffer_bytes[self.place]
            self.traffic.seconds_in_background += task.seconds
            if task.waiting:
                task.resume()

    def _count(self) -> None:
        """Count bytes and messages of what is through by now, before somebody reads them."""
        self.settle()
        for placed, times in self._uncounted.items():
            placed.count(placed.place[self.rank], self._port, times, arriving=True)
        self._uncounted.clear()

    # As a part of the group's queue, which is taken back

    def leave_group(self) -> None:
        """Leave the group's queue: this queue executes what is not through by itself."""
        self.settle()
        self.group = None
        for task in self.tasks:
            task.finished_at = task.through = inf

    def go_on(self, member: Participation, started: float) -> None:
        """The first task is under way since the time `started`, as `member`."""
        self._member, self._started, self._joined = member, started, member.arrived

    def join_first(self, free: float) -> None:
        """The first task began, or will, where the one before it was done at the time `free`."""
        task = self.tasks[0]
        self._started = max(free, task.begun) if task.follows else task.begun
        self._join(self._started + task.given.placed.beginning / self.processor.rate)

    def waits(self) -> Wait:
        """Whom the first of them waits for, and for what."""
        if self.group is not None:
            return self.group.waits(self)
        if self._member is None:
            return (self._port.rank,), "a collective in the background"
        return self._member.waits()

    def _start(self, time: float) -> None:
        """Let the first of them begin at `time`, now or later."""
        self._started = time
        if time > self.kernel.now() and not self.is_steady:
            # How long it takes is known only when it is its turn.
            self.kernel.call_at(time, self._start, time)
        else:
            beginning = self.tasks[0].given.placed.beginning
            self._compute(time, self._caches.warm_up() + beginning, self._join)

    def _compute(self, time: float, seconds: float, then: Callable[[float], None]) -> None:
        """Let the thread compute from `time` on; `then` is called with the time of its end."""
        if self.processor.undisturbed():
            then(time + seconds / self.processor.rate)
        else:
            self.processor.start(seconds, lambda: then(self.kernel.now()))

    def _join(self, time: float) -> None:
        port, given = self._port, self.tasks[0].given
        self._joined = time
        if len(given.placed.ranks) == 1 or not given.placed.plan.length:
            self._end(time)
            return
        self._member = self._rendezvous.join(given, port.rank, self.processor, self.through, time)
        if self._member is None:
            self.kernel.at(time, self._exchange_messages)

    def through(self) -> None:
        """Note that the first task has been executed."""
        assert self._member is not None
        self._member.count(self._port)
        _, communicating = self._member.seconds
        self.tasks[0].buffer_bytes = self._member.buffer_bytes
        self._member = None
        self.traffic.seconds_in_background += self._joined - self._started + communicating
        self._compute(self.kernel.now(), self.signal_seconds, self._end)

    def _end(self, time: float) -> None:
        self.tasks.popleft().finish(time)
        if self.tasks:
            self._start(max(time, self.tasks[0].begun))

    def _exchange_messages(self) -> None:
        """Another rank, the first to come, wants to see the messages: a flow sends them."""
        port, kernel, given = self._port, self.kernel, self.tasks[0].given
        transport = self._new_transport()

        def live() -> None:
            self.tasks[0].buffer_bytes = transport.exchange(given.call)

        def ended(flow: Flow) -> None:
            if flow.error is not None:
                kernel.fail(flow.error)
            self.traffic.seconds_in_background += transport.traffic.seconds_communicating
            self._compute(kernel.now(), self.signal_seconds, self._end)

        kernel.start(port.rank, live, self.processor).on_end.append(ended)
