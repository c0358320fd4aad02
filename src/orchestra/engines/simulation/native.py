"""torch.distributed's own collectives in virtual time: a ring, on connections of its own.

What the backends do depends on their version, the message and the links. A ring is what gloo and
NCCL do with large tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchestra.collectives import Group, broadcast
from orchestra.engines.simulation.background import BackgroundQueue, Queued
from orchestra.engines.simulation.network import Port
from orchestra.engines.simulation.rendezvous import Contribution, Rendezvous
from orchestra.engines.simulation.transport import SimulatedTransport
from orchestra.schedules import ALL_REDUCE
from orchestra.transports.protocol import Traffic
from orchestra.transports.tags import Tag


@dataclass
class NativeTask:
    """An all-reduce of `tensor`, waiting for its turn or under way."""

    tensor: Tensor
    queued: Queued

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.queued.done()

    def wait(self) -> Tensor:
        """Let virtual time pass until it is done; the tensor, in place."""
        self.queued.wait()
        return self.tensor


class NativeCollectives:
    """Of the rank of `port`: all-reduces one after the other, beside what its flows do.

    The caches are those of `caches`, through which its flows send.
    """

    def __init__(self, rendezvous: Rendezvous, port: Port, caches: Port) -> None:
        self._rendezvous = rendezvous
        self._port = port
        self._queue = BackgroundQueue(rendezvous, port, caches, self._transport, Traffic())
        self._group = Group(tuple(range(len(port.net.ports))))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place of a contiguous `tensor`."""
        return self.start_all_reduce(tensor).wait()

    def start_all_reduce(self, tensor: Tensor) -> NativeTask:
        """Begin to replace a contiguous `tensor` by its sum over all ranks."""
        self._port.net.kernel.catch_up()
        vector, ring = tensor.view(-1), ALL_REDUCE["ring"](len(self._group))
        placed = self._rendezvous.placed(self._port.net, ring, self._group, vector, None)
        return NativeTask(tensor, self._queue.begin(Contribution(placed, vector, Tag.NATIVE, None)))

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """Replace a contiguous `tensor` by that of rank `root`."""
        broadcast(
            SimulatedTransport(self._port, self._rendezvous),
            tensor.view(-1),
            root,
            self._group,
            Tag.NATIVE,
        )
        return tensor

    def barrier(self) -> None:
        """Let virtual time pass until every rank is here."""
        self.all_reduce(torch.zeros(1))

    def _transport(self) -> SimulatedTransport:
        return SimulatedTransport(self._port, self._rendezvous)
