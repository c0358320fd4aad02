"""What a flow computes on: a thread on a node's cores, which it may have to share.

An operating system does not divide a core among threads at every instant. A thread keeps its core
until it has nothing to compute, or until its time slice is over and another one waits; then it
queues up behind. Pieces of work that are shorter than a slice are therefore done one after the
other: of three equal ones on two cores the last is done after twice the time, not after one and a
half. A thread that gets a core after another thread fills its caches first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from orchestra.engines.simulation.fluid import Activity, Fluid, Resource
from orchestra.engines.simulation.kernel import Call, Kernel, Timer


class Cores:
    """`count` cores; a thread that others wait for gives way after `time_slice` seconds.

    `refill`: seconds of a core of speed 1 that a thread needs in addition on a core that another
    thread had before.
    """

    def __init__(
        self, kernel: Kernel, fluid: Fluid, count: int, time_slice: float, refill: float
    ) -> None:
        self._kernel, self._fluid = kernel, fluid
        self._slice, self._refill = time_slice, refill
        self._free = list(range(count))
        self._last: dict[int, Thread] = {}  # who had each core last
        self._waiting: deque[Thread] = deque()
        self._having: dict[Thread, None] = {}  # a set in the order of insertion

    def start(self, thread: Thread, seconds: float, then: Call) -> None:
        """Let `thread` compute `seconds` core-seconds, then call `then`."""
        assert thread.then is None, "a thread does one piece of work at a time"
        thread.left, thread.then = seconds, then
        if not thread.held and thread.core is None:
            self._queue(thread)
        elif not thread.held:
            self._run(thread)

    def hold(self, thread: Thread) -> None:
        """Stop `thread`; another one gets its core."""
        if thread in self._waiting:
            self._waiting.remove(thread)
        elif thread.activity is not None:
            self._interrupt(thread)
            self._release(thread)

    def let_go(self, thread: Thread) -> None:
        """Let `thread` go on where it was held."""
        if thread.then is not None and thread.core is None:
            self._queue(thread)

    def _queue(self, thread: Thread) -> None:
        self._waiting.append(thread)
        self._hand_out()
        if self._waiting:
            for other in self._having:
                self._set_alarm(other)

    def _hand_out(self) -> None:
        while self._waiting and self._free:
            thread = self._waiting.popleft()
            self._having[thread] = None
            thread.core, thread.until = self._best_for(thread), self._kernel.now() + self._slice
            self._free.remove(thread.core)
            if self._last.get(thread.core, thread) is not thread:
                # Caches are filled by the core itself, as slowly as it computes everything else.
                thread.left += self._refill
            self._last[thread.core] = thread
            self._run(thread)
            if self._waiting:
                self._set_alarm(thread)

    def _best_for(self, thread: Thread) -> int:
        """Of the free cores the one that it had last, else one that nobody had, else the first."""
        own = [core for core in self._free if self._last.get(core) is thread]
        fresh = [core for core in self._free if core not in self._last]
        return (own or fresh or self._free)[0]

    def _run(self, thread: Thread) -> None:
        then = partial(self._done, thread)
        thread.activity = self._fluid.start(thread.left, thread.resources, then)

    def _done(self, thread: Thread) -> None:
        then, thread.then, thread.activity = thread.then, None, None
        assert then is not None
        then()
        # The thread keeps its core if it goes on at once, which it does before this event.
        self._kernel.at(self._kernel.now(), lambda: self._leave(thread))

    def _leave(self, thread: Thread) -> None:
        if thread.then is None and thread.core is not None:
            self._release(thread)

    def _set_alarm(self, thread: Thread) -> None:
        """Let `thread` give way at the end of its slice, if somebody waits by then."""
        # Alarms exist only while somebody waits: on free cores a slice costs no event.
        if thread.alarm is None:
            time = max(self._kernel.now(), thread.until)
            thread.alarm = self._kernel.at(time, lambda: self._give_way(thread))

    def _give_way(self, thread: Thread) -> None:
        thread.alarm = None
        if thread.activity is None or not self._waiting:
            return
        self._interrupt(thread)
        self._waiting.append(thread)
        self._release(thread)

    def _interrupt(self, thread: Thread) -> None:
        assert thread.activity is not None
        thread.left = thread.activity.left_at(self._kernel.now())
        self._fluid.cancel(thread.activity)
        thread.activity = None

    def _release(self, thread: Thread) -> None:
        if thread.alarm is not None:
            thread.alarm.cancel()
            thread.alarm = None
        assert thread.core is not None
        self._free.append(thread.core)
        thread.core = None
        del self._having[thread]
        self._hand_out()


@dataclass(eq=False)
class Thread:
    """One flow's thread, or the `width` threads that a rank's main flow computes with.

    `resources` are the threads themselves, whose capacity is `width` times the speed of a core, and
    the cores of the node, where more threads than cores may run.
    """

    kernel: Kernel
    fluid: Fluid
    resources: Sequence[Resource]
    undisturbed: Callable[[], bool]  # whether it computes at its own rate, whatever others do
    cores: Cores | None = None  # None: threads share them evenly at every instant
    width: float = 1.0
    held: bool = False
    core: int | None = None  # where threads take turns, the one that it has now
    until: float = 0.0  # the end of its slice there
    left: float = 0.0  # of the piece of work under way, in seconds of a core of speed 1
    then: Call | None = None  # called at the end of that piece; None: there is none
    activity: Activity | None = None
    alarm: Timer | None = None

    def __post_init__(self) -> None:
        # Seconds of a core of speed 1 that pass here in a second, where no other thread runs.
        self.rate = self.resources[0].capacity / self.width

    def change_speed(self, speed: float) -> None:
        """From an event: compute at another rate from now on."""
        self.rate = speed
        if not self.held or self.cores is not None:
            self.fluid.set_capacity(self.resources[0], self.width * speed)

    def hold(self) -> None:
        """From an event: compute nothing, and leave the core to others."""
        self.held = True
        if self.cores is None:
            self.fluid.set_capacity(self.resources[0], 0.0)
        else:
            self.cores.hold(self)

    def let_go(self) -> None:
        """From an event: go on where it was held."""
        self.held = False
        if self.cores is None:
            self.fluid.set_capacity(self.resources[0], self.width * self.rate)
        else:
            self.cores.let_go(self)

    def start(self, seconds: float, then: Call) -> None:
        """Compute `seconds` seconds of a core of speed 1, on all threads, then call `then`."""
        if self.undisturbed():
            # Cores of its own: nothing can change the rate, so that the fluid need not know.
            self.kernel.after(seconds / self.rate, then)
        elif self.cores is None:
            amount = self.width * seconds
            self.fluid.start(amount, self.resources, then, weight=self.width)
        else:
            self.cores.start(self, seconds, then)

    def spend(self, seconds: float) -> None:
        """Let the current flow compute `seconds` seconds of a core of speed 1, on all threads."""
        kernel, flow = self.kernel, self.kernel.current
        if self.undisturbed():
            # The flow goes ahead of the world's clock without a switch (`Kernel.catch_up`).
            flow.ahead = kernel.here() + seconds / self.rate
            return
        kernel.catch_up()
        self.start(seconds, lambda: kernel.resume(flow))
        kernel.park()
