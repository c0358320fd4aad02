"""A collective in virtual time, computed by one of two drivers.

The driver is chosen when the first rank begins the collective, and never changes. A collective
whose ranks have links and cores of their own is evaluated: one function computes the times of all
ranks as soon as the last rank has begun (evaluate.py). Any other collective is followed: each rank
sends and receives its messages, which share links with all other messages (participant.py).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from orchestra.engines.simulation.kernel import Call, Kernel, Wait
from orchestra.engines.simulation.loads import Loads
from orchestra.engines.simulation.network import Port
from orchestra.engines.simulation.participant import Messages, Participant
from orchestra.engines.simulation.placed import PlacedPlan
from orchestra.engines.simulation.processor import Thread
from orchestra.schedules.sums import add_up, move
from orchestra.transports.protocol import CollectiveCall, Traffic


class PlacedCall(NamedTuple):
    """A rank's call of a collective, and the plan that all of its ranks share."""

    call: CollectiveCall
    placed: PlacedPlan


@dataclass(eq=False)
class Part:
    """One rank's execution of a collective, on one of its threads.

    Attributes:
        began: when the rank's flow called the collective.
        before: the execution that the thread has to finish first; None once it has.
        beginning: core-seconds that the thread computes before the first message.
        signalling: core-seconds that it computes at the end, to tell the rank's flow.
        send: starts a flow that sends the messages, for a collective that is `Sent`.
        started: when the thread turned to it.
        joined: when the thread was ready for messages.
        ended: when it is complete; infinite as long as that time is unknown.
        waiting, communicating: seconds between `joined` and the last message.
        at_once: whether it was evaluated, so that arrived messages still have to be counted.
        sent: whether sent messages still have to be counted.
        collective: that it is part of; None once its end is known.
        then: called as soon as `ended` is known.
    """

    given: PlacedCall
    port: Port
    processor: Thread
    began: float
    before: Part | None
    beginning: float
    signalling: float
    # Attributes of the class until they are set: a ring of 1,024 ranks makes 15,000 parts per step.
    send: Callable[[Part], None] | None = field(default=None, init=False)
    started: float = field(default=inf, init=False)
    joined: float = field(default=inf, init=False)
    ended: float = field(default=inf, init=False)
    waiting: float = field(default=0.0, init=False)
    communicating: float = field(default=0.0, init=False)
    at_once: bool = field(default=False, init=False)
    sent: bool = field(default=True, init=False)
    collective: Collective | None = field(default=None, init=False)
    then: tuple[Call, ...] = field(default=(), init=False)

    @property
    def place(self) -> int:
        return self.given.placed.place[self.port.rank]

    def compute(self, seconds: float, then: Callable[[Part], None]) -> None:
        """Let its thread compute `seconds` core-seconds, then call `then`; called from an event."""
        if seconds > 0:
            self.processor.start(seconds, functools.partial(then, self))
        else:
            then(self)

    def end(self, ended: float) -> None:
        """Set when it is complete, now or later."""
        # Without a cycle that only the garbage collector would find.
        self.ended, self.collective = ended, None
        if self.then:
            then, self.then = self.then, ()
            for call in then:
                call()

    def pass_time(self) -> float:
        """Block the current flow until it is complete; return the virtual seconds that passed."""
        kernel = self.port.net.kernel
        flow, started = kernel.current, kernel.here()
        if self.ended == inf:
            self.then += (functools.partial(kernel.resume, flow),)
            flow.waits = self._waits
            while self.ended == inf:
                kernel.park()
            flow.waits = None
        # The flow runs ahead of the kernel's clock, since the end cannot change any more.
        flow.ahead = max(kernel.here(), self.ended)
        return flow.ahead - started

    def _waits(self) -> Wait:
        """Return the ranks that it waits for: those that have not begun, or all others."""
        assert self.collective is not None, "it is complete"
        ranks, begun = self.given.placed.ranks, self.collective.parts
        missing = [rank for place, rank in enumerate(ranks) if place not in begun]
        others = missing or [rank for rank in ranks if rank != self.port.rank]
        return tuple(others), f"to add up, tag {self.given.call.tag}"

    def count(self) -> None:
        """Add the bytes and messages of the rank to its port."""
        self.given.placed.count(self.place, self.port, 1, arriving=self.at_once)

    def traffic(self) -> Traffic:
        """Return the bytes, messages and seconds of the rank."""
        plan, place = self.given.placed.plan, self.place
        return Traffic(
            plan.bytes_sent[place],
            plan.bytes_received[place],
            plan.messages_sent[place],
            plan.messages_received[place],
            self.waiting,
            self.communicating,
            bytes_in_memory=plan.bytes_in_memory[place],
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes that the executor allocates in addition to the vector."""
        return self.given.placed.plan.buffer_bytes[self.place]


class Collective(ABC):
    """The executions of one collective by all of its ranks.

    Attributes:
        missing: number of ranks that have not begun it.
    """

    def __init__(self, kernel: Kernel, placed: PlacedPlan, tag: int) -> None:
        self.placed, self.tag = placed, tag
        self.missing = len(placed.ranks)
        self.parts: dict[int, Part] = {}  # by place
        self._kernel = kernel

    def begin(self, part: Part) -> None:
        """Add the execution of one rank. The last rank to call this computes the results."""
        given = part.given
        assert given.placed is self.placed, f"tag {self.tag}: an all-reduce of unlike vectors"
        self.parts[part.place] = part
        part.collective = self
        if not self.missing:
            self._add_up()
        before = part.before
        if before is None:
            part.started = part.began
            self._started(part)
        elif before.ended < inf:
            self._turn(part)
        else:
            before.then += (functools.partial(self._turn, part),)

    def _turn(self, part: Part) -> None:
        """Set when the thread starts `part`; the end of the execution before it is known."""
        assert part.before is not None
        part.started = max(part.began, part.before.ended)
        part.before = None  # a chain of all executions would keep their memory
        self._started(part)

    @abstractmethod
    def _started(self, part: Part) -> None:
        """Go on with `part`, of which it is known when the thread starts it."""

    def _add_up(self) -> None:
        """Replace every rank's vector by its result."""
        calls = [self.parts[place].given.call for place in range(len(self.parts))]
        if not calls[0].vector.is_meta:
            vectors, schedule = [call.vector for call in calls], self.placed.plan.schedule
            (add_up if schedule.all_reduce else move)(schedule, vectors, calls[0].edges)


class Evaluated(Collective):
    """A collective of which `evaluate` computes all times at once.

    `is_ready` is called as soon as the start of every rank is known.

    Attributes:
        joined_at: when the last rank is ready for messages.
    """

    joined_at: float

    def __init__(
        self, kernel: Kernel, placed: PlacedPlan, tag: int, is_ready: Callable[[Evaluated], None]
    ) -> None:
        super().__init__(kernel, placed, tag)
        self._is_ready = is_ready
        self._unknown = len(placed.ranks)  # ranks whose start is unknown
        self._rates = self._joined = np.empty(0)

    def _started(self, part: Part) -> None:
        self._unknown -= 1
        if not self._unknown:
            parts = self._by_place()
            self._rates = np.array([each.processor.rate for each in parts])
            started = np.array([each.started for each in parts])
            beginning = np.array([each.beginning for each in parts])
            self._joined = started + beginning / self._rates
            self.joined_at = float(self._joined.max())
            self._is_ready(self)

    def evaluate(self, loads: Loads) -> None:
        """Compute when each rank is complete, given the other traffic on its links."""
        placed, joined, thread = self.placed, self._joined, self.parts[0].processor
        links, slowed = loads.links_before(placed, thread, joined, self._rates)
        ends = placed.ends(joined, self._rates, links, slowed)
        loads.add(placed, thread, joined, ends)
        parts = self._by_place()
        ended = ends.clock + np.array([part.signalling for part in parts]) / self._rates
        rows = zip(
            parts, ends.waiting.tolist(), ends.communicating.tolist(), joined.tolist(),
            ended.tolist(), strict=True,
        )  # fmt: skip
        for part, waiting, communicating, start, end in rows:
            part.waiting, part.communicating, part.joined = waiting, communicating, start
            part.at_once = True
            part.end(end)

    def _by_place(self) -> list[Part]:
        return [self.parts[place] for place in range(len(self.parts))]


class Followed(Collective):
    """A collective whose ranks send and receive message by message."""

    def __init__(self, kernel: Kernel, placed: PlacedPlan, tag: int) -> None:
        super().__init__(kernel, placed, tag)
        self._messages = Messages(placed, kernel)
        self._ended: list[Participant] = []  # at the present instant

    def _started(self, part: Part) -> None:
        self._kernel.call_at(max(part.started, self._kernel.now()), self._begin, part)

    def _begin(self, part: Part) -> None:
        part.compute(part.beginning, self._join)

    def _join(self, part: Part) -> None:
        part.joined = self._kernel.now()
        Participant(self._messages, part.place, part.processor, self._through).go_on()

    def _through(self, participant: Participant) -> None:
        """Collect ranks that finish at one instant: they resume at its end, in rank order."""
        if not self._ended:
            self._kernel.call_at(self._kernel.now(), self._finish, None)
        self._ended.append(participant)

    def _finish(self, _: None) -> None:
        ended, self._ended = self._ended, []
        for each in sorted(ended, key=attrgetter("index")):
            part = self.parts[each.index]
            part.waiting, part.communicating = each.waiting, each.communicating
            part.compute(part.signalling, self._tell)

    def _tell(self, part: Part) -> None:
        part.end(self._kernel.now())


class Sent(Collective):
    """A collective whose ranks have flows that send its messages, for a timeline or a fault."""

    def _started(self, part: Part) -> None:
        assert part.send is not None
        self._kernel.call_at(max(part.started, self._kernel.now()), part.send, part)

    def _add_up(self) -> None:
        """Do nothing: the messages carry the values."""
