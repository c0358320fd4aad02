"""Clusters from lscpu and nvidia-smi, and from the table of instances."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from orchestra.cli.main import main
from orchestra.cluster import Cluster
from orchestra.cluster.machines import cluster_of, instances
from orchestra.errors import InputError

Way = tuple[Any, Any]


def way(cluster: Cluster, source: str, target: str) -> Way:
    """The narrowest bandwidth between two nodes, and the latency."""
    nodes = {node.name: node for node in cluster.nodes}
    path = cluster.path(nodes[source], nodes[target])
    return min(channel.bandwidth for channel in path.channels), path.latency


# Machines

LINK = "bandwidth=1 Gbit/s,latency=50 us"


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Saved outputs: of a node with 8 of 10 processors on line, and of GPUs."""
    fields = [
        {"field": "Architecture:", "data": "x86_64", "children": []},
        {"field": "CPU(s):", "data": "10",
         "children": [{"field": "On-line CPU(s) list:", "data": "0-5,8,9"}]},
    ]  # fmt: skip
    (tmp_path / "node.json").write_text(json.dumps({"lscpu": fields}))
    (tmp_path / "topo.txt").write_text(
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV12\tPXB\t0-31\t0\nGPU1\tNV12\t X \tSYS\t32-63\t1\nNIC0\tPXB\tSYS\t X \n\n"
        "Legend:\n\n  X    = Self\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_saved_lscpu_counts_the_processors_on_line(outputs: Path) -> None:
    cluster = cluster_of([f"node.json,3,speed=0.5,watts=120,{LINK}"], "x")
    assert [node.name for node in cluster.nodes] == ["node-0", "node-1", "node-2"]
    assert {(node.cores, node.speed, node.watts) for node in cluster.nodes} == {(8, 0.5, 120)}
    assert way(cluster, "node-0", "node-2") == (125e6, pytest.approx(100e-6))


def test_a_single_machine_needs_no_link(outputs: Path) -> None:
    (node,) = cluster_of(["node.json,speed=1"], "x").nodes
    assert (node.switch, node.up) == (None, None)


def test_this_machine_has_speed_1() -> None:
    (node,) = cluster_of(["here"], "x").nodes[:1]
    assert node.speed == 1 or node.devices


def test_gpus_are_nodes_at_the_switch_of_their_machine(outputs: Path) -> None:
    machine = f"node.json,2,topo=topo.txt,flops=100 TFLOP/s,price=3 EUR/h,{LINK}"
    cluster = cluster_of([machine], "x")
    names = [f"node-{m}-gpu-{g}" for m in range(2) for g in range(2)]
    assert [node.name for node in cluster.nodes] == names
    assert {(n.devices, n.cores, n.price) for n in cluster.nodes} == {(1, 4, "1.5 EUR/h")}
    assert way(cluster, names[0], names[1]) == (300e9, pytest.approx(3.4e-6))
    assert way(cluster, names[0], names[3]) == (125e6, pytest.approx(103.4e-6))
    assert cluster.overhead is not None


@pytest.mark.parametrize(
    ("old", "new", "source", "message"),
    [
        ("NV12", "SYS", "", "its gpu_link is not known; add ,gpu_link=31.5 GB/s"),
        ("NV12", "QQ", "", r"topo.txt:2: GPU0 and GPU1 are joined by QQ, which is not known"),
        ("GPU1\tNV12", "GPU1\tNV4", "", r"topo.txt:2: GPU0 and GPU1 are joined by NV12, GPU1 and"),
        (" X ", " Y ", "", "topo.txt: is no output of nvidia-smi topo -m"),
        ("", "", ",speeed=1", "'speeed=1' is no KEY=VALUE that is known; did you mean 'speed'"),
        ("", "", ",watts=-1", "watts: -1.0 is not above 0"),
        ("", "", ",memory=16", "memory: 16 has no unit; write size like"),
        ("", "", ",price=3", "price: '3' is no price; write an amount"),
    ],
)
def test_what_is_not_known_of_a_machine_has_to_be_given(
    outputs: Path, old: str, new: str, source: str, message: str
) -> None:
    topo = outputs / "topo.txt"
    topo.write_text(topo.read_text().replace(old, new) if old else topo.read_text())
    with pytest.raises(InputError, match=re.escape(message).replace(r"\.txt", ".txt")):
        cluster_of([f"node.json,topo=topo.txt,flops=1 TFLOP/s{source}"], "x")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("aws:g5.xlarge", "how fast it is nobody says; add ,flops=15 TFLOP/s"),
        ("aws:g5.xlarge,2,flops=15 TFLOP/s", "its latency is not known; add ,latency=50 us"),
        ("aws:g5.xlrge", "is not in the table; did you mean 'aws:g5.xlarge'?"),
        ("aws:g5.xlarge,0", "there have to be 1 or more"),
        ("aws:m5.xlarge,99999999,speed=1", "99999999 machines are more than 16384"),
        ("nothing.json", "nothing.json: cannot be read: No such file or directory; give here"),
        ("topo.txt,speed=1", "topo.txt: is no output of lscpu -J; save one with: lscpu -J"),
    ],
)
def test_a_source_that_says_too_little_is_refused(
    outputs: Path, source: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", source]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_instances_have_their_network_memory_and_price(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = cluster_of(
        ["aws:g5.xlarge,2,flops=15 TFLOP/s,latency=25 us", "aws:m5.xlarge,speed=0.5,latency=25 us"],
        "x",
    )
    gpu, _, plain = cluster.nodes
    assert (gpu.devices, gpu.memory, gpu.price) == (1, 22888 * 2**20, "1.006 USD/h")
    assert (plain.cores, plain.memory, plain.price) == (4, 2**34, "0.192 USD/h")
    assert way(cluster, "g5.xlarge-0", "m5.xlarge") == (1250e6 / 8, pytest.approx(50e-6))
    assert cluster.overhead is None
    assert main(["import", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in instances())


def test_every_row_of_the_table_makes_a_cluster() -> None:
    for name in instances():
        given = "flops=1 TFLOP/s,latency=25 us,gpu_link=10 GB/s"
        assert len(cluster_of([f"{name},2,{given}"], "x").nodes) >= 2
