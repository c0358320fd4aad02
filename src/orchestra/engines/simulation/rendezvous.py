"""Where the ranks of a collective meet: values are summed when the last has come, and times follow.

Where nobody else has to do with the links and cores of the ranks that take part, the times of all
are evaluated when the last rank has come (rounds.py). Whoever is about to use such a link says so
before (`Rendezvous.disturb`): then the collective is replayed up to that time, and goes on in the
world, message by message (participant.py). So it does from the beginning where links or cores are
shared anyway.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from math import inf
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from orchestra.engines.simulation.fluid import Fluid, Resource
from orchestra.engines.simulation.kernel import Events, Kernel, Processor, Timer
from orchestra.engines.simulation.network import Net, Port
from orchestra.engines.simulation.participant import Messages, Participant, Scene
from orchestra.engines.simulation.plan import Plan
from orchestra.engines.simulation.round_state import Usage
from orchestra.engines.simulation.rounds import Ends, PlacedPlan, Ranks
from orchestra.engines.simulation.shared_memory import Barriers, node_stages
from orchestra.engines.simulation.stream import SlowStart
from orchestra.schedules.sums import add_up
from orchestra.transports.protocol import CollectiveCall, Traffic

MAX_KNOWN = 100_000
"""Collectives that are known by identity: a thousand ranks with a hundred buckets each."""


class Contribution(NamedTuple):
    """One rank's part in a collective, and the messages of all ranks."""

    call: CollectiveCall
    placed: PlacedPlan

    @property
    def result_known_without_messages(self) -> bool:
        """Whether what each rank gets is known without messages, once all have begun."""
        schedule = self.placed.plan.schedule
        summed = schedule.all_reduce or (schedule.synchronizing and self.call.vector.is_meta)
        return summed and self.placed.plan.is_synchronizing


class Member:
    """A rank that takes part; `then` is called when it is through."""

    __slots__ = (
        *("_at_once", "_collective", "_placed", "_then"),
        *("arrived", "done", "index", "processor", "seconds"),
    )

    def __init__(
        self,
        collective: Collective,
        index: int,
        processor: Processor,
        then: Callable[[], None],
        arrived: float,
    ) -> None:
        self.index = index
        self.processor = processor
        self.arrived = arrived
        self.done = False
        self.seconds = 0.0, 0.0  # waiting, communicating
        self._collective: Collective | None = collective
        self._placed = collective.placed
        self._at_once = False
        self._then = then

    def waits(self) -> tuple[Ranks, str]:
        """Whom it waits for, and for what."""
        assert self._collective is not None, "it is through"
        return self._collective.waits(self.index)

    def finish(self, waiting: float, communicating: float) -> None:
        """It is through, after so many seconds."""
        if not self.done:
            self.done = True
            assert self._collective is not None
            self._at_once = self._collective.evaluated
            self._collective = None  # a cycle would be left to the garbage collector
            self.seconds = waiting, communicating
            self._then()

    def count(self, port: Port) -> None:
        """Count on `port`, the rank's, what it has sent."""
        placed, index = self._placed, self.index
        port.bytes_sent += placed.plan.bytes_sent[index]
        port.meter.count_all(placed.sent[index])
        for source, arrived in placed.arriving[index].items() if self._at_once else ():
            port.mailbox.count(source, *arrived)

    def traffic(self) -> Traffic:
        """Return what it has moved."""
        plan, index = self._placed.plan, self.index
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
        return self._placed.plan.buffer_bytes[self.index]


class Collective:
    """One collective, from the first rank's arrival to the last byte's.

    Attributes:
        placed: its messages.
        usage: the links after it, once it has been evaluated.
    """

    def __init__(
        self,
        kernel: Kernel,
        given: Contribution,
        *,
        ahead: bool,
        before: Collective | None,
    ) -> None:
        self.placed = placed = given.placed
        self.usage: Usage | None = None
        self._kernel = kernel
        self._tag = given.call.tag
        self._shapes = given.call.vector.is_meta
        self._ahead = ahead
        self._before = before  # of the same ranks, not quite over
        if before is not None:
            # That one is over: each rank was through with it before it joined `before`.
            before._before = None
        self._over = inf
        self._members: dict[int, Member] = {}
        self._vectors: dict[int, Tensor] = {}
        self._timers: list[Timer] = []
        self._ended: list[Participant] = []  # at the present instant
        self._used: list[tuple[SlowStart, float]] = []  # and until when it had been before
        self._messages = None if ahead else Messages(placed, Scene(kernel))

    @property
    def evaluated(self) -> bool:
        """Whether its times follow from the rounds, and not from messages."""
        return self._messages is None

    @property
    def is_ahead(self) -> bool:
        """Whether anything of it has been evaluated ahead of the world."""
        return self._ahead and self._kernel.now() < self._over

    def is_through(self, index: int) -> bool:
        """Whether the rank at place `index` has come, and is through."""
        member = self._members.get(index)
        return member is not None and member.done

    def join(
        self,
        index: int,
        given: Contribution,
        processor: Processor,
        then: Callable[[], None],
        arrived: float,
    ) -> Member:
        """The rank at place `index` takes part from the time `arrived` on, now or later."""
        call = given.call
        assert given.placed is self.placed, f"tag {self._tag}: an all-reduce of unlike vectors"
        before = self._before
        if before is not None and before.is_ahead and self._meets(before, index, arrived):
            self.enter_world()
        member = Member(self, index, processor, then, arrived)
        self._members[index] = member
        all_there = len(self._members) == len(self.placed.ranks)
        if not self._shapes:
            self._vectors[index] = call.vector
            if all_there:
                vectors = [self._vectors[place] for place in sorted(self._vectors)]
                add_up(self.placed.plan.schedule, vectors, call.edges)
                self._vectors.clear()
        if self._ahead and all_there:
            self._evaluate()
        elif self._messages is not None:
            participant = Participant(self._messages, index, processor, self._through)
            self._kernel.at(arrived, participant.go_on)
        return member

    def _meets(self, before: Collective, index: int, arrived: float) -> bool:
        """Whether what a rank sends may share a link with what `before` has evaluated otherwise."""
        if not before.is_through(index):
            return True  # another flow of its is still in that one, and sends, too
        if before.usage is None or not self.placed.begins_elsewhere(before.placed):
            return False
        return self.placed.may_meet(index, arrived, before.usage)

    def waits(self, index: int) -> tuple[Ranks, str]:
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
        for each in reversed(collectives):
            for slow_start, used_at in each._used:
                slow_start.used_at = used_at
        now = self._kernel.now()
        arrivals = [m.arrived for each in collectives for m in each._members.values()]
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
            timer.cancel()
        self._messages = messages = Messages(self.placed, scene)
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
        """All are there: when each is through."""
        members = [self._members[place] for place in range(len(self._members))]
        arrivals = [member.arrived for member in members]
        rates = tuple(member.processor.rate for member in members)
        before = self._before
        usage = before.usage if before is not None and before._ahead else None
        ends = self.placed.ends(arrivals, rates, usage)
        if ends is None or not self._use_connections(ends):
            self.enter_world()
            return
        self.usage = ends.usage
        columns = (ends.clock, ends.waiting, ends.communicating)
        together: dict[float, list[tuple[Member, float, float]]] = {}
        for member, clock, *seconds in zip(members, *(c.tolist() for c in columns), strict=True):
            together.setdefault(clock, []).append((member, *seconds))
        kernel, now = self._kernel, self._kernel.now()
        self._over = max(together)
        for clock, group in together.items():
            timer = kernel.at(max(clock, now), functools.partial(_finish, group))
            self._timers.append(timer)

    def _use_connections(self, ends: Ends) -> bool:
        """Whether they all have started when they are used first."""
        first, last = ends.carried.tolist()
        slow_starts = self.placed.slow_starts.items()
        if not all(slow_start.is_over(first[number]) for number, slow_start in slow_starts):
            return False
        for number, slow_start in slow_starts:
            self._used.append((slow_start, slow_start.used_at))
            slow_start.use(last[number])
        return True

    def _through(self, participant: Participant) -> None:
        """Those who are through at the same instant go on in the order of their places."""
        if not self._ended:
            self._kernel.call_at(self._kernel.now(), self._finish_ended, None)
        self._ended.append(participant)

    def _finish_ended(self, _: None) -> None:
        ended, self._ended = self._ended, []
        for each in sorted(ended, key=attrgetter("index")):
            self._members[each.index].finish(each.waiting, each.communicating)


def _finish(group: list[tuple[Member, float, float]]) -> None:
    for member, waiting, communicating in group:
        member.finish(waiting, communicating)


class Rendezvous:
    """Brings the ranks of each collective together.

    `crowded` tells of ranks whether one of them may have to wait for a core; `faults`, whether
    anything goes wrong in this cluster.
    """

    def __init__(
        self, kernel: Kernel, crowded: Callable[[Ranks], bool], *, faults: bool = False
    ) -> None:
        self.faults = faults
        self.barriers = Barriers(kernel)
        self._kernel = kernel
        self._crowded = crowded
        self._open: dict[tuple[int, int], Collective | None] = {}  # None: message by message
        self._joined: Counter[tuple[int, int]] = Counter()  # ranks of each that is open
        self._plans: dict[object, PlacedPlan] = {}
        self._groups: dict[tuple[Net, Ranks], int] = {}
        self._asked: dict[tuple[int, ...], tuple[PlacedPlan, object]] = {}
        self._claims: dict[Resource, Collective] = {}

    def contribution(self, net: Net, call: CollectiveCall) -> Contribution:
        """Return `call` with the messages of its collective: the same object for equal ones.

        Ranks begin the same ones again and again: these are known by the identity of what is given,
        since to compare it takes time over a thousand ranks.
        """
        asked = net, call.schedule, call.group.ranks, call.edges
        identity = *map(id, asked), call.vector.numel(), call.vector.itemsize
        if identity not in self._asked:
            if len(self._asked) > MAX_KNOWN:
                self._asked.clear()
            # what was asked with lives as long as its identity counts
            self._asked[identity] = self._place(net, call), asked
        return Contribution(call, self._asked[identity][0])

    def _place(self, net: Net, call: CollectiveCall) -> PlacedPlan:
        schedule, ranks = call.schedule, call.group.ranks
        assert schedule is not None
        length, itemsize = call.vector.numel(), call.vector.itemsize
        cuts = None if call.edges is None else tuple(call.edges)
        key = net, schedule, ranks, length, cuts, itemsize
        if key not in self._plans:
            hosts = tuple(net.hosts[rank] for rank in ranks) if net.hosts else ()
            plan = Plan(schedule, length, cuts, itemsize, node_stages(schedule, hosts))
            group = self._groups.setdefault((net, ranks), len(self._groups))
            self._plans[key] = PlacedPlan(net, ranks, plan, group)
        return self._plans[key]

    def join(
        self,
        given: Contribution,
        rank: int,
        processor: Processor,
        then: Callable[[], None],
        *,
        message_by_message: bool = False,
        arrived: float | None = None,
    ) -> Member | None:
        """Let `rank` take part from now on, or from the time `arrived` on.

        None: message by message, as the first to come has asked for, or because ranks may be
        through, and come again, before all have begun.
        """
        placed = given.placed
        if not placed.plan.is_synchronizing:
            return None
        key = placed.group, given.call.tag
        if key not in self._open:
            self._open[key] = None if message_by_message else self._begin(given)
        collective = self._open[key]
        self._joined[key] += 1
        if self._joined[key] == len(placed.ranks):
            del self._open[key], self._joined[key]
        if collective is None:
            return None
        arrived = self._kernel.now() if arrived is None else arrived
        return collective.join(placed.place[rank], given, processor, then, arrived)

    def disturb(self, links: Iterable[Resource]) -> None:
        """A message is about to cross `links`."""
        if self._claims:
            for link in links:
                claim = self._claims.get(link)
                if claim is not None and claim.is_ahead:
                    claim.enter_world()

    def flow_began(self, rank: int) -> None:
        """A further flow of `rank` computes from now on."""
        for claim in dict.fromkeys(self._claims.values()):
            if claim.is_ahead and rank in claim.placed.place and self._crowded((rank,)):
                claim.enter_world()

    def _begin(self, given: Contribution) -> Collective:
        placed = given.placed
        ahead = placed.contention_free and not self.faults and not self._crowded(placed.ranks)
        ahead = ahead and not any(map(attrgetter("activities"), placed.links))
        now = self._kernel.now()
        ahead = ahead and all(each.is_over(now) for each in placed.slow_starts.values())
        follows, before = self._predecessor(placed) if ahead else (False, None)
        ahead = ahead and follows
        collective = Collective(self._kernel, given, ahead=ahead, before=before)
        if ahead:
            self._claims.update(dict.fromkeys(placed.links, collective))
        return collective

    def _predecessor(self, placed: PlacedPlan) -> tuple[bool, Collective | None]:
        """Whether `placed` may follow what has claimed its links; if so, the last of these."""
        before = None
        for claim in dict.fromkeys(map(self._claims.get, placed.links)):
            if claim is not None and claim.is_ahead:
                if not placed.may_follow(claim.placed):
                    return False, None
                before = claim
        return True, before
