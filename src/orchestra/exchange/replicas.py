"""Servers with replicas, as a rank connects to them: the server's two slices, and the client."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from orchestra.collectives import Group, receive_object, send_object
from orchestra.errors import PeerLost
from orchestra.exchange.agreement import agree_on_parameters, broadcast_buffers
from orchestra.exchange.channel import ServerChannel
from orchestra.exchange.servers import make_slice
from orchestra.optimizers.state import capture, restore
from orchestra.parameter_server.client import Client
from orchestra.parameter_server.held_slice import HeldSlice
from orchestra.parameter_server.replicas import ReplicatedServer
from orchestra.parameter_server.replicated_client import ReplicatedClient
from orchestra.parameter_server.server import Server
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker


@dataclass(eq=False)
class ReplicatedChannel(ServerChannel):
    """Each server also holds the slice of the one before it."""

    def _make_client(self) -> Client:
        worker = self.worker
        queue, encode = self._queue_and_codec()
        return ReplicatedClient(worker.transport, self.slices, worker.parameters, queue, encode)

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

    def take_model(self, *, tolerant: bool) -> None:
        """Let workers ask for the values, since any server may be lost; one tells the servers."""
        worker = self.worker
        if self.client is not None:
            assert isinstance(self.client, ReplicatedClient)
            self.client.agree()
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
