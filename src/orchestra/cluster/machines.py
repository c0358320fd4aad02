"""Clusters from descriptions of machines: this one, saved outputs of tools, a cloud's instances.

here                                     this machine: lscpu, and nvidia-smi where there is one
node.json,4,speed=0.8,topo=topo.txt      four like the one whose `lscpu -J` was saved
aws:g5.xlarge,2,flops=15 TFLOP/s         two of an instance of the table
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from orchestra.cluster.cluster import Cluster
from orchestra.cluster.file import READER
from orchestra.cluster.nodes import Link, Node, Switch
from orchestra.cluster.presets import GPU_OVERHEAD, LOOPBACK, NVLINK, PCIE_LATENCY, gpu_nodes
from orchestra.errors import InputError, nearest
from orchestra.settings import MAX_RANKS
from orchestra.settings.reading import Entry, yaml_value

HERE = "here"
KEYS = ("name", "speed", "flops", "memory", "price", "watts", "jitter")
LINKS = {
    "bandwidth": "1 Gbit/s", "latency": "50 us", "gpu_link": "31.5 GB/s", "gpu_latency": "2.85 us",
}  # fmt: skip
"""The quantities of a machine's network, and of each GPU's link inside it, with examples."""
PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")
MAX_OUTPUT = 4_000_000
MIB = 2**20


@cache
def instances() -> dict[str, dict[str, str]]:
    """Return the rows of the table of cloud instances, by name ("aws:g5.xlarge")."""
    text = Path(__file__).with_name("instances.csv").read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {row["name"]: row for row in csv.DictReader(lines)}


def cluster_of(sources: Sequence[str], name: str) -> Cluster:
    """Return the machines that `sources` name, at one switch.

    Raises:
        InputError: an unknown machine or key, or a figure that nobody knows and was not given.
    """
    machines = [_machine(source) for source in sources]
    total = sum(machine.count for machine in machines)
    if total > MAX_RANKS:
        raise InputError(f"{sources[0]}: {total} machines are more than {MAX_RANKS}")
    nodes: list[Node] = []
    switches = [Switch("network")] if total > 1 else []
    for machine in machines:
        for label in machine.labels():
            one = replace(machine.node, name=label)
            link = machine.link("bandwidth", "latency") if total > 1 else None
            to = "network" if link else None
            if machine.gpus > 1:
                inside = machine.link("gpu_link", "gpu_latency")
                nodes += gpu_nodes(label, machine.gpus, one, inside)
                switches.append(Switch(label, to=to, up=link, down=link))
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
    names = (*KEYS, *LINKS, "topo")
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
    topo = given.pop("topo", None)
    if what in instances():
        gpus = _instance(instances()[what], known, links)
    elif ":" in what and not Path(what).exists():
        raise InputError(f"{source}: is not in the table; {nearest(what, instances())}")
    else:
        lscpu, matrix = _outputs(what, topo)
        known |= {"name": re.sub(r"[^\w.-]", "-", Path(what).stem), "cores": _cores(lscpu, what)}
        gpus = _topology(matrix, topo or "nvidia-smi topo -m", links) if matrix else 0
        if what == HERE and not gpus:
            # The machine itself is the one that is calibrated.
            known["speed"] = 1.0
    for key, value in given.items():
        entry = Entry(value if key in ("name", "price") else yaml_value(value), source)
        of_link = "latency" if key.endswith("latency") else "bandwidth"
        settings, field = (Node, key) if key in KEYS else (Link, of_link)
        read = READER.read_setting(settings, field, entry, key)
        (known if key in KEYS else links)[key] = read
        if key in ("speed", "flops"):
            # A figure that is given replaces the other unit, of which a node has one only.
            known.pop("flops" if key == "speed" else "speed", None)
    if "speed" not in known and "flops" not in known:
        unit = "speed=1, of a core beside the machine that was calibrated"
        unit = "flops=15 TFLOP/s, what a GPU sustains" if gpus else unit
        raise InputError(f"{source}: how fast it is nobody says; add ,{unit}")
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


# Outputs of lscpu and nvidia-smi


def _outputs(what: str, topo: str | None) -> tuple[str, str]:
    """Return the outputs of `lscpu -J` and `nvidia-smi topo -m`; the latter may be empty."""
    if what != HERE:
        return _read(what), _read(topo) if topo else ""
    lscpu = _run("lscpu", "-J")
    if not lscpu:
        raise InputError(f"{HERE}: there is no lscpu; save its output elsewhere, or write the file")
    return lscpu, _read(topo) if topo else _run("nvidia-smi", "topo", "-m")


def _run(*command: str) -> str:
    """Return the output of a command; empty where there is none, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: str) -> str:
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.read(MAX_OUTPUT)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror}; give {HERE}, a saved output of lscpu -J, "
            "or an instance such as aws:g5.xlarge"
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not a text file in UTF-8") from None


def _cores(text: str, what: str) -> int:
    """Return the processors that a system has at work: what Orchestra calls cores elsewhere."""
    try:
        fields = {each["field"]: each["data"] for each in _fields(json.loads(text)["lscpu"])}
        parts = [part.strip().partition("-") for part in fields["On-line CPU(s) list:"].split(",")]
        return sum(int(last or first) - int(first) + 1 for first, _, last in parts)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{what}: is no output of lscpu -J; save one with: lscpu -J") from None


def _fields(found: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the fields, which newer versions of lscpu nest."""
    for each in found:
        yield each
        yield from _fields(each.get("children", ()))


def _topology(text: str, where: str, links: dict[str, float]) -> int:
    """Take the link between GPUs from a matrix; return how many there are.

    Raises:
        InputError: they are not all joined alike, which is no star.
    """
    # nvidia-smi underlines its header, also where its output is no terminal.
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in text.splitlines()]
    # The header begins with GPU0, too; a row has an X at itself.
    rows = [
        (at, line)
        for at, line in enumerate(lines, 1)
        if line and re.match(r"GPU\d+$", line[0]) and "X" in line
    ]
    if not rows:
        raise InputError(f"{where}: is no output of nvidia-smi topo -m: no row begins with GPU0")
    kinds: dict[str, str] = {}
    for at, line in rows:
        for column, kind in enumerate(line[1 : len(rows) + 1]):
            if kind != "X":
                kind = "PCIe" if kind in PCIE else kind
                pair = f"{line[0]} and GPU{column}"
                kinds.setdefault(kind, f"{where}:{at}: {pair} are joined by {kind}")
    if len(kinds) > 1:
        first, other, *_ = kinds.values()
        again = other.partition(": ")[2]
        raise InputError(f"{first}, {again}: a tree needs all alike; write the file by hand")
    for kind, text in kinds.items():
        bonded = re.fullmatch(r"NV(\d+)", kind)
        if bonded is not None:
            links["gpu_link"] = int(bonded[1]) * NVLINK.bandwidth
        elif kind != "PCIe":
            raise InputError(f"{text}, which is not known")
        # The bandwidth of PCIe depends on generation and lanes, which the matrix does not say.
        links["gpu_latency"] = NVLINK.latency if bonded else PCIE_LATENCY
    return len(rows)
