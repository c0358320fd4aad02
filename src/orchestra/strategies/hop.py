"""Gossip with neighbours that may be some iterations ahead or behind (Hop)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

from orchestra import exchange
from orchestra.errors import InputError
from orchestra.settings import MAX_RANKS, MAX_STEPS, setting
from orchestra.strategies.base import Replicas, Roles, torch
from orchestra.strategies.member import ReplicaMember
from orchestra.strategies.traits import Footprint, Traits, WorkMode
from orchestra.topologies import Ring, Topology, connected, doubly_stochastic, sources_of
from orchestra.transports.tags import Tag

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.coordinator.rest import Rest
    from orchestra.transports.protocol import Handle
    from orchestra.worker.worker import Worker

CLOSED = 2**63 - 1
"""In place of an iteration: no more before the next quiet point."""


@dataclass(frozen=True, repr=False)
class Hop(Replicas):
    """Mix parameters with neighbours that may be some iterations ahead or behind.

    Hop (Luo et al., ASPLOS 2019). Worker i in its iteration k:

        send x_i and k;  g_i at x_i;  x_i <- sum_u w_u u / sum_u w_u - gamma g_i

    over its own parameters and the updates u of its neighbours. Without the settings below these
    are the updates of iteration k, w_u = W_ij, and Hop is D-PSGD, as `Gossip` is, except that
    parameters travel while gradients are taken.

    max_gap (max_ig)  a worker enters an iteration with a token of each worker that it sends to,
                      which hands one out in each iteration that it enters itself: nobody is more
                      than `max_gap` iterations ahead of such a neighbour
    backup            the updates of all neighbours but `backup` are enough, and what else is here
                      is mixed, too; updates of former iterations are dropped
    staleness (s)     from each neighbour the newest update is enough if it is not of an iteration
                      before k - s; w_u = W_ij (Iter(u) - (k - s) + 1)
    skip              a worker that finds one that it sends to more than `behind` iterations ahead
                      leaves up to `skip` iterations out, after the average of the last of them

    With `skip` the workers take batches from a queue: who skips has time for fewer, and the others
    take them. With `work: equal` it takes all of its own, the last ones after the others have left.
    Without `skip` all have equal parts, since tokens tie everyone to the pace of the slowest.

    Only the abstract of the paper was at hand when this was written. These details are our reading,
    and may differ from the authors':

    - Where updates are missing, their weights are divided among the others in proportion.
    - With `staleness` an update is mixed again until a newer one comes or it is too old, and may be
      of an iteration after k. Each neighbour but `backup` has to be heard of once before.
    - Neighbours learn which iterations were skipped, and wait for no update of them.
    - A jump goes as far as tokens are there, and not beyond the furthest neighbour. It is made only
      if the updates are there already; the worker's own parameters have their part in the average.

    The final parameters are the exact mean.
    """

    use = "for gossip among workers of which some are slow, by turns or always"
    variants = (
        ("Hop(backup=1)", "for workers that are slow by turns"),
        ("Hop(staleness=4, skip=4)", "for some workers that are always slower"),
    )

    topology: Topology = setting(Ring(), "who mixes with whom; the same in every step")
    _: KW_ONLY
    max_gap: int = setting(
        5, "max_ig: iterations a worker may be ahead of those it sends to", low=1, high=MAX_STEPS
    )
    backup: int = setting(
        0, "neighbours whose updates a worker does not wait for", low=0, high=MAX_RANKS
    )
    staleness: int = setting(0, "s: iterations that an update may be old", low=0, high=MAX_STEPS)
    skip: int = setting(
        0, "iterations that a worker leaves out at most when it is behind", low=0, high=MAX_STEPS
    )
    behind: int = setting(
        2, "with skip: behind when a neighbour is more iterations ahead", low=1, high=MAX_STEPS
    )

    def check(self) -> None:
        """Refuse a `skip` that never happens, as nobody gets that far behind."""
        reach = self.max_gap if self.backup else min(self.max_gap, self.staleness + 1)
        if self.skip and self.behind >= reach:
            raise InputError(
                f"Hop: skip={self.skip} has no effect: neighbours get at most {reach} ahead, and "
                f"behind is {self.behind}; lower behind, or raise staleness, backup or max_gap"
            )

    def traits(self, work: WorkMode = "shared") -> Traits:
        """Only with `skip` workers may take unlike numbers of iterations."""
        if self.skip:
            return self._free_traits(work)
        return replace(super().traits(work), depends_on_speed=self._takes_what_is_there)

    @property
    def _takes_what_is_there(self) -> bool:
        """True if values depend on speeds: the gap alone only changes when they are there."""
        return bool(self.backup or self.staleness)

    def roles(self, ranks: int) -> Roles:
        """All ranks are workers; the graph has to connect them, and to stay the same."""
        graph, *others = self.topology.graphs(ranks)
        if not connected([graph, *others]):
            raise InputError(f"{self!r}: the topology does not connect {ranks} ranks")
        if others:
            raise InputError(
                f"{self!r}: the topology changes from step to step, and neighbours that are not in "
                "the same iteration would disagree on it; take one that does not, or Gossip"
            )
        doubly_stochastic(graph)
        fewest = min(map(len, sources_of(graph)))
        if ranks > 1 and self.backup >= fewest:
            raise InputError(
                f"{self!r}: of {ranks} ranks one hears of {fewest} only; set backup below that, or "
                "take a topology with more links"
            )
        return super().roles(ranks)

    def _memory(self, rank: int, ranks: int) -> Footprint:
        """Add updates of the iterations that neighbours are ahead, and those on their way out."""
        graph = self.topology.graph(ranks, 0)
        sources = sources_of(graph)
        ahead = self.max_gap if self._takes_what_is_there or sources != graph else 1
        moving = len(sources[rank]) + min(len(graph[rank]), 1)
        return replace(super()._memory(rank, ranks), copies=float(moving * (1 + ahead)))

    def member(self, worker: Worker) -> HopMember:
        return HopMember(self, worker, worker.local_optimizer())


@dataclass(eq=False)
class HopMember(ReplicaMember[Hop]):
    """A worker that mixes its parameters with the updates of its neighbours that are here.

    `queues` hold these updates; they are empty at a quiet point.
    """

    queues: IterationQueues = field(init=False)

    def __post_init__(self) -> None:
        self.queues = IterationQueues(self.worker, self.strategy)

    def begin(self) -> None:
        """Send the parameters, which travel while the gradient at them is taken."""
        self.queues.enter()

    def update(self) -> None:
        """x_i <- sum_u w_u u / sum_u w_u - gamma g_i."""
        worker = self.worker
        worker.clip()
        self.queues.mix()
        worker.update_locally(self.optimizer)
        worker.snapshots.offer(worker.step.consumed, worker.parameters)

    def settle(self, rest: Rest) -> None:
        self.queues.drain()


class IterationQueues:
    """What this rank knows of the iterations of its neighbours, and the parameters they sent.

    A worker that enters iteration k sends its parameters to those that the graph tells it to, its
    targets, and then k to all neighbours. From a target, k is what the paper counts as tokens:
    `max_gap` + Iter(target) - Iter(own) are left. From a source, it says that the parameters of k
    are here, and that those of iterations before k which did not come were skipped.

    Iterations are counted from the last quiet point, so that a checkpoint keeps nothing of them.
    """

    def __init__(self, worker: Worker, hop: Hop) -> None:
        graph = hop.topology.graph(len(worker.workers), 0)
        own, ranks = worker.workers.index(worker.rank), worker.workers.ranks
        weights = doubly_stochastic(graph)[own]
        self._worker, self._hop = worker, hop
        self._weights = {ranks[peer]: weight for peer, weight in sorted(weights.items())}
        self._targets = [ranks[peer] for peer in graph[own]]
        self._sources = [ranks[peer] for peer in sources_of(graph)[own]]
        self._neighbours = sorted({*self._targets, *self._sources})
        self._leaving: list[Handle] = []
        self._arrival: Handle | None = None
        self._begin()

    def _begin(self) -> None:
        self.iteration = 0
        self._entered = False
        self._iterations = dict.fromkeys(self._neighbours, -1)  # entered, as far as is known
        self._updates: dict[int, dict[int, Tensor]] = {source: {} for source in self._sources}

    def enter(self) -> None:
        """Enter the iteration that is next, once there is a token of each target."""
        if self._entered:
            return
        self._take_what_is_here()
        if self._hop.skip and self.iteration:
            self._jump()
        # A token of each target: `max_gap` + Iter(target) - Iter(own) has to be 0 or more. All
        # enter iteration 0 without hearing of anybody.
        least = self.iteration - self._hop.max_gap
        while any(max(self._iterations[target], 0) < least for target in self._targets):
            self._take_next()
        self._entered = True
        # Not waited for before a quiet point: a suspended neighbour must not hold this worker up.
        # Tokens bound what can pile up.
        self._leaving = [handle for handle in self._leaving if not handle.done()]
        if self._targets:  # a copy, since the parameters change before it has arrived everywhere
            copy = exchange.copy_of(self._worker, self._worker.parameters)
            send = self._worker.transport.send
            self._leaving += [send(copy, target, Tag.UPDATE) for target in self._targets]
        self._tell(self.iteration)

    def mix(self) -> None:
        """Wait for enough updates, then replace the parameters by the average of all that came."""
        self.enter()
        while not self._enough(self.iteration):
            self._take_next()
        self._take_what_is_here()
        self._average(self.iteration)
        self._entered = False
        self._go_to(self.iteration + 1)

    def drain(self) -> None:
        """Collective: end the iterations, and wait until nothing is on its way."""
        self._tell(CLOSED)
        while self._open():
            self._take_next()
        for handle in self._leaving:
            handle.wait()
        self._leaving.clear()
        exchange.wait_for_workers(self._worker)  # none of them begins anew before all are here
        self._begin()

    def _jump(self) -> None:
        """Leave out iterations, if this worker is behind and the updates to do so are here."""
        known = (self._iterations[target] for target in self._targets)
        theirs = [iteration for iteration in known if iteration < CLOSED]
        furthest, slowest = max(theirs, default=-1), min(theirs, default=-1)
        # By the furthest target, as far as the tokens of the slowest allow. By the slowest alone
        # two slow neighbours would never jump.
        to = min(self.iteration + self._hop.skip, furthest, max(slowest, 0) + self._hop.max_gap)
        if furthest - (self.iteration - 1) <= self._hop.behind or to <= self.iteration:
            return
        # A jump never waits, since updates of skipped iterations may never come.
        if self._usable(to - 1) and self._enough(to - 1):
            self._average(to - 1)
            self._go_to(to)

    def _go_to(self, iteration: int) -> None:
        """Drop the updates that come too late for `iteration`."""
        self.iteration = iteration
        if not self._hop.staleness:
            for source, updates in self._updates.items():
                self._updates[source] = {k: x for k, x in updates.items() if k >= iteration}

    # Updates

    def _usable(self, iteration: int) -> dict[int, int]:
        """Find the sources whose updates can be mixed in `iteration`, and the newest of each."""
        usable, stale = {}, self._hop.staleness
        for source, updates in self._updates.items():
            newest = max(updates, default=-1) if stale else iteration
            if newest in updates and newest >= iteration - stale:
                usable[source] = newest
        return usable

    def _enough(self, iteration: int) -> bool:
        """Tell whether all but `backup` sources sent what can be mixed, or no more can come."""
        usable, oldest = self._usable(iteration), max(iteration - self._hop.staleness, 0)
        # A source that is beyond `oldest` without an update has skipped it, or has ended.
        return len(usable) >= len(self._sources) - self._hop.backup or not any(
            self._iterations[source] < oldest for source in self._sources if source not in usable
        )

    def _average(self, iteration: int) -> None:
        """x <- sum_u w_u u / sum_u w_u with w_u = W (Iter(u) - (iteration - staleness) + 1)."""
        oldest = iteration - self._hop.staleness
        taken = {self._worker.rank: iteration, **self._usable(iteration)}
        if len(taken) == 1:
            return
        weights = {rank: self._weights[rank] * (k - oldest + 1) for rank, k in taken.items()}
        total = sum(weights.values())
        x = self._worker.parameters

        def mix() -> None:
            x.mul_(weights.pop(self._worker.rank) / total)
            for source, weight in weights.items():
                x.add_(self._updates[source][taken[source]], alpha=weight / total)

        exchange.charge(self._worker, "mix", (len(taken) - 1) * x.numel(), mix)

    # Messages

    def _tell(self, iteration: int) -> None:
        """Send the number of `iteration` behind its update: who reads this has all of that."""
        word, transport = torch.tensor([iteration]), self._worker.transport
        self._leaving += [transport.send(word, peer, Tag.ITERATION) for peer in self._neighbours]

    def _open(self) -> bool:
        """Return whether anything can come before the next quiet point."""
        return any(iteration < CLOSED for iteration in self._iterations.values())

    def _take_what_is_here(self) -> None:
        while self._open() and self._next_arrival().done():
            self._take_next()

    def _next_arrival(self) -> Handle:
        if self._arrival is None:
            self._arrival = self._worker.transport.receive(None, Tag.ITERATION)
        return self._arrival

    def _take_next(self) -> None:
        arrival = self._next_arrival()
        iteration = int(arrival.wait())
        self._arrival = None
        self._iterations[arrival.source] = iteration
        if iteration < CLOSED and arrival.source in self._updates:
            into = torch.empty_like(self._worker.parameters)
            # It is here already, or about to be: its sender sent it before the number.
            update = self._worker.transport.receive(arrival.source, Tag.UPDATE, into).wait()
            kept = {} if self._hop.staleness else self._updates[arrival.source]
            self._updates[arrival.source] = {**kept, iteration: update}  # or the newest alone
