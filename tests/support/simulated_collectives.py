"""Collectives in virtual time: evaluated, followed and sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast
from unittest import mock

import torch
from tests.support.simulated import run_ranks

from orchestra.cluster.nodes import Line, Overhead
from orchestra.collectives import Group, execute
from orchestra.engines.simulation import placed
from orchestra.engines.simulation.collective import Collective, Followed
from orchestra.engines.simulation.participant import Participant
from orchestra.engines.simulation.placed import PlacedPlan
from orchestra.engines.simulation.rendezvous import Rendezvous
from orchestra.schedules import ALL_REDUCE, Schedule, hierarchical
from orchestra.transports.protocol import CollectiveCall, Pending, Transport
from orchestra.worker.runtime import Runtime, Work

COSTLY = Overhead(
    send=Line(20e-6, 2e-10),
    receive=Line(15e-6, 1e-10),
    add=2e-10,
    buffer=700,
    wire=1.06,
    cold=3e-6,
    collective=7e-6,
    handling=5e-6,
)
TAG, FOREIGN = 70, 71


def schedule_of(name: str, ranks: int) -> Schedule:
    """Nodes have two ranks, the last one perhaps one."""
    if name in ALL_REDUCE:
        return ALL_REDUCE[name](ranks)
    return hierarchical([2] * (ranks // 2) + [1] * (ranks % 2))


class MessageByMessage:
    """A transport on which flows send the messages of every collective."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def collective(self, call: CollectiveCall) -> Pending[int]:
        return self.inner.collective(call._replace(message_by_message=True))


@dataclass(frozen=True)
class Trial:
    """All-reduces after one another, each begun by the ranks after delays of their own, in seconds.

    `noise` lets the last rank send so many messages to the first one from a flow of its own
    meanwhile, after it has computed for `noise_after` seconds;
    `spawn` lets rank 0 begin flows that compute, before the first all-reduce is over.
    """

    name: str
    ranks: int
    length: int
    delays: Sequence[Sequence[float]]
    on: str = "lan_1gbit(nodes=32)"
    overhead: Overhead = COSTLY
    noise: int = 0
    noise_after: float = 1e-6
    noise_length: int = 2000
    spawn: bool = False
    edges: tuple[int, ...] | None = None

    def run(self, way: Literal["as decided", "followed", "sent"] = "as decided") -> list[Any]:
        """Of each rank: what each all-reduce gave and when, and what was counted."""
        with followed() if way == "followed" else nullcontext():
            outcome = run_ranks(
                self.ranks,
                lambda runtime: self._program(runtime, way != "sent"),
                self.on,
                self.overhead,
            )
        assert outcome.failure is None, outcome.failure
        return list(outcome.results)

    def _program(self, runtime: Runtime, without_flows: bool) -> Any:
        inner, rank = runtime.transport, runtime.rank
        transport = inner if without_flows else cast(Transport, MessageByMessage(inner))
        schedule, group = schedule_of(self.name, self.ranks), Group(tuple(range(self.ranks)))
        tasks = []
        if self.noise and rank == self.ranks - 1:
            tasks.append(inner.spawn(lambda flow: self._send_noise(flow, runtime)))
        if self.spawn and rank == 0:
            tasks.append(inner.spawn(lambda flow: self._begin_later(flow, runtime)))
        given = []
        for number, delays in enumerate(self.delays):
            generator = torch.Generator().manual_seed(1000 * number + rank)
            vector = torch.randn(self.length, generator=generator)
            if delays[rank]:
                work = Work("gradient", cast(int, delays[rank]))
                runtime.compute.run(work, lambda: None)
            buffer = execute(transport, vector, schedule, group, TAG, self.edges)
            given.append((inner.now(), vector.numpy().tobytes(), buffer))
        if self.noise and rank == 0:
            for _ in range(self.noise):
                inner.receive(self.ranks - 1, FOREIGN).wait()
        for task in tasks:
            task.wait()
        return given, asdict(inner.traffic), inner.bytes_sent, inner.now()

    def _send_noise(self, flow: Transport, runtime: Runtime) -> None:
        runtime.compute.run(Work("gradient", cast(int, self.noise_after)), lambda: None)
        for _ in range(self.noise):
            flow.send(torch.zeros(self.noise_length), 0, FOREIGN).wait()

    def _begin_later(self, flow: Transport, runtime: Runtime) -> None:
        """Two flows that begin while the main one is in an all-reduce, and compute."""
        runtime.compute.run(Work("gradient", cast(int, 3e-5)), lambda: None)
        tasks = [
            flow.spawn(lambda _: runtime.compute.run(Work("update", cast(int, 1e-3)), int))
            for _ in range(2)
        ]
        for task in tasks:
            task.wait()


@contextmanager
def followed() -> Iterator[None]:
    """Nothing is evaluated."""

    def begin(self: Rendezvous, placed: PlacedPlan, call: CollectiveCall) -> Collective:
        usual = _begin(self, placed, call)
        return usual if usual.is_sent else Followed(self._kernel, placed, call.tag)

    with mock.patch.object(Rendezvous, "_begin", begin):
        yield


_begin = Rendezvous._begin


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often a rank went message by message, or a collective was evaluated."""
    counts: Counter[str] = Counter()

    def counting(of: object, name: str, label: str) -> Any:
        original = getattr(of, name)

        def counted_call(*arguments: Any) -> Any:
            counts[label] += 1
            return original(*arguments)

        return mock.patch.object(of, name, counted_call)

    with (
        counting(Participant, "__init__", "participants"),
        counting(placed, "evaluate", "evaluated"),
    ):
        yield counts


def staggered(ranks: int, rounds: int = 3) -> list[list[float]]:
    """No two ranks arrive together, and not in the same order each time."""
    return [
        [1e-6 + 3e-4 * ((7 * rank + 3 * number) % ranks) for rank in range(ranks)]
        for number in range(rounds)
    ]
