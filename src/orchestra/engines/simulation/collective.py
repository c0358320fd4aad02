"""A collective in virtual time, computed by one of two drivers.

The driver is chosen when the first rank begins the collective, and never changes. A collective
whose ranks have links and cores of their own is evaluated: one function computes the times of all
ranks as soon as the last rank has begun (evaluate.py). Others are followed: each rank sends and
receives its messages, which share links with all other messages (participant.py). `Rendezvous`
decides. Neither driver is used for a timeline or a fault: then flows send the messages (`Sent`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from math import inf
from operator import attrgetter

import numpy as np

from orchestra.engines.simulation.kernel import Call, Kernel, Wait
from orchestra.engines.simulation.loads import Loads
from orchestra.engines.simulation.network import Port
from orchestra.engines.simulation.participant import Messages, Participant
from orchestra.engines.simulation.placed import PlacedPlan
from orchestra.engines.simulation.processor import Thread
from orchestra.schedules.sums import add_up, move
from orchestra.transports.protocol import CollectiveCall, Traffic


class Part:
    """One rank's execution of a collective: the rank at place `place` of its group."""

    __slots__ = ("collective", "place")

    def __init__(self, collective: Collective, place: int) -> None:
        self.collective, self.place = collective, place

    @property
    def ended(self) -> float:
        """When it is complete; infinite as long as that is unknown."""
        return self.collective.ended[self.place]

    def pass_time(self) -> float:
        """Block the current flow until it is complete; return the virtual seconds that passed."""
        collective, place = self.collective, self.place
        kernel = collective.kernel
        started = kernel.here()
        if collective.ended[place] <= started:
            return 0.0
        flow = kernel.current
        if collective.ended[place] == inf:
            collective.tell(place, functools.partial(kernel.resume, flow))
            flow.waits = self._waits
            while collective.ended[place] == inf:
                kernel.park()
            flow.waits = None
        # The flow runs ahead of the kernel's clock, since the end cannot change any more.
        flow.ahead = max(kernel.here(), collective.ended[place])
        return flow.ahead - started

    def _waits(self) -> Wait:
        """Return the ranks that it waits for: those that have not begun, or all others."""
        collective = self.collective
        ranks = collective.placed.ranks
        missing = tuple(
            rank for rank, call in zip(ranks, collective.calls, strict=True) if call is None
        )
        others = missing or ranks[: self.place] + ranks[self.place + 1 :]
        return others, f"to add up, tag {collective.tag}"

    def send(self, collective: ByRank) -> None:
        """Start a flow that sends the messages of `collective`, its own, which `is_sent`."""
        raise AssertionError("a flow that begins a collective itself sends the messages, too")

    def count(self, port: Port) -> None:
        """Add the bytes and messages of the rank to its port."""
        self.collective.placed.count(self.place, port, 1, arriving=self.collective.at_once)

    def traffic(self) -> Traffic:
        """Return the bytes, messages and seconds of the rank."""
        collective, place = self.collective, self.place
        plan = collective.placed.plan
        return Traffic(
            plan.bytes_sent[place],
            plan.bytes_received[place],
            plan.messages_sent[place],
            plan.messages_received[place],
            collective.waiting[place],
            collective.communicating[place],
            bytes_in_memory=plan.bytes_in_memory[place],
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes that the executor allocates in addition to the vector."""
        return self.collective.placed.plan.buffer_bytes[self.place]


class Collective(ABC):
    """The executions of one collective by all of its ranks.

    What is known of each rank is in columns by place. With a thousand ranks and buckets of a
    gradient, objects for it would be fetched from memory again and again.

    Attributes:
        missing: number of ranks that have not begun it.
        calls: what each rank has begun.
        ended: when each rank is complete; infinite as long as that is unknown.
        busy: seconds that each rank's thread spent on it, its wait for others aside.
        waiting, communicating: seconds of each rank between its first message and its last.
        at_once: whether it is evaluated, so that arrived messages still have to be counted.
        is_sent: whether flows send its messages, and count them.
    """

    at_once = False
    is_sent = False

    def __init__(self, kernel: Kernel, placed: PlacedPlan, tag: int) -> None:
        self.kernel, self.placed, self.tag = kernel, placed, tag
        self.missing = ranks = len(placed.ranks)
        self.calls: list[CollectiveCall | None] = [None] * ranks
        self.ended = [inf] * ranks
        self.busy, self.waiting, self.communicating = ([0.0] * ranks for _ in range(3))
        self._processors: list[Thread | None] = [None] * ranks
        self._began, self._beginning, self._signalling = (
            array("d", bytes(8 * ranks)) for _ in range(3)
        )
        self._then: defaultdict[int, list[Call]] = defaultdict(list)  # called at the end, by place

    def begin(
        self,
        part: Part,
        call: CollectiveCall,
        processor: Thread,
        began: float,
        before: Part | None = None,
        beginning: float = 0.0,
        signalling: float = 0.0,
    ) -> None:
        """Add the execution of one rank. The last rank to call this computes the results.

        Args:
            began: when the rank's flow called the collective.
            before: the execution that its thread, `processor`, has to finish first.
            beginning: core-seconds that the thread computes before the first message.
            signalling: core-seconds that it computes at the end, to tell the rank's flow.
        """
        place = part.place
        self.calls[place], self._processors[place] = call, processor
        self._began[place], self._beginning[place] = began, beginning
        self._signalling[place] = signalling
        if not self.missing and not call.vector.is_meta:
            self._add_up()
        self._start(part, before)

    def is_executed_by(self, thread: Thread, place: int) -> bool:
        """Return whether the rank at `place` has begun it on no other thread."""
        return self._processors[place] in (None, thread)

    @abstractmethod
    def _start(self, part: Part, before: Part | None) -> None:
        """Let the thread of `part` turn to it as soon as `before` has ended."""

    def _add_up(self) -> None:
        """Replace every rank's vector by its result."""
        calls = [call for call in self.calls if call is not None]
        vectors, schedule = [call.vector for call in calls], self.placed.plan.schedule
        (add_up if schedule.all_reduce else move)(schedule, vectors, calls[0].edges)

    def tell(self, place: int, call: Call) -> None:
        """Call `call` when the end of the rank at `place` is known."""
        self._then[place].append(call)

    def precede(self, place: int, following: Evaluated) -> None:
        """Tell `following` when the end of the rank at `place` is known."""
        self.tell(place, functools.partial(following.know_starts, 1))


class Evaluated(Collective):
    """A collective whose times `evaluate` computes all at once.

    `when_ready` is called as soon as the start of every rank is known.

    Attributes:
        joined_at: when the last rank is ready for messages.
    """

    at_once = True
    joined_at: float

    def __init__(
        self, kernel: Kernel, placed: PlacedPlan, tag: int, when_ready: Callable[[Evaluated], None]
    ) -> None:
        super().__init__(kernel, placed, tag)
        self._when_ready = when_ready
        self._unknown = len(placed.ranks)  # ranks whose start is unknown
        self._before: list[Part | None] = [None] * len(placed.ranks)
        # Those that some of the same threads execute next, and how many.
        self._following: Counter[Evaluated] = Counter()
        self._rates = self._started = self._joined = np.empty(0)

    def _start(self, part: Part, before: Part | None) -> None:
        self._before[part.place] = before
        if before is None or before.ended < inf:
            self.know_starts(1)
        else:
            before.collective.precede(before.place, self)

    def precede(self, place: int, following: Evaluated) -> None:
        """Tell `following` when the end is known: of all ranks at once."""
        self._following[following] += 1

    def know_starts(self, count: int) -> None:
        """Note that it is known of so many more ranks when they start."""
        self._unknown -= count
        if self._unknown:
            return
        free = [-inf if before is None else before.ended for before in self._before]
        self._before.clear()  # a chain of all executions would keep their memory
        threads = [thread for thread in self._processors if thread is not None]
        self._rates = np.array([thread.rate for thread in threads])
        self._started = np.maximum(self._began, free)
        self._joined = self._started + np.array(self._beginning) / self._rates
        self.joined_at = float(self._joined.max())
        self._when_ready(self)

    def evaluate(self, loads: Loads) -> None:
        """Compute when each rank is complete, given the other traffic on its links."""
        placed, joined, rates, thread = self.placed, self._joined, self._rates, self._processors[0]
        assert thread is not None
        links, slowed = loads.links_before(placed, thread, joined)
        ends = placed.ends(joined, rates, links, slowed)
        loads.add(placed, thread, joined, ends)
        self.ended = (ends.clock + np.array(self._signalling) / rates).tolist()
        self.busy = (joined - self._started + ends.communicating).tolist()
        self.waiting, self.communicating = ends.waiting.tolist(), ends.communicating.tolist()
        for _, calls in sorted(self._then.items()):
            for call in calls:
                call()
        for following, count in self._following.items():
            following.know_starts(count)
        # Without a cycle that only the garbage collector would find.
        self._then.clear()
        self._following.clear()


class ByRank(Collective):
    """A collective that each rank starts as soon as its thread is free."""

    def _start(self, part: Part, before: Part | None) -> None:
        if before is not None and before.ended == inf:
            before.collective.tell(before.place, functools.partial(self._turn, part, before))
        else:
            self._turn(part, before)

    def _turn(self, part: Part, before: Part | None) -> None:
        began = self._began[part.place]
        started = began if before is None else max(began, before.ended)
        self.busy[part.place] = -started
        self.kernel.call_at(max(started, self.kernel.now()), self._execute, part)

    @abstractmethod
    def _execute(self, part: Part) -> None:
        """Execute `part`, whose thread turns to it now."""

    def join(self, part: Part) -> None:
        """Note that the thread of `part` is ready for its first message."""
        self.busy[part.place] += self.kernel.now()

    def end(self, part: Part, communicating: float) -> None:
        """Let the thread of `part` tell the rank's flow that all messages are there."""
        self.communicating[part.place] = communicating
        self.busy[part.place] += communicating
        self._compute(part, self._signalling[part.place], self._complete)

    def _compute(self, part: Part, seconds: float, then: Callable[[Part], None]) -> None:
        processor = self._processors[part.place]
        assert processor is not None
        if seconds > 0:
            processor.start(seconds, functools.partial(then, part))
        else:
            then(part)

    def _complete(self, part: Part) -> None:
        self.ended[part.place] = self.kernel.now()
        for call in self._then.pop(part.place, ()):
            call()


class Followed(ByRank):
    """A collective whose ranks send and receive message by message."""

    def __init__(self, kernel: Kernel, placed: PlacedPlan, tag: int) -> None:
        super().__init__(kernel, placed, tag)
        self._messages = Messages(placed, kernel)
        self._parts: dict[int, Part] = {}
        self._ended: list[Participant] = []  # at the present instant

    def _execute(self, part: Part) -> None:
        self._compute(part, self._beginning[part.place], self._join)

    def _join(self, part: Part) -> None:
        self.join(part)
        self._parts[part.place] = part
        processor = self._processors[part.place]
        assert processor is not None
        Participant(self._messages, part.place, processor, self._through).go_on()

    def _through(self, participant: Participant) -> None:
        """Collect ranks that finish at one instant: they resume at its end, in rank order."""
        if not self._ended:
            self.kernel.call_at(self.kernel.now(), self._finish, None)
        self._ended.append(participant)

    def _finish(self, _: None) -> None:
        ended, self._ended = self._ended, []
        for each in sorted(ended, key=attrgetter("index")):
            self.waiting[each.index] = each.waiting
            self.end(self._parts.pop(each.index), each.communicating)


class Sent(ByRank):
    """A collective whose ranks have flows that send its messages, for a timeline or a fault."""

    is_sent = True

    def _execute(self, part: Part) -> None:
        part.send(self)

    def _add_up(self) -> None:
        """Do nothing: the messages carry the values."""
