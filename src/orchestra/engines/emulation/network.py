"""The network of a cluster: a bridge for each switch, and a cable with two shaped ends a link.

    node's namespace            the fabric's namespace
    eth0 ====================== port-0 -- switch-0 -- up-1 ==== down-1 -- switch-1
    shaped as "node up"         shaped as "node down"

Each end of a cable (a veth pair) shapes what it sends, by a token bucket filter (tbf). Where all
traffic of a switch shares a bandwidth, whatever enters by one of its ports first passes an
interface (ifb) that is shaped as "switch shared".

A namespace that `ip netns add` makes has a name in the file system and stays after a crash. These
are held by open descriptors of the launcher, and by the processes inside. When both are gone the
kernel removes them, and with them every interface, bridge and queueing discipline, whatever it was
that ended the processes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from orchestra.cluster import Channel, Cluster, NetworkSwitch, Node
from orchestra.engines.processes.system import enter_namespace, leave_namespace, set_namespace
from orchestra.errors import RunFailed

NODE_END = "eth0"
HEADERS_BYTES = 14 + 20 + 32  # of a segment: Ethernet, IPv4, TCP with Linux's time stamps
WIRE_BYTES = 24
"""That each frame has on Ethernet beside those: preamble, check sequence and gap. Token buckets
count them; the counters of interfaces do not."""

_COUNTERS = Path("/proc/thread-self/net/dev")
"""Of the thread's namespace: interface, 8 columns of what came in, 8 of what left."""
_IPV6 = Path("/proc/net/if_inet6")
_LONGEST_TIMEOUT = Path("/proc/sys/net/ipv4/tcp_rto_max_ms")
"""After a cut TCP tries again within that time, instead of after as long as the cut has lasted."""

_BURST_SECONDS = 1e-3
_LEAST_BURST = 3200  # two frames, without which nothing would ever pass
_QUEUE_SECONDS, _LEAST_QUEUE = 2e-3, 128_000  # as in a switch: what comes beyond is lost
_DELAYED_FRAMES = 1 << 20  # that netem holds
_CUBIC = "congctl cubic"  # which most systems have; the default of a virtual machine may differ
_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_OWN_NAMESPACE = "/proc/thread-self/ns/net"
_MOST_RATE = 4e9  # bytes/s: tbf counts in 32 bits of 64 ns, and no cable here is faster


@contextmanager
def _returning() -> Iterator[None]:
    """Bring this thread back into its network namespace at the end of the block."""
    with ExitStack() as held:
        before = os.open(_OWN_NAMESPACE, os.O_RDONLY)
        held.callback(os.close, before)
        held.callback(set_namespace, before)
        yield


@contextmanager
def inside(path: str) -> Iterator[None]:
    """Sockets and processes that this thread makes inside belong to the namespace at `path`."""
    with _returning():
        enter_namespace(path)
        yield


class Namespace:
    """A network namespace, until `close`."""

    def __init__(self) -> None:
        with _returning():
            leave_namespace()  # which moves this thread
            self.descriptor = os.open(_OWN_NAMESPACE, os.O_RDONLY)

    @property
    def path(self) -> str:
        """The path by which other processes of this machine open it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def inside(self) -> AbstractContextManager[None]:
        """Enter the namespace in this thread: see the function `inside`."""
        return inside(self.path)

    def ip(self, lines: Sequence[str]) -> None:
        """Carry out commands of ip(8), such as "link set lo up". Raises `RunFailed`."""
        self._batch("ip", lines)

    def tc(self, lines: Sequence[str]) -> None:
        """Carry out commands of tc(8). Raises `RunFailed`."""
        self._batch("tc", lines)

    def _batch(self, program: str, lines: Sequence[str]) -> None:
        with self.inside():
            done = subprocess.run(
                [program, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True,
                text=True, check=False,
            )  # fmt: skip
        if done.returncode != 0:
            reason = "; ".join(done.stderr.strip().splitlines())
            raise RunFailed(f"the emulated network: {program}: {reason}")

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True)
class End:
    """One end of a cable, or a switch's middle: what it sends is shaped as `channel`."""

    channel: Channel
    namespace: Namespace
    interface: str


@dataclass(frozen=True)
class LinkCounters:
    """What an end has sent: frames, and their bytes with headers."""

    frames: int
    bytes: int

    @property
    def on_the_wire(self) -> int:
        """The bytes that count against a link's bandwidth, as token buckets do."""
        return self.bytes + WIRE_BYTES * self.frames

    @property
    def payload(self) -> int:
        """The bytes without the headers of frames, which all belong to TCP connections."""
        return self.bytes - HEADERS_BYTES * self.frames


@dataclass(frozen=True)
class Meters:
    """Names of counters, by interface, by the path of a namespace: any process of this machine that
    may enter the namespaces reads them, as long as their launcher lives."""

    interfaces: Mapping[str, Mapping[str, str]]

    def read(self) -> dict[str, LinkCounters]:
        """Read what each end has sent so far."""
        found = {}
        for path, names in self.interfaces.items():
            with inside(path):
                lines = _COUNTERS.read_text().splitlines()
            for line in lines:
                interface, _, fields = line.partition(":")
                if (name := names.get(interface.strip())) is not None:
                    size, frames = map(int, fields.split()[8:10])
                    found[name] = LinkCounters(frames, size)
        return found


class Network:
    """The `nodes` of `cluster` in namespaces of their own, joined by its switches; until `close`.

    Where there is `netem`, the kernel adds latencies itself.
    """

    def __init__(self, cluster: Cluster, nodes: Iterable[Node]) -> None:
        self._cluster = cluster
        self._nodes = list({node.name: node for node in nodes}.values())
        self._held = ExitStack()
        self.namespaces: dict[str, Namespace] = {}  # by the name of a node
        self.addresses: dict[str, str] = {}  # the same
        self.ends: dict[str, End] = {}  # by the channel that they shape ("worker-3 up")
        self._bridges: dict[str, str] = {}  # by the name of a switch
        self._ports: dict[str, list[str]] = {}  # of each bridge
        try:
            self._fabric = self._namespace()
            self.netem = self._has_netem()
            self._build()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of all namespaces: they end with the last process inside."""
        self._held.close()

    def shape(self, channel: str, factor: float = 1.0) -> None:
        end = self.ends[channel]
        end.namespace.tc([_tbf("change", end, factor)])

    def cut(self, owner: str, *, cut: bool) -> None:
        """Pull the cable of `owner`, a node or switch, towards its switch; or plug it in again."""
        end = self.ends[f"{owner} down"]
        end.namespace.ip([f"link set {end.interface} {'down' if cut else 'up'}"])

    def meters(self) -> Meters:
        """Return the counters of all ends, by the name of their channel."""
        interfaces: dict[str, dict[str, str]] = {}
        for name, end in self.ends.items():
            interfaces.setdefault(end.namespace.path, {})[end.interface] = name
        return Meters(interfaces)

    def _namespace(self) -> Namespace:
        namespace = Namespace()
        self._held.callback(namespace.close)
        return namespace

    def _build(self) -> None:
        switches, lines = self._cluster.switches, ["link set lo up"]
        for index, switch in enumerate(switches):
            bridge = self._bridges[switch.name] = f"switch-{index}"
            lines += [f"link add name {bridge} type bridge stp_state 0 mcast_snooping 0"]
            lines += _up(bridge)
        for index, switch in enumerate(switches):
            lines += self._join(index, switch)
        for index, node in enumerate(self._nodes):
            lines += self._plug_in(index, node)
        self._fabric.ip(lines)
        for node in self._nodes:
            address, namespace = self.addresses[node.name], self.namespaces[node.name]
            own = ["link set lo up", f"address add {address}/32 dev lo"]
            if node.switch is not None:
                own = [own[0], f"address add {address}/16 dev {NODE_END}", *_up(NODE_END)]
            namespace.ip(own)
            if node.switch is not None and "cubic" in _CONTROLS.read_text().split():
                namespace.ip([f"route replace 10.0.0.0/16 dev {NODE_END} src {address} {_CUBIC}"])
            with namespace.inside(), suppress(OSError):  # from Linux 6.15 on
                _LONGEST_TIMEOUT.write_text("1000")
        self._shape_all()
        for index, switch in enumerate(switches):
            if switch.shared is not None:
                ports = self._ports[self._bridges[switch.name]]
                middle = f"shared-{index}"
                self._fabric.tc([line for port in ports for line in redirected(port, middle)])

    def _has_netem(self) -> bool:
        with suppress(RunFailed):
            self._fabric.tc(["qdisc add dev lo root netem delay 1us", "qdisc del dev lo root"])
            return True
        return False

    def _join(self, index: int, switch: NetworkSwitch) -> list[str]:
        """Commands that join a switch to the one above it, and make what all its traffic shares."""
        lines = []
        if switch.shared is not None:
            middle = f"shared-{index}"
            lines += [f"link add name {middle} type ifb", *_up(middle)]
            self._add_end(f"{switch.name} shared", self._fabric, middle)
        if switch.to is not None:
            up, down = f"up-{index}", f"down-{index}"
            lines += [
                f"link add name {up} type veth peer name {down}",
                *self._port(up, switch.name),
                *self._port(down, switch.to),
            ]
            self._add_end(f"{switch.name} up", self._fabric, up)
            self._add_end(f"{switch.name} down", self._fabric, down)
        return lines

    def _plug_in(self, index: int, node: Node) -> list[str]:
        """Make a node's namespace; commands that plug its cable into its switch."""
        namespace = self.namespaces[node.name] = self._namespace()
        self.addresses[node.name] = f"10.0.{index // 250}.{1 + index % 250}"
        if node.switch is None:
            return []
        port = f"port-{index}"
        self._add_end(f"{node.name} up", namespace, NODE_END)
        self._add_end(f"{node.name} down", self._fabric, port)
        # The far end is made in the node's namespace, so that all nodes can call it eth0.
        cable = f"link add name {port} type veth peer name {NODE_END} netns {namespace.path}"
        return [cable, *self._port(port, node.switch)]

    def _port(self, interface: str, switch: str) -> list[str]:
        bridge = self._bridges[switch]
        self._ports.setdefault(bridge, []).append(interface)
        return [f"link set {interface} master {bridge}", *_up(interface)]

    def _add_end(self, channel: str, namespace: Namespace, interface: str) -> None:
        self.ends[channel] = End(self._cluster.channels[channel], namespace, interface)

    def _shape_all(self) -> None:
        lines: dict[Namespace, list[str]] = {}
        for end in self.ends.values():
            own = lines.setdefault(end.namespace, [])
            own.append(_tbf("add", end))
            if self.netem and end.channel.latency > 0:
                microseconds = max(1, round(end.channel.latency * 1e6))
                own.append(
                    f"qdisc add dev {end.interface} parent 1:1 handle 10: netem "
                    f"delay {microseconds}us limit {_DELAYED_FRAMES}"
                )
        for namespace, own in lines.items():
            namespace.tc(own)


def _tbf(verb: str, end: End, factor: float = 1.0) -> str:
    bucket = token_bucket(end.channel.bandwidth * factor)
    return f"qdisc {verb} dev {end.interface} root handle 1: {bucket}"


def token_bucket(bandwidth: float) -> str:
    """Return the queueing discipline that lets `bandwidth` bytes a second through."""
    rate = min(bandwidth, _MOST_RATE)
    burst = max(_LEAST_BURST, int(rate * _BURST_SECONDS))
    queue = max(_LEAST_QUEUE, int(rate * _QUEUE_SECONDS))
    bits = max(8, int(rate * 8))
    return f"tbf rate {bits}bit burst {burst} limit {queue} overhead {WIRE_BYTES}"


def redirected(interface: str, middle: str) -> list[str]:
    """Return commands of tc(8) that send what enters by `interface` through `middle` first."""
    return [
        f"qdisc add dev {interface} handle ffff: ingress",
        f"filter add dev {interface} parent ffff: protocol all u32 match u32 0 0 "
        f"action mirred egress redirect dev {middle}",
    ]


def _up(interface: str) -> list[str]:
    """Return commands that bring `interface` up, without IPv6, whose announcements would count."""
    quiet = [f"link set {interface} addrgenmode none"] if _IPV6.exists() else []
    return [*quiet, f"link set {interface} up"]
