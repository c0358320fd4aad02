"""Clusters from the table of instances."""

from __future__ import annotations

from typing import Any

import pytest

from orchestra.cli.main import main
from orchestra.cluster import Cluster
from orchestra.cluster.machines import cluster_of, instances

Way = tuple[Any, Any]


def way(cluster: Cluster, source: str, target: str) -> Way:
    """The narrowest bandwidth between two nodes, and the latency."""
    nodes = {node.name: node for node in cluster.nodes}
    path = cluster.path(nodes[source], nodes[target])
    return min(channel.bandwidth for channel in path.channels), path.latency


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("aws:g5.xlarge", "its speed is not known; add ,flops=15 TFLOP/s"),
        ("aws:m5.xlarge", "its speed is not known; add ,speed=1"),
        ("aws:g5.xlarge,2,flops=15 TFLOP/s", "its latency is not known; add ,latency=50 us"),
        ("aws:g5.xlrge", "is not in the table; did you mean 'aws:g5.xlarge'?"),
        ("aws:g5.xlarge,0", "there have to be 1 or more"),
        ("aws:m5.xlarge,99999999,speed=1", "99999999 machines are more than 16384"),
        ("aws:m5.xlarge,speeed=1", "'speeed=1' is no KEY=VALUE that is known; did you mean"),
        ("aws:m5.xlarge,speed=1,flops=1 TFLOP/s", "flops"),
        ("aws:m5.xlarge,speed=1,watts=-1", "watts: -1.0 is not above 0"),
        ("aws:m5.xlarge,speed=1,memory=16", "memory: 16 has no unit; write size like"),
        ("aws:m5.xlarge,speed=1,price=3", "price: '3' is no price; write an amount"),
    ],
)
def test_a_source_that_says_too_little_is_refused(
    source: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", source]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_single_machine_needs_no_link() -> None:
    (node,) = cluster_of(["aws:m5.xlarge,speed=1"], "x").nodes
    assert (node.switch, node.up) == (None, None)


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
    assert main(["list", "instances"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in instances())


def test_every_row_of_the_table_makes_a_cluster() -> None:
    for name in instances():
        given = "flops=1 TFLOP/s,latency=25 us,gpu_link=10 GB/s"
        assert len(cluster_of([f"{name},2,{given}"], "x").nodes) >= 2
