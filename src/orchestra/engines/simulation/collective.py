"""One collective that all of its ranks meet in: values are summed when the last has come, and times
follow.

Where nobody else has to do with the links and cores of the ranks that take part, the times of all
are evaluated when the last rank has come (rounds.py). Once somebody has (`Collective.enter_world`),
it is replayed up to that time, and goes on in the world, message by message (participant.py). So it
does from the beginning where links or cores are shared anyway.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from orchestra.engines.simulation.fluid import Fluid
from orchestra.engines.simulation.kernel import Call, Events, Kernel, Timer, Wait
from orchestra.engines.simulation.network import Port, Reader
from orchestra.engines.simulation.participant import Messages, Participant, Scene
from orchestra.engines.simulation.processor import Thread
from orchestra.engines.simulation.round_state import Usage
from orchestra.engines.simulation.rounds import Ends, PlacedPlan
from orchestra.engines.simulation.stream import SlowStart
from orchestra.schedules.sums import add_up
from orchestra.transports.protocol import CollectiveCall, Traffic


class CollectivePart(NamedTuple):
    """One rank's part in a collective, and the messages of all ranks."""

    call: CollectiveCall
    placed: PlacedPlan

    @property
    def result_known_without_messages(self) -> bool:
        """True if the result of each rank is known without messages, once all have begun."""
        schedule = self.placed.plan.schedule
        summed = schedule.all_reduce or (schedule.synchronizing and self.call.vector.is_meta)
        return summed and self.placed.plan.is_synchronizing


@dataclass(eq=False, slots=True)
class Participation:
    """A rank that takes part; `then` is called when it is through."""

    collective: Collective | None  # None once it is through: cycles are left to the collector
    index: int
    processor: Thread
    then: Call
    arrived: float
    done: bool = False
    seconds: tuple[float, float] = (0.0, 0.0)  # waiting, communicating
    placed: PlacedPlan = field(init=False)
    _at_once: bool = False
    _reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        assert self.collective is not None
        self.placed = self.collective.placed
        self._reader = self.placed.net.ports[self.placed.ranks[self.index]].reader
        self._reader.begin(self, self.arrived)

    def waits(self) -> Wait:
        """Whom it waits for, and for what."""
        assert self.collective is not None, "it is through"
        return self.collective.waits(self.index)

    def finish(self, waiting: float, communicating: float) -> None:
        """Note that the rank is through, after so many seconds of waiting and communicating."""
        if not self.done:
            assert self.collective is not None
            self._at_once = self.collective.messages is None
            self.seconds = waiting, communicating
            self.leave()
            self.then()

    def leave(self) -> None:
        """Detach from the collective."""
        self._reader.end(self)
        self.done = True
        self.collective = None

    def count(self, port: Port) -> None:
        """Count on `port`, the rank's, what it has sent."""
        self.placed.count(self.index, port, 1, arriving=self._at_once)

    def traffic(self) -> Traffic:
        """Return what it has moved."""
        plan, index = self.placed.plan, self.index
        return Traffic(
            plan.bytes_sent[index],
            plan.bytes_received[index],
            plan.messages_sent[index],
            plan.messages_received[index],
            *self.seconds,
            bytes_in_memory=plan.bytes_in_memory[index],
        )

    @property
    def buffer_bytes(self) -> int:
        """That the executor needs beside the vector."""
        return self.placed.plan.buffer_bytes[self.index]


class Collective:
    """One collective, from the first rank's arrival to the last byte's.

    Attributes:
        placed: its messages.
        usage: the links after it, once it has been evaluated.
    """

    def __init__(
        self, kernel: Kernel, given: CollectivePart, *, ahead: bool, before: Collective | None
    ) -> None:
        self.placed = placed = given.placed
        self.usage: Usage | None = None  # the links after it, once it has been evaluated
        self._kernel = kernel
        self._tag = given.call.tag
        self._shapes = given.call.vector.is_meta
        self._ahead = ahead
        self._before = before  # of the same ranks, not quite over
        if before is not None:
            before._before = None  # each rank was through with that before it joined `before`
        self._over = inf
        self._members: dict[int, Participation] = {}
        self._vectors: dict[int, Tensor] = {}
        self._timers: list[Timer] = []
        self._ended: list[Participant] = []  # at the present instant
        self._used: list[tuple[SlowStart, float]] = []  # and until when it had been before
        # None: its times follow from the rounds of the plan.
        self.messages = None if ahead else Messages(placed, Scene(kernel))

    @property
    def is_ahead(self) -> bool:
        """True if anything of it has been evaluated ahead of the world."""
        return self._ahead and self._kernel.now() < self._over

    def is_through(self, index: int) -> bool:
        """Return whether the rank at place `index` has come, and is through."""
        member = self._members.get(index)
        return member is not None and member.done

    def join(
        self, index: int, given: CollectivePart, processor: Thread, then: Call, arrived: float
    ) -> Participation:
        """The rank at place `index` takes part from the time `arrived` on, now or later."""
        call = given.call
        assert given.placed is self.placed, f"tag {self._tag}: an all-reduce of unlike vectors"
        # As real messages, which are told apart by source and tag alone, those would be mixed up.
        assert index not in self._members, (
            f"tag {self._tag}: two flows of rank {self.placed.ranks[index]} use it at the same time"
        )
        before = self._before
        if before is not None and before.is_ahead and self._meets(before, index, arrived):
            self.enter_world()
        member = self.rejoin(index, processor, then, arrived)
        all_there = len(self._members) == len(self.placed.ranks)
        if not self._shapes:
            self._vectors[index] = call.vector
            if all_there:
                vectors = [self._vectors[place] for place in sorted(self._vectors)]
                add_up(self.placed.plan.schedule, vectors, call.edges)
                self._vectors.clear()
        if self._ahead and all_there:
            self._evaluate()
        elif self.messages is not None:
            participant = Participant(self.messages, index, processor, self._through)
            self._kernel.at(arrived, participant.go_on)
        return member

    def _meets(self, before: Collective, index: int, arrived: float) -> bool:
        """Return whether a message of a rank may share a link with one of `before` whose time was
        computed without it.
        """
        if not before.is_through(index):
            return True  # another flow of its is still in that one, and sends, too
        if before.usage is None or not self.placed.begins_elsewhere(before.placed):
            return False
        return self.placed.may_meet(index, arrived, before.usage)

    def waits(self, index: int) -> Wait:
        """Whom the rank at place `index` waits for: those who are missing, or all others."""
        ranks = self.placed.ranks
        places = set(range(len(ranks)))
        others = places - self._members.keys() or places - {index}
        return tuple(ranks[place] for place in sorted(others)), f"to add up, tag {self._tag}"

    def enter_world(self) -> None:
        """Somebody else is about to use its links or cores: go on message by message."""
        collectives = [self]
        if self._before is not None and self._before._ahead:
            collectives.insert(0, self._before)  # even if it is over: others queued up behind it
        # The older one last: the times from before it are those that count.
        for each in reversed(collectives):
            for slow_start, used_at in each._used:
                slow_start.used_at = used_at
        now = self._kernel.now()
        arrivals = [m.arrived for each in collectives for m in each._members.values()]
        # A world of its own, in which nobody else sends: until now that was so.
        scene = Scene(Events(min([now, *arrivals])), replays=True)
        fluid = Fluid(scene.events)
        participants = [each for one in collectives for each in one._replay(scene, fluid)]
        streams = dict.fromkeys(s for each in collectives for s in each.placed.streams.values())
        scene.enter_world(self._kernel, self.placed.net.fluid, streams)
        for participant in participants:
            participant.enter_world()

    def _replay(self, scene: Scene, fluid: Fluid) -> list[Participant]:
        """Let those who have come begin again, when they came, among the events of `scene`."""
        self._ahead = False
        for timer in self._timers:
            timer.cancel()  # what was told of the ends does not hold any more
        self.messages = messages = Messages(self.placed, scene)
        for stream in self.placed.streams.values():
            stream.enter(scene.events, fluid)
        participants = []
        for index, member in self._members.items():
            participant = Participant(messages, index, member.processor, self._through)
            if member.arrived > self._kernel.now():
                self._kernel.at(member.arrived, participant.go_on)
            else:
                scene.events.at(member.arrived, participant.go_on)
            participants.append(participant)
        return participants

    def _evaluate(self) -> None:
        """Compute when each rank is through, now that all have come."""
        members = self._by_place()
        arrivals = [member.arrived for member in members]
        rates = tuple(member.processor.rate for member in members)
        before = self._before
        usage = before.usage if before is not None and before._ahead else None
        ends = self.placed.ends(arrivals, rates, usage)
        if ends is not None and self._use_connections(ends):
            self.announce(ends)
        else:
            self.enter_world()

    def rejoin(self, index: int, processor: Thread, then: Call, arrived: float) -> Participation:
        """`join` for one that joined at the time `arrived`; `announce` says how it goes on."""
        member = self._members[index] = Participation(self, index, processor, then, arrived)
        return member

    def announce(self, ends: Ends) -> None:
        """All are there: let each go on when it is through."""
        self.usage = ends.usage
        columns = (each.tolist() for each in (ends.clock, ends.waiting, ends.communicating))
        # One event for all who are through at one time; they go on in the order of their places.
        together: dict[float, list[tuple[Participation, float, float]]] = {}
        for member, clock, *seconds in zip(self._by_place(), *columns, strict=True):
            together.setdefault(clock, []).append((member, *seconds))
        kernel, now = self._kernel, self._kernel.now()
        self._over = max(together)
        for clock, group in together.items():
            self._timers.append(kernel.at(max(clock, now), functools.partial(_finish, group)))

    def _by_place(self) -> list[Participation]:
        return [self._members[place] for place in range(len(self._members))]

    def _use_connections(self, ends: Ends) -> bool:
        """Note when long links are used; returns False if one of them would start slowly."""
        first, last = ends.carried.tolist()
        slow_starts = self.placed.slow_starts.items()
        if not all(each.is_over(first[number]) for number, each in slow_starts):
            return False
        for number, slow_start in slow_starts:
            self._used.append((slow_start, slow_start.used_at))
            slow_start.use(last[number])
        return True

    def _through(self, participant: Participant) -> None:
        """Those who are through at one instant go on at its end, in the order of their places."""
        if not self._ended:
            self._kernel.call_at(self._kernel.now(), self._finish_ended, None)
        self._ended.append(participant)

    def _finish_ended(self, _: None) -> None:
        ended, self._ended = self._ended, []
        for each in sorted(ended, key=attrgetter("index")):
            self._members[each.index].finish(each.waiting, each.communicating)


def _finish(group: list[tuple[Participation, float, float]]) -> None:
    for member, waiting, communicating in group:
        member.finish(waiting, communicating)
