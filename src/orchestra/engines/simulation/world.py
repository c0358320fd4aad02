"""A described cluster as the simulator's cores, links and ports."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from orchestra.cluster import Channel, Cluster, Node
from orchestra.cluster.nodes import Overhead, Sharing
from orchestra.collectives import Group
from orchestra.engines.simulation.background import BackgroundQueue, Queued
from orchestra.engines.simulation.fluid import Fluid, Resource
from orchestra.engines.simulation.kernel import Kernel
from orchestra.engines.simulation.loads import Loads
from orchestra.engines.simulation.network import BeginNativeAllReduce, Message, Meter, Net, Port
from orchestra.engines.simulation.placed import Ranks
from orchestra.engines.simulation.processor import Cores, Thread
from orchestra.engines.simulation.rendezvous import Rendezvous
from orchestra.engines.simulation.sharing import ROUNDING
from orchestra.engines.simulation.stream import LONG, Route, SlowStart
from orchestra.engines.simulation.transport import SimulatedTransport
from orchestra.errors import PeerLost
from orchestra.schedules import ALL_REDUCE
from orchestra.transports.protocol import CollectiveCall, Traffic
from orchestra.transports.tags import Tag


@dataclass(eq=False)
class Host:
    """A node that has ranks, and what computes there."""

    node: Node
    ranks: list[int]
    speed: float  # seconds of a core of speed 1 that one of its cores does in a second
    at_once: float  # how many times as much as one core by itself all cores do together
    cores: Resource  # all of them
    is_oversubscribed: bool  # whether the threads of its ranks want more cores than it has
    turns: Cores | None  # where threads take turns
    threads: int = 0  # that there have been
    native: int = 0  # threads of torch.distributed
    room: tuple[int, bool] = -1, False  # at so many changes of flows, what `_has_room` has found


class World:
    """`cluster` with `ranks` ranks on it and those that join, at the virtual time of `kernel`.

    `reference_flops` are the FLOP/s of a core of speed 1, and `threads` what the main flow of each
    rank computes with. `draw_share` draws the factor on the weight of the next message between two
    ranks on unlike nodes; without it, weights are even. Without `faults`, a flow with a core for
    itself runs ahead of the others' virtual time until it next interacts with them.
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
        *,
        faults: bool,
    ) -> None:
        # A fault may change a speed or stop a rank at any time: then nothing is told ahead.
        self._goes_ahead = not faults
        self._cluster, self._overhead, self._sharing = cluster, overhead, sharing
        self._ranks = ranks
        self._reference_flops, self._widths = reference_flops, threads
        self._draw_share = draw_share
        self._channels: dict[Channel, Resource] = {}
        self._bandwidths: dict[str, float] = {}  # factors, by channel, where it is not 1
        self._threads_of: dict[int, list[Thread]] = defaultdict(list)
        self._known_crowded: dict[Ranks, tuple[int, bool]] = {}
        self.kernel = kernel
        self.fluid = Fluid(kernel, overhead.tcp.acknowledgements if cluster.tcp else 0.0)
        self.loads = Loads(kernel, self.fluid)
        self.rendezvous = Rendezvous(kernel, self.loads, self._crowded, faults)
        self.nodes = cluster.nodes_of(ranks)
        ranks_of: dict[str, list[int]] = defaultdict(list)
        self.local_ranks: list[int] = []
        for rank, node in enumerate(self.nodes):
            self.local_ranks.append(len(ranks_of[node.name]))
            ranks_of[node.name].append(rank)
        by_name = {node.name: node for node in self.nodes}
        self._hosts = {name: self._host(by_name[name], ranks_of[name]) for name in by_name}
        self._share_memory = [
            # collectives of tensors that are on devices are messages
            ranks_of[node.name][0] if node.shared_memory and not node.devices else rank
            for rank, node in enumerate(self.nodes)
        ]
        self.meters = [Meter(kernel.here) for _ in self.nodes]
        self._nets: list[Net] = []  # of the newest group
        self.net = self.connect(tuple(range(ranks)))

    def connect(self, members: tuple[int, ...]) -> Net:
        """Make the net of a group of ranks, in place of that of the group before."""
        self._nets = self._nets_of(members)
        return self._nets[0]

    def alone(self, slot: int) -> Net:
        """Make the net of a rank that joins, for the time until it is in a group."""
        return self._nets_of((slot,))[0]

    def _nets_of(self, members: tuple[int, ...]) -> list[Net]:
        names = [self.nodes[slot].name for slot in members]
        hosts = [self._share_memory[slot] for slot in members]
        # The second has connections of its own on the same links, as torch.distributed has them.
        nets = [
            Net(
                self.kernel, self.fluid, self._overhead, members, names, each, self._route,
                self.loads.start_message,
            )
            for each in (hosts, members)
        ]  # fmt: skip
        for rank, slot in enumerate(members):
            new_thread = functools.partial(self.thread, slot)
            port, native = (Port(net, rank, new_thread, self.meters[slot]) for net in nets)
            port.native = functools.cache(functools.partial(self._native, native, port))
        return nets

    def _host(self, node: Node, ranks: list[int]) -> Host:
        sharing, slots = self._sharing, node.slots
        speed, at_once = node.speed_beside(self._reference_flops), max(1.0, slots * sharing.speed)
        turns = None
        if sharing.time_slice is not None:
            turns = Cores(self.kernel, self.fluid, slots, sharing.time_slice, sharing.refill)
        cores = Resource(f"{node.name} cores", speed * at_once)
        wanted = [self._widths[rank] for rank in ranks]
        oversubscribed = max(wanted) > 1 and len(ranks) > 1 and sum(wanted) > at_once
        return Host(node, ranks, speed, at_once, cores, oversubscribed, turns)

    def thread(self, rank: int, *, main: bool = False) -> Thread:
        """A thread for one more flow of `rank`, on the cores of its node; several for `main`."""
        host = self._hosts[self.nodes[rank].name]
        host.threads += 1
        # Where all threads have a core, costs for so many threads tell all.
        width = min(self._widths[rank], host.at_once) if main and host.is_oversubscribed else 1.0
        own = Resource(f"threads of rank {rank}", width * host.speed)
        undisturbed = functools.partial(self._has_room, host)
        # Cores take turns with single threads; several of a rank share them with others evenly.
        turns = host.turns if width == 1 else None
        resources = own, host.cores
        thread = Thread(self.kernel, self.fluid, resources, undisturbed, turns, width)
        self._threads_of[rank].append(thread)
        return thread

    def _has_room(self, host: Host) -> bool:
        """Return `_count_room`, computed again only when a flow has begun or ended."""
        counted, room = host.room
        if counted != self.kernel.changes:
            room = self._count_room(host)
            host.room = self.kernel.changes, room
        return room

    def _count_room(self, host: Host) -> bool:
        """Return whether `host` has a core for each of its flows, and for one that may begin.

        Where threads take turns, a core that another one had before has to be refilled, even if it
        is free now.
        """
        if host.is_oversubscribed or not self._goes_ahead:
            return False
        # Threads that have ended, too, may have left their data in a core's caches.
        if host.turns is not None and host.threads >= host.node.slots:
            return False
        return self._fit(host, 1)

    def _fit(self, host: Host, further: int = 0) -> bool:
        """Return whether there is a core for every flow of `host`, and for `further` ones."""
        flows = host.native + further + sum(self.kernel.flows_of[rank] for rank in host.ranks)
        return flows * host.speed <= host.cores.capacity * ROUNDING

    def _native(self, port: Port, caches: Port) -> BeginNativeAllReduce:
        """Return a function that begins an all-reduce of torch.distributed on the rank of `port`.

        It replaces a contiguous tensor by its sum over all ranks, one tensor after the other, on a
        thread of its own in the rank. It is simulated as a ring on connections of its own. The
        algorithm of a real backend depends on its version, the message and the links; for large
        tensors gloo and NCCL use a ring.
        """
        self._hosts[self.nodes[port.slot].name].native += 1
        self.kernel.changes += 1  # what is known of free cores has to be counted anew
        new_transport = functools.partial(SimulatedTransport, port, self.rendezvous)
        queue = BackgroundQueue(self.rendezvous, port, caches, new_transport, Traffic())
        everyone = Group(tuple(range(len(port.net.members))))

        def begin(tensor: Tensor) -> Queued:
            self.kernel.catch_up()
            ring = ALL_REDUCE["ring"](len(everyone))
            call = CollectiveCall(ring, tensor.view(-1), everyone, Tag.NATIVE)
            return queue.begin(self.rendezvous.plan(port.net, call), call)

        return begin

    def _crowded(self, ranks: Ranks) -> bool:
        """Return whether a flow of one of `ranks` may have to wait for a core of its node."""
        changes, crowded = self._known_crowded.get(ranks, (-1, False))
        if changes != self.kernel.changes:
            names = {self.nodes[rank].name for rank in ranks}
            crowded = not all(self._fit(self._hosts[name]) for name in names)
            self._known_crowded[ranks] = self.kernel.changes, crowded
        return crowded

    def _route(self, source: int, target: int) -> Route:
        here, there = self.nodes[source], self.nodes[target]
        path = self._cluster.path(here, there)
        resources = tuple(self._resource(channel) for channel in path.channels)
        at_nodes = [
            channel
            for channel in path.channels
            if channel.name.rpartition(" ")[0] in (here.name, there.name)
        ]
        trunks = len(at_nodes) < len(path.channels)
        bandwidth = min(channel.bandwidth for channel in path.channels)
        delay = draw = None
        if self._cluster.faults:
            delay = functools.partial(self._cluster.delay, source, target, self._ranks)
        # The bandwidth of a loopback is measured with all that it takes: no headers are added.
        if here.name == there.name or not self._cluster.tcp:
            return Route(resources, path.latency, bandwidth, crosses_trunks=trunks, delay=delay)
        if self._draw_share is not None:
            draw = functools.partial(self._draw_share, source, target)
        tcp, back = self._overhead.tcp, self._cluster.path(there, here)
        round_trip = path.latency + back.latency
        # At most a window is in flight: that limits the connection like one more link.
        if bandwidth * round_trip > tcp.window:
            bandwidth = tcp.window / round_trip
            name = f"window of rank {source} to rank {target}"
            resources = (*resources, Resource(name, bandwidth))
        # The weight is that of SimGrid's CM02 model (weight-S), but without the queues of trunks: a
        # trunk's queue fills only while the trunk itself is the bottleneck.
        whole = path.latency + sum(tcp.queue / channel.bandwidth for channel in at_nodes)
        is_long = bandwidth * round_trip > max(LONG, tcp.first_window)
        return Route(
            resources,
            path.latency,
            bandwidth,
            tuple(map(self._resource, back.channels)) if tcp.acknowledgements else (),
            self._overhead.wire,
            tcp.acknowledgements,
            SlowStart(tcp, bandwidth, round_trip) if is_long else None,
            weight=1 / whole if whole else 1.0,
            crosses_trunks=trunks,
            delay=delay,
            draw_share=draw,
        )

    def _resource(self, channel: Channel) -> Resource:
        if channel not in self._channels:
            self._channels[channel] = Resource(channel.name, channel.bandwidth)
            self.change_bandwidth(channel, self._bandwidths.get(channel.name, 1.0))
        return self._channels[channel]

    # What goes wrong, from events

    def change_speed(self, node: Node, factor: float) -> None:
        """Let the cores of `node` compute `factor` times as fast as usual."""
        host = self._hosts[node.name]
        host.speed = node.speed_beside(self._reference_flops) * factor
        for rank in host.ranks:
            for thread in self._threads_of[rank]:
                thread.change_speed(host.speed)
        self.fluid.set_capacity(host.cores, host.speed * host.at_once)

    def change_bandwidth(self, channel: Channel, factor: float) -> None:
        """Let `channel` carry `factor` times as much as usual; 0: nothing."""
        self._bandwidths[channel.name] = factor
        if channel in self._channels:
            self.fluid.set_capacity(self._channels[channel], channel.bandwidth * factor)

    def is_heard(self, rank: int) -> bool:
        """Return whether no link is cut on the way from `rank` to the watcher, beside rank 0."""
        path = self._cluster.path(self.nodes[rank], self.nodes[0])
        return all(self._bandwidths.get(channel.name, 1.0) > 0 for channel in path.channels)

    def latency(self, source: int, target: int) -> float:
        """Return the seconds until the first byte from one rank is at another."""
        return self._cluster.path(self.nodes[source], self.nodes[target]).latency

    def hold(self, rank: int) -> None:
        """Stop `rank`: it computes nothing, and takes in nothing."""
        self.kernel.held.add(rank)
        for thread in self._threads_of[rank]:
            thread.hold()

    def let_go(self, rank: int) -> None:
        """Let `rank` go on after `hold`."""
        for thread in self._threads_of[rank]:
            thread.let_go()
        self.kernel.let_go(rank)
        for port in self._ports(rank):
            for stream in port.streams(out=False):
                stream.go_on()

    def kill(self, rank: int, reason: str) -> None:
        """End `rank`; what it has sent is lost."""
        self.hold(rank)
        self.kernel.kill(rank)
        for port in self._ports(rank):
            for stream in port.streams(into=False):
                stream.close(PeerLost(port.rank, reason))

    def part(self, rank: int, lost: int, reason: str) -> None:
        """Tell `rank` that `lost` is gone, if both are in one group."""
        for port, gone in zip(self._ports(rank), self._ports(lost), strict=False):
            streams = port.net.streams
            if (coming := streams.get((gone.rank, port.rank))) is None:
                arriving = None
            else:
                arriving = coming.cut_off.arriving if isinstance(coming.cut_off, Message) else None
            port.mailbox.depart(gone.rank, reason, arriving, lost=True)
            if (leaving := streams.get((port.rank, gone.rank))) is not None:
                leaving.close(PeerLost(gone.rank, reason))
            port.wake_all()

    def moved(self, rank: int) -> float:
        """Return the bytes that have crossed of messages under way to and from `rank`."""
        return sum(stream.moved() for port in self._ports(rank) for stream in port.streams())

    def _ports(self, slot: int) -> list[Port]:
        """Return the ends of a rank in the nets of the newest group; none if it is not in it."""
        return [port for net in self._nets for port in net.ports if port.slot == slot]
