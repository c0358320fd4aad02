"""Servers whose messages arrive in a given order: no network, no threads, nothing by chance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.support.threads import FreeCompute, Notes
from tests.support.without_time import WithoutTime
from torch import Tensor, nn

from orchestra.optimizers.settings import Optimizer
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.parameter_server.messages import (
    Answer,
    Kind,
    Push,
    Request,
    decode_answer,
    encode_request,
)
from orchestra.parameter_server.server import Server
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Worker

RATE = 0.1
PAUSE_NUMBERS = 2  # a pause is told in two numbers, an answer to a push in more

Gradient = Callable[[int, Tensor, int], Tensor]
"""Of a worker, at the part of the parameters that begins at an element, on arrival."""


@dataclass
class Here:
    """A message that has arrived."""

    tensor: Tensor
    source: int

    def wait(self) -> Tensor:
        return self.tensor

    def done(self) -> bool:
        return True

    def withdraw(self) -> None:
        """It has been taken."""


@dataclass
class Pushed:
    """A gradient, of the values that its worker has when it pushes."""

    gradient: Callable[[], Tensor]
    source: int
    into: Tensor | None

    def wait(self) -> Tensor:
        gradient = self.gradient()
        return gradient if self.into is None else self.into.copy_(gradient)

    def done(self) -> bool:
        return True

    def withdraw(self) -> None:
        """Its worker pushes no more."""


class Arrivals(WithoutTime):
    """The transport of a server: `order` names who pushes next; at the end all send `last`.

    `given` holds for each worker the values that it was last sent, `clocks` how far it is, and
    `answers` all that pushes were told.
    """

    def __init__(self, rank: int, workers: int) -> None:
        self.rank, self.size = rank, rank + 1
        self.clocks = dict.fromkeys(range(workers), 0)
        self.given: dict[int, Tensor] = {}
        self.answers: list[Answer] = []
        self._coming: deque[tuple[int, Kind]] = deque()
        self._gradient: Callable[[int, Tensor], Tensor]
        self._pieces = 0

    def expect(
        self,
        order: Sequence[int],
        last: Kind,
        gradient: Callable[[int, Tensor], Tensor],
        pieces: int,
    ) -> None:
        """What is to arrive from now on."""
        self._coming.extend((worker, Kind.PUSH) for worker in order)
        self._coming.extend((worker, last) for worker in self.clocks)
        self._gradient, self._pieces = gradient, pieces

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Here | Pushed:
        if source is not None:
            assert tag == Tag.GRADIENT
            return Pushed(lambda: self._gradient(source, self.given[source]), source, into)
        worker, kind = self._coming.popleft()
        if kind is not Kind.PUSH:
            return Here(encode_request(Request(worker, kind)), worker)
        push = Push(
            worker, self.clocks[worker] + 1, 1, len(self.clocks), 0.0, False,
            (RATE,), (True,) * self._pieces,
        )  # fmt: skip
        return Here(encode_request(Request(worker, Kind.PUSH, push)), worker)

    def send(self, tensor: Tensor, to: int, tag: int, **options: Any) -> Here:
        if tag == Tag.VALUES:
            self.given[to] = tensor.clone()
        elif tensor.numel() > PAUSE_NUMBERS:
            self.answers.append(decode_answer(to, tensor))
            self.clocks[to] = self.answers[-1].clock
        return Here(tensor, to)

    def lost(self) -> frozenset[int]:
        """Everybody else: nobody takes part in anything collective."""
        return frozenset(range(self.size)) - {self.rank}

    def spawn(self, function: Callable[[Transport], Any]) -> Any:
        raise NotImplementedError


class Served:
    """The dedicated servers of `strategy` for `workers` workers, each with its own arrivals."""

    def __init__(
        self,
        strategy: ParameterServer,
        workers: int,
        model: Callable[[], nn.Module],
        gradient: Gradient,
        optimizer: str = f"SGD(lr={RATE})",
    ) -> None:
        self.strategy = strategy
        self.gradient = gradient
        self.workers: list[Worker] = []
        self.members: list[Any] = []
        for rank in range(workers, workers + strategy.servers):
            module = model()
            names = [name for name, _ in module.named_parameters()]
            spec = OptimizerSpec.from_settings(Optimizer.parse(optimizer, where="test"), names)
            transport: Any = Arrivals(rank, workers)
            ranks = workers + strategy.servers
            runtime = Runtime(rank, ranks, transport, FreeCompute(), Notes(), lambda _: None)
            worker = Worker(runtime, module, spec)
            worker.survives_losses = True
            self.workers.append(worker)
            self.members.append(strategy.join(worker))
            server = self.servers[-1]  # to all but which the workers are lost
            server.own.state.live.update(range(workers))
            server.own.all_have_read()
            transport.given = {m: self.servers[-1].own.values.clone() for m in range(workers)}

    @property
    def servers(self) -> list[Server]:
        servers = [member.connection.server for member in self.members]
        return [server for server in servers if isinstance(server, Server)]

    @property
    def transports(self) -> list[Arrivals]:
        return [_arrivals(worker.transport) for worker in self.workers]

    def serve(self, order: Sequence[int], last: Kind = Kind.LEAVE) -> Tensor:
        """Let the pushes of `order` arrive; the parameters then."""
        for member in self.members:
            worker = member.worker
            part = next(part for part in member.connection.slices if part.rank == worker.rank)
            first = part.first
            _arrivals(worker.transport).expect(
                order,
                last,
                lambda source, values, first=first: self.gradient(source, values, first),  # type: ignore[misc]
                len(part.pieces),
            )
            member.serve()
        return torch.cat([server.own.values for server in self.servers])

    def resume(self, saved: Sequence[Mapping[str, Any]], others: Served) -> None:
        """Go on from what each of the servers of `others` saved; its workers are the same."""
        for server, state in zip(self.servers, saved, strict=True):
            server.load_state_dict(state)
        for mine, theirs in zip(self.transports, others.transports, strict=True):
            mine.given = {m: values.clone() for m, values in theirs.given.items()}
            mine.clocks = dict(theirs.clocks)


def _arrivals(transport: Transport) -> Arrivals:
    assert isinstance(transport, Arrivals)
    return transport
