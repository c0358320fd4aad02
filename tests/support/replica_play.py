"""Workers and replicated servers on a network where chance decides, with books of their own."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from tests.support.interleaved import Network
from torch import Tensor

from orchestra.coordinator.rest import Reason, Rest
from orchestra.exchange.replicas import ReplicatedChannel
from orchestra.optimizers.state import capture
from orchestra.parameter_server.held_slice import HeldSlice
from orchestra.parameter_server.how import AdaptiveDelayCompensation, OptimizerStep
from orchestra.parameter_server.messages import Push
from orchestra.parameter_server.placement import Slice, place
from orchestra.parameter_server.replicas import Replica, ReplicatedServer
from orchestra.parameter_server.state import ServerState
from orchestra.parameter_server.when import Synchronous, When


@dataclass
class Play:
    """Workers that push, pause, agree and leave, and servers, one of which may die.

    Worker w pushes a gradient of 1 at element w of each slice, at a rate that makes every update
    1 as well: the values count the pushes of each worker.
    """

    consistency: When
    workers: int
    servers: int
    beside: bool = False
    compensated: bool = False
    adam: bool = False
    steps: int = 4
    pauses: int = 2
    reads: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    agreed: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    answered: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    histories: dict[tuple[int, bool], list[Any]] = field(default_factory=lambda: defaultdict(list))
    notices: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.workers if self.beside else self.workers + self.servers

    @property
    def server_ranks(self) -> tuple[int, ...]:
        first = 0 if self.beside else self.workers
        return tuple(range(first, first + self.servers))

    def slices(self) -> list[Slice]:
        spans = [(k * self.workers, self.workers) for k in range(self.servers)]
        size = self.servers * self.workers
        parts = place(spans, size, self.servers, divisible=False)
        ranks = self.server_ranks
        return [replace(part, rank=rank) for rank, part in zip(ranks, parts, strict=True)]

    def run(self, chance: random.Random, deaths: Sequence[tuple[int, int]] = ()) -> list[Any]:
        programs = [lambda port: self.program(port)] * self.ranks
        return Network(self.ranks, chance).run(programs, deaths)

    def program(self, port: Any) -> Any:
        server = self.make_server(port) if port.rank in self.server_ranks else None
        if port.rank >= self.workers:
            assert server is not None
            kept = []
            while server.serve(port) is not None:
                kept.append(plain(capture(server)))
            return kept
        flow = port.spawn(server.serve_to_the_end) if server is not None else None
        values = self.work(port)
        if flow is not None:
            flow.wait()
        return values

    def work(self, port: Any) -> Tensor:
        rank, slices = port.rank, self.slices()
        values = torch.zeros(self.servers * self.workers)
        gradient = torch.zeros_like(values)
        gradient[rank :: self.workers] = 1.0
        worker: Any = SimpleNamespace(rank=rank, transport=port, parameters=values)
        channel = ReplicatedChannel(worker, slices)
        used, rate = (True,) * self.servers, 1.0
        if isinstance(self.consistency, Synchronous):
            rate = float(self.workers)
        for step in range(self.steps):
            push = Push(rank, channel.clock + 1, 1, 1, 0.0, False, (rate,), used)
            channel.exchange(push, gradient, values)
            self.answered[rank] = channel.clock
            self.reads[rank].append(values.clone())
            if step < self.pauses:
                channel.pause(Rest(Reason.CHECKPOINT))
                channel.agree()
                self.reads[rank].append(values.clone())
                self.agreed[step].append(values.clone())
        channel.leave()
        return values

    def make_server(self, port: Any) -> ReplicatedServer:
        slices, index = self.slices(), self.server_ranks.index(port.rank)
        own, mirror = (self.make_slice(slices[place]) for place in (index, index - 1))
        server = ReplicatedServer(
            own, mirror, self.server_ranks, index, lost=(), alone=self.notices.append
        )
        for replica in server.replicas:
            self.write_down(server, replica)
        return server

    def make_slice(self, part: Slice) -> HeldSlice:
        values = torch.zeros(part.end - part.first)
        workers = set(range(self.workers))
        optimizer: torch.optim.Optimizer = torch.optim.SGD([values])
        if self.adam or self.compensated:
            optimizer = torch.optim.Adam([values])
        corrections = [AdaptiveDelayCompensation(2.0, 0.9)] if self.compensated else []
        return HeldSlice(
            ServerState(self.consistency, workers),
            OptimizerStep(values, {"x": (values, 0)}, optimizer),
            lambda kind, amount, function: function(),
            corrections=corrections,
        )

    def write_down(self, server: ReplicatedServer, replica: Replica) -> None:
        """What a replica holds after each request that it took, until it stands in for another."""
        take, is_own = replica.take, replica.held is server.own

        def noting(transport: Any, addressed: Any, gradient: Tensor | None) -> None:
            take(transport, addressed, gradient)
            if is_own or server._before not in server._lost:
                state = capture(replica.held)
                state |= {"request": repr(addressed), "points": replica.log.points}
                self.histories[replica.place, is_own].append(plain(state))

        replica.take = noting  # type: ignore[method-assign]

    def check_histories(self) -> None:
        """A replica holds what the other one held after as many requests, bit for bit."""
        for number in range(self.servers):
            own, mirror = self.histories[number, True], self.histories[number, False]
            for one, other in zip(own, mirror, strict=False):
                assert one == other, f"slice {number} after {one['request']}"

    def check_reads(self) -> None:
        """Who was answered finds its own pushes there, once; nothing that was read goes away."""
        for worker, reads in self.reads.items():
            for before, after in pairwise(reads):
                assert bool((after <= before).all()), "values that were read are gone"
            counted = [read[worker :: self.workers].tolist() for read in reads]
            clocks = [[-float(clock)] * self.servers for clock in self.clocks()]
            assert counted == clocks[: len(counted)]
        for first, *others in self.agreed.values():
            assert all(torch.equal(first, other) for other in others)

    def check_ends(self, results: Sequence[Any], dead: set[int]) -> None:
        """All that live have the same, with every push of theirs, and what others were told of."""
        ends = [results[worker] for worker in range(self.workers) if worker not in dead]
        assert all(torch.equal(end, ends[0]) for end in ends)
        for worker in range(self.workers):
            counts = {-float(value) for value in ends[0][worker :: self.workers]}
            if worker in dead:  # a push may have come through that nobody could be told of
                assert counts <= {self.answered[worker], self.answered[worker] + 1}
            else:
                assert counts == {self.steps}

    def clocks(self) -> list[int]:
        """The step behind a worker at each of its reads."""
        steps = range(1, self.steps + 1)
        return [step for step in steps for _ in range(2 if step <= self.pauses else 1)]


def plain(value: Any) -> Any:
    """Tensors as lists, so that equal means equal."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
