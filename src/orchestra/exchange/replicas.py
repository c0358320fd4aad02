"""Servers with replicas, as a rank connects to them: a worker's end, and a server's two slices."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from orchestra.collectives import Group, receive_object, send_object
from orchestra.coordinator.rest import Reason, Rest
from orchestra.errors import PeerLost
from orchestra.exchange.agreement import agree_on_parameters, broadcast_buffers
from orchestra.exchange.channel import ServerChannel
from orchestra.exchange.connection import Connection
from orchestra.exchange.servers import make_slice
from orchestra.optimizers.state import capture, restore
from orchestra.parameter_server.held_slice import HeldSlice
from orchestra.parameter_server.messages import Kind, Request
from orchestra.parameter_server.replicas import (
    Addressed,
    ReplicaNotice,
    ReplicatedServer,
    encode_addressed,
    encode_notice,
)
from orchestra.parameter_server.server import Server
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker


class ReplicatedChannel(ServerChannel):
    """A request that a lost server has not answered goes to the one after it."""

    _points = 0  # quiet points behind this worker
    _failed_over: frozenset[int] = frozenset()  # slices that the next server serves
    _has_left = False

    def pause(self, rest: Rest) -> bool:
        """Push no more until every worker has paused too. True if none has left."""
        complete = super().pause(rest)
        self._points += 1
        return complete

    def agree(self) -> None:
        """At a quiet point: let all workers take the same values.

        Nothing is to be done where they took them on leaving.
        """
        if not self._has_left:
            self._take_values(
                Request(self.worker.rank, Kind.PAUSE, step=Rest(Reason.AGREEMENT).code)
            )
            self._points += 1

    def leave(self) -> None:
        """Push no more; take the values that are there when all have left."""
        self._take_values(Request(self.worker.rank, Kind.LEAVE))
        for place, part in enumerate(self.slices):
            with contextlib.suppress(PeerLost):
                done = encode_notice(ReplicaNotice.DONE, place, self.worker.rank)
                self.worker.transport.send(done, part.rank, Tag.REQUEST).wait()
        self._has_left = True

    def _take_values(self, request: Request) -> None:
        """Ask all servers for the values, which become the parameters."""
        waits = [
            self._ask(place, request, into=self.worker.parameters[part.first : part.end])
            for place, part in enumerate(self.slices)
        ]
        for wait in waits:
            wait()

    def _ask(
        self,
        place: int,
        request: Request,
        gradient: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        # A push is answered with values without being asked for them.
        values = into is not None and request.push is None
        message = encode_addressed(Addressed(place, request, self._points, values))

        def begin() -> Callable[[], Tensor]:
            head, tag = Tag.ANSWER, Tag.VALUES
            if place in self._failed_over:
                head, tag = Tag.BACKUP_ANSWER, Tag.BACKUP_VALUES
            # To leave is answered with values alone.
            answer = None if request.kind is Kind.LEAVE else head
            return self._post(self._server_of(place), message, gradient, answer, tag, into)

        under_way = begin()

        def wait() -> Tensor:
            nonlocal under_way
            while True:
                try:
                    return under_way()
                except PeerLost as lost:
                    # The same request again: by its number a server knows it (`RequestLog`).
                    self._fail_over(lost, place)
                    under_way = begin()

        return wait

    def _server_of(self, place: int) -> int:
        """Return the rank that serves the slice at `place` now."""
        return self.slices[(place + (place in self._failed_over)) % len(self.slices)].rank

    def _fail_over(self, lost: PeerLost, place: int) -> None:
        """Ask the next server from now on; raise `lost` where no server is left for the slice."""
        next_rank = self.slices[(place + 1) % len(self.slices)].rank
        if (
            lost.rank != self._server_of(place)
            or place in self._failed_over
            or next_rank in self.worker.transport.lost()
        ):
            raise lost
        self._failed_over |= {place}


@dataclass(eq=False)
class ReplicatedConnection(Connection):
    """Each server also holds the slice of the one before it."""

    def _make_channel(self) -> ServerChannel:
        rules = self.rules
        return ReplicatedChannel(self.worker, self.slices, rules.queue_shares, rules.compression)

    def _make_server(self) -> Server:
        worker, ranks = self.worker, self.servers
        place = ranks.index(worker.rank)
        # The mirror of the first one is the last slice (place - 1 is -1 then).
        own, mirror = (
            make_slice(worker, self.slices, part, self.workers, self.rules)
            for part in (self.slices[place], self.slices[place - 1])
        )
        mirror.on_update = partial(
            worker.snapshots.offer, offset=self.slices[place - 1].first, mirror=True
        )
        before, after = ranks[place - 1], ranks[(place + 1) % len(ranks)]
        lost = worker.transport.lost()
        if after not in lost:
            _hand_on_moments(worker.transport, own, after)
        if before not in lost:
            _take_over_moments(worker.transport, mirror, before)

        def alone(text: str) -> None:
            worker.reporter.expendable(False)
            worker.reporter.notice(text)

        return ReplicatedServer(own, mirror, ranks, place, lost=lost, alone=alone)

    def take_model(self) -> None:
        """Let workers ask for the values, since any server may be lost; one tells the servers."""
        worker = self.worker
        if self.channel is not None:
            assert isinstance(self.channel, ReplicatedChannel)
            self.channel.agree()
            if self.rules.when.lockstep:
                broadcast_buffers(worker, worker.workers)
        elif self.server is not None:
            self.server.serve(worker.transport)
        _tell_servers(worker, sorted(set(self.servers) - set(self.workers)), self.leader)


def _hand_on_moments(transport: Transport, held: HeldSlice, to: int) -> None:
    """Send the moments to the replica: ranks may have inherited different ones."""
    moments = [
        (index, name, value)
        for part in held.application.optimizer_parts()
        for index, state in capture(part.optimizer).items()
        for name, value in state.items()
    ]
    tensors = [value.contiguous() for _, _, value in moments if isinstance(value, Tensor)]
    heads = [
        (index, name, True, None) if isinstance(value, Tensor) else (index, name, False, value)
        for index, name, value in moments
    ]
    send_object(transport, heads, to)
    for tensor in tensors:
        transport.send(tensor, to, Tag.AGREE).wait()


def _take_over_moments(transport: Transport, held: HeldSlice, source: int) -> None:
    state: dict[int, dict[str, Any]] = defaultdict(dict)
    for index, name, is_tensor, value in receive_object(transport, source):
        state[index][name] = transport.receive(source, Tag.AGREE).wait() if is_tensor else value
    for part in held.application.optimizer_parts():
        restore(part.optimizer, state)


def _tell_servers(worker: Worker, servers: Sequence[int], leader: int) -> None:
    """Give `servers` without data the parameters and buffers of the `leader`, a worker."""
    if worker.rank in servers:
        agree_on_parameters(worker, Group((leader, worker.rank)))
    elif worker.rank == leader:
        for server in servers:
            with contextlib.suppress(PeerLost):
                agree_on_parameters(worker, Group((leader, server)))
