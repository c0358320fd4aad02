"""Push-sum: averages over one-way links, by a weight that is pushed along with the values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestra.collectives import all_reduce
from orchestra.topologies import Topology, sources_of
from orchestra.transports.protocol import Handle
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker

Shares = Callable[[tuple[int, ...], int, int], Mapping[int, float]]
"""shares(targets, rank, step): what the rank sends to each target and keeps; they sum to 1."""


@dataclass(frozen=True)
class Moving:
    """A message of mixing step `step` on its way, out or in."""

    step: int
    handle: Handle


class PushSum:
    """This rank's mass: x and behind it w, in one flat vector, [layout.size + 1].

    Each step sends a share of the mass along every link and keeps the rest, so that the sums of
    x and of w over all ranks, messages included, never change. z = x / w tends to the mean.
    Messages of a step may be added up to `overlap` steps later. Where workers are `self_paced`,
    those that have arrived are added, whatever step they are of, and a worker waits only until
    its own of `overlap` steps ago have left.
    """

    def __init__(
        self,
        worker: Worker,
        topology: Topology,
        shares: Shares,
        overlap: int,
        *,
        self_paced: bool = False,
    ) -> None:
        self.mass = torch.cat([worker.parameters, worker.parameters.new_ones(1)])
        self.step = 0
        self._worker = worker
        self._topology = topology
        self._shares = shares
        self._overlap = overlap
        self._leaving: list[Moving] = []
        self._arriving: list[Moving] = []
        self._self_paced = self_paced
        self._sent = torch.zeros(len(worker.workers))  # messages to each worker, since a drain
        self._received = 0
        self._next: Handle | None = None  # the receive from whoever is next; one is left at the end

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
        """Send, and add what is here; wait for what is due."""
        worker, transport = self._worker, self._worker.transport
        ranks, own = worker.workers.ranks, worker.workers.index(worker.rank)
        graph = self._topology.graph(len(ranks), self.step)
        shares = self._shares(graph[own], own, self.step)
        for peer in () if self._self_paced else sources_of(graph)[own]:
            handle = transport.receive(ranks[peer], Tag.MIX, torch.empty_like(self.mass))
            self._arriving.append(Moving(self.step, handle))
        for peer in graph[own]:
            part = self._charged(lambda share=shares[peer]: self.mass * share)  # type: ignore[misc]
            self._leaving.append(Moving(self.step, transport.send(part, ranks[peer], Tag.MIX)))
            self._sent[peer] += 1
        self._charged(lambda: self.mass.mul_(shares[own]))
        if self._self_paced:
            while self._waiting().done():
                self._take_next()
        self._finish(self.step - self._overlap)
        self.step += 1

    def drain(self) -> None:
        """Collective: take in all that is on its way; nobody may go on before all have done so."""
        if self._self_paced:
            worker, sent = self._worker, self._sent.clone()
            if len(worker.workers) > 1:
                all_reduce(worker.transport, sent, "ring", worker.workers, Tag.COUNT)
            while self._received < int(sent[worker.workers.index(worker.rank)]):
                self._take_next()
            self._sent.zero_()
            self._received = 0
        self._finish(self.step)

    def _waiting(self) -> Handle:
        if self._next is None:
            into = torch.empty_like(self.mass)
            self._next = self._worker.transport.receive(None, Tag.MIX, into)
        return self._next

    def _take_next(self) -> None:
        arrived = self._waiting().wait()
        self._next = None
        self._received += 1
        self._charged(lambda: self.mass.add_(arrived))

    def _finish(self, due: int) -> None:
        """Add what has arrived, and wait for the messages of the steps up to `due`."""
        late = []
        for message in self._arriving:
            if message.step <= due or message.handle.done():
                arrived = message.handle.wait()
                self._charged(lambda values=arrived: self.mass.add_(values))  # type: ignore[misc]
            else:
                late.append(message)
        self._arriving = late
        for message in self._leaving:
            if message.step <= due:
                message.handle.wait()
        self._leaving = [message for message in self._leaving if message.step > due]

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
        return {"mass": self.mass, "step": self.step}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        self.mass.copy_(saved["mass"])
        self.step = saved["step"]
