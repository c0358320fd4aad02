"""Virtual time: exactly one flow runs at a time, and events happen in their order.

A flow runs until it parks. The flow that parks carries out the next events, in the order of
(time, sequence), until an event makes a flow go on. It then passes the turn to that flow.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from orchestra.engines.events import follow_waits
from orchestra.engines.simulation.contexts import Context, ThreadContext
from orchestra.errors import RunAborted

if TYPE_CHECKING:
    from orchestra.engines.simulation.processor import Thread

T = TypeVar("T")
Call = Callable[[], None]

Wait = tuple[tuple[int, ...], str]
"""The ranks that a flow waits for (one of them is enough), and what it waits for."""


class Timer:
    """A scheduled call, which can be cancelled until it is made."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call: Call | None = call

    def cancel(self) -> None:
        """Make `fire` do nothing."""
        self._call = None

    def fire(self, _: object) -> None:
        """Make the call, unless it has been cancelled."""
        if self._call is not None:
            self._call()


class Events:
    """Calls in the order of their times, and of their making where these are equal."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._due: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._sequence = itertools.count()

    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now

    def at(self, time: float, call: Call) -> Timer:
        """Schedule `call` at `time`, after everything that is already scheduled for that time."""
        timer = Timer(call)
        self.call_at(time, timer.fire, None)
        return timer

    def call_at(self, time: float, call: Callable[[T], object], argument: T) -> None:
        """Like `at`, for `call(argument)`, which cannot be cancelled: cheaper, for each message."""
        assert time >= self._now, f"{time} lies before {self._now}"
        # The sequence number breaks ties: runs are deterministic, and calls are never compared.
        heapq.heappush(self._due, (time, next(self._sequence), call, argument))

    def after(self, seconds: float, call: Call) -> Timer:
        """Schedule `call` in `seconds` seconds of virtual time."""
        return self.at(self._now + seconds, call)


@dataclass(eq=False)
class Flow:
    """One strand of a rank's work, from its start to its end."""

    kernel: Kernel
    rank: int
    function: Callable[[], Any]
    processor: Thread  # what it computes on
    main: bool  # whether it is the rank's own, and no background flow
    waits: Callable[[], Wait] | None = None  # whom it waits for, and for what, while it is parked
    ahead: float = 0.0  # until when it has computed already, where nothing can come between
    due: bool = False  # whether its turn came while its rank was held
    dead: bool = False  # whether its turn never comes any more
    ended: bool = False
    result: Any = None  # what `function` returned
    error: BaseException | None = None  # what it raised
    on_end: list[Callable[[Flow], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.number = self.kernel.started_of[self.rank]  # how many flows its rank had before it
        self.context = self.kernel.launcher.another(self._live, f"rank {self.rank}")

    def _live(self) -> Context:
        kernel = self.kernel
        try:
            kernel.entered(self)
            self.result = self.function()
            kernel.catch_up()  # it ends when the world's clock has reached its own
        except BaseException as error:
            self.error = error
            if isinstance(error, KeyboardInterrupt):  # no failure of this flow
                kernel.fail(error)
        self.ended = True
        return kernel.leave(self)


class Killed(BaseException):
    """Unwinds a flow of a killed rank, whose program has no part in that: no `except Exception`
    may write a file, as none does in a process that was killed."""


class Deadlock(Exception):
    """Nothing is due any more, and flows are still parked."""


class Kernel(Events):
    """The clock, what is due when, and whose turn it is.

    The context that makes the kernel also calls `run`.

    Args:
        on_turn: called on the context of each flow whose turn begins.
        contexts: the kind of context that each flow runs on.

    Attributes:
        current: the flow whose turn it is; not set before the first turn.
        outstanding: how many things besides the main flows have to end before `run` returns.
    """

    current: Flow

    def __init__(
        self,
        on_turn: Callable[[Flow], None] = lambda flow: None,
        contexts: type[Context] = ThreadContext,
    ) -> None:
        super().__init__()
        self.launcher: Context = contexts.present()
        self.flows: list[Flow] = []
        self.flows_of: Counter[int] = Counter()  # by rank
        self.started_of: Counter[int] = Counter()  # those that have ended included
        self.turns_of: Counter[int] = Counter()  # how often flows of a rank have gone on
        self.changes = 0  # of the flows
        self.outstanding = 0  # besides the main flows, what has to end before `run` returns
        self.held: set[int] = set()  # ranks; what is ahead of the others cannot be stopped
        self.failure: BaseException | None = None
        self._ready: deque[Flow] = deque()
        self._aborted: Exception | None = None
        self._living = 0  # main flows
        self._dead: list[Flow] = []
        self._on_turn = on_turn

    # Flows

    def start(
        self, rank: int, function: Callable[[], Any], processor: Thread, *, main: bool = False
    ) -> Flow:
        """A new flow of `rank`; its turn comes at the present time."""
        flow = Flow(self, rank, function, processor, main)
        self.flows.append(flow)
        self.add_thread(rank)
        self._living += main
        self.call_at(self._now, self.resume, flow)
        return flow

    def add_thread(self, rank: int, count: int = 1) -> None:
        """Count `count` further threads of `rank`, each of a flow or without one."""
        self.flows_of[rank] += count
        self.started_of[rank] += max(count, 0)  # a negative count ends threads
        self.changes += 1

    def resume(self, flow: Flow) -> None:
        """From an event: a parked `flow` goes on behind those whose turn has come before.

        If its rank is held, that is once `let_go` is called.
        """
        if flow.rank in self.held:
            flow.due = True
        elif not flow.dead:
            self.turns_of[flow.rank] += 1
            self._ready.append(flow)

    def wait_of(self, rank: int) -> Wait | None:
        """What `rank` waits for; None as long as one of its flows computes."""
        calls = [flow.waits for flow in self.flows if flow.rank == rank]  # its main flow's first
        if not calls or None in calls:
            return None
        return foremost(rank, [call() for call in calls if call is not None])

    def let_go(self, rank: int) -> None:
        """From an event: flows of `rank`, which was held, go on whose turn has come."""
        self.held.discard(rank)
        for flow in self.flows:
            if flow.rank == rank and flow.due:
                flow.due = False
                self.resume(flow)

    def kill(self, rank: int) -> None:
        """From an event: the flows of `rank` never go on any more."""
        for flow in [flow for flow in self.flows if flow.rank == rank]:
            flow.dead = True
            self._dead.append(flow)  # `abort` still has to unwind its context
            self._remove(flow)

    def park(self) -> None:
        """Give the turn away, until an event resumes this flow.

        Raises:
            RunAborted: the run has ended meanwhile.
            Killed: the same, and the rank of this flow was killed before.
        """
        flow = self.current
        self._check(flow)
        following = self._next()
        if following is not flow.context:  # else this flow goes on without a switch
            flow.context.pass_to(following)
            self.entered(flow)

    # A flow alone on its core goes ahead of the others until it has to do with them.

    def here(self) -> float:
        """The present of the flow whose turn it is."""
        ahead = self.current.ahead
        return ahead if ahead > self._now else self._now

    def catch_up(self) -> None:
        """Park until the present of this flow is everybody's."""
        flow = self.current
        if flow.ahead > self._now:
            self.call_at(flow.ahead, self.resume, flow)
            self.park()

    def catch_up_with_own(self) -> None:
        """`catch_up`, where the rank has other flows, which may be behind this one."""
        if self.flows_of[self.current.rank] > 1:
            self.catch_up()

    def join(self, flow: Flow) -> None:
        """Park until `flow` has ended."""
        if not flow.ended:
            waiter = self.current
            flow.on_end.append(lambda _: self.resume(waiter))
            # What the flow waits for holds up this one, too
            own: Wait = ((flow.rank,), "a flow of its own")
            waiter.waits = lambda: own if flow.waits is None else flow.waits()
            self.park()
            waiter.waits = None

    def entered(self, flow: Flow) -> None:
        """From a new flow: its first turn has come."""
        self.current = flow
        self._check(flow)
        self._on_turn(flow)

    def leave(self, flow: Flow) -> Context:
        """From a flow that has ended: whose turn comes next."""
        if self._aborted is not None:
            return self.launcher  # `abort` unwinds one flow after the other
        try:
            for call in flow.on_end:
                call(flow)
        except Exception as error:
            self.fail(error)
        self._remove(flow)
        return self._next()

    def _remove(self, flow: Flow) -> None:
        self.flows.remove(flow)
        self.add_thread(flow.rank, -1)
        self._living -= flow.main

    def run(self) -> None:
        """From the launcher: let virtual time pass until every main flow has ended.

        Raises:
            Deadlock: flows wait, and nothing is due.
            BaseException: what a signal has raised, as Ctrl-C does; no flow runs any more.
        """
        first = self._next()
        if first is not self.launcher:
            self._pass_to(first)
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """From a flow or an event: the run ends here; `run` raises `error`."""
        self.failure = self.failure or error  # later ones may be consequences of the first

    def abort(self, reason: str) -> None:
        """From the launcher, after `run`: unwind every flow that is left."""
        self._aborted = RunAborted(reason)
        left, self.flows = [*self.flows, *self._dead], []
        for flow in left:
            self._pass_to(flow.context)  # where `_check` raises
            flow.context.join()

    def _pass_to(self, context: Context) -> None:
        """From the launcher: let flows go on until it is its turn again.

        Ctrl-C or another signal may raise meanwhile, while a flow runs: the run ends once that
        one parks.
        """
        away: Call = functools.partial(self.launcher.pass_to, context)
        while True:
            try:
                return away()
            except BaseException as error:
                self.fail(error)
                away = self.launcher.await_turn  # a flow still runs: the turn is not passed twice

    def _check(self, flow: Flow) -> None:
        if self._aborted is not None:
            raise Killed() if flow.dead else self._aborted

    def _next(self) -> Context:
        """Make due calls until a flow is ready: its context, or the launcher's after the end."""
        while (self._living or self.outstanding) and self.failure is None:
            if self._ready:
                return self._ready.popleft().context
            if not self._due:
                self.fail(Deadlock(describe(self.flows)))
                break
            self._now, _, call, argument = heapq.heappop(self._due)
            try:
                call(argument)
            except Exception as error:
                self.fail(error)
        return self.launcher


def foremost(rank: int, waits: Sequence[Wait]) -> Wait:
    """Return the first of `waits` that is for another rank; the first of all is `rank`'s main flow.

    Background flows may only be idle until somebody has a message for them.
    """
    return next((wait for wait in waits if wait[0] != (rank,)), waits[0])


def describe(flows: Iterable[Flow]) -> str:
    """Who waits for whom, for what, in one line."""
    waits: dict[int, list[Wait]] = {}
    for flow in flows:
        if flow.waits is not None:
            waits.setdefault(flow.rank, []).append(flow.waits())
    own = {rank: foremost(rank, each) for rank, each in waits.items()}
    whats = {rank: what for rank, (_, what) in own.items()}
    blocked = {rank: ranks for rank, (ranks, _) in own.items()}
    return follow_waits(blocked, whats, {}) if blocked else "flows are parked that wait for nothing"
