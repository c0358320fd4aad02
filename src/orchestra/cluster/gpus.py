"""Machines with several GPUs in a tree of switches, and presets of them.

Each GPU is a node with a device and a link of its own to the switch that joins those of a machine;
the link of that switch is the machine's network.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.costs import Line, Overhead
from orchestra.cluster.nodes import DEFAULT, JITTER_MEANS, JitterSetting, Link, Node, Switch
from orchestra.cluster.presets import CLUSTERS, LOOPBACK, Preset
from orchestra.cluster.units import BANDWIDTH, BYTES, FLOPS, SECONDS, read_price
from orchestra.settings import MAX_RANKS, setting, write

NVLINK = Link(25e9, 1.7e-6)
"""One NVLink of the generations 2 to 4 (V100, A100, H100), each direction: NVIDIA states 50 GB/s
for both. The latency is half of what NCCL's tuning takes for a hop (src/graph/tuning.cc: ring,
simple protocol), as a message crosses two links."""
PCIE_LATENCY = 2.85e-6
"""The same for a hop over PCIe."""
OVERHEAD = Overhead(
    send=Line(1e-9, 0.0), receive=Line(1e-9, 0.0), local=Line(0.0, 0.0), add=2e-12, buffer=1 << 17,
    wire=1.0, collective=8.4e-6,
)  # fmt: skip
"""Of messages between GPUs by NCCL: what a hop takes is in the latencies of the links, a collective
has 8.4 us beside its hops (as above), and no processor touches a byte. A GPU adds at the pace of
its memory: three passes at 1.5 TB/s."""


def gpu_machine(name: str, gpus: int, node: Node, link: Link) -> tuple[list[Node], Switch]:
    """The nodes of a machine's GPUs, and the switch that joins them, without a link of its own.

    Args:
        node: the machine: its cores, price and watts are dealt out, its link is left out.
        link: of each GPU, in each direction.
    """
    price = None
    if node.price is not None:
        amount, currency = read_price(node.price, where="price")
        price = f"{amount / gpus:.9f}".rstrip("0").rstrip(".") + f" {currency}/h"
    one = replace(
        node, cores=max(1, node.cores // gpus), devices=1, switch=name, up=link, down=link,
        price=price, watts=None if node.watts is None else node.watts / gpus,
    )  # fmt: skip
    return [replace(one, name=f"{name}-gpu-{index}") for index in range(gpus)], Switch(name)


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
        """A switch in each machine, and one above them."""
        machine = Node(
            "machine", self.cores, flops=self._read(FLOPS, "flops"), devices=1,
            memory=self._read(BYTES, "memory"), jitter=self.jitter, loopback=LOOPBACK,
        )  # fmt: skip
        inside = self._link("gpu_link", "gpu_latency")
        network = Link(self._read(BANDWIDTH, "bandwidth"), self._read(SECONDS, "latency"))
        nodes: list[Node] = []
        switches = [Switch("network")]
        for index in range(self.machines):
            gpus, switch = gpu_machine(f"node-{index}", self.gpus, machine, inside)
            nodes += gpus
            switches.append(replace(switch, to="network", up=network, down=network))
        return Cluster(
            write(self, CLUSTERS), tuple(nodes), tuple(switches), placement="packed",
            overhead=OVERHEAD,
        )  # fmt: skip


@dataclass(frozen=True, repr=False)
class DgxA100(GpuMachines):
    """NVIDIA DGX A100: 8 GPUs on NVSwitch, 8 InfiniBand ports of 200 Gbit/s.

    GPUs: 12 NVLinks each, 300 GB/s in each direction. Network: all ports together; 9.6 us a hop in
    NCCL's tuning (ring, simple protocol), of which 3.4 us are the two GPUs' links here. Sustained:
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
    cores: int = setting(112, "processor cores of each machine", low=1, high=4096)
    flops: str = setting("400 TFLOP/s", "what a GPU sustains in training")
    memory: str = setting("80 GB", "of a GPU")
    gpu_link: str = setting("450 GB/s", "of a GPU to the others of its machine, each direction")
    bandwidth: str = setting("3.2 Tbit/s", "of a machine's network, in each direction")


@dataclass(frozen=True, repr=False)
class PcieGpus(GpuMachines):
    """Machines with 4 GPUs on PCIe 4.0 and a network card of 100 Gbit/s.

    PCIe 4.0: 16 lanes of 16 GT/s, 31.5 GB/s in each direction; 5.7 us a hop in NCCL's tuning.
    Cores, memory and what a GPU sustains are a scenario. All GPUs are at one PCIe switch.
    """

    _: KW_ONLY
    gpus: int = setting(4, "of each machine", low=1, high=64)
    cores: int = setting(32, "processor cores of each machine", low=1, high=4096)
    flops: str = setting("60 TFLOP/s", "what a GPU sustains in training")
    memory: str = setting("24 GB", "of a GPU")
    gpu_link: str = setting("31.5 GB/s", "of a GPU to the others of its machine, each direction")
    gpu_latency: str = setting("2.85 us", "of that link; a message crosses two")
    bandwidth: str = setting("100 Gbit/s", "of a machine's network, in each direction")
    latency: str = setting("2 us", "of that link; between two machines a message crosses two")
