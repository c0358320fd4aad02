"""Matches the ranks of each collective, and chooses the driver that computes its times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from weakref import WeakValueDictionary

from orchestra.engines.simulation.collective import (
    Collective,
    Evaluated,
    Followed,
    Sent,
)
from orchestra.engines.simulation.kernel import Kernel
from orchestra.engines.simulation.loads import Loads
from orchestra.engines.simulation.network import Net
from orchestra.engines.simulation.placed import PlacedPlan, Ranks
from orchestra.engines.simulation.plan import CollectivePlan, node_stages
from orchestra.engines.simulation.processor import Thread
from orchestra.transports.protocol import CollectiveCall

MAX_FOLLOWED = 64
"""So many ranks at most are followed where their partners change. Messages of two rounds may share
a link then, which an evaluation has cross it one after the other: its times were up to 15 % short
where nodes are unlike. With a thousand ranks following them takes a quarter of an hour."""

MAX_KNOWN = 100_000
"""Collectives that are known by identity: a thousand ranks with a hundred buckets each."""

MAX_PLANS = 4_000
"""Plans that are kept: groups that are drawn at random would leave one for each."""


class TaggedCollectives:
    """The collectives of a group with one tag.

    Ranks begin them in the same order, so a count tells them apart.

    Attributes:
        count: by place, how many each rank has begun.
        waiting: by number, those that some have begun, and others have not.
    """

    def __init__(self, ranks: int) -> None:
        self.count = [0] * ranks
        self.waiting: dict[int, Collective] = {}


class Rendezvous:
    """Brings the ranks of each collective together.

    `crowded` tells of ranks whether one of them may have to wait for a core; `faults`, whether
    anything goes wrong in this cluster.
    """

    def __init__(
        self, kernel: Kernel, loads: Loads, crowded: Callable[[Ranks], bool], faults: bool
    ) -> None:
        self.faults = faults
        self._kernel, self._loads, self._crowded = kernel, loads, crowded
        self._begun: dict[tuple[int, int], TaggedCollectives] = {}  # by group and tag
        self._ready: dict[float, list[Evaluated]] = defaultdict(list)  # by time of evaluation
        # As long as somebody has one: all ranks of a collective have to find the same.
        self._plans: WeakValueDictionary[object, PlacedPlan] = WeakValueDictionary()
        self._most_plans = MAX_PLANS
        self._groups: dict[tuple[Net, Ranks], int] = {}
        self._asked: dict[tuple[int, ...], tuple[PlacedPlan, object]] = {}

    def plan(self, net: Net, call: CollectiveCall) -> PlacedPlan:
        """Return the messages of a collective: the same object for equal ones.

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
        return known[0]

    def _place(self, net: Net, call: CollectiveCall) -> PlacedPlan:
        schedule, ranks = call.schedule, call.group.ranks
        assert schedule is not None
        length, itemsize = call.vector.numel(), call.vector.itemsize
        cuts = None if call.edges is None else tuple(call.edges)
        key = net, schedule, ranks, length, cuts, itemsize
        if (placed := self._plans.get(key)) is None:
            if len(self._plans) >= self._most_plans:
                self._asked.clear()
                self._most_plans = max(MAX_PLANS, 2 * len(self._plans))  # those that others have
            hosts = tuple(net.hosts[rank] for rank in ranks)
            plan = CollectivePlan(schedule, length, cuts, itemsize, node_stages(schedule, hosts))
            group = self._groups.setdefault((net, ranks), len(self._groups))
            placed = self._plans[key] = PlacedPlan(net, ranks, plan, group)
        return placed

    def collective(
        self, placed: PlacedPlan, call: CollectiveCall, place: int, thread: Thread
    ) -> Collective:
        """Return the collective that the rank at `place` begins with this call, on `thread`.

        The first rank to call this for a collective chooses the driver for all ranks.
        """
        key = placed.group, call.tag
        begun = self._begun.get(key)
        if begun is None:
            begun = self._begun[key] = TaggedCollectives(len(placed.ranks))
        number, waiting = begun.count[place], begun.waiting
        begun.count[place] = number + 1
        # Messages are told apart by source and tag alone: those of two flows would be mixed up.
        assert number - 1 not in waiting or waiting[number - 1].is_executed_by(thread, place), (
            f"tag {call.tag}: two flows of rank {placed.ranks[place]} use it at the same time"
        )
        collective = waiting.get(number)
        if collective is None:
            collective = waiting[number] = self._begin(placed, call)
        assert collective.placed is placed, f"tag {call.tag}: an all-reduce of unlike vectors"
        collective.missing -= 1
        if not collective.missing:
            del waiting[number]
            if not waiting:  # all ranks have begun as many, and may count from 0 again
                del self._begun[key]
        return collective

    def _begin(self, placed: PlacedPlan, call: CollectiveCall) -> Collective:
        tag = call.tag
        if call.message_by_message or self.faults:
            return Sent(self._kernel, placed, tag)
        alone = placed.private and not placed.starts_slowly and not self._crowded(placed.ranks)
        if alone and (placed.keeps_partners or len(placed.ranks) > MAX_FOLLOWED):
            return Evaluated(self._kernel, placed, tag, self._evaluate_at_join)
        return Followed(self._kernel, placed, tag)

    def _evaluate_at_join(self, collective: Evaluated) -> None:
        """Evaluate `collective` when its last rank joins it: then earlier messages are on links."""
        time = max(self._kernel.now(), collective.joined_at)
        if time not in self._ready:
            self._kernel.call_at(time, self._evaluate, time)
        self._ready[time].append(collective)

    def _evaluate(self, time: float) -> None:
        # By rank and tag, so that the order of events at this instant does not matter.
        for each in sorted(self._ready.pop(time), key=lambda one: (one.placed.ranks, one.tag)):
            each.evaluate(self._loads)
