"""All-reduces at once: values are added up when the last rank is there, times follow from a plan.

As long as nobody else has to do with the links and cores of the ranks that take part, all times are
computed when the last rank has come. Whoever is about to use such a link says so before
(`Meetings.disturb`): then everything is computed up to that time only, and goes on message by
message in the world, which is shared (walk.py). Where links or cores are shared anyway, or in use,
the messages are in the world from the beginning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from torch import Tensor

from orchestra.engines.simulation.course import Course, Ranks
from orchestra.engines.simulation.fluid import Resource
from orchestra.engines.simulation.kernel import Kernel, Processor, Timer
from orchestra.engines.simulation.plan import Plan
from orchestra.engines.simulation.recurrence import Times
from orchestra.engines.simulation.sums import add_up
from orchestra.engines.simulation.walk import Paths, Walk
from orchestra.schedules import Schedule
from orchestra.transports.protocol import Traffic

if TYPE_CHECKING:
    from orchestra.engines.simulation.transport import Net


@dataclass(frozen=True)
class Summed:
    """What a rank brings; see `Transport.collective`."""

    vector: Tensor
    schedule: Schedule
    ranks: Ranks
    tag: int
    edges: Sequence[int] | None


class Member:
    """A rank that takes part; `then` is called when it is through."""

    def __init__(
        self, meeting: Meeting, index: int, processor: Processor, then: Callable[[], None]
    ) -> None:
        self.index = index
        self.processor = processor
        self.arrived = meeting.kernel.now()
        self.done = False
        self._meeting = meeting
        self._then = then
        self._seconds = 0.0, 0.0

    def signs(self) -> tuple[Ranks, str]:
        """Whom it waits for, and for what."""
        return self._meeting.signs(self.index)

    def finish(self, waiting: float, communicating: float) -> None:
        """It is through, after so many seconds."""
        self.done = True
        self._seconds = waiting, communicating
        self._then()

    def traffic(self) -> Traffic:
        """What it moved."""
        plan, index = self._meeting.course.plan, self.index
        return Traffic(
            plan.bytes_sent[index],
            plan.bytes_received[index],
            plan.messages_sent[index],
            plan.messages_received[index],
            *self._seconds,
        )

    @property
    def sent(self) -> dict[int, int]:
        """The bytes that it sends to each other rank."""
        return self._meeting.course.sent[self.index]

    @property
    def buffer_bytes(self) -> int:
        """That the executor needs beside the vector."""
        return self._meeting.course.plan.buffer_bytes[self.index]


class Meeting:
    """One all-reduce, from the first rank's arrival to the last byte's.

    `ahead`: whether its times are computed ahead of the world. `before`: one of the same ranks, not
    quite over.
    """

    def __init__(
        self, kernel: Kernel, course: Course, tag: int, *, ahead: bool, before: Meeting | None
    ) -> None:
        self.kernel: Kernel = kernel
        self.course = course
        self._tag = tag
        self._ahead = ahead
        self._before: Meeting | None = before
        if before is not None:
            before._before = None  # it is over: all were through before they came to `before`
        self._over = inf
        self._members: dict[int, Member] = {}
        self._vectors: dict[int, Tensor] = {}
        self._timers: list[Timer] = []
        self._free = {pair: stream.free for pair, stream in course.streams.items()}
        self._ended: list[Walk] = []  # at the present instant
        self._paths = self._new_paths()

    @property
    def is_ahead(self) -> bool:
        """Whether anything of it lies ahead of the world."""
        return self._ahead and self.kernel.now() < self._over

    def leads_to(self, net: Net, summed: Summed) -> bool:
        """Whether each rank comes from here if it takes part in that: if its flow is the same."""
        return (self.course.net, self.course.ranks) == (net, summed.ranks)

    def let_go(self, index: int) -> bool:
        """Whether the rank at place `index` was here, and is through."""
        member = self._members.get(index)
        return member is not None and member.done

    def join(
        self,
        index: int,
        summed: Summed,
        processor: Processor,
        then: Callable[[], None],
        arrived: float | None = None,
    ) -> Member:
        """The rank at place `index` takes part from now on, or has since it `arrived`."""
        vector, plan = summed.vector, self.course.plan
        assert (vector.numel(), vector.itemsize) == (plan.length, plan.itemsize), (
            f"tag {self._tag}: an all-reduce of unlike vectors"
        )
        before = self._before
        if before is not None and before.is_ahead and not before.let_go(index):
            self.enter_world()  # another flow of its is still in the last one, and sends, too
        member = self._members[index] = Member(self, index, processor, then)
        if arrived is not None:
            member.arrived = arrived
        self._vectors[index] = vector
        complete = len(self._members) == len(self.course.ranks)
        if complete and not vector.is_meta:
            add_up(
                plan.schedule,
                [self._vectors[place] for place in sorted(self._vectors)],
                summed.edges,
            )
            self._vectors.clear()
        if not self._ahead:
            walk = Walk(self._paths, index, processor, self._through)
            self.kernel.at(self.kernel.now(), walk.enter_world)
        elif complete:
            self._look_ahead()
        return member

    def signs(self, index: int) -> tuple[Ranks, str]:
        """Whom the rank at place `index` waits for: those who are missing, or all others."""
        ranks = self.course.ranks
        places = set(range(len(ranks)))
        others = places - self._members.keys() or places - {index}
        return tuple(ranks[place] for place in sorted(others)), f"to add up, tag {self._tag}"

    def enter_world(self) -> None:
        """Somebody else is about to use its links: nothing lies ahead of the world any more."""
        if self._before is not None and self._before.is_ahead:
            self._before.enter_world()
        now = self.kernel.now()
        self._ahead = False
        for timer in self._timers:
            timer.cancel()
        self._paths = self._new_paths()
        walks = self._walks(now)
        for stream in self.course.streams.values():
            stream.free = 0.0
        self._paths.enter_world()
        for place, walk in walks.items():
            if not self._members[place].done:
                walk.enter_world()

    def _look_ahead(self) -> None:
        """All are there: when each is through."""
        if self.course.follows:
            times = self._times(inf)
            columns = times.clock, times.waiting, times.communicating
            ends = list(zip(*(column.tolist() for column in columns), strict=True))
        else:
            walks = self._walks(inf)
            ends = [(walk.clock, walk.waiting, walk.communicating) for walk in walks.values()]
        kernel, members, now = self.kernel, self._members, self.kernel.now()
        self._over = max(clock for clock, _, _ in ends)
        for pair, stream in self.course.streams.items():
            stream.free = self._paths.free[pair]
        for place, (clock, waiting, communicating) in enumerate(ends):
            call = functools.partial(members[place].finish, waiting, communicating)
            self._timers.append(kernel.at(max(clock, now), call))

    def _walks(self, until: float) -> dict[int, Walk]:
        """The ways of those who are there, by place, as far as they get ahead of the world."""
        paths = self._paths
        walks = self._known_walks(until)
        paths.ready.extend(walks)
        while paths.ready:
            place = paths.ready.popleft()
            if place in walks:
                walks[place].go_ahead(until)
        return walks

    def _known_walks(self, until: float) -> dict[int, Walk]:
        """As far as the times of all ranks follow from one another; else from the beginning."""
        members = [self._members[place] for place in sorted(self._members)]
        if not self.course.follows or len(members) < len(self.course.ranks):
            return {
                member.index: Walk(
                    self._paths,
                    member.index,
                    member.processor,
                    self._through,
                    clock=member.arrived,
                )
                for member in members
            }
        times = self._times(until)
        return {
            member.index: Walk(
                self._paths,
                member.index,
                member.processor,
                self._through,
                number=times.round,
                clock=float(times.clock[member.index]),
                waiting=float(times.waiting[member.index]),
                communicating=float(times.communicating[member.index]),
            )
            for member in members
        }

    def _times(self, until: float) -> Times:
        """Those of all ranks, which follow from one another."""
        members = [self._members[place] for place in sorted(self._members)]
        arrivals = [member.arrived for member in members]
        rates = tuple(member.processor.rate for member in members)
        times = self.course.times(arrivals, self._free, rates, until)
        free = times.free.tolist()
        for source, target in self._free:
            self._paths.free[source, target] = free[source]
        return times

    def _through(self, walk: Walk) -> None:
        """Those who are through at the same instant go on in the order of their places."""
        if not self._ended:
            self.kernel.call_at(self.kernel.now(), self._let_go, None)
        self._ended.append(walk)

    def _let_go(self, _: None) -> None:
        ended, self._ended = self._ended, []
        for walk in sorted(ended, key=lambda walk: walk.index):
            self._members[walk.index].finish(walk.waiting, walk.communicating)

    def _new_paths(self) -> Paths:
        course = self.course
        return Paths(self.kernel, course.plan, course.overhead, course.streams, self._free)


class _Open:
    """A meeting that some ranks have still to come to; None where they exchange messages."""

    def __init__(self, meeting: Meeting | None, missing: int) -> None:
        self.meeting = meeting
        self.missing = missing


class Meetings:
    """Brings the ranks of each all-reduce together.

    `crowded` tells of ranks whether one of them may have to wait for a core; `faults`, whether
    anything goes wrong in this cluster.
    """

    def __init__(
        self, kernel: Kernel, crowded: Callable[[Ranks], bool], *, faults: bool = False
    ) -> None:
        self.faults = faults
        self._kernel = kernel
        self._crowded = crowded
        self._open: dict[tuple[Net, int, Ranks], _Open] = {}
        self._courses: dict[object, Course] = {}
        self._claims: dict[Resource, Meeting] = {}

    def join(
        self,
        net: Net,
        summed: Summed,
        rank: int,
        processor: Processor,
        then: Callable[[], None],
        *,
        message_by_message: bool = False,
        arrived: float | None = None,
    ) -> Member | None:
        """Let `rank` take part; None: message by message, as the first to come has asked for, or
        because ranks may be through, and come again, before all have begun.

        It may have `arrived` before now, if nothing has happened on its links since then.
        """
        if not (summed.schedule.all_reduce or self.course(net, summed).plan.is_joint):
            return None
        ranks = summed.ranks
        key = net, summed.tag, ranks
        entry = self._open.get(key)
        if entry is None:
            meeting = None if message_by_message else self._meet(net, summed)
            entry = self._open[key] = _Open(meeting, len(ranks))
        entry.missing -= 1
        if not entry.missing:
            del self._open[key]
        if entry.meeting is None:
            return None
        return entry.meeting.join(ranks.index(rank), summed, processor, then, arrived)

    def disturb(self, links: Iterable[Resource]) -> None:
        """A message is about to cross `links`."""
        if self._claims:
            for link in links:
                meeting = self._claims.get(link)
                if meeting is not None and meeting.is_ahead:
                    meeting.enter_world()

    def flow_began(self, rank: int) -> None:
        """A further flow of `rank` computes from now on."""
        for meeting in dict.fromkeys(self._claims.values()):
            ranks = meeting.course.ranks
            if meeting.is_ahead and rank in ranks and self._crowded(ranks):
                meeting.enter_world()

    def _meet(self, net: Net, summed: Summed) -> Meeting:
        course = self.course(net, summed)
        ahead = course.apart and not self.faults and not self._crowded(course.ranks)
        before = None
        for link, pair in course.links.items() if ahead else ():
            claim = self._claims.get(link)
            if claim is not None and claim.is_ahead:
                before = claim
                ahead = ahead and claim.leads_to(net, summed) and claim.course.links[link] == pair
            ahead = ahead and not link.activities
        before = before if ahead else None
        meeting = Meeting(self._kernel, course, summed.tag, ahead=ahead, before=before)
        if ahead:
            self._claims.update(dict.fromkeys(course.links, meeting))
        return meeting

    def course(self, net: Net, summed: Summed) -> Course:
        """The messages of an all-reduce."""
        vector, edges = summed.vector, summed.edges
        length, itemsize = vector.numel(), vector.itemsize
        cuts = None if edges is None else tuple(edges)
        key = net, summed.schedule, summed.ranks, length, cuts, itemsize
        if key not in self._courses:
            plan = Plan(summed.schedule, length, cuts, itemsize)
            self._courses[key] = Course(net, summed.ranks, plan)
        return self._courses[key]
