"""A cluster come to life: its nodes and links as resources, its ranks with their ports."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from orchestra.cluster import Channel, Cluster, Node
from orchestra.cluster.costs import EVENLY, Overhead, Sharing
from orchestra.engines.simulation.cores import Cores
from orchestra.engines.simulation.fluid import Fluid, Resource
from orchestra.engines.simulation.kernel import Kernel
from orchestra.engines.simulation.meeting import Meetings
from orchestra.engines.simulation.native import NativeCollectives
from orchestra.engines.simulation.processor import Thread
from orchestra.engines.simulation.sharing import ROUNDING
from orchestra.engines.simulation.transport import Net, Port


@dataclass(frozen=True)
class Way:
    """The resources that a message crosses, and how long its first byte takes."""

    resources: Sequence[Resource]
    latency: float


class World:
    """`cluster` with `ranks` ranks on it, at the virtual time of `kernel`.

    `reference_flops` are the FLOP/s of a core of speed 1. With `goes_ahead` a flow with a core for
    itself does not wait for the others until it has to do with them.
    """

    def __init__(
        self,
        kernel: Kernel,
        cluster: Cluster,
        ranks: int,
        overhead: Overhead,
        reference_flops: float,
        sharing: Sharing = EVENLY,
        *,
        goes_ahead: bool = False,
    ) -> None:
        self._goes_ahead = goes_ahead and not cluster.faults
        self._reference_flops = reference_flops
        self._sharing = sharing
        self.kernel = kernel
        self.fluid = Fluid(kernel)
        self.nodes = [cluster.node_of(rank, ranks) for rank in range(ranks)]
        meetings = Meetings(kernel, self._crowded, faults=bool(cluster.faults))
        self.net = Net(kernel, self.fluid, overhead, self._way, meetings)
        self._native = Net(kernel, self.fluid, overhead, self._way, meetings)
        self._native_threads: Counter[str] = Counter()  # by node
        self._cluster = cluster
        self._channels: dict[Channel, Resource] = {}
        self._cores: dict[str, Resource] = {}
        self._turns: dict[str, Cores] = {}
        self._threads: Counter[str] = Counter()  # by node, those that have ended included
        self._by_name = {node.name: node for node in self.nodes}
        self._room: dict[str, tuple[int, bool]] = {}
        self._ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, node in enumerate(self.nodes):
            self._ranks_of[node.name].append(rank)
        for rank in range(ranks):
            for net in (self.net, self._native):
                Port(net, rank, functools.partial(self.thread, rank))

    def thread(self, rank: int) -> Thread:
        """A thread for one more flow of `rank`, on the cores of its node."""
        node = self.nodes[rank]
        speed = self._speed(node)
        own = Resource(f"a thread of rank {rank}", speed)
        self._threads[node.name] += 1
        if node.name not in self._cores:
            together = speed * max(1.0, node.slots * self._sharing.speed)
            self._cores[node.name] = Resource(f"{node.name} cores", together)
            if self._sharing.time_slice is not None:
                self._turns[node.name] = Cores(
                    self.kernel,
                    self.fluid,
                    node.slots,
                    self._sharing.time_slice,
                    self._sharing.refill,
                )
        undisturbed = functools.partial(self._has_room, node.name) if self._goes_ahead else _never
        resources, turns_here = (own, self._cores[node.name]), self._turns.get(node.name)
        return Thread(self.kernel, self.fluid, resources, undisturbed, turns_here)

    def _has_room(self, name: str) -> bool:
        """`_count_room`, as long as no flow has begun or ended."""
        counted, room = self._room.get(name, (-1, False))
        if counted != self.kernel.changes:
            room = self._count_room(self._by_name[name])
            self._room[name] = self.kernel.changes, room
        return room

    def _count_room(self, node: Node) -> bool:
        """Whether there is a core for every flow of `node`, and for one that may begin.

        Where threads take turns, a core that another one had before has to be refilled, even if it
        is free now.
        """
        if node.name in self._turns and self._threads[node.name] >= node.slots:
            return False
        flows = sum(self.kernel.flows_of[rank] for rank in self._ranks_of[node.name])
        flows += self._native_threads[node.name] + 1
        return flows * self._speed(node) <= self._cores[node.name].capacity * ROUNDING

    def native(self, rank: int) -> NativeCollectives:
        """What stands for torch.distributed's own collectives on `rank`, on a thread of its own."""
        self._native_threads[self.nodes[rank].name] += 1
        return NativeCollectives(self._native.ports[rank], self.net.ports[rank].warm_up)

    def _crowded(self, ranks: Sequence[int]) -> bool:
        """Whether a flow of one of `ranks` may have to wait for a core of its node."""
        flows = Counter(self.nodes[flow.rank].name for flow in self.kernel.flows)
        flows += self._native_threads
        nodes = {self.nodes[rank].name: self.nodes[rank] for rank in ranks}
        return any(
            flows[name] * self._speed(node) > self._cores[name].capacity * ROUNDING
            for name, node in nodes.items()
        )

    def _speed(self, node: Node) -> float:
        """Seconds of the cost model's machine that a core of `node` does in a second."""
        if node.speed is not None:
            return node.speed
        assert node.flops is not None
        return node.flops / self._reference_flops

    def _way(self, source: int, target: int) -> Way:
        path = self._cluster.path(self.nodes[source], self.nodes[target])
        return Way([self._resource(channel) for channel in path.channels], path.latency)

    def _resource(self, channel: Channel) -> Resource:
        if channel not in self._channels:
            self._channels[channel] = Resource(channel.name, channel.bandwidth)
        return self._channels[channel]


def _never() -> bool:
    return False
