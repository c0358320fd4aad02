"""`orchestra plan --measure`: machines and links, measured, as a cluster's file."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from tests.support.commands import run, torchrun
from tests.support.emulated import needs_emulation, small_cluster, written

from orchestra.calibration.machines import Links, MeasuredMachine, as_cluster, names_of
from orchestra.cli.main import main
from orchestra.cluster import Cluster, Link, NetworkSwitch, Node, load_cluster
from orchestra.engines.processes.environment import latencies_of
from orchestra.errors import InputError


def machines(*rates: float) -> list[MeasuredMachine]:
    return [
        MeasuredMachine(f"host{n}", 2, 8e9, rate, Link(3e9, 15e-6)) for n, rate in enumerate(rates)
    ]


def links_of(cluster: Cluster) -> Links:
    """What a perfect measurement of `cluster` gives."""
    return {
        (i, j): Link(
            min(channel.bandwidth for channel in cluster.path(a, b).channels),
            cluster.path(a, b).latency,
        )
        for i, a in enumerate(cluster.nodes)
        for j, b in enumerate(cluster.nodes)
        if i != j
    }


def star(*links: tuple[Link, Link]) -> Cluster:
    nodes = tuple(
        Node(f"host{n}", 2, speed=1, switch="switch", up=up, down=down, loopback=Link(3e9, 15e-6))
        for n, (up, down) in enumerate(links)
    )
    return Cluster("star", nodes, (NetworkSwitch("switch"),), placement="spread")


def test_a_star_is_found_again_from_its_pairs() -> None:
    wide, thin, far = Link(125e6, 50e-6), Link(25e6, 50e-6), Link(125e6, 2e-3)
    made = star((wide, wide), (thin, wide), (wide, wide), (far, far))
    found, remarks = as_cluster("found", machines(10, 10, 5, 20), links_of(made))
    for node, original in zip(found.nodes, made.nodes, strict=True):
        assert node.up is not None
        assert original.up is not None
        assert node.up.bandwidth == original.up.bandwidth
        assert node.down is not None
        assert node.down.bandwidth == 125e6
        assert node.up.latency == pytest.approx(original.up.latency)
    assert [node.speed for node in found.nodes] == [1, 1, 0.5, 2]
    assert remarks == []


def test_two_sites_are_named_as_slower_than_the_links_of_their_nodes() -> None:
    cluster = load_cluster(
        "two_sites(nodes=4, wan_bandwidth='40 Mbit/s', wan_latency='10 ms')",
        where="",
        folder=Path(),
    )
    found, remarks = as_cluster("found", machines(1, 1, 1, 1), links_of(cluster))
    assert found.nodes[0].up == Link(125e6, 50e-6)
    across = "host0 to host2 is slower than their links: 40 Mbit/s, not 1 Gbit/s"
    assert across in remarks
    assert not [line for line in remarks if line.startswith("host0 to host1")]


def test_a_late_pair_is_compared_with_the_fastest_one() -> None:
    """With such latencies the own latency of the nodes 0 and 1 comes out as 0."""
    pairs = itertools.combinations(range(4), 2)
    late = dict.fromkeys(pairs, 60e-6) | {(0, 1): 220e-6, (2, 3): 120e-6}
    links = {pair: Link(125e6, seconds) for pair, seconds in late.items()}
    links |= {pair[::-1]: link for pair, link in links.items()}
    _, remarks = as_cluster("found", machines(1, 1, 1, 1), links)
    assert "host0 to host1 is slower than their links: a message takes 220 us, not 60 us" in remarks


def test_one_machine_has_no_link_and_a_single_rank_no_loopback() -> None:
    (machine,) = machines(3)
    found, _ = as_cluster("one", [machine], {})
    assert found.nodes[0].up is None
    _, remarks = as_cluster("one", [MeasuredMachine("a", 2, None, 3, None)], {})
    assert remarks == ["a: its loopback is assumed: it had one rank"]


def test_hosts_of_one_name_are_numbered() -> None:
    same = [MeasuredMachine("box", 2, None, 1.0, None)] * 2
    assert names_of(same) == ["node-0", "node-1"]
    assert names_of(machines(1, 1)) == ["host0", "host1"]


@pytest.mark.parametrize("text", ["0.1", "0.1,x", "0.1,-1", "0.1,inf"])
def test_latencies_that_are_none_are_refused(text: str) -> None:
    assert latencies_of({"ORCHESTRA_LATENCIES": "0,0.001"}, 2) == (0.0, 0.001)
    with pytest.raises(InputError, match="ORCHESTRA_LATENCIES"):
        latencies_of({"ORCHESTRA_LATENCIES": text}, 2)


def test_without_a_launcher_there_is_nothing_to_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["plan", "--task", "digits", "--cluster", str(tmp_path / "new.yaml"), "--measure"]
    assert main(given) == 2
    assert "torchrun" in capsys.readouterr().err


@pytest.mark.lab
def test_two_ranks_of_torchrun_write_the_file_of_this_machine(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from orchestra.cli.main import main\nraise SystemExit(main())\n")
    given = ["plan", "--task", "digits", "--cluster", "new.yaml", "--measure"]
    with torchrun(script, 2, given, tmp_path) as process:
        ended = process.end()
    assert ended.status == 0, ended.err
    cluster = load_cluster("new.yaml", where="", folder=tmp_path)
    (node,) = cluster.nodes
    assert node.speed == 1
    assert node.loopback.bandwidth > 1e7
    assert "plan on it" in ended.out


@pytest.mark.lab
@needs_emulation
def test_an_emulated_cluster_is_found_again(tmp_path: Path) -> None:
    cluster = small_cluster(3, speed=0.4, link=Link(2.5e6, 2e-3))
    command = [
        "emulation", "run", written(cluster, tmp_path), "--", sys.executable, "-m", "orchestra",
        "plan", "--task", "digits", "--cluster", "new.yaml", "--measure",
    ]  # fmt: skip
    ended = run(command, tmp_path)
    assert ended.status == 0, ended.err
    found = load_cluster("new.yaml", where="", folder=tmp_path)
    assert len(found.nodes) == 3
    for node in found.nodes:
        assert node.up is not None
        assert node.down is not None
        assert node.up.bandwidth == pytest.approx(2.5e6, rel=0.3)
        assert node.down.bandwidth == pytest.approx(2.5e6, rel=0.3)
        # What messages take of a processor is taken off, and two digits are written.
        assert node.up.latency >= 1.9e-3
