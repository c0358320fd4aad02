"""Files and presets of clusters: what they mean, what is refused and where, and back to a file."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from orchestra.cluster import (
    CLUSTERS,
    Cluster,
    Death,
    Delay,
    Drift,
    Jitter,
    Join,
    Link,
    LinkCut,
    LinkSlow,
    LogNormal,
    NetworkSwitch,
    Node,
    Normal,
    Pause,
    SlowDown,
    load_cluster,
)
from orchestra.cluster.faults import FAULTS
from orchestra.cluster.file import KEYS, cluster_text
from orchestra.cluster.nodes import Line, Overhead
from orchestra.cluster.presets import GpuMachines, Preset
from orchestra.cluster.units import BANDWIDTH
from orchestra.errors import InputError
from orchestra.report.figures.cluster import link_text
from orchestra.settings import parse, write
from orchestra.settings.base import settings_of

PRESETS = [
    name
    for name in CLUSTERS.names()
    if not issubclass(CLUSTERS.resolve(name, where="test"), Jitter)
]
Load = Callable[[str], Cluster]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Reads the text of a file, which is c.yaml in messages."""

    def read(text: str) -> Cluster:
        (tmp_path / "c.yaml").write_text(text)
        try:
            return load_cluster("c.yaml", where="cluster", folder=tmp_path)
        except InputError as error:
            raise InputError(str(error).replace(f"{tmp_path}/", "")) from None

    return read


SMALL = """\
nodes:
  worker: {count: 2, cores: 4, speed: 1, link: {bandwidth: 1 Gbit/s, latency: 50 us},
           loopback: {bandwidth: 3 GB/s, latency: 15 us}}
ranks: spread
"""
GBIT = Link(125e6, 50e-6)
LOOPBACK = Link(3e9, 15e-6)

ALL = """\
name: everything
all_nodes: &all
  cores: 4
  speed: 1
  jitter: LogNormal(0.2)
  loopback: {bandwidth: 3 GB/s, latency: 15 us}
nodes:
  worker: {count: 2, switch: rack, drift: {sigma: 0.2}, link: {bandwidth: 1 Gbit/s, latency: 50 us}}
  gpu:
    flops: 1.5 TFLOP/s
    devices: 2
    memory: 16 GB
    jitter: null
    switch: core
    link:
      up: {bandwidth: 10 Mbit/s, latency: 2 ms}
      down: {bandwidth: 125 MB/s, latency: 0 s}
switches:
  core: {}
  rack: {to: core, link: {bandwidth: 1 Gbit/s, latency: 50 us}, shared: 180 Mbit/s}
ranks: [gpu, worker-1]
overhead:
  send: {fixed: 20 us, each: 0.2 ns/B}
  receive: {fixed: 30 us, each: 0.3 ns/B}
  add: 0.1 ns/B
  buffer: 128 KiB
  wire: 1.06
  local: {fixed: 9 us, each: 0 s/B}
faults:
  - SlowDown: {node: gpu, at: 20 s, until: 60 s, factor: 4}
  - Pause: {of: rank 1, at: 30 s, seconds: 5 s}
  - Death: {of: worker-1, at: 1.5 min}
  - LinkCut: {of: rack, at: 0 s}
  - LinkSlow: {of: worker-0, at: 1 s, until: 2 s, factor: 10}
  - Delay: {target: gpu, seconds: 50 ms, at: 0 s}
  - Join: {node: gpu, at: 2 min, spare: true}
"""


def everything() -> Cluster:
    jitter = LogNormal(0.2)
    workers = tuple(
        Node(
            f"worker-{i}", 4, speed=1, jitter=jitter, drift=Drift(0.2), switch="rack", up=GBIT,
            down=GBIT, loopback=LOOPBACK,
        )
        for i in range(2)
    )  # fmt: skip
    gpu = Node(
        "gpu", 4, flops=1.5e12, devices=2, memory=16e9, jitter=None,
        switch="core", up=Link(1.25e6, 0.002), down=Link(125e6, 0), loopback=LOOPBACK,
    )  # fmt: skip
    return Cluster(
        "everything",
        (*workers, gpu),
        (
            NetworkSwitch("core"),
            NetworkSwitch("rack", to="core", up=GBIT, down=GBIT, shared=22.5e6),
        ),
        placement=("gpu", "worker-1"),
        overhead=Overhead(
            Line(20e-6, 2e-10), Line(30e-6, 3e-10), 1e-10, 128 * 1024, 1.06, Line(9e-6, 0.0)
        ),
        faults=(
            SlowDown("gpu", 4, at=20, until=60),
            Pause("rank 1", at=30, seconds=5),
            Death("worker-1", at=90),
            LinkCut("rack", at=0),
            LinkSlow("worker-0", 10, at=1, until=2),
            Delay(0.05, target="gpu", at=0),
            Join("gpu", at=120, spare=True),
        ),
    )


def test_a_file_means_what_python_says(load: Load) -> None:
    assert load(ALL) == everything()


def test_a_node_varies_by_default_and_null_is_exact(load: Load) -> None:
    text = "loopback: {bandwidth: 3 GB/s, latency: 15 us}"
    given = (None, "jitter: null", "jitter: default", "jitter: Normal(0.1)")
    assert [
        load(SMALL.replace(text, f"{text}, {jitter}" if jitter else text)).nodes[0].jitter
        for jitter in given
    ] == ["default", None, "default", Normal(0.1)]
    slow = load(SMALL.replace(text, f"{text}, drift: {{sigma: 0.2, time_constant: 2 min}}"))
    assert slow.nodes[0].drift == Drift(0.2, 120)


def test_a_small_file_has_one_switch_and_the_name_of_its_file(load: Load) -> None:
    cluster = load(SMALL)
    nodes = tuple(
        Node(f"worker-{i}", 4, speed=1, switch="switch", up=GBIT, down=GBIT, loopback=LOOPBACK)
        for i in range(2)
    )
    assert cluster == Cluster("c", nodes, (NetworkSwitch("switch"),), placement="spread")


def test_a_node_that_has_a_flops_of_its_own_has_no_speed_of_all(load: Load) -> None:
    text = ALL.replace("  speed: 1\n", "  flops: 2 GFLOP/s\n").replace("flops: 1.5 T", "speed: 2 #")
    gpu = load(text).nodes[-1]
    assert (gpu.speed, gpu.flops) == (2, None)


def test_an_overhead_may_say_all_that_a_calibration_does(load: Load) -> None:
    cluster = load(ALL.replace("wire: 1.06\n", "wire: 1.06\n  cold: 3 us\n  collective: 7 us\n"))
    overhead = everything().overhead
    assert overhead is not None
    assert cluster.overhead == replace(overhead, cold=3e-6, collective=7e-6)
    assert load(cluster_text(cluster)) == cluster


def test_merge_keys_of_yaml_work_and_keep_their_places(load: Load) -> None:
    common = "x: &x {cores: 4, speed: 1, loopback: {bandwidth: 3 GB/s, latency: 15 us}}"
    with pytest.raises(InputError, match=r"c\.yaml:1: unknown key 'x'"):
        load(f"{common}\n{SMALL}")
    text = "nodes:\n  a: &x\n    cores: 4\n    loopback: {bandwidth: 3 GB/s, latency: 5}\n"
    with pytest.raises(InputError, match=r"c.yaml:4 nodes.a.loopback.latency: 5 has no unit"):
        load(f"{text}  b: {{<<: *x, speed: 1}}\nranks: packed\n")


# Refused: the text of a file, or changes to ALL, and the message

CHANGES: list[tuple[str, str, str]] = [
    ("cores: 4", "cores: 0", "c.yaml:3 nodes.worker.cores: 0 is below 1"),
    ("cores: 4", "cores: 4.5", "c.yaml:3 nodes.worker.cores: expected whole number, got 4.5"),
    ("  cores: 4\n", "", "c.yaml:7 nodes.worker: cores is missing; add it, such as cores: 4"),
    ("  speed: 1\n", "", "c.yaml:7 nodes.worker: node worker lacks a speed; give speed: 1 or"),
    ("speed: 1", "speed: 0", "c.yaml:4 nodes.worker.speed: 0.0 is not above 0"),
    ("speed: 1", "speed: fast", "c.yaml:4 nodes.worker.speed: expected number"),
    ("speed: 1", "speed: 1\n  flops: 1 GFLOP/s", "node worker has both speed and flops"),
    ("speed: 1", "sped: 1", "c.yaml:4 nodes.worker: unknown key 'sped'; did you mean 'speed'?"),
    ("speed: 1", "gpus: 1", "c.yaml:4 nodes.worker: unknown key 'gpus'; did you mean 'devices'?"),
    ("LogNormal(0.2)", "LogNormal(-1)", "c.yaml:5 nodes.worker.jitter: LogNormal.sigma: -1.0 is"),
    ("sigma: 0.2", "sigma: 0", "c.yaml:8 nodes.worker.drift.sigma: 0.0 is not above 0"),
    ("{sigma: 0.2}", "0.2", "c.yaml:8 nodes.worker.drift: has to be a mapping, such as {sigma"),
    ("{sigma: 0.2}", "{time_constant: 3}", "nodes.worker.drift.time_constant: 3 has no unit"),
    ("LogNormal(0.2)", "LogNorml", "nodes.worker.jitter: unknown cluster 'LogNorml'; did you"),
    ("LogNormal(0.2)", "wifi", "c.yaml:5 nodes.worker.jitter: expected Jitter or 'default'"),
    ("{bandwidth: 3 GB/s, latency: 15 us}", "15 us", "c.yaml:6 nodes.worker.loopback: has to be a"),
    ("{bandwidth: 3 GB/s, latency: 15 us}", "{bandwidth: 3 GB/s}", "latency is missing; add it,"),
    ("bandwidth: 3 GB/s", "bandwidth: 0 B/s", "c.yaml:6 nodes.worker.loopback.bandwidth: 0.0 is n"),
    ("bandwidth: 3 GB/s", "bandwidth: 3", "nodes.worker.loopback.bandwidth: 3 has no unit; write"),
    ("bandwidth: 3 GB/s", "bandwidth: null", "bandwidth: None is no bandwidth; write a number"),
    ("15 us", "-15 us", "c.yaml:6 nodes.worker.loopback.latency: -1.5e-05 is below 0"),
    ("15 us", "15 parsecs", "unknown unit 'parsecs' of time"),
    ("count: 2", "count: 0", "c.yaml:8 nodes.worker.count: 0 is no number of nodes; write 1"),
    ("count: 2", "count: two", "nodes.worker.count: 'two' is no number of nodes"),
    ("count: 2", "cuont: 2", "c.yaml:8 nodes.worker: unknown key 'cuont'; did you mean 'count'?"),
    ("worker: {", "two words: {", "c.yaml:8 nodes.two words: 'two words' is no name"),
    ("switch: rack", "switch: rak", "c.yaml:8 nodes.worker: there is no switch 'rak'; did you"),
    (", switch: rack", "", "c.yaml:8 nodes.worker: node worker needs all of switch, up and down"),
    ("link: {bandwidth: 1 Gbit/s, latency: 50 us}}\n  gpu", "}\n  gpu", "needs all of switch"),
    ("latency: 50 us}}\n  gpu", "}}\n  gpu", "c.yaml:8 nodes.worker.link: latency is missing"),
    ("      down:", "      # ", "c.yaml:15 nodes.gpu.link: down is missing; add it, such as down:"),
    ("      down:", "      dwon:", "c.yaml:17 nodes.gpu.link: unknown key 'dwon'; did you mean"),
    ("up: {bandwidth: 10 Mbit/s, ", "up: {", "c.yaml:16 nodes.gpu.link.up: bandwidth is missing"),
    ("memory: 16 GB", "memory: 16", "c.yaml:12 nodes.gpu.memory: 16 has no unit; write size like"),
    ("memory: 16 GB", "memory: 0 B", "c.yaml:12 nodes.gpu.memory: 0.0 is not above 0"),
    ("1.5 TFLOP/s", "1.5 TFLOPS", "c.yaml:10 nodes.gpu.flops: '1.5 TFLOPS': unknown unit"),
    ("devices: 2", "devices: -1", "c.yaml:11 nodes.gpu.devices: -1 is below 0"),
    ("  gpu:", "  worker-1:", "c.yaml:9 nodes.worker-1: the name worker-1 is given twice"),
    ("  gpu:", "  core:", "c.yaml:19 switches.core: the name core is given twice"),
    ("to: core", "to: cord", "c.yaml:20 switches.rack: there is no switch 'cord'; did you mean"),
    ("to: core", "to: rack", "c.yaml:20 switches.rack: rack leads into a circle"),
    ("to: core, ", "", "c.yaml:20 switches.rack: switch rack has a link, but not to what"),
    ("core: {}", "core: {link: 3}", "c.yaml:19 switches.core.link: has to be a mapping"),
    ("core: {}", "core:", "c.yaml:19 switches.core: has to be a mapping, such as {to: core"),
    ("core: {}", "core: {too: x}", "c.yaml:19 switches.core: unknown key 'too'; did you mean 'to'"),
    ("core: {}", "core: {}\n  other: {}", "c.yaml:20 switches.other: other and core have no swit"),
    ("shared: 180 Mbit/s", "shared: 180", "c.yaml:20 switches.rack.shared: 180 has no unit"),
    ("[gpu, worker-1]", "sprad", "c.yaml:21 ranks: 'sprad' is not known; did you mean 'spread'?"),
    ("[gpu, worker-1]", "[gpu, work]", "c.yaml:21 ranks: there is no node 'work'; did you mean"),
    ("[gpu, worker-1]", "3", "c.yaml:21 ranks: expected 'spread' or 'packed' or list of texts"),
    ("name: everything", "name: 3", "c.yaml:1 name: expected text, got 3"),
    ("faults:", "fautls:", "c.yaml:29: unknown key 'fautls'; did you mean 'faults'?"),
    ("  add: 0.1 ns/B\n", "", "c.yaml:22 overhead: add is missing; add it, such as add: 0.3 ns/B"),
    ("wire: 1.06", "wire: 0.9", "c.yaml:27 overhead.wire: 0.9 is below 1"),
    ("fixed: 20 us", "fixed: -1 us", "c.yaml:23 overhead.send.fixed: -1e-06 is below 0"),
    ("fixed: 20 us, ", "", "c.yaml:23 overhead.send: fixed is missing; add it, such as fixed: 50"),
    ("{fixed: 20 us, each: 0.2 ns/B}", "null", "c.yaml:23 overhead.send: has to be a mapping, su"),
    ("local:", "loca:", "c.yaml:28 overhead: unknown key 'loca'; did you mean 'local'?"),
    ("  local: {fixed: 9 us, each: 0 s/B}\n", "", "c.yaml:22 overhead: local is missing; add it,"),
    ("buffer: 128 KiB", "buffer: 128", "c.yaml:26 overhead.buffer: 128 has no unit"),
    ("SlowDown:", "Slowdown:", "c.yaml:30 faults: unknown key 'Slowdown'; did you mean 'SlowDown'"),
    ("node: gpu", "node: gnu", "c.yaml:30 faults.SlowDown: there is no node 'gnu'; did you mean"),
    ("node: gpu, ", "", "c.yaml:30 faults.SlowDown: node is missing; add it, such as node:"),
    ("at: 20 s, ", "", "c.yaml:30 faults.SlowDown: at is missing; add it, such as at: 50 us"),
    ("until: 60 s", "until: 20 s", "c.yaml:30 faults.SlowDown: SlowDown ends at 20 s, not after"),
    ("factor: 4}", "factor: 0.5}", "c.yaml:30 faults.SlowDown.factor: 0.5 is not above 1"),
    ("factor: 4}", "factor: 4, of: x}", "c.yaml:30 faults.SlowDown: unknown key 'of'"),
    ("of: rank 1", "of: rank one", "c.yaml:31 faults.Pause: there is no node 'rank one'"),
    ("seconds: 5 s", "seconds: 0 s", "c.yaml:31 faults.Pause.seconds: 0.0 is not above 0"),
    ("at: 1.5 min", "at: 90", "c.yaml:32 faults.Death.at: 90 has no unit; write time like"),
    ("of: rack, at", "of: core, at", "c.yaml:33 faults.LinkCut: no link of 'core'; "),
    ("Join: {node: gpu", "Join: {node: rank 1", "c.yaml:36 faults.Join: there is no node 'rank 1'"),
    ("spare: true", "spare: yes please", "c.yaml:36 faults.Join.spare: expected true or"),
    ("target: gpu, ", "", "c.yaml:35 faults.Delay: Delay has neither source nor target"),
    ("- Death: {", "- Return: {", "c.yaml:32 faults: unknown key 'Return'; known: Death, Delay,"),
    ("  - Death: {", "    Death: {", "c.yaml:31 faults: each item is one fault with its settings"),
]
TEXTS: list[tuple[str, str]] = [
    ("", "c.yaml: is empty; it needs at least nodes and ranks"),
    ("- a\n", "c.yaml: is not a mapping of keys to values, such as ranks: spread"),
    ("ranks: spread\n", "c.yaml: nodes is missing; add it, such as nodes: {worker: {count: 8,"),
    ("nodes: {}\nranks: spread\n", "c.yaml:1 nodes: a cluster needs at least one node"),
    ("nodes: [a]\nranks: spread\n", "c.yaml:1 nodes: has to be a mapping, such as {worker:"),
    ("nodes: {a: 3}\nranks: spread\n", "c.yaml:1 nodes.a: has to be a mapping"),
    ("nodes: {a: {}}\n", "c.yaml: ranks is missing; add it, such as ranks: spread"),
    (SMALL + "faults: {}\n", "c.yaml:5 faults: has to be a list of items such as - Death: {of: "),
    (
        SMALL + "faults: [3]\n",
        "c.yaml:5 faults: each item is one fault with its settings, such as ",
    ),
    (
        SMALL + "faults: [{kind: Death, of: rank 1, at: 3 s}]\n",
        "c.yaml:5 faults: each item is one fault with its settings, such as - Death: {of: worker-3",
    ),
    (SMALL + "faults: [Death: 3]\n", "c.yaml:5 faults.Death: has to be a mapping, such as {of:"),
    (SMALL + "overhead: 3\n", "c.yaml:5 overhead: has to be a mapping, such as {send: {fixed"),
    (SMALL + "all_nodes: 3\n", "c.yaml:5 all_nodes: has to be a mapping, such as {cores: 4"),
    (SMALL + "switches: 3\n", "c.yaml:5 switches: has to be a mapping, such as {core: {}"),
    (SMALL + "ranks: packed\n", "c.yaml:5: 'ranks' stands in line 4, too"),
    (
        SMALL.replace("link: {bandwidth: 1 Gbit/s, latency: 50 us},", ""),
        "c.yaml:2 nodes.worker: worker-0 has no link to a switch; only a single node may",
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), CHANGES, ids=[row[2] for row in CHANGES])
def test_a_changed_figure_is_refused_with_its_place(
    load: Load, old: str, new: str, message: str
) -> None:
    assert old in ALL
    with pytest.raises(InputError) as refused:
        load(ALL.replace(old, new, 1))
    assert message in str(refused.value)
    assert re.match(r"c\.yaml:\d+[ :]", str(refused.value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "message"), TEXTS, ids=[message for _, message in TEXTS])
def test_a_file_of_another_form_is_refused(load: Load, text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        load(text)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lan_2gbit", "cluster: unknown cluster 'lan_2gbit'; did you mean 'lan_1gbit'?"),
        ("lan_1gbit(nods=3)", "cluster: lan_1gbit has no argument 'nods'; did you mean 'nodes'?"),
        ("lan_1gbit(0)", "cluster: Lan1Gbit.nodes: 0 is below 1"),
        ("lan_1gbit(bandwidth=3)", "cluster: Lan1Gbit.bandwidth: expected text, got 3"),
        ("lan_1gbit(bandwidth='3')", "cluster: lan_1gbit.bandwidth: 3 has no unit; write bandwid"),
        ("lan_1gbit(latency='-1 s')", "cluster: Link.latency: -1.0 is below 0"),
        ("stragglers(4, slow=5)", "cluster: stragglers.slow: 5 of 4 nodes; give fewer"),
        ("LogNormal(0.2)", "cluster: LogNormal(0.2) is no cluster; one of them is lan_1gbit"),
        ("none.yaml", "cluster: there is no file "),
        ("7", "cluster: '7' is not a constructor call"),
    ],
)
def test_a_bad_name_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        load_cluster(text, where="cluster", folder=tmp_path)
    assert str(refused.value).startswith(message)


# Back to a file

CLUSTERS_TO_WRITE: dict[str, Callable[[], Cluster]] = {
    "everything": everything,
    "example": lambda: load_cluster("examples/cluster.yaml", where="test", folder=ROOT),
    "names that clash": lambda: Cluster(
        "clash",
        tuple(
            Node(name, cores, speed=1 / 3, switch="s", up=GBIT, down=GBIT, loopback=LOOPBACK)
            for cores, names in enumerate(("a-0 a-1", "a", "b-1 b-0", "c-0", "d-0 e-1", "x-0-0"), 1)
            for name in names.split()
        ),
        (NetworkSwitch("s"),),
        placement="packed",
    ),
} | {name: lambda name=name: load_cluster(name, where="test", folder=ROOT) for name in PRESETS}


@pytest.mark.parametrize("make", CLUSTERS_TO_WRITE.values(), ids=CLUSTERS_TO_WRITE)
def test_a_written_file_gives_an_equal_cluster(load: Load, make: Callable[[], Cluster]) -> None:
    cluster = make()
    assert load(cluster_text(cluster)) == cluster


def test_a_measured_overhead_is_not_written() -> None:
    class Curve:
        def at(self, amount: float) -> float:
            return amount

    overhead = Overhead(Curve(), Line(1e-6, 0), 0, 0, 1)
    with pytest.raises(InputError, match="leave overhead out"):
        cluster_text(everything().with_setting("overhead", overhead))
    free = Overhead(Line(1e-6, 0), Line(1e-6, 0), 0, 0, 1)
    text = cluster_text(everything().with_setting("overhead", free))
    assert "local:\n    fixed: 0 s\n    each: 0 s/B\n" in text


def test_alike_nodes_are_written_once() -> None:
    text = cluster_text(load_cluster("two_sites(64)", where="test", folder=ROOT))
    assert text.count("cores:") == 2
    assert text.count("count: 32") == 2


# Presets and documentation


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_a_cluster_of_its_name(name: str) -> None:
    preset = parse(name, CLUSTERS, where="test")
    cluster = preset.cluster()
    assert cluster.name == write(preset, CLUSTERS)
    assert load_cluster(cluster.name, where="test", folder=ROOT) == cluster
    for source in cluster.nodes_of(5):
        for target in cluster.nodes_of(5):
            path = cluster.path(source, target)
            assert path.latency > 0
            assert min(channel.bandwidth for channel in path.channels) > 0
    if isinstance(preset, GpuMachines):
        assert len(parse(f"{name}(3, gpus=2)", CLUSTERS, where="test").cluster().nodes) == 6
    elif name != "one_host":
        assert len(parse(f"{name}(nodes=3)", CLUSTERS, where="test").cluster().nodes) == 3


def test_what_the_presets_of_special_form_are() -> None:
    def make(text: str) -> Cluster:
        return load_cluster(text, where="test", folder=ROOT)

    slow = [node.speed for node in make("stragglers(8)").nodes]
    assert slow == [1.0] * 6 + [1 / 3] * 2
    assert [n.speed for n in make("stragglers(3, slow=0)").nodes] == [1, 1, 1]
    sites = make("two_sites(5)")
    assert [node.switch for node in sites.nodes] == ["site-a"] * 3 + ["site-b"] * 2
    across = sites.path(sites.nodes[4], sites.nodes[0])
    assert [c.name for c in across.channels] == ["b-1 up", "site-b up", "a-0 down"]
    assert across.latency == pytest.approx(0.0101)
    gpus = make("dgx_a100")
    inside, outside = (gpus.path(gpus.nodes[0], gpus.nodes[other]) for other in (7, 8))
    assert [c.bandwidth for c in inside.channels] == [300e9] * 2
    assert [c.bandwidth for c in outside.channels] == [300e9, 200e9, 200e9, 300e9]
    assert [inside.latency, outside.latency] == pytest.approx([3.4e-6, 9.6e-6])
    air = make("wifi").path(*make("wifi").nodes[:2]).channels
    assert [c.bandwidth for c in air] == [45e6, 22.5e6, 45e6]
    up, down = make("containers_10mbit").path(*make("containers_10mbit").nodes[:2]).channels
    assert (up.bandwidth, down.bandwidth) == (1.25e6, 387.5e6)


def table(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of docs/reference/clusters.md, without its head."""
    text = (ROOT / "docs" / "reference" / "clusters.md").read_text()
    section = text.partition(f"{heading}\n")[2].partition("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    head = [cell.strip() for cell in rows[0]]
    found = [[cell.strip() for cell in row] for row in rows if set(row[0]) != {"-"}]
    return [row for row in found if row != head]


def test_the_documented_presets_are_those_that_there_are() -> None:
    rows = []
    for name in PRESETS:
        preset = parse(name, CLUSTERS, where="test")
        first = preset.cluster().nodes[0]
        fields = ", ".join(field.name for field in settings_of(type(preset)))
        count = len(preset.cluster().nodes)
        nodes = f"{count} of {first.cores} core{'s' * (first.cores > 1)}"
        meaning = (inspect.getdoc(type(preset)) or "").partition("\n")[0]
        rows.append([f"`{name}`", fields, nodes, link_text(first), meaning])
    assert table("## Presets") == rows


def test_the_documented_faults_keys_and_units_are_those_that_there_are() -> None:
    rows = [
        [f"`{name}`", keys(cls), (inspect.getdoc(cls) or "").partition("\n")[0]]
        for name, cls in FAULTS.items()
    ]
    assert table("### Faults") == rows
    keys_of_file = {row[0].strip("`") for row in table("## A file")}
    node = {field.name for field in settings_of(Node)} - {"name", "up", "down"}
    assert keys_of_file == {*KEYS} | node | {"link", "count"}
    bandwidths = re.findall(r"`([^`]+)`", dict(table("### Units"))["bandwidth"])
    assert {*bandwidths} <= {*BANDWIDTH.factors}


def keys(cls: type) -> str:
    """The settings of a fault: its own first, then when it is."""
    names = [field.name for field in settings_of(cls)]
    late: Mapping[str, int] = {"at": 1, "until": 2}
    own = sorted(names, key=lambda name: late.get(name, 0))
    return ", ".join(["of", "at", "seconds"] if cls is Pause else own)


def test_the_example_of_the_documentation_loads(load: Load) -> None:
    text = (ROOT / "docs" / "reference" / "clusters.md").read_text()
    small, overhead, faults = re.findall(r"```yaml\n(.*?)```", text, re.S)
    cluster = load(small + overhead + faults)
    assert len(cluster.faults) == 3
    assert len(cluster.nodes) == 10
    assert cluster.overhead is not None


def test_the_python_of_the_documentation_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "reference" / "clusters.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(code, {})
    assert capsys.readouterr().out == "0.0001\n"


def test_a_plug_in_that_is_no_preset_is_refused() -> None:
    with pytest.raises(InputError, match="is no cluster"):
        load_cluster("orchestra.cluster:Link(1.0, 1.0)", where="cluster", folder=ROOT)
    assert issubclass(CLUSTERS.resolve("wifi", where="test"), Preset)
