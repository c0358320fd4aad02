"""Clusters from SimGrid's platforms, from lscpu and nvidia-smi, and from the table of instances."""

from __future__ import annotations

import json
import re
import textwrap
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from orchestra.cli.main import main
from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.machines import cluster_of, instances
from orchestra.cluster.simgrid import read_platform
from orchestra.cluster.simgrid_file import NoTree, tree_of
from orchestra.errors import InputError

Way = tuple[Any, Any]


def platform(folder: Path, text: str) -> Path:
    path = folder / "p.xml"
    head = '<?xml version="1.0"?>\n<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n'
    path.write_text(f'{head}<platform version="4.1">\n{textwrap.dedent(text)}</platform>\n')
    return path


def imported(folder: Path, text: str) -> Cluster:
    """The cluster of a platform, after it was written and read."""
    path = platform(folder, text)
    assert main(["import", str(path), "-o", str(folder / "c.yaml")]) == 0
    return load_cluster("c.yaml", where="test", folder=folder)


def way(cluster: Cluster, source: str, target: str) -> Way:
    """The narrowest bandwidth between two nodes, and the latency."""
    nodes = {node.name: node for node in cluster.nodes}
    path = cluster.path(nodes[source], nodes[target])
    return min(channel.bandwidth for channel in path.channels), path.latency


def shared(cluster: Cluster, one: tuple[str, str], other: tuple[str, str]) -> float:
    """The narrowest of the capacities that messages of two pairs of nodes compete for, else 0."""
    nodes = {node.name: node for node in cluster.nodes}
    ways = [
        {c.name: c.bandwidth for c in cluster.path(nodes[a], nodes[b]).channels}
        for a, b in (one, other)
    ]
    return min((ways[0][name] for name in ways[0].keys() & ways[1].keys()), default=0.0)


# SimGrid

CLUSTER = """
<cluster id="c" prefix="n-" radical="0-2,7" suffix=".x" speed="2Gf" core="4"
         bw="125MBps" lat="50us" bb_bw="200MBps" bb_lat="500us" loopback_bw="1GBps"
         loopback_lat="5us"/>
"""


def test_a_cluster_with_a_backbone(tmp_path: Path) -> None:
    cluster = imported(tmp_path, CLUSTER)
    assert [node.name for node in cluster.nodes] == ["n-0.x", "n-1.x", "n-2.x", "n-7.x"]
    node = cluster.nodes[0]
    assert (node.cores, node.flops) == (4, 2e9)
    assert (node.loopback.bandwidth, node.loopback.latency) == (1e9, 5e-6)
    assert way(cluster, "n-0.x", "n-7.x") == (125e6, pytest.approx(600e-6))
    # two messages between four hosts share the backbone and nothing else
    assert shared(cluster, ("n-0.x", "n-1.x"), ("n-2.x", "n-7.x")) == 200e6


def test_half_duplex_links_share_both_directions(tmp_path: Path) -> None:
    text = CLUSTER.replace("<cluster", '<cluster sharing_policy="SHARED"').replace("bb_bw", "xx")
    both = imported(tmp_path, text)
    assert way(both, "n-0.x", "n-1.x") == (125e6, pytest.approx(100e-6))
    assert shared(both, ("n-0.x", "n-1.x"), ("n-2.x", "n-0.x")) == 125e6
    full = imported(tmp_path, text.replace("SHARED", "SPLITDUPLEX"))
    assert shared(full, ("n-0.x", "n-1.x"), ("n-2.x", "n-0.x")) == 0.0


ZONES = """
<zone id="world" routing="Full">
  <cluster id="a" prefix="a-" radical="0-1" suffix="" speed="1Gf" bw="1Gbps" lat="50us"/>
  <cluster id="b" prefix="b-" radical="0-1" suffix="" speed="1Gf" bw="1Gbps" lat="50us"
           bb_bw="2Gbps" bb_lat="40us" router_id="rb"/>
  <zone id="c" routing="None"><host id="alone" speed="3Gf"/></zone>
  <link id="line" bandwidth="100Mbps" latency="10ms"/>
  <link id="last" bandwidth="80Mbps" latency="1ms" sharing_policy="SPLITDUPLEX"/>
  <zoneRoute src="a" dst="b" gw_src="a-a_router" gw_dst="rb"><link_ctn id="line"/></zoneRoute>
  <zoneRoute src="a" dst="c" gw_src="a-a_router" gw_dst="alone">
    <link_ctn id="line"/><link_ctn id="last" direction="DOWN"/></zoneRoute>
  <zoneRoute src="b" dst="c" gw_src="rb" gw_dst="alone">
    <link_ctn id="line"/><link_ctn id="last" direction="DOWN"/></zoneRoute>
</zone>
"""


def test_zones_and_a_line_that_all_share(tmp_path: Path) -> None:
    cluster = imported(tmp_path, ZONES)
    assert way(cluster, "a-0", "a-1") == (125e6, pytest.approx(100e-6))
    assert way(cluster, "b-0", "b-1") == (125e6, pytest.approx(140e-6))
    assert way(cluster, "a-0", "b-0") == (12.5e6, pytest.approx(10.14e-3))
    assert way(cluster, "a-0", "alone") == (10e6, pytest.approx(11.05e-3))
    assert way(cluster, "alone", "b-1") == (10e6, pytest.approx(11.09e-3))
    assert shared(cluster, ("a-0", "b-0"), ("b-1", "a-1")) == 12.5e6  # in both directions together
    assert shared(cluster, ("a-0", "a-1"), ("b-1", "a-1")) == 125e6  # of the link of a-1 alone


ROUTES = """
<zone id="z" routing="Full">
  <host id="h1" speed="98.095Mf"/> <host id="h2" speed="76Mf"/>
  <host id="h3" speed="76Mf"/> <host id="h4" speed="48Mf">
    <prop id="wattage_per_state" value="95.0:120.0:200.0"/></host>
  <link id="1" bandwidth="10MBps" latency="1ms"/> <link id="2" bandwidth="20MBps" latency="2ms"/>
  <link id="3" bandwidth="30MBps" latency="3ms"/> <link id="4" bandwidth="40MBps" latency="4ms"/>
  <link id="m" bandwidth="5MBps" latency="10ms" sharing_policy="SPLITDUPLEX"/>
  <link id="lo" bandwidth="498MBps" latency="15us" sharing_policy="FATPIPE"/>
  <route src="h1" dst="h1"><link_ctn id="lo"/></route>
  <route src="h1" dst="h2"><link_ctn id="1"/><link_ctn id="2"/></route>
  <route src="h1" dst="h3"><link_ctn id="1"/><link_ctn id="m"/><link_ctn id="3"/></route>
  <route src="h1" dst="h4"><link_ctn id="1"/><link_ctn id="m"/><link_ctn id="4"/></route>
  <route src="h2" dst="h3"><link_ctn id="2"/><link_ctn id="m"/><link_ctn id="3"/></route>
  <route src="h2" dst="h4"><link_ctn id="2"/><link_ctn id="m"/><link_ctn id="4"/></route>
  <route src="h3" dst="h4"><link_ctn id="3"/><link_ctn id="4"/></route>
</zone>
"""


def test_routes_of_a_tree(tmp_path: Path) -> None:
    cluster = imported(tmp_path, ROUTES)
    bandwidths = {"1": 10e6, "2": 20e6, "3": 30e6, "4": 40e6, "m": 5e6}
    latencies = {"1": 1e-3, "2": 2e-3, "3": 3e-3, "4": 4e-3, "m": 10e-3}
    for one, other in combinations("1234", 2):
        links = [one, other, *["m"] * ((one in "12") != (other in "12"))]
        narrow, late = min(bandwidths[n] for n in links), sum(latencies[n] for n in links)
        assert way(cluster, f"h{one}", f"h{other}") == (narrow, pytest.approx(late))
    assert shared(cluster, ("h1", "h3"), ("h2", "h4")) == 5e6
    assert shared(cluster, ("h1", "h2"), ("h3", "h4")) == 0.0
    first, *_, last = cluster.nodes
    assert first.up is not None
    assert first.up.bandwidth == 10e6  # its own, not the link of all others
    assert (first.loopback.bandwidth, first.flops, last.watts) == (498e6, 98.095e6, 200)


def test_a_zone_is_entered_at_its_router(tmp_path: Path) -> None:
    site = """
    <zone id="{0}" routing="Full">
      <host id="{0}1" speed="1Gf"/> <host id="{0}2" speed="1Gf"/> <router id="{0}r"/>
      <link id="{0}u" bandwidth="10MBps" latency="1ms"/>
      <link id="{0}v" bandwidth="20MBps" latency="2ms"/>
      <link id="{0}w" bandwidth="5MBps" latency="3ms"/>
      <route src="{0}1" dst="{0}2"><link_ctn id="{0}u"/><link_ctn id="{0}v"/></route>
      <route src="{0}1" dst="{0}r"><link_ctn id="{0}u"/><link_ctn id="{0}w"/></route>
      <route src="{0}2" dst="{0}r"><link_ctn id="{0}v"/><link_ctn id="{0}w"/></route>
    </zone>
    """
    text = f"""
    <zone id="world" routing="Full">{site.format("a")}{site.format("b")}
      <link id="line" bandwidth="30MBps" latency="10ms"/>
      <zoneRoute src="a" dst="b" gw_src="ar" gw_dst="br"><link_ctn id="line"/></zoneRoute>
    </zone>
    """
    cluster = imported(tmp_path, text)
    assert way(cluster, "a1", "a2") == (10e6, pytest.approx(3e-3))
    assert way(cluster, "a2", "b1") == (5e6, pytest.approx(2e-3 + 3e-3 + 10e-3 + 3e-3 + 1e-3))
    assert shared(cluster, ("a1", "b1"), ("a2", "b2")) == 5e6


def test_hops_of_a_tree_with_routers(tmp_path: Path) -> None:
    hops = """
    <zone id="z" routing="Floyd">
      <host id="a" speed="1Gf"/> <host id="b" speed="1Gf"/> <router id="r"/> <router id="s"/>
      <link id="ar" bandwidth="10MBps" latency="1ms"/>
      <link id="rs" bandwidth="20MBps" latency="2ms"/>
      <link id="sb" bandwidth="30MBps" latency="3ms"/>
      <route src="a" dst="r"><link_ctn id="ar"/></route>
      <route src="r" dst="s"><link_ctn id="rs"/></route>
      <route src="s" dst="b"><link_ctn id="sb"/></route>
    </zone>
    """
    assert way(imported(tmp_path, hops), "a", "b") == (10e6, pytest.approx(6e-3))
    ring = hops.replace("</zone>", '<route src="a" dst="s"><link_ctn id="rs"/></route></zone>')
    with pytest.raises(InputError, match=r"p\.xml:5: <zone> z has more than one way"):
        read_platform(platform(tmp_path, ring))


def test_host_links_of_a_star(tmp_path: Path) -> None:
    star = """
    <zone id="z" routing="Cluster">
      <router id="r"/> <host id="a" speed="1Gf"/> <host id="b" speed="1Gf"/>
      <link id="u" bandwidth="10MBps" latency="1ms"/>
      <link id="d" bandwidth="20MBps" latency="2ms"/>
      <link id="l" bandwidth="1GBps" latency="0" sharing_policy="SPLITDUPLEX"/>
      <host_link id="a" up="u" down="d"/> <host_link id="b" up="l_UP" down="l_DOWN"/>
      <backbone id="bb" bandwidth="50MBps" latency="4ms"/>
    </zone>
    """
    cluster = imported(tmp_path, star)
    assert way(cluster, "a", "b") == (10e6, pytest.approx(5e-3))
    assert way(cluster, "b", "a") == (20e6, pytest.approx(6e-3))
    second = star.replace("</zone>", '<backbone id="b2" bandwidth="1MBps" latency="0"/></zone>')
    with pytest.raises(InputError, match=r"<backbone> b2 is a second one of its zone"):
        read_platform(platform(tmp_path, second))


REFUSED = [
    (CLUSTER.replace("<cluster", '<cluster topology="TORUS"'), r":5: <cluster> c has the topology"),
    (CLUSTER.replace("2Gf", "2 apples"), r":5: <cluster> c has a speed '2 apples', which is"),
    (CLUSTER.replace("125MBps", "125MBpm"), r":5: <cluster> c has a bw '125MBpm', which is"),
    (CLUSTER.replace('core="4"', 'core="four"'), r":5: <cluster> c has a core 'four', which is"),
    (CLUSTER.replace("2Gf", "1e999Gf"), r":5: <cluster> c has a speed '1e999Gf', which is beyond"),
    (CLUSTER.replace("0-2,7", "all"), r":5: <cluster> c has a radical 'all', not one such"),
    (CLUSTER.replace("0-2,7", "0-99999999"), r":5: <cluster> c has more than 16384 hosts"),
    (CLUSTER.replace("n-", "0"), r":5: <cluster> c '00\.x' is no name; use letters"),
    (CLUSTER + CLUSTER, r":3: <platform> has 2 outermost zones; there has to be one"),
    (CLUSTER.replace("200MBps", '100MBps" bb_sharing_policy="FATPIPE'), r"a FATPIPE that"),
    (ROUTES.replace('"Full"', '"Vivaldi"'), r":5: <zone> z has the routing Vivaldi, which"),
    (ROUTES.replace('speed="76Mf"', 'speed="76Mf" state_file="f"', 1), r":6: <host> h2 changes"),
    (ROUTES.replace('<link_ctn id="m"/>', "", 1), r":1\d: <route> link m is on routes"),
    (ROUTES.replace('<route src="h1" dst="h2">', '<route src="h2" dst="h2">'), r"no route"),
    (ROUTES.replace('"3"/><link_ctn id="4"/>', '"3"/><link_ctn id="5"/>'),
     r"<link_ctn> 5 names a link 5 that there is not"),
    (ROUTES.replace("</zone>", '<bypassRoute src="h1" dst="h2"/></zone>'), r"<bypassRoute> is"),
    (ROUTES.replace('dst="h4">', 'dst="h4" symmetrical="NO">', 1), r"<route> has no way back"),
    (ZONES.replace('gw_src="rb"', 'gw_src="r"'), r"<zoneRoute> enters b at r, others at rb"),
    (ZONES.replace('gw_dst="rb"', 'gw_dst="r"').replace('gw_src="rb"', 'gw_src="r"'),
     r":7: <cluster> b is entered at r, not at its router"),
    ('<zone id="z" routing="Full"><peer id="p"/></zone>', r":4: <peer> p is not among what can be"),
    ('<zone id="z" routing="Full"/>', r":4: <zone> z holds no host"),
    ("<zone>", r"p\.xml:\d: not XML: mismatched tag"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_does_not_fit_is_refused_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as refused:
        read_platform(platform(tmp_path, text))
    assert "\n" not in str(refused.value)


def test_entities_are_not_expanded(tmp_path: Path) -> None:
    (tmp_path / "p.xml").write_text(
        '<?xml version="1.0"?>\n<!DOCTYPE platform [<!ENTITY a "aaaa">\n<!ENTITY b "&a;&a;">]>\n'
        '<platform version="4.1"><zone id="&b;" routing="Full"/></platform>'
    )
    with pytest.raises(InputError, match=r"p\.xml:2: declares an entity \(a\); write it out"):
        read_platform(tmp_path / "p.xml")


def test_routes_without_a_tree_name_a_pair() -> None:
    ring = {frozenset(pair): ["".join(sorted(pair))] for pair in ("ab", "bc", "ac")}
    with pytest.raises(NoTree, match="that form no tree"):
        tree_of("abc", ring)
    with pytest.raises(NoTree, match="no route between a and c"):
        tree_of("abc", {pair: ring[pair] for pair in list(ring)[:2]})


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


def test_a_platform_is_imported_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(platform(tmp_path, CLUSTER))
    assert main(["import", path, "here"]) == 2
    assert "is a whole cluster; import it alone" in capsys.readouterr().err
    assert main(["import", path]) == 0
    assert "n-7.x" in capsys.readouterr().out
    assert main(["import", path, "-o", "c.txt"]) == 2
