"""What a flow computes on: a thread on a node's cores, which it may have to share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestra.engines.simulation.cores import Cores, Turn
from orchestra.engines.simulation.fluid import Fluid, Resource
from orchestra.engines.simulation.kernel import Kernel


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
