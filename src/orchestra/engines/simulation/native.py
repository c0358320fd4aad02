"""torch.distributed's own collectives in virtual time: a ring, on connections of its own.

What the backends do depends on their version, the message and the links. A ring is what gloo and
NCCL do with large tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from orchestra.collectives import Group, broadcast
from orchestra.engines.simulation.kernel import Flow, Kernel
from orchestra.engines.simulation.rendezvous import Contribution
from orchestra.engines.simulation.transport import Port, SimulatedTransport
from orchestra.schedules import ALL_REDUCE
from orchestra.transports.tags import Tag


class NativeTask:
    """An all-reduce of `tensor`, waiting for its turn or under way."""

    def __init__(self, kernel: Kernel, rank: int, tensor: Tensor) -> None:
        self.tensor = tensor
        self._kernel = kernel
        self._rank = rank
        self._done = False
        self._waiting: list[Flow] = []

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        self._kernel.catch_up()
        return self._done

    def wait(self) -> Tensor:
        """Let virtual time pass until it is done; the tensor, in place."""
        self._kernel.catch_up()
        if not self._done:
            flow = self._kernel.current
            self._waiting.append(flow)
            flow.waits = lambda: ((self._rank,), "a native collective")
            self._kernel.park()
            flow.waits = None
        return self.tensor

    def finish(self) -> None:
        """From an event: it is done."""
        self._done = True
        for flow in self._waiting:
            self._kernel.resume(flow)


class NativeCollectives:
    """Of the rank of `port`: all-reduces one after the other, beside what its flows do.

    `warm_up` tells how many seconds the first message after a pass takes more.
    """

    def __init__(self, port: Port, warm_up: Callable[[], float]) -> None:
        self._port = port
        self._warm_up = warm_up
        self._kernel = port.net.kernel
        self._ranks = tuple(range(len(port.net.ports)))
        self._processor = port.new_processor()
        self._transport = SimulatedTransport(port)
        self._under_way: deque[NativeTask] = deque()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place of a contiguous `tensor`."""
        return self.start_all_reduce(tensor).wait()

    def start_all_reduce(self, tensor: Tensor) -> NativeTask:
        """Begin to replace a contiguous `tensor` by its sum over all ranks."""
        self._kernel.catch_up()
        task = NativeTask(self._kernel, self._port.rank, tensor)
        self._under_way.append(task)
        if len(self._under_way) == 1:
            self._begin()
        return task

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """Replace a contiguous `tensor` by that of rank `root`."""
        broadcast(self._transport, tensor.view(-1), root, Group(self._ranks), Tag.NATIVE)
        return tensor

    def barrier(self) -> None:
        """Let virtual time pass until every rank is here."""
        self.all_reduce(torch.zeros(1))

    def _begin(self) -> None:
        seconds = self._warm_up() + self._port.net.overhead.collective
        self._processor.start(seconds, self._join)

    def _join(self) -> None:
        net, vector = self._port.net, self._under_way[0].tensor.view(-1)
        if len(self._ranks) == 1 or not vector.numel():
            self._finish()
            return
        ring = ALL_REDUCE["ring"](len(self._ranks))
        given = Contribution(vector, ring, self._ranks, Tag.NATIVE, None)
        member = net.rendezvous.join(net, given, self._port.rank, self._processor, self._finish)
        assert member is not None, "nobody asked for messages"
        self._port.meter.count_all(member.sent)

    def _finish(self) -> None:
        self._under_way.popleft().finish()
        if self._under_way:
            self._begin()
