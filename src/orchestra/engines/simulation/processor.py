"""What a flow computes on: a thread on a node's cores, which it may have to share.

An operating system does not divide a core among threads at every instant. A thread keeps its core
until it has nothing to compute, or until its time slice is over and another one waits; then it
queues up behind. Pieces of work that are shorter than a slice are therefore done one after the
other: of three equal ones on two cores the last is done after twice the time, not after one and a
half. Whoever gets a core that somebody else had before fills its caches first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from orchestra.engines.simulation.events import Timer
from orchestra.engines.simulation.fluid import Activity, Fluid, Resource
from orchestra.engines.simulation.kernel import Kernel

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


class Team:
    """The threads of a flow that computes with several, where those of other ranks want the same
    cores. `own` has the capacity of `width` cores, `together` of all those of the node."""

    def __init__(self, own: Resource, together: Resource, width: float) -> None:
        self.resources = own, together
        self.width = width


class Thread:
    """One flow's thread. `resources`: the thread itself, whose capacity is the node's speed, and
    the node's cores where more threads than cores may run. `undisturbed` tells whether it computes
    at its own rate, whatever others do. With `cores`, threads that have to share them take turns;
    without, they share them evenly at every instant. Its further threads are in `team`; None: there
    are none, or they have cores for themselves."""

    def __init__(
        self,
        kernel: Kernel,
        fluid: Fluid,
        resources: Sequence[Resource],
        undisturbed: Callable[[], bool],
        cores: Cores | None = None,
        team: Team | None = None,
    ) -> None:
        self._team = team
        self._speed = resources[0].capacity
        self._held = False
        self._cores = cores
        self._turn = Turn(resources)
        self.undisturbed = undisturbed
        self._kernel = kernel
        self._fluid = fluid
        self._resources = resources

    @property
    def rate(self) -> float:
        """Seconds of a core of speed 1 that pass here in a second, where no other thread runs."""
        return self._speed

    def change_speed(self, speed: float) -> None:
        """From an event: from now on it computes at another rate."""
        self._speed = speed
        if not self._held or self._cores is not None:
            self._fluid.set_capacity(self._resources[0], speed)
        if not self._held:
            self._set_team(speed)

    def hold(self) -> None:
        """From an event: it computes nothing, and others have its core."""
        self._held = True
        self._set_team(0.0)
        if self._cores is None:
            self._fluid.set_capacity(self._resources[0], 0.0)
        else:
            self._cores.hold(self._turn)

    def let_go(self) -> None:
        """From an event: it goes on where it was held."""
        self._held = False
        self._set_team(self._speed)
        if self._cores is None:
            self._fluid.set_capacity(self._resources[0], self._speed)
        else:
            self._cores.let_go(self._turn)

    def start(self, seconds: float, then: Callable[[], None]) -> None:
        """Compute what takes so many seconds on a core of speed 1; `then` is called at its end."""
        if self.undisturbed():
            self._kernel.after(seconds / self.rate, then)
        elif self._cores is None:
            self._fluid.start(seconds, self._resources, then)
        else:
            self._cores.start(self._turn, seconds, then)

    def spend(self, seconds: float) -> None:
        """Let the present flow compute for so many seconds of a core of speed 1."""
        kernel, flow = self._kernel, self._kernel.current
        if self.undisturbed():
            flow.ahead = kernel.here() + seconds / self.rate
            return
        kernel.catch_up()
        self.start(seconds, lambda: kernel.resume(flow))
        kernel.park()

    def compute(self, seconds: float) -> None:
        """`spend`, with all of its threads: done when the last one is."""
        kernel, flow, team = self._kernel, self._kernel.current, self._team
        if team is None:
            self.spend(seconds)
            return
        kernel.catch_up()
        left = 2

        def end() -> None:
            nonlocal left
            left -= 1
            if not left:
                kernel.resume(flow)

        self._fluid.start(team.width * seconds, team.resources, end)
        self.start(seconds, end)
        kernel.park()

    def _set_team(self, speed: float) -> None:
        if self._team is not None:
            self._fluid.set_capacity(self._team.resources[0], self._team.width * speed)
