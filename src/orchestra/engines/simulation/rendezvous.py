"""Where the ranks of a collective meet.

Whoever is about to use a link says so before (`Rendezvous.disturb`), since times of collectives may
have been evaluated ahead of the world (collective.py, group_queue.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter

from orchestra.engines.simulation.collective import Collective, Contribution, Member
from orchestra.engines.simulation.fluid import Resource
from orchestra.engines.simulation.group_queue import GroupQueue
from orchestra.engines.simulation.kernel import Kernel, Processor
from orchestra.engines.simulation.network import Net
from orchestra.engines.simulation.plan import Plan
from orchestra.engines.simulation.rounds import PlacedPlan, Ranks
from orchestra.engines.simulation.shared_memory import Barriers, node_stages
from orchestra.transports.protocol import CollectiveCall

MAX_KNOWN = 100_000
"""Collectives that are known by identity: a thousand ranks with a hundred buckets each."""


class Rendezvous:
    """Brings the ranks of each collective together.

    `crowded` tells of ranks whether one of them may have to wait for a core; `faults`, whether
    anything goes wrong in this cluster.
    """

    def __init__(self, kernel: Kernel, crowded: Callable[[Ranks], bool], faults: bool) -> None:
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
        self._queues: dict[int, GroupQueue] = {}  # by group

    def group_queue(self, placed: PlacedPlan) -> GroupQueue:
        """Return the queue that executes collectives of the ranks of `placed` ahead of time."""
        if placed.group not in self._queues:
            self._queues[placed.group] = GroupQueue(self, self._kernel, placed)
        return self._queues[placed.group]

    def contribution(self, net: Net, call: CollectiveCall) -> Contribution:
        """Return `call` with the messages of its collective: the same object for equal ones.

        Ranks begin the same ones again and again: these are known by the identity of what is given,
        since to compare it takes time over a thousand ranks.
        """
        schedule, ranks, edges, vector = call.schedule, call.group.ranks, call.edges, call.vector
        identity = id(net), id(schedule), id(ranks), id(edges), vector.numel(), vector.itemsize
        known = self._asked.get(identity)
        if known is None:
            if len(self._asked) > MAX_KNOWN:
                self._asked.clear()
            # what was asked with lives as long as its identity counts
            known = self._place(net, call), (net, schedule, ranks, edges)
            self._asked[identity] = known
        return Contribution(call, known[0])

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
            self._rewind(placed.links)
        if key not in self._open:  # whose ranks may have joined it just now
            self._open[key] = None if message_by_message else self._begin(given)
        collective = self._open[key]
        # All ranks agree on a tag's collectives in their order, so that the count tells the end of
        # this one.
        self._joined[key] += 1
        if self._joined[key] == len(placed.ranks):
            del self._open[key], self._joined[key]
        if collective is None:
            return None
        arrived = self._kernel.now() if arrived is None else arrived
        return collective.join(placed.place[rank], given, processor, then, arrived)

    def is_open(self, given: Contribution) -> bool:
        """Return whether some ranks have joined the collective, and others are still to come."""
        return (given.placed.group, given.call.tag) in self._open

    def disturb(self, links: Iterable[Resource]) -> None:
        """Before a message crosses `links`: let what was evaluated ahead go on in the world."""
        self._rewind(links)
        if self._claims:
            for link in links:
                claim = self._claims.get(link)
                if claim is not None and claim.is_ahead:
                    claim.enter_world()

    def flow_began(self, rank: int) -> None:
        """After a further flow of `rank` has begun: its cores may not be free any more."""
        for queue in self._queues.values():
            if queue.is_ahead and (queue.disturbed_by(rank) or self._crowded((rank,))):
                queue.rewind()
        for claim in dict.fromkeys(self._claims.values()):
            if claim.is_ahead and rank in claim.placed.place and self._crowded((rank,)):
                claim.enter_world()

    def _rewind(self, links: Iterable[Resource]) -> None:
        """Take back queues that are ahead on `links`, which somebody else is about to use."""
        for queue in self._queues.values():
            if queue.uses(links):
                queue.rewind()

    def _begin(self, given: Contribution) -> Collective:
        ahead, before = self.goes_ahead(given.placed)
        if ahead:
            return self.begin_ahead(given, before)
        return Collective(self._kernel, given, ahead=False, before=None)

    def begin_ahead(
        self, given: Contribution, before: Collective | None, *, joining: bool = False
    ) -> Collective:
        """Make a collective that is evaluated ahead of the world, behind `before`.

        With `joining` ranks are still to join it.
        """
        collective = Collective(self._kernel, given, ahead=True, before=before)
        self._claims.update(dict.fromkeys(given.placed.links, collective))
        if joining:
            self._open[given.placed.group, given.call.tag] = collective
        return collective

    def goes_ahead(self, placed: PlacedPlan) -> tuple[bool, Collective | None]:
        """Return whether `placed` can be evaluated ahead of the world now, and behind what."""
        self._rewind(placed.links)
        ahead = placed.contention_free and not self.faults and not self._crowded(placed.ranks)
        # Nobody else's message may be on the links, since its end would depend on what is sent now.
        ahead = ahead and not any(map(attrgetter("activities"), placed.links))
        now = self._kernel.now()
        ahead = ahead and all(each.is_over(now) for each in placed.slow_starts.values())
        return self._predecessor(placed) if ahead else (False, None)

    def _predecessor(self, placed: PlacedPlan) -> tuple[bool, Collective | None]:
        """Return whether `placed` may follow what has claimed its links, and the last of these."""
        before = None
        for claim in dict.fromkeys(map(self._claims.get, placed.links)):
            if claim is not None and claim.is_ahead:
                if not placed.may_follow(claim.placed):
                    return False, None
                before = claim
        return True, before
