"""A described cluster as the simulator's cores, links and ports."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor

from orchestra.cluster import Channel, Cluster, Node
from orchestra.cluster.nodes import Overhead, Sharing
from orchestra.collectives import Group
from orchestra.engines.simulation.background import BackgroundQueue, Queued
from orchestra.engines.simulation.fluid import Fluid, Resource
from orchestra.engines.simulation.kernel import Kernel
from orchestra.engines.simulation.network import (
    BeginNativeAllReduce,
    Message,
    Meter,
    Net,
    Port,
)
from orchestra.engines.simulation.processor import Cores, Team, Thread
from orchestra.engines.simulation.rendezvous import Rendezvous
from orchestra.engines.simulation.rounds import Ranks
from orchestra.engines.simulation.route import LONG, Route, SlowStart
from orchestra.engines.simulation.sharing import ROUNDING
from orchestra.engines.simulation.stream import Load, Stream
from orchestra.engines.simulation.transport import SimulatedTransport
from orchestra.errors import PeerLost
from orchestra.schedules import ALL_REDUCE
from orchestra.transports.protocol import CollectiveCall, Traffic
from orchestra.transports.tags import Tag


class World:
    """`cluster` with `ranks` ranks on it, at the virtual time of `kernel`.

    `reference_flops` are the FLOP/s of a core of speed 1, and `threads` what the main flow of each
    rank computes with. `draw_share` is that of a `Net`. Without faults, a flow with
    a core for itself runs ahead of the others' virtual time until it next interacts with them.
    """

    def __init__(
        self,
        kernel: Kernel,
        cluster: Cluster,
        ranks: int,
        overhead: Overhead,
        reference_flops: float,
        sharing: Sharing,
        threads: Sequence[int],
        draw_share: Callable[[int, int], float] | None,
    ) -> None:
        faults = bool(cluster.faults)
        # A fault may change a speed or stop a rank at any time: then nothing is told ahead.
        self._goes_ahead = not faults
        self._reference_flops = reference_flops
        self._sharing = sharing
        self.kernel = kernel
        self._overhead = overhead
        self.fluid = Fluid(kernel, overhead.tcp.acknowledgements if cluster.tcp else 0.0)
        self.nodes = cluster.nodes_of(ranks)
        self.rendezvous = Rendezvous(kernel, self._crowded, faults)
        delay = (lambda a, b, time: cluster.delay(a, b, ranks, time)) if faults else None
        self.net = Net(kernel, self.fluid, overhead, self._route, delay, draw_share)
        # Connections of their own on the same links, as torch.distributed has them.
        self._native = Net(kernel, self.fluid, overhead, self._route, delay, draw_share)
        for net in (self.net, self._native):
            net.before_arrival = self.rendezvous.disturb
            net.nodes = [node.name for node in self.nodes]
        self.net.hosts = [
            # collectives of tensors that are on devices are messages
            node.name if node.shared_memory and not node.devices else rank
            for rank, node in enumerate(self.nodes)
        ]
        self._native_threads: Counter[str] = Counter()  # by node
        self._cluster = cluster
        self._channels: dict[Channel, Resource] = {}
        self._speeds: dict[str, float] = {}  # factors, by node, where it is not 1
        self._bandwidths: dict[str, float] = {}  # factors, by channel, where it is not 1
        self._threads_of: dict[int, list[Thread]] = defaultdict(list)
        self._cores: dict[str, Resource] = {}
        self._turns: dict[str, Cores] = {}
        self._threads: Counter[str] = Counter()  # by node, those that have ended included
        self._by_name = {node.name: node for node in self.nodes}
        self._room: dict[str, tuple[int, bool]] = {}
        self._known_crowded: dict[Ranks, tuple[int, bool]] = {}
        self._widths = threads
        self._teams: dict[str, Resource] = {}  # of nodes whose cores several teams want
        self._ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, node in enumerate(self.nodes):
            self._ranks_of[node.name].append(rank)
        for node in self._by_name.values():
            widths = [self._widths[rank] for rank in self._ranks_of[node.name]]
            # Otherwise all threads of the node have cores for themselves, and a team would change
            # nothing.
            if max(widths) > 1 and len(widths) > 1 and sum(widths) > self._at_once(node):
                self._teams[node.name] = Resource(f"{node.name} teams", self._together(node))
        for rank in range(ranks):
            meter = Meter(kernel.here)
            for net in (self.net, self._native):
                Port(net, rank, functools.partial(self.thread, rank), meter)

    def thread(self, rank: int, *, main: bool = False) -> Thread:
        """A thread for one more flow of `rank`, on the cores of its node; several for `main`."""
        node = self.nodes[rank]
        speed = self._speed(node)
        own = Resource(f"a thread of rank {rank}", speed)
        self._threads[node.name] += 1
        if node.name not in self._cores:
            self._cores[node.name] = Resource(f"{node.name} cores", self._together(node))
            if self._sharing.time_slice is not None:
                self._turns[node.name] = Cores(
                    self.kernel,
                    self.fluid,
                    node.slots,
                    self._sharing.time_slice,
                    self._sharing.refill,
                )
        undisturbed = functools.partial(self._has_room, node.name)
        resources, turns_here = (own, self._cores[node.name]), self._turns.get(node.name)
        team = self._team(rank, node) if main else None
        thread = Thread(self.kernel, self.fluid, resources, undisturbed, turns_here, team)
        self._threads_of[rank].append(thread)
        return thread

    def _team(self, rank: int, node: Node) -> Team | None:
        """The threads of the main flow of `rank`, where those of others want the same cores.

        What so many threads take by themselves is in the costs of work with so many.
        """
        if node.name not in self._teams:
            return None
        width = min(self._widths[rank], self._at_once(node))
        own = Resource(f"the threads of rank {rank}", width * self._speed(node))
        return Team(own, self._teams[node.name], width)

    def _has_room(self, name: str) -> bool:
        """Return `_count_room`, computed again only when a flow has begun or ended."""
        counted, room = self._room.get(name, (-1, False))
        if counted != self.kernel.changes:
            room = self._count_room(self._by_name[name])
            self._room[name] = self.kernel.changes, room
        return room

    def _count_room(self, node: Node) -> bool:
        """Return whether `node` has a core for each of its flows, and for one that may begin.

        Where threads take turns, a core that another one had before has to be refilled, even if it
        is free now.
        """
        if node.name in self._teams or not self._goes_ahead:
            return False
        # `_threads` counts all that there have been, since each may have left its data in a core's
        # caches.
        if node.name in self._turns and self._threads[node.name] >= node.slots:
            return False
        return self._fit(node, 1)

    def _fit(self, node: Node, further: int = 0) -> bool:
        """Return whether there is a core for every flow of `node`, and for `further` ones."""
        flows = self._native_threads[node.name] + further
        flows += sum(self.kernel.flows_of[rank] for rank in self._ranks_of[node.name])
        return flows * self._speed(node) <= self._cores[node.name].capacity * ROUNDING

    def native(self, rank: int) -> BeginNativeAllReduce:
        """Return a function that begins an all-reduce of torch.distributed on `rank`.

        It replaces a contiguous tensor by its sum over all ranks, one tensor after the other, on a
        thread beside the flows of the rank. It is a ring on connections of its own: what the
        backends do depends on their version, the message and the links, and with large tensors gloo
        and NCCL do that.
        """
        self._native_threads[self.nodes[rank].name] += 1
        # What is known of free cores has to be counted anew.
        self.kernel.changes += 1
        port, caches = self._native.ports[rank], self.net.ports[rank]
        new_transport = functools.partial(SimulatedTransport, port, self.rendezvous)
        queue = BackgroundQueue(self.rendezvous, port, caches, new_transport, Traffic())
        self.rendezvous.flow_began(rank)
        everyone = Group(tuple(range(len(self.nodes))))

        def begin(tensor: Tensor) -> Queued:
            self.kernel.catch_up()
            ring = ALL_REDUCE["ring"](len(everyone))
            call = CollectiveCall(ring, tensor.view(-1), everyone, Tag.NATIVE)
            return queue.begin(self.rendezvous.contribution(self._native, call))

        return begin

    def _crowded(self, ranks: Ranks) -> bool:
        """Return whether a flow of one of `ranks` may have to wait for a core of its node."""
        changes, crowded = self._known_crowded.get(ranks, (-1, False))
        if changes != self.kernel.changes:
            nodes = {self.nodes[rank].name: self.nodes[rank] for rank in ranks}
            crowded = not all(map(self._fit, nodes.values()))
            self._known_crowded[ranks] = self.kernel.changes, crowded
        return crowded

    def _speed(self, node: Node) -> float:
        """Return the core-seconds (of a core of speed 1) that a core of `node` does in a second."""
        factor = self._speeds.get(node.name, 1.0)
        return node.speed_beside(self._reference_flops) * factor

    def _together(self, node: Node) -> float:
        """Return what all cores of `node` do in a second, in seconds of a core of speed 1."""
        return self._speed(node) * self._at_once(node)

    def _at_once(self, node: Node) -> float:
        """Return how many times as much as one core by itself all cores of `node` do together."""
        return max(1.0, node.slots * self._sharing.speed)

    def _route(self, source: int, target: int) -> Route:
        here, there = self.nodes[source], self.nodes[target]
        path = self._cluster.path(here, there)
        resources = tuple(self._resource(channel) for channel in path.channels)
        # The bandwidth of a loopback is measured with all that it takes: no headers are added.
        if here.name == there.name or not self._cluster.tcp:
            return Route(resources, path.latency)
        tcp, back = self._overhead.tcp, self._cluster.path(there, here)
        round_trip = path.latency + back.latency
        bandwidth = min(channel.bandwidth for channel in path.channels)
        # At most a window is in flight: that limits the connection like one more link.
        if bandwidth * round_trip > tcp.window:
            bandwidth = tcp.window / round_trip
            name = f"window of rank {source} to rank {target}"
            resources = (*resources, Resource(name, bandwidth))
        # The weight of a share: SimGrid's CM02 with weight-S (docs/decisions/0095-tcp.md).
        delay = path.latency + sum(tcp.queue / channel.bandwidth for channel in path.channels)
        is_long = bandwidth * round_trip > max(LONG, tcp.first_window)
        return Route(
            resources,
            path.latency,
            tuple(map(self._resource, back.channels)) if tcp.acknowledgements else (),
            self._overhead.wire,
            tcp.acknowledgements,
            SlowStart(tcp, bandwidth, round_trip) if is_long else None,
            weight=1 / delay if delay else 1.0,
            tcp=True,
            buffer=tcp.unread * self._overhead.wire,
        )

    def _resource(self, channel: Channel) -> Resource:
        if channel not in self._channels:
            self._channels[channel] = Resource(channel.name, channel.bandwidth)
            self._set_bandwidth(channel)
        return self._channels[channel]

    def _set_bandwidth(self, channel: Channel) -> None:
        bandwidth = channel.bandwidth * self._bandwidths.get(channel.name, 1.0)
        self.fluid.set_capacity(self._channels[channel], bandwidth)

    # What goes wrong, from events

    def change_speed(self, node: Node, factor: float) -> None:
        """Let the cores of `node` compute `factor` times as fast as usual."""
        self._speeds[node.name] = factor
        for rank in self._ranks_of[node.name]:
            for thread in self._threads_of[rank]:
                thread.change_speed(self._speed(node))
        if node.name in self._cores:
            self.fluid.set_capacity(self._cores[node.name], self._together(node))
        if node.name in self._teams:
            self.fluid.set_capacity(self._teams[node.name], self._together(node))

    def change_bandwidth(self, channel: Channel, factor: float) -> None:
        """Let `channel` carry `factor` times as much as usual; 0: nothing."""
        self._bandwidths[channel.name] = factor
        if channel in self._channels:
            self._set_bandwidth(channel)

    def is_heard(self, rank: int) -> bool:
        """Return whether no link is cut on the way from `rank` to the watcher, beside rank 0."""
        path = self._cluster.path(self.nodes[rank], self.nodes[0])
        return all(self._bandwidths.get(channel.name, 1.0) > 0 for channel in path.channels)

    def latency(self, source: int, target: int) -> float:
        """Return the seconds until the first byte from one rank is at another."""
        return self._cluster.path(self.nodes[source], self.nodes[target]).latency

    def hold(self, rank: int) -> None:
        """Stop `rank`: it computes nothing, and takes in nothing."""
        self.kernel.hold(rank)
        for thread in self._threads_of[rank]:
            thread.hold()

    def let_go(self, rank: int) -> None:
        """Let `rank` go on after `hold`."""
        for thread in self._threads_of[rank]:
            thread.let_go()
        self.kernel.let_go(rank)
        for stream in self._streams(target=rank):
            stream.go_on()

    def kill(self, rank: int, reason: str) -> dict[int, Load | None]:
        """End `rank`; what it has sent is lost. Returns the messages cut off, by target."""
        self.hold(rank)
        self.kernel.kill(rank)
        error = PeerLost(rank, reason)
        return {
            target: stream.close(error)
            for (source, target), stream in self.net.streams.items()
            if source == rank
        }

    def part(self, rank: int, lost: int, reason: str, cut_off: Load | None = None) -> None:
        """Tell `rank` that `lost` is gone; `cut_off` is a message from there that was under way."""
        port, streams = self.net.ports[rank], self.net.streams
        arriving = cut_off.arriving if isinstance(cut_off, Message) else None
        port.mailbox.depart(lost, reason, arriving, lost=True)
        if (rank, lost) in streams:
            streams[rank, lost].close(PeerLost(lost, reason))
        port.wake_all()

    def moved(self, rank: int) -> float:
        """Return the bytes that have crossed of messages under way to and from `rank`."""
        return sum(s.moved() for s in (*self._streams(source=rank), *self._streams(target=rank)))

    def _streams(self, *, source: int | None = None, target: int | None = None) -> list[Stream]:
        return [
            stream
            for net in (self.net, self._native)
            for (a, b), stream in net.streams.items()
            if source in (None, a) and target in (None, b)
        ]
