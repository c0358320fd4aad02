"""Push-sum: averages over one-way links, by a weight that is pushed along with the values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from orchestra.collectives import all_reduce
from orchestra.topologies import Topology, sources_of
from orchestra.transports.protocol import Handle
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker

Exchanges = Literal["every_tau_steps", "one_at_a_time", "every_step"]

Shares = Callable[[tuple[int, ...], int, int], Mapping[int, float]]
"""shares(targets, rank, exchange): what the rank sends to each target and keeps; sum 1."""


class PushSum:
    """This rank's mass: x and behind it w, in one flat vector, [layout.size + 1].

    An exchange sends a share of the mass along every link and keeps the rest, so that the sums of
    x and of w over all ranks, messages included, never change. z = x / w tends to the mean.
    Messages of a step may be added up to `overlap` steps later; `exchanges` tells in which steps
    an exchange begins. The graph of an exchange is that of its number.
    """

    def __init__(
        self,
        worker: Worker,
        topology: Topology,
        shares: Shares,
        overlap: int,
        exchanges: Exchanges = "every_tau_steps",
    ) -> None:
        self.mass = torch.cat([worker.parameters, worker.parameters.new_ones(1)])
        self.step = 0
        self.exchanges = 0
        self._worker = worker
        self._topology = topology
        self._shares = shares
        self._overlap = overlap  # steps that messages may be late
        self._period = max(overlap, 1) if exchanges == "every_tau_steps" else 1
        self._one_at_a_time = exchanges == "one_at_a_time" and overlap > 0
        self._leaving: list[tuple[int, Handle]] = []  # since which step, and what
        self._arriving: list[tuple[int, Handle]] = []
        self._closed: dict[int, int] = {}  # ranks that drain, and the exchanges that they began

    @property
    def x(self) -> Tensor:
        """The numerator."""
        return self.mass[:-1]

    @property
    def w(self) -> float:
        """The weight; 1 at the beginning. NaN where tensors have shapes only."""
        return math.nan if self.mass.is_meta else float(self.mass[-1])

    def z(self) -> Tensor:
        """The de-biased values."""
        return self.x / self.mass[-1]

    def mix(self) -> None:
        """Send, if an exchange begins, and add what is here; wait for what is due."""
        due = self.step - self._overlap
        if self._one_at_a_time:
            self._finish(due)
            if not self._arriving:
                self._send()
        else:
            if self.step % self._period == 0:
                self._send()
            self._finish(due)
        self.step += 1

    def _send(self) -> tuple[int, ...]:
        """Begin the next exchange; the workers that are sent to."""
        worker, transport = self._worker, self._worker.transport
        ranks, own = worker.workers.ranks, worker.workers.index(worker.rank)
        graph = self._topology.graph(len(ranks), self.exchanges)
        shares = self._shares(graph[own], own, self.exchanges)
        self._expect([ranks[peer] for peer in sources_of(graph)[own]])
        for peer in graph[own]:
            part = self._charged(lambda share=shares[peer]: self.mass * share)  # type: ignore[misc]
            self._leaving.append((self.step, transport.send(part, ranks[peer], Tag.MIX)))
        self._charged(lambda: self.mass.mul_(shares[own]))
        self.exchanges += 1
        return graph[own]

    def _expect(self, sources: Sequence[int]) -> None:
        """The ranks `sources` send in this exchange, too."""
        for source in sources:
            if source not in self._closed:
                self._arriving.append((self.step, self._worker.transport.receive(source, Tag.MIX)))

    def drain(self) -> None:
        """Collective, after a step of all: take in all that is on its way."""
        if self._one_at_a_time:
            self._drain_one_at_a_time()
        else:
            self._finish(self.step)

    def _drain_one_at_a_time(self) -> None:
        """Tell the others how many exchanges this rank began, as the last of its messages.

        A rank that is in an earlier step, and has begun more exchanges, would wait for ever for
        its part of them: the number of exchanges in a number of steps is each rank's own.
        """
        begun = torch.tensor([self.exchanges])
        others = [rank for rank in self._worker.workers.ranks if rank != self._worker.rank]
        for peer in others:
            self._leaving.append((self.step, self._worker.transport.send(begun, peer, Tag.MIX)))
        self._finish(self.step)
        for peer in others:
            while peer not in self._closed:
                self._expect([peer])
                self._finish(self.step)
        self.exchanges = max(self.exchanges, *self._closed.values(), 0)
        self._closed.clear()

    def _finish(self, due: int) -> None:
        """Add what has arrived, and wait for the messages of the steps up to `due`."""
        late = []
        for step, handle in self._arriving:
            if step <= due or handle.done():
                self._take(handle)
            else:
                late.append((step, handle))
        self._arriving = late
        for step, handle in self._leaving:
            if step <= due:
                handle.wait()
        self._leaving = [(step, handle) for step, handle in self._leaving if step > due]

    def _take(self, handle: Handle) -> None:
        arrived = handle.wait()
        if arrived.dtype == torch.int64:
            self._closed[handle.source] = int(arrived)
        else:
            there = arrived.to(self.mass.device)
            self._charged(lambda: self.mass.add_(there))

    def agree(self) -> None:
        """With nothing on its way: everyone gets the exact mean, sum of x / sum of w."""
        total = self.mass.double()
        worker = self._worker
        if len(worker.workers) > 1:
            all_reduce(worker.transport, total, "ring", worker.workers, Tag.AGREE)
        self.mass.copy_(total / total[-1])

    def _charged(self, function: Callable[[], Tensor]) -> Tensor:
        return self._worker.compute.run(Work("mix", self.mass.numel()), function)

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint keeps; taken when nothing is on its way."""
        assert not self._arriving
        return {"mass": self.mass, "step": self.step, "exchanges": self.exchanges}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        self.mass.copy_(saved["mass"])
        self.step = saved["step"]
        self.exchanges = saved["exchanges"]


class SelfPacedPushSum(PushSum):
    """Push-sum among workers that take as many steps as they can.

    A worker adds whatever has arrived, and waits for nobody. One that has sent keeps the rest of
    its mass until it has heard of somebody: its w would become arbitrarily small otherwise, and its
    steps in z arbitrarily long.
    """

    def __init__(self, worker: Worker, topology: Topology, shares: Shares, overlap: int) -> None:
        super().__init__(worker, topology, shares, overlap)
        self._sent = torch.zeros(len(worker.workers), dtype=torch.float64)  # since the last drain
        self._received = 0
        self._heard = True  # of somebody, since it last sent
        self._arrival: Handle | None = None  # of whatever comes next

    def mix(self) -> None:
        """Add what is here; send."""
        while self._next_arrival().done():
            self._add_next()
        if self._heard:
            for peer in self._send():
                self._sent[peer] += 1
            self._heard = False
        self._finish(self.step - self._overlap)
        self.step += 1

    def drain(self) -> None:
        """Collective: take in all that is on its way. Nobody may send before all have done so."""
        worker, sent = self._worker, self._sent.clone()
        if len(worker.workers) > 1:
            all_reduce(worker.transport, sent, "ring", worker.workers, Tag.COUNT)
        while self._received < int(sent[worker.workers.index(worker.rank)]):
            self._add_next()
        self._sent.zero_()
        self._received = 0
        self._finish(self.step)

    def agree(self) -> None:
        """Nothing is expected any more: what comes next is for another phase."""
        if self._arrival is not None:
            transport = self._worker.transport
            transport.send(torch.zeros_like(self.mass), transport.rank, Tag.MIX).wait()
            self._arrival.wait()
            self._arrival = None
        super().agree()

    def _expect(self, sources: Sequence[int]) -> None:
        """Nothing of anybody in particular."""

    def _next_arrival(self) -> Handle:
        if self._arrival is None:
            into = torch.empty_like(self.mass)
            self._arrival = self._worker.transport.receive(None, Tag.MIX, into)
        return self._arrival

    def _add_next(self) -> None:
        arrived = self._next_arrival().wait()
        self._arrival = None
        self._received += 1
        self._heard = True
        self._charged(lambda: self.mass.add_(arrived))
