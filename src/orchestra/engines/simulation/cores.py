"""Cores that more threads want than there are: one after the other, a time slice each.

An operating system does not divide a core among threads at every instant. A thread keeps its core
until it has nothing to compute, or until its slice is over and another one waits; then it queues
up behind. Pieces of work that are shorter than a slice are therefore done one after the other: of
three equal ones on two cores the last is done after twice the time, not after one and a half.
Whoever gets a core that somebody else had before fills its caches first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from orchestra.engines.simulation.fluid import Activity, Fluid, Resource
from orchestra.engines.simulation.kernel import Kernel, Timer

Then = Callable[[], None]


class Turn:
    """A thread's claim on a core.

    Attributes:
        resources: what its work crosses while it has one.
        core: which one it has now, None: none; `until` is when its slice ends.
        left: of the piece of work under way, in seconds of a core of speed 1.
        then: called at the end of that piece; None: there is none.
    """

    def __init__(self, resources: Sequence[Resource]) -> None:
        self.resources = resources
        self.core: int | None = None
        self.held = False
        self.until = 0.0
        self.left = 0.0
        self.then: Then | None = None
        self.activity: Activity | None = None
        self.alarm: Timer | None = None


class Cores:
    """`count` cores; a thread that others wait for gives way after `time_slice` seconds.

    `refill` are the seconds that it takes on a core that another one had before.
    """

    def __init__(
        self, kernel: Kernel, fluid: Fluid, count: int, time_slice: float, refill: float
    ) -> None:
        self._kernel = kernel
        self._fluid = fluid
        self._slice = time_slice
        self._refill = refill
        self._free = list(range(count))
        self._last: dict[int, Turn] = {}  # who had each core last
        self._waiting: deque[Turn] = deque()
        self._having: dict[Turn, None] = {}  # a set in the order of insertion

    def start(self, turn: Turn, seconds: float, then: Then) -> None:
        """Let the thread of `turn` compute for so many seconds of a core of speed 1."""
        assert turn.then is None, "a thread does one piece of work at a time"
        turn.left, turn.then = seconds, then
        if turn.held:
            return
        if turn.core is None:
            self._queue(turn)
        else:
            self._run(turn)

    def hold(self, turn: Turn) -> None:
        """Let the thread of `turn` stand still; another one gets its core."""
        turn.held = True
        if turn in self._waiting:
            self._waiting.remove(turn)
        elif turn.activity is not None:
            self._interrupt(turn)
            self._release(turn)

    def let_go(self, turn: Turn) -> None:
        """Let the thread of `turn` go on where it was held."""
        turn.held = False
        if turn.then is not None and turn.core is None:
            self._queue(turn)

    def _queue(self, turn: Turn) -> None:
        self._waiting.append(turn)
        self._hand_out()
        if self._waiting:
            for other in self._having:
                self._set_alarm(other)

    def _hand_out(self) -> None:
        while self._waiting and self._free:
            turn = self._waiting.popleft()
            self._having[turn] = None
            turn.core, turn.until = self._best_for(turn), self._kernel.now() + self._slice
            self._free.remove(turn.core)
            if self._last.get(turn.core, turn) is not turn:
                turn.left += self._refill * turn.resources[0].capacity
            self._last[turn.core] = turn
            self._run(turn)
            if self._waiting:
                self._set_alarm(turn)

    def _best_for(self, turn: Turn) -> int:
        """Of the free cores the one that it had last, else one that nobody had, else the first."""
        own = [core for core in self._free if self._last.get(core) is turn]
        fresh = [core for core in self._free if core not in self._last]
        return (own or fresh or self._free)[0]

    def _run(self, turn: Turn) -> None:
        turn.activity = self._fluid.start(turn.left, turn.resources, lambda: self._done(turn))

    def _done(self, turn: Turn) -> None:
        then, turn.then, turn.activity = turn.then, None, None
        assert then is not None
        then()
        # The thread keeps its core if it goes on at once, which it does before this event.
        self._kernel.at(self._kernel.now(), lambda: self._leave(turn))

    def _leave(self, turn: Turn) -> None:
        if turn.then is None and turn.core is not None:
            self._release(turn)

    def _set_alarm(self, turn: Turn) -> None:
        """At the end of its slice, somebody else's turn may come."""
        if turn.alarm is None:
            time = max(self._kernel.now(), turn.until)
            turn.alarm = self._kernel.at(time, lambda: self._give_way(turn))

    def _give_way(self, turn: Turn) -> None:
        turn.alarm = None
        if turn.activity is None or not self._waiting:
            return
        self._interrupt(turn)
        self._waiting.append(turn)
        self._release(turn)

    def _interrupt(self, turn: Turn) -> None:
        assert turn.activity is not None
        turn.left = turn.activity.left_at(self._kernel.now())
        self._fluid.cancel(turn.activity)
        turn.activity = None

    def _release(self, turn: Turn) -> None:
        if turn.alarm is not None:
            turn.alarm.cancel()
            turn.alarm = None
        assert turn.core is not None
        self._free.append(turn.core)
        turn.core = None
        del self._having[turn]
        self._hand_out()
