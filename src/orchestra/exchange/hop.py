"""Iterations that need not be the same everywhere: update queues and token queues."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestra.exchange.agreement import wait_for_workers
from orchestra.exchange.replicas import copy_of
from orchestra.topologies import Graph, doubly_stochastic, sources_of
from orchestra.transports.protocol import Handle
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker

CLOSED = torch.iinfo(torch.int64).max
"""In place of an iteration: no more before the next quiet point."""


class IterationQueues:
    """What this rank knows of the iterations of its neighbours, and the parameters they sent.

    A worker that enters iteration k sends its parameters to those that `graph` tells it to, its
    targets, and then k to all neighbours. From a target, k is what the paper counts as tokens:
    `max_gap` + Iter(target) - Iter(own) are left. From a source, it says that the parameters of k
    are here, and that those of iterations before k which did not come were skipped.

    Iterations are counted from the last quiet point, so that a checkpoint keeps nothing of them.

    Args:
        backup: how many sources a worker does not wait for.
        staleness: how many iterations parameters may be old; 0: those of an iteration are mixed
            in that iteration or never.
        skip: how many iterations a worker leaves out at most when one of its targets is more than
            `behind` iterations ahead.
    """

    def __init__(
        self,
        worker: Worker,
        graph: Graph,
        max_gap: int,
        backup: int = 0,
        staleness: int = 0,
        skip: int = 0,
        behind: int = 1,
    ) -> None:
        own, ranks = worker.workers.index(worker.rank), worker.workers.ranks
        weights = doubly_stochastic(graph)[own]
        self._worker = worker
        self._weights = {ranks[peer]: weight for peer, weight in sorted(weights.items())}
        self._targets = [ranks[peer] for peer in graph[own]]
        self._sources = [ranks[peer] for peer in sources_of(graph)[own]]
        self._neighbours = sorted({*self._targets, *self._sources})
        self._max_gap, self._backup, self._staleness = max_gap, backup, staleness
        self._skip, self._behind = skip, behind
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
        if self._skip and self.iteration:
            self._jump()
        while any(self._ahead_of(target) > self._max_gap for target in self._targets):
            self._take_next()
        self._entered = True
        self._leaving = [handle for handle in self._leaving if not handle.done()]
        if self._targets:  # a copy, since the parameters change before it has arrived everywhere
            copy = copy_of(self._worker, self._worker.parameters)
            send = self._worker.transport.send
            self._leaving += [send(copy, target, Tag.UPDATE) for target in self._targets]
        self._tell(self.iteration)

    def mix(self) -> None:
        """Once enough updates are here, the parameters become the average of all that are."""
        self.enter()
        while not self._enough(self.iteration):
            self._take_next()
        self._take_what_is_here()
        self._average(self.iteration)
        self._entered = False
        self._go_to(self.iteration + 1)

    def drain(self) -> None:
        """Collective: all have ended their iterations, and nothing is on its way."""
        self._tell(CLOSED)
        while self._open():
            self._take_next()
        for handle in self._leaving:
            handle.wait()
        self._leaving.clear()
        wait_for_workers(self._worker)  # none of them begins anew before all are here
        self._begin()

    # Tokens

    def _ahead_of(self, target: int) -> int:
        """Return by how much the iteration that is next is ahead of that of `target`."""
        return self.iteration - max(self._iterations[target], 0)

    def _jump(self) -> None:
        """Leave out iterations, if this worker is behind and the updates to do so are here."""
        theirs = [self._iterations[target] for target in self._targets]
        theirs = [iteration for iteration in theirs if iteration < CLOSED]
        furthest, slowest = max(theirs, default=-1), min(theirs, default=-1)
        to = min(self.iteration + self._skip, furthest, max(slowest, 0) + self._max_gap)
        if furthest - (self.iteration - 1) <= self._behind or to <= self.iteration:
            return
        if self._usable(to - 1) and self._enough(to - 1):
            self._average(to - 1)
            self._go_to(to)

    def _go_to(self, iteration: int) -> None:
        """Drop the updates that come too late for `iteration`."""
        self.iteration = iteration
        if not self._staleness:
            for source, updates in self._updates.items():
                self._updates[source] = {k: x for k, x in updates.items() if k >= iteration}

    # Updates

    def _usable(self, iteration: int) -> dict[int, int]:
        """Find the sources whose updates can be mixed in `iteration`, and the newest of each."""
        newest = {
            source: max(updates, default=-1) if self._staleness else iteration
            for source, updates in self._updates.items()
        }
        return {
            source: k
            for source, k in newest.items()
            if k in self._updates[source] and k >= iteration - self._staleness
        }

    def _enough(self, iteration: int) -> bool:
        """Tell whether all but `backup` sources sent what can be mixed, or no more can come."""
        usable, oldest = self._usable(iteration), max(iteration - self._staleness, 0)
        return len(usable) >= len(self._sources) - self._backup or not any(
            self._iterations[source] < oldest for source in self._sources if source not in usable
        )

    def _average(self, iteration: int) -> None:
        """x <- sum_u w_u u / sum_u w_u with w_u = W (Iter(u) - (iteration - staleness) + 1)."""
        oldest = iteration - self._staleness
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

        self._worker.compute.run(Work("mix", (len(taken) - 1) * x.numel()), mix)

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
        """Wait for what comes next, from any neighbour."""
        arrival = self._next_arrival()
        iteration = int(arrival.wait())
        self._arrival = None
        self._iterations[arrival.source] = iteration
        if iteration < CLOSED and arrival.source in self._updates:
            into = torch.empty_like(self._worker.parameters)
            update = self._worker.transport.receive(arrival.source, Tag.UPDATE, into).wait()
            kept = {} if self._staleness else self._updates[arrival.source]
            self._updates[arrival.source] = {**kept, iteration: update}  # or the newest alone
