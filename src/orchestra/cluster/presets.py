"""Clusters with a name. Each figure's source stands with it; all are settings.

Bandwidths are those of the wire: what headers take of them is part of what messages cost
(`Overhead.wire`). Latencies are one way over one link; a message between two nodes of a switch
crosses two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.nodes import (
    DEFAULT,
    JITTER_MEANS,
    MAX_CORES,
    JitterSetting,
    Line,
    Link,
    LogNormal,
    NetworkSwitch,
    Node,
    Overhead,
)
from orchestra.cluster.units import BANDWIDTH, BYTES, FLOPS, SECONDS, Unit, read_price
from orchestra.errors import InputError
from orchestra.settings import MAX_RANKS, Registry, Settings, setting, write
from orchestra.settings.base import redefault

CLUSTERS = Registry(
    "cluster",
    {
        "ExponentialTail": "orchestra.cluster.nodes:ExponentialTail",
        "LogNormal": "orchestra.cluster.nodes:LogNormal",
        "Normal": "orchestra.cluster.nodes:Normal",
        "containers_10mbit": "orchestra.cluster.presets:Containers10Mbit",
        "dgx_a100": "orchestra.cluster.presets:DgxA100",
        "dgx_h100": "orchestra.cluster.presets:DgxH100",
        "infiniband": "orchestra.cluster.presets:Infiniband",
        "lan_10gbit": "orchestra.cluster.presets:Lan10Gbit",
        "lan_1gbit": "orchestra.cluster.presets:Lan1Gbit",
        "one_host": "orchestra.cluster.presets:OneHost",
        "pcie_gpus": "orchestra.cluster.presets:PcieGpus",
        "stragglers": "orchestra.cluster.presets:Stragglers",
        "two_sites": "orchestra.cluster.presets:TwoSites",
        "wifi": "orchestra.cluster.presets:Wifi",
    },
    group="orchestra.clusters",
)


LOOPBACK = Link(3e9, 15e-6)
"""The link between ranks of one node; `OneHost` gives the sources of the figures."""
NVLINK = Link(25e9, 1.7e-6)
"""One NVLink of the generations 2 to 4 (V100, A100, H100), each direction: NVIDIA states 50 GB/s
for both. The latency is half of what NCCL's tuning takes for a hop (src/graph/tuning.cc: ring,
simple protocol), as a message crosses two links."""
PCIE_LATENCY = 2.85e-6
"""The same for a hop over PCIe."""
GPU_OVERHEAD = Overhead(
    send=Line(1e-9, 0.0), receive=Line(1e-9, 0.0), local=Line(0.0, 0.0), add=2e-12, buffer=1 << 17,
    wire=1.0, collective=8.4e-6,
)  # fmt: skip
"""The overhead of messages between GPUs by NCCL. The time of a hop is in the latencies of the
links, a collective takes 8.4 us beside its hops (as above), and no processor touches a byte. A GPU
adds at the speed of its memory: three passes at 1.5 TB/s."""


@dataclass(frozen=True, repr=False)
class Preset(Settings, ABC):
    """A cluster by name."""

    @abstractmethod
    def cluster(self) -> Cluster:
        """Return the cluster that the settings describe."""

    def _read(self, unit: Unit, name: str) -> float:
        where = f"{CLUSTERS.name_of(type(self))}.{name}"
        return unit.read(getattr(self, name), where=where)

    def _link(self, bandwidth: str, latency: str) -> Link:
        return Link(self._read(BANDWIDTH, bandwidth), self._read(SECONDS, latency))


@dataclass(frozen=True, repr=False)
class OneHost(Preset):
    """One machine: ranks share its cores, and talk over loopback.

    Loopback: 3 GB/s in all and 15 us, measured on 2 cores of an AMD EPYC with TCP sockets in
    Python (100 MB one way in 33 ms; 4 KB and its answer in 50 us, processor time included).
    """

    cores: int = setting(8, "processor cores", low=1, high=MAX_CORES)
    _: KW_ONLY
    speed: float = setting(
        1.0, "of a core; the machine that was calibrated has 1", above=0, high=1e9
    )
    bandwidth: str = setting("3 GB/s", "what all ranks together move over loopback")
    latency: str = setting("15 us", "of a message over loopback, one way")
    jitter: JitterSetting = setting(DEFAULT, JITTER_MEANS)
    shared_memory: bool = setting(True, "whether ranks carry out collectives in shared memory")

    def cluster(self) -> Cluster:
        node = Node(
            "host", self.cores, speed=self.speed, jitter=self.jitter,
            loopback=self._link("bandwidth", "latency"), shared_memory=self.shared_memory,
        )  # fmt: skip
        return Cluster(write(self, CLUSTERS), (node,), placement="packed")


@dataclass(frozen=True, repr=False)
class Lan(Preset):
    """Equal nodes at one switch that is never the bottleneck. Base of the presets below."""

    nodes: int = setting(8, "how many", low=1, high=MAX_RANKS)
    _: KW_ONLY
    cores: int = setting(4, "processor cores of each node", low=1, high=MAX_CORES)
    speed: float = setting(
        1.0, "of a core; the machine that was calibrated has 1", above=0, high=1e9
    )
    bandwidth: str = setting("1 Gbit/s", "of each node's link, in each direction")
    latency: str = setting("50 us", "of one link, one way; between two nodes a message crosses two")
    jitter: JitterSetting = setting(DEFAULT, JITTER_MEANS)

    def cluster(self) -> Cluster:
        return self._star()

    def _star(
        self,
        speeds: Iterable[float] | None = None,
        down: Link | None = None,
        shared: float | None = None,
    ) -> Cluster:
        """Return nodes of these `speeds` at a switch whose traffic shares what is `shared`."""
        up = self._link("bandwidth", "latency")
        nodes = tuple(
            Node(
                f"worker-{index}", self.cores, speed=speed, jitter=self.jitter,
                switch="switch", up=up, down=down or up, loopback=LOOPBACK,
            )
            for index, speed in enumerate(speeds or [self.speed] * self.nodes)
        )  # fmt: skip
        return Cluster(
            write(self, CLUSTERS),
            nodes,
            (NetworkSwitch("switch", shared=shared),),
            placement="spread",
        )


@dataclass(frozen=True, repr=False)
class Lan1Gbit(Lan):
    """Equal machines at one Gigabit Ethernet switch.

    Bandwidth: IEEE 802.3, 1000BASE-T. Latency: 100 us from node to node, in the range of 40 to 300
    us that Aspen Systems' glossary gives for Gigabit Ethernet ("Low latency").
    """


@dataclass(frozen=True, repr=False)
class Lan10Gbit(Lan):
    """Equal machines at one 10 Gigabit Ethernet switch.

    Bandwidth: IEEE 802.3ae. Latency: 20 us from application to application, as Hurwitz and Feng
    measured (Initial End-to-End Performance Evaluation of 10-Gigabit Ethernet, Hot Interconnects
    11, 2003).
    """

    _: KW_ONLY
    bandwidth: str = redefault(Lan, "bandwidth", "10 Gbit/s")
    latency: str = redefault(Lan, "latency", "10 us")


@dataclass(frozen=True, repr=False)
class Infiniband(Lan):
    """Equal machines on an InfiniBand HDR fabric, used natively: sockets over it are slower.

    Nothing is taken by TCP (`tcp: false`); InfiniBand's own headers, 1 % of 4 KiB, are left out.

    Bandwidth: HDR at width 4x, 200 Gbit/s. Latency: 1.2 us from node to node, as MPI's small
    messages do in the examples of QLogic's user guide IB6054601-00 (1.06 to 1.26 us).
    """

    _: KW_ONLY
    bandwidth: str = redefault(Lan, "bandwidth", "200 Gbit/s")
    latency: str = redefault(Lan, "latency", "600 ns")

    def cluster(self) -> Cluster:
        return replace(self._star(), tcp=False)


@dataclass(frozen=True, repr=False)
class Wifi(Lan):
    """Laptops at one access point, which share its radio channel: one sends at a time.

    Bandwidth: 360 Mbit/s, what a device with two antennas gets of Wi-Fi 5 (866.7 Mbit/s nominal)
    at ten metres, by duckware.com/tech/wifi-in-the-us.html. A byte between two laptops crosses the
    air twice, so all of them together move half of it. Latency: an assumption.
    """

    _: KW_ONLY
    bandwidth: str = setting("360 Mbit/s", "of the radio channel, which every byte crosses twice")
    latency: str = redefault(Lan, "latency", "1 ms")

    def cluster(self) -> Cluster:
        return self._star(shared=self._read(BANDWIDTH, "bandwidth") / 2)


@dataclass(frozen=True, repr=False)
class Containers10Mbit(Lan):
    """Containers on one host of 16 cores, one processor each, their sending shaped to 10 Mbit/s.

    The set-up that the report of the O.N.O. project states for its study of Strategy-NetworkSwitch
    (Docker with one CPU a node, Pumba at 10 Mbit/s). Pumba shapes what a container sends (netem on
    its own interface); what it receives comes at the bridge's pace. 3.1 Gbit/s for that were
    measured between two network namespaces over veth on 2 cores of an AMD EPYC; the latency of a
    link is that of a message over loopback there.
    """

    _: KW_ONLY
    cores: int = setting(1, "processors of each container", low=1, high=MAX_CORES)
    bandwidth: str = setting("10 Mbit/s", "of what a container sends")
    down: str = setting("3.1 Gbit/s", "of what a container receives")
    latency: str = redefault(Lan, "latency", "15 us")

    def cluster(self) -> Cluster:
        return self._star(down=self._link("down", "latency"))


@dataclass(frozen=True, repr=False)
class Stragglers(Lan1Gbit):
    """Gigabit Ethernet between unlike machines, whose compute takes now longer, now shorter.

    The figures are a scenario: a quarter of the nodes, the last ones, at a third of the speed, and
    durations that vary by about a fifth.
    """

    _: KW_ONLY
    slow: int | None = setting(
        None, "nodes that are slow; none: a quarter, at least one", low=0, high=MAX_RANKS
    )
    factor: float = setting(3.0, "how many times as long these take", above=1, high=1e9)
    jitter: JitterSetting = redefault(Lan, "jitter", LogNormal(0.2))

    def check(self) -> None:
        if self.slow is not None and self.slow > self.nodes:
            raise InputError(f"stragglers.slow: {self.slow} of {self.nodes} nodes; give fewer")

    def cluster(self) -> Cluster:
        slow = max(1, self.nodes // 4) if self.slow is None else self.slow
        speeds = [self.speed] * (self.nodes - slow) + [self.speed / self.factor] * slow
        return self._star(speeds)


@dataclass(frozen=True, repr=False)
class TwoSites(Lan1Gbit):
    """Two sites of Gigabit Ethernet, half of the nodes at each, with a slow and long line between.

    The line is a scenario: 100 Mbit/s each way, and 10 ms, which light in fibre (5 us a km) needs
    for 2,000 km.
    """

    _: KW_ONLY
    wan_bandwidth: str = setting("100 Mbit/s", "of the line between the sites, in each direction")
    wan_latency: str = setting("10 ms", "of the line between the sites, one way")

    def cluster(self) -> Cluster:
        star = self._star()
        line = self._link("wan_bandwidth", "wan_latency")
        # Ranks are spread in the order of nodes, so each site has neighbouring ranks.
        here = (self.nodes + 1) // 2
        nodes = tuple(
            replace(node, name=f"{site}-{number}", switch=f"site-{site}")
            for index, node in enumerate(star.nodes)
            for site, number in [("a", index) if index < here else ("b", index - here)]
        )
        switches = (
            NetworkSwitch("site-a"),
            NetworkSwitch("site-b", to="site-a", up=line, down=line),
        )
        return Cluster(write(self, CLUSTERS), nodes, switches, placement="spread")


def gpu_nodes(name: str, gpus: int, node: Node, link: Link) -> list[Node]:
    """Return a node for each GPU of a machine, at a switch with the name of the machine.

    Args:
        node: the machine: its cores, price and watts are dealt out, its link is left out.
        link: of each GPU, in each direction.
    """
    price = None
    if node.price is not None:
        amount, currency = read_price(node.price, where="price")
        # A price is text: nine decimals, so that the sum over the GPUs is the machine's.
        price = f"{amount / gpus:.9f}".rstrip("0").rstrip(".") + f" {currency}/h"
    one = replace(
        node, cores=max(1, node.cores // gpus), devices=1, switch=name, up=link, down=link,
        price=price, watts=None if node.watts is None else node.watts / gpus,
    )  # fmt: skip
    return [replace(one, name=f"{name}-gpu-{index}") for index in range(gpus)]


@dataclass(frozen=True, repr=False)
class GpuMachines(Preset):
    """Machines of alike GPUs at one switch. Base of the presets below."""

    machines: int = setting(2, "how many", low=1, high=MAX_RANKS)
    _: KW_ONLY
    gpus: int = setting(8, "of each machine", low=1, high=64)
    cores: int = setting(128, "processor cores of each machine", low=1, high=4096)
    flops: str = setting("163 TFLOP/s", "what a GPU sustains in training")
    memory: str = setting("40 GB", "of a GPU")
    gpu_link: str = setting("300 GB/s", "of a GPU to the others of its machine, each direction")
    gpu_latency: str = setting("1.7 us", "of that link; a message crosses two")
    bandwidth: str = setting("1.6 Tbit/s", "of a machine's network, in each direction")
    latency: str = setting("3.1 us", "of that link; between two machines a message crosses two")
    jitter: JitterSetting = setting(DEFAULT, JITTER_MEANS)

    def cluster(self) -> Cluster:
        machine = Node(
            "machine", self.cores, flops=self._read(FLOPS, "flops"), devices=1,
            memory=self._read(BYTES, "memory"), jitter=self.jitter, loopback=LOOPBACK,
        )  # fmt: skip
        inside = self._link("gpu_link", "gpu_latency")
        network = self._link("bandwidth", "latency")
        names = [f"node-{index}" for index in range(self.machines)]
        nodes = [each for name in names for each in gpu_nodes(name, self.gpus, machine, inside)]
        switches = [NetworkSwitch(name, to="network", up=network, down=network) for name in names]
        return Cluster(
            write(self, CLUSTERS), tuple(nodes), (NetworkSwitch("network"), *switches),
            placement="packed", overhead=GPU_OVERHEAD,
        )  # fmt: skip


@dataclass(frozen=True, repr=False)
class DgxA100(GpuMachines):
    """NVIDIA DGX A100: 8 GPUs on NVSwitch, 8 InfiniBand ports of 200 Gbit/s.

    GPUs: 12 NVLinks each, 300 GB/s in each direction. Network: all ports together; 9.6 us a hop in
    NCCL's tuning (ring, simple protocol); the two GPUs' links here take 3.4 us of these. Sustained:
    163 TFLOP/s, measured by Narayanan et al. with Megatron-LM on 3,072 A100 (SC 2021), 52 % of the
    peak in 16-bit arithmetic; far less in float32 and on small models.
    """


@dataclass(frozen=True, repr=False)
class DgxH100(GpuMachines):
    """NVIDIA DGX H100: 8 GPUs on NVSwitch, 8 InfiniBand ports of 400 Gbit/s.

    GPUs: 18 NVLinks each, 450 GB/s in each direction. Latencies as in dgx_a100. Sustained: 400
    TFLOP/s, as Llama 3 was trained with on 16,384 H100 (Dubey et al., 2024), 41 % of the peak in
    16-bit arithmetic.
    """

    _: KW_ONLY
    cores: int = redefault(GpuMachines, "cores", 112)
    flops: str = redefault(GpuMachines, "flops", "400 TFLOP/s")
    memory: str = redefault(GpuMachines, "memory", "80 GB")
    gpu_link: str = redefault(GpuMachines, "gpu_link", "450 GB/s")
    bandwidth: str = redefault(GpuMachines, "bandwidth", "3.2 Tbit/s")


@dataclass(frozen=True, repr=False)
class PcieGpus(GpuMachines):
    """Machines with 4 GPUs on PCIe 4.0 and a network card of 100 Gbit/s.

    PCIe 4.0: 16 lanes of 16 GT/s, 31.5 GB/s in each direction; 5.7 us a hop in NCCL's tuning.
    Cores, memory and what a GPU sustains are a scenario. All GPUs are at one PCIe switch.
    """

    _: KW_ONLY
    gpus: int = redefault(GpuMachines, "gpus", 4)
    cores: int = redefault(GpuMachines, "cores", 32)
    flops: str = redefault(GpuMachines, "flops", "60 TFLOP/s")
    memory: str = redefault(GpuMachines, "memory", "24 GB")
    gpu_link: str = redefault(GpuMachines, "gpu_link", "31.5 GB/s")
    gpu_latency: str = redefault(GpuMachines, "gpu_latency", "2.85 us")
    bandwidth: str = redefault(GpuMachines, "bandwidth", "100 Gbit/s")
    latency: str = redefault(GpuMachines, "latency", "2 us")
