"""Clusters of a cloud's instances, such as two of "aws:g5.xlarge,2,flops=15 TFLOP/s"."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.file import READER
from orchestra.cluster.nodes import Link, NetworkSwitch, Node
from orchestra.cluster.presets import GPU_OVERHEAD, LOOPBACK, NVLINK, PCIE_LATENCY, gpu_nodes
from orchestra.errors import InputError, nearest
from orchestra.settings import MAX_RANKS
from orchestra.settings.reading import Entry, yaml_value

KEYS = ("name", "speed", "flops", "memory", "price", "watts", "jitter")
LINKS = {
    "bandwidth": "1 Gbit/s", "latency": "50 us", "gpu_link": "31.5 GB/s", "gpu_latency": "2.85 us",
}  # fmt: skip
"""The quantities of a machine's network, and of each GPU's link inside it, with examples."""
MIB = 2**20


@cache
def instances() -> dict[str, dict[str, str]]:
    """Return the rows of the table of cloud instances, by name ("aws:g5.xlarge")."""
    text = Path(__file__).with_name("instances.csv").read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {row["name"]: row for row in csv.DictReader(lines)}


def cluster_of(sources: Sequence[str], name: str) -> Cluster:
    """Return the instances that `sources` name, at one switch.

    Raises:
        InputError: an unknown instance or key, or a figure that the table lacks and was not given.
    """
    machines = [_machine(source) for source in sources]
    total = sum(machine.count for machine in machines)
    if total > MAX_RANKS:
        raise InputError(f"{sources[0]}: {total} machines are more than {MAX_RANKS}")
    nodes: list[Node] = []
    switches = [NetworkSwitch("network")] if total > 1 else []
    for machine in machines:
        for label in machine.labels():
            one = replace(machine.node, name=label)
            link = machine.link("bandwidth", "latency") if total > 1 else None
            to = "network" if link else None
            if machine.gpus > 1:
                inside = machine.link("gpu_link", "gpu_latency")
                nodes += gpu_nodes(label, machine.gpus, one, inside)
                switches.append(NetworkSwitch(label, to=to, up=link, down=link))
            else:
                nodes.append(replace(one, switch=to, up=link, down=link))
    every_gpu = all(node.devices for node in nodes)
    return Cluster(
        name, tuple(nodes), tuple(switches), placement="packed" if every_gpu else "spread",
        overhead=GPU_OVERHEAD if every_gpu else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """The description of `count` alike machines."""

    source: str
    node: Node  # one of them, without links
    count: int
    gpus: int
    links: Mapping[str, float]  # the quantities that are known, by the names of `LINKS`

    def labels(self) -> list[str]:
        name = self.node.name
        return [name] if self.count == 1 else [f"{name}-{index}" for index in range(self.count)]

    def link(self, bandwidth: str, latency: str) -> Link:
        """Return the link of these two quantities."""
        for key in (bandwidth, latency):
            if key not in self.links:
                raise InputError(f"{self.source}: its {key} is not known; add ,{key}={LINKS[key]}")
        return Link(self.links[bandwidth], self.links[latency])


def _machine(source: str) -> Machine:
    what, *rest = source.split(",")
    count = int(rest.pop(0)) if rest and re.fullmatch(r"\d{1,9}", rest[0]) else 1
    given: dict[str, str] = {}
    names = (*KEYS, *LINKS)
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or key not in names:
            hint = nearest(key, names)
            raise InputError(f"{source}: {part!r} is no KEY=VALUE that is known; {hint}")
        given[key] = value
    if count < 1:
        raise InputError(f"{source}: there have to be 1 or more")
    known: dict[str, Any] = {}
    links: dict[str, float] = {}
    if what not in instances():
        raise InputError(f"{source}: is not in the table; {nearest(what, instances())}")
    gpus = _instance(instances()[what], known, links)
    for key, value in given.items():
        entry = Entry(value if key in ("name", "price") else yaml_value(value), source)
        of_link = "latency" if key.endswith("latency") else "bandwidth"
        settings, field = (Node, key) if key in KEYS else (Link, of_link)
        read = READER.read_setting(settings, field, entry, key)
        (known if key in KEYS else links)[key] = read
    if "speed" not in known and "flops" not in known:
        unit = "speed=1, of a core beside the machine that was calibrated"
        unit = "flops=15 TFLOP/s, what a GPU sustains" if gpus else unit
        raise InputError(f"{source}: its speed is not known; add ,{unit}")
    try:
        node = Node(**known, devices=min(gpus, 1), loopback=LOOPBACK)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    return Machine(source, node, count, gpus, links)


def _instance(row: Mapping[str, str], known: dict[str, Any], links: dict[str, float]) -> int:
    """Take the figures of a row of the table; return the number of GPUs."""
    gpus = int(row["gpus"])
    memory = float(row["gpu_memory"] if gpus else row["memory"]) * MIB
    known |= {"name": row["name"].partition(":")[2], "cores": int(row["vcpus"]), "memory": memory}
    if row["usd_per_hour"]:
        known["price"] = f"{row['usd_per_hour']} USD/h"
    links["bandwidth"] = float(row["network"]) * 1e6 / 8  # the table has Mbit/s
    if row["gpu_link"]:
        links |= {"gpu_link": float(row["gpu_link"]) * 1e9, "gpu_latency": NVLINK.latency}
    elif gpus > 1:
        links["gpu_latency"] = PCIE_LATENCY
    return gpus
