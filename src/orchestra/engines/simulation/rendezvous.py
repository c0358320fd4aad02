"""Where the ranks of a collective meet.

Whoever is about to use a link says so before (`Rendezvous.disturb`), since times of collectives may
have been evaluated ahead of the world: those of one that all ranks wait for (collective.py), and of
those in the background that all ranks of a group queue alike (`GroupQueue`).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from orchestra.engines.simulation.collective import Collective, CollectivePart, Participation
from orchestra.engines.simulation.fluid import Resource
from orchestra.engines.simulation.kernel import Call, Kernel, Wait
from orchestra.engines.simulation.network import Net
from orchestra.engines.simulation.participant import Barriers
from orchestra.engines.simulation.plan import CollectivePlan, node_stages
from orchestra.engines.simulation.processor import Thread
from orchestra.engines.simulation.round_state import Floats
from orchestra.engines.simulation.rounds import Ends, PlacedPlan, Ranks
from orchestra.transports.protocol import CollectiveCall

if TYPE_CHECKING:
    from orchestra.engines.simulation.background import BackgroundQueue, Queued

MAX_KNOWN = 100_000
"""Collectives that are known by identity: a thousand ranks with a hundred buckets each."""

MAX_PLANS = 4_000
"""Plans that are kept: groups that are drawn at random would leave one for each."""


class Rendezvous:
    """Brings the ranks of each collective together.

    `crowded` tells of ranks whether one of them may have to wait for a core; `faults`, whether
    anything goes wrong in this cluster.
    """

    def __init__(self, kernel: Kernel, crowded: Callable[[Ranks], bool], faults: bool) -> None:
        self.faults, self.barriers = faults, Barriers(kernel)
        self._kernel, self._crowded = kernel, crowded
        self._open: dict[tuple[int, int], Collective | None] = {}  # None: message by message
        self._joined: Counter[tuple[int, int]] = Counter()  # ranks of each that is open
        # As long as somebody has one: all ranks of a collective have to find the same.
        self._plans: WeakValueDictionary[object, PlacedPlan] = WeakValueDictionary()
        self._most_plans = MAX_PLANS
        self._groups: dict[tuple[Net, Ranks], int] = {}
        self._asked: dict[tuple[int, ...], tuple[PlacedPlan, object]] = {}
        self._claims: dict[Resource, Collective] = {}
        self._queues: dict[int, GroupQueue] = {}  # by group

    def group_queue(self, placed: PlacedPlan) -> GroupQueue:
        """Return the queue that executes collectives of the ranks of `placed` ahead of time."""
        if placed.group not in self._queues:
            self._queues[placed.group] = GroupQueue(self, self._kernel, placed)
        return self._queues[placed.group]

    def contribution(self, net: Net, call: CollectiveCall) -> CollectivePart:
        """Return `call` with the messages of its collective: the same object for equal ones.

        Ranks begin the same ones again and again: these are known by the identity of what is given,
        since to compare it takes time over a thousand ranks.
        """
        schedule, ranks, edges, vector = call.schedule, call.group.ranks, call.edges, call.vector
        identity = id(net), id(schedule), id(ranks), id(edges), vector.numel(), vector.itemsize
        if identity not in self._asked:
            if len(self._asked) > MAX_KNOWN:
                self._asked.clear()
            # what was asked with lives as long as its identity counts
            self._asked[identity] = self._place(net, call), (net, schedule, ranks, edges)
        return CollectivePart(call, self._asked[identity][0])

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

    def join(
        self,
        given: CollectivePart,
        rank: int,
        processor: Thread,
        then: Call,
        arrived: float,
        *,
        message_by_message: bool = False,
    ) -> Participation | None:
        """Let `rank` take part from the time `arrived` on, now or later.

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
        # All ranks agree on the order of a tag's collectives: the count tells when this one ends.
        self._joined[key] += 1
        if self._joined[key] == len(placed.ranks):
            del self._open[key], self._joined[key]
        if collective is None:
            return None
        return collective.join(placed.place[rank], given, processor, then, arrived)

    def is_open(self, given: CollectivePart) -> bool:
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

    def _begin(self, given: CollectivePart) -> Collective:
        ahead, before = self.goes_ahead(given.placed)
        if ahead:
            return self.begin_ahead(given, before)
        return Collective(self._kernel, given, ahead=False, before=None)

    def begin_ahead(
        self, given: CollectivePart, before: Collective | None, *, joining: bool = False
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
        before = None
        for claim in dict.fromkeys(map(self._claims.get, placed.links)) if ahead else ():
            if claim is not None and claim.is_ahead:
                if not placed.may_follow(claim.placed):
                    return False, None
                before = claim
        return ahead, before


@dataclass(eq=False)
class Entry:
    """One collective of the queue: of each rank what it has begun, by place, shape [ranks] each."""

    given: CollectivePart
    tasks: dict[int, Queued] = field(default_factory=dict)
    over: float = inf  # when the last rank is through, once it has been evaluated
    started: Floats = field(init=False)  # when each rank's thread turns to it
    joined: Floats = field(init=False)  # when it is ready to send
    ends: Ends = field(init=False)
    finished: Floats = field(init=False)  # when it has told of it


class GroupQueue:
    """The collectives in the background of the ranks of a group, in the order of all of them.

    A rank that computes ahead of the others begins many before the first of them is through. Where
    nothing disturbs them, their times follow from those of the one before, for all ranks over
    arrays, as soon as the last rank has begun it. Whatever may disturb them takes that back: each
    rank then is where it would be by itself, in the queue of its own (background.py).
    """

    def __init__(self, rendezvous: Rendezvous, kernel: Kernel, placed: PlacedPlan) -> None:
        self._rendezvous, self._kernel = rendezvous, kernel
        self._ranks, self._nodes = placed.ranks, placed.net.nodes
        self._reset()

    def _reset(self) -> None:
        self._entries: deque[Entry] = deque()
        self._first = 0  # the number of the first of them
        self._evaluated = 0  # that of the first that has not been
        self._before: Collective | None = None  # on the links before the first of all
        self._queues: dict[int, BackgroundQueue] = {}  # by place
        self._on_node: dict[str, list[BackgroundQueue]] = defaultdict(list)
        self._links: dict[Resource, None] = {}
        self._rates: tuple[float, ...] = ()

    @property
    def is_ahead(self) -> bool:
        """True if anything in it has been begun and is not over."""
        return bool(self._entries) and self._kernel.now() < self._entries[-1].over

    def uses(self, links: Iterable[Resource]) -> bool:
        """Return whether it is ahead on one of `links`."""
        return self.is_ahead and any(link in self._links for link in links)

    def disturbed_by(self, rank: int) -> bool:
        """Return whether a flow of `rank` may keep one of its threads from a core of the node."""
        queues = self._on_node.get(self._nodes[rank], ())
        return not all(queue.processor.undisturbed() for queue in queues)

    def add(self, queue: BackgroundQueue, task: Queued) -> bool:
        """Take in what a rank begins; False if the ranks' own queues have to execute it."""
        admitted = queue.group is self or self._admit(queue, task.given.placed)
        entry = self._entry(queue, task.given) if admitted else None
        if entry is None:
            self.rewind()
            return False
        entry.tasks[queue.place] = task
        # As of now: with a queue of its own the thread would be busy, or would have to be woken.
        task.follows = bool(queue.tasks) and queue.tasks[-1].through > self._kernel.now()
        queue.tasks.append(task)
        queue.position += 1
        if len(entry.tasks) == len(self._ranks):
            self._evaluate()
        return True

    def _admit(self, queue: BackgroundQueue, placed: PlacedPlan) -> bool:
        """Take `queue` in; False if it has something else to do, or its costs are not known."""
        if queue.group is not None:
            queue.group.rewind()
        place = placed.place[queue.rank]
        if queue.tasks or place in self._queues or self._first or not queue.is_steady:
            return False
        queue.group, queue.place, queue.position = self, place, 0
        self._queues[place] = queue
        self._on_node[self._nodes[queue.rank]].append(queue)
        return True

    def _entry(self, queue: BackgroundQueue, given: CollectivePart) -> Entry | None:
        """Return the entry of `given`; None if its times cannot be evaluated ahead."""
        if queue.position - self._first == len(self._entries) and not self._append(given):
            return None
        entry, before = self._entries[queue.position - self._first], self._before
        if before is not None and before.is_ahead and not before.is_through(queue.place):
            return None  # another flow of the rank is still in that one, and sends, too
        alike = entry.given.placed is given.placed and entry.given.call.tag == given.call.tag
        return entry if alike else None

    def _append(self, given: CollectivePart) -> bool:
        placed = given.placed
        if self.is_ahead:
            before = self._entries[-1].given.placed
            ahead = placed.may_follow(before)
        else:
            self._first += len(self._entries)
            self._entries.clear()
            self._links.clear()
            # All before are over: the links belong to whoever comes, and have to be claimed anew.
            ahead, self._before = self._rendezvous.goes_ahead(placed)
            before = placed if self._before is None else self._before.placed
        if ahead and not placed.begins_elsewhere(before) and not self._rendezvous.is_open(given):
            self._links.update(dict.fromkeys(placed.links))
            self._entries.append(Entry(given))
            return True
        return False

    def _evaluate(self) -> None:
        """Evaluate all that every rank has begun."""
        while self._evaluated - self._first < len(self._entries):
            number = self._evaluated - self._first
            entry = self._entries[number]
            if len(entry.tasks) < len(self._ranks):
                return
            if not self._evaluate_entry(entry, self._entries[number - 1] if number else None):
                self.rewind()
                return
            self._evaluated += 1
            while len(self._entries) > 2 and self._entries[1].over <= self._kernel.now():
                self._entries.popleft()  # it is over, and so is the one behind it
                self._first += 1

    def _evaluate_entry(self, entry: Entry, before: Entry | None) -> bool:
        placed, places = entry.given.placed, range(len(self._ranks))
        if not self._rates:
            self._rates = tuple(self._queues[place].processor.rate for place in places)
        rates = np.array(self._rates)
        tasks = [entry.tasks[place] for place in places]
        started = np.array([task.begun for task in tasks])
        usage = None if self._before is None else self._before.usage
        if before is not None:
            follows = np.array([task.follows for task in tasks])
            # The thread turns to it when it has been begun and the one before is done.
            started = np.where(follows, np.maximum(started, before.finished), started)
            usage = before.ends.usage
        joined = started + placed.beginning / rates
        ends = placed.ends(joined, self._rates, usage)
        if ends is None:
            return False
        entry.started, entry.joined, entry.ends = started, joined, ends
        signals = np.array([self._queues[place].signal_seconds for place in places])
        entry.finished, entry.over = ends.clock + signals / rates, float(ends.clock.max())
        background = joined - started + ends.communicating
        waiting: dict[float, list[Queued]] = {}
        columns = (each.tolist() for each in (entry.finished, ends.clock, background))
        for task, finished, through, seconds in zip(tasks, *columns, strict=True):
            task.finished_at, task.through, task.seconds = finished, through, seconds
            if task.waiting:
                waiting.setdefault(through, []).append(task)
        for time, group in waiting.items():
            self._kernel.call_at(max(time, self._kernel.now()), self._wake, group)
        return True

    def _wake(self, tasks: list[Queued]) -> None:
        for task in tasks:
            task.resume()  # who waits looks again: it may have been taken back

    def waits(self, queue: BackgroundQueue) -> Wait:
        """Return whom the rank of `queue` waits for, and for what."""
        for entry in self._entries:
            missing = [r for place, r in enumerate(self._ranks) if place not in entry.tasks]
            if missing:
                return tuple(missing), f"to add up, tag {entry.given.call.tag}"
        return (queue.rank,), "a collective in the background"

    def rewind(self) -> None:
        """Each rank has a queue of its own from now on, and is where it would be with that.

        At most two collectives are under way: who is through with one may have joined the next.
        """
        entries = deque(self._entries if self.is_ahead else ())
        queues, before = self._queues, self._before
        # First, so that what follows finds no queue to take back once more.
        self._reset()
        now = self._kernel.now()
        for queue in queues.values():
            queue.leave_group()
        while len(entries) > 1 and entries[1].over <= now:
            entries.popleft()
        # Now rebuild what there would be without this queue, from the times that were evaluated. At
        # most two collectives are under way: who is through with one may have joined the next.
        through, free = np.full(len(self._ranks), -inf), np.zeros(len(self._ranks))
        while entries and entries[0].over < inf and through.max() <= now:
            entry = entries.popleft()
            before = self._rendezvous.begin_ahead(entry.given, before)
            through, free = entry.ends.clock, entry.finished
            for place, joined in enumerate(entry.joined.tolist()):
                queue = queues[place]
                member = before.rejoin(place, queue.processor, queue.through, joined)
                if through[place] > now:
                    queue.go_on(member, float(entry.started[place]))
                else:
                    member.leave()
            before.announce(entry.ends)
        places = [place for place in entries[0].tasks if through[place] <= now] if entries else []
        if places:
            self._rendezvous.begin_ahead(entries[0].given, before, joining=True)
        # In the order in which they would have come.
        for place in sorted(places, key=lambda place: through[place]):
            queues[place].join_first(float(free[place]))
