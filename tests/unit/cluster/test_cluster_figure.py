"""The drawing of a cluster: what stands in it, and the file that it is written into."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ROOT

from orchestra.cli.main import main
from orchestra.cluster import Cluster, Death, Link, NetworkSwitch, Node, load_cluster
from orchestra.cluster.file import cluster_text
from orchestra.report.figures.cluster import cluster_figure

EXAMPLE = str(ROOT / "examples" / "cluster.yaml")


def data(cluster: Cluster, ranks: int | None = None) -> list[dict[str, Any]]:
    figure = cluster_figure(cluster, ranks)
    return [value for values in figure.spec["datasets"].values() for value in values]


def words(cluster: Cluster, ranks: int | None = None) -> list[str]:
    return [value["text"] for value in data(cluster, ranks) if "text" in value]


def load(text: str) -> Cluster:
    return load_cluster(text, where="test", folder=ROOT)


def test_everything_of_the_example_is_drawn() -> None:
    cluster = load("examples/cluster.yaml")
    shown = words(cluster, 12)
    for name in [*(n.name for n in cluster.nodes), *(s.name for s in cluster.switches)]:
        assert shown.count(name) == 1
    for fault in cluster.faults:
        assert sum(fault.words in text for text in shown) == 1
    for text in ("0, 10", "rank 4 paused 5 s at 30 s", "10 Gbit/s, 10 us", "64 GB", "faults"):
        assert text in shown
    values = data(cluster, 12)
    assert sum("area" in value for value in values) == len(cluster.nodes)
    assert sum("thick" in value for value in values) == len(cluster.nodes) + 2
    assert sum(value.keys() == {"x", "y"} for value in values) == 3 + 3  # switches, crosses


def test_no_two_words_of_a_column_touch() -> None:
    values = [value for value in data(load("examples/cluster.yaml"), 12) if "text" in value]
    places = [(value["x"], value["y"]) for value in values if value["text"]]
    assert len({*places}) == len(places)
    for x, y in places:
        assert all(abs(y - other) >= 13 for at, other in places if at == x and other != y)


def test_the_tree_grows_to_the_right() -> None:
    values = data(load("examples/cluster.yaml"), 12)
    names = {value["text"]: value["x"] for value in values if "text" in value}
    squares = {value["x"] for value in values if "area" in value}
    assert len(squares) == 1
    assert names["core"] < names["rack-1"] == names["rack-2"] < min(squares) < names["worker-0"]
    heads = [names[head] for head in ("node", "link", "computes with", "memory", "ranks", "faults")]
    assert heads == sorted(heads)


def test_a_faster_node_is_larger_and_a_wider_link_thicker() -> None:
    values = data(load("examples/cluster.yaml"))
    areas = sorted({round(value["area"], 3) for value in values if "area" in value})
    assert areas == [48, 120]  # speeds 0.4 and 1
    thick = sorted({value["thick"] for value in values if "thick" in value})
    assert len(thick) == 3
    assert thick[0] == 1


def test_faults_of_ranks_stand_apart_while_their_nodes_are_not_known() -> None:
    cluster = load("examples/cluster.yaml")
    assert "rank 4: paused 5 s at 30 s" in words(cluster)
    assert "ranks" not in words(cluster)


@pytest.mark.parametrize(("nodes", "rows"), [(2, 2), (64, 64), (65, 1), (1000, 1)])
def test_many_alike_nodes_share_a_row(nodes: int, rows: int) -> None:
    cluster = load(f"lan_1gbit({nodes})")
    values = data(cluster, nodes)
    assert sum("area" in value for value in values) == rows
    if rows == 1:
        assert f"worker-0 to worker-{nodes - 1} ({nodes} nodes)" in words(cluster, nodes)
        assert f"0-{nodes - 1}" in words(cluster, nodes)


def test_a_faulty_node_keeps_its_row_among_many() -> None:
    cluster = load("lan_1gbit(100)").with_setting("faults", (Death("worker-40", at=3),))
    names = [text for text in words(cluster) if text.startswith("worker")]
    assert names == [
        "worker-0 to worker-39 (40 nodes)", "worker-40", "worker-41 to worker-99 (59 nodes)"
    ]  # fmt: skip


def test_a_switch_without_nodes_and_a_node_without_switch_are_drawn() -> None:
    assert "loopback 24 Gbit/s, 15 us" in words(load("one_host"))
    link = Link(1e6, 0)
    node = Node("n", 1, speed=1, switch="root", up=link, down=link, loopback=link)
    empty = NetworkSwitch("empty", to="root", up=link, down=Link(2e6, 1e-3))
    cluster = Cluster("c", (node,), (NetworkSwitch("root"), empty), placement="spread")
    shown = words(cluster)
    assert {"root", "empty"} <= {*shown}
    assert "8 Mbit/s, 0 s up; 16 Mbit/s, 1 ms down" in shown


# The command


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    return tmp_path


@pytest.mark.parametrize("name", ["lan_1gbit(nodes=3)", "one_host", EXAMPLE])
def test_the_command_writes_png_and_svg(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", name, "--draw", "a.png", "--ranks", "12"]) == 0
    assert main(["list", name, "--draw", "a.svg"]) == 0
    assert capsys.readouterr().out == "a.png\na.svg\n"
    png = Path("a.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert width >= 840
    assert height > 100
    svg = Path("a.svg").read_text()
    for node in load_cluster(name, where="test", folder=Path()).nodes:
        assert f">{node.name}<" in svg


def test_the_words_fit_into_the_picture() -> None:
    cluster = load("examples/cluster.yaml")
    figure = cluster_figure(cluster, 12)
    width = figure.least_width
    scales = re.findall(r"'domain': \[0, ([\d.]+)\]", str(figure.spec))
    assert {round(float(scale)) for scale in scales} == {width, figure.spec["height"]}
    for value in data(cluster, 12):
        if "text" in value:
            length = 5 * len(value["text"])
            right = value["style"] in ("switch", "link", "fault of a link")
            assert value["x"] - length * right >= 0
            assert value["x"] + length * (not right) <= width


def test_the_command_lists_presets_and_writes_a_cluster_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list", "clusters"]) == 0
    listed = capsys.readouterr().out
    assert "\n  lan_1gbit " in listed
    assert "ParameterServer" not in listed
    assert "\n  LogNormal" not in listed
    assert main(["list", "jitter"]) == 0
    assert "LogNormal" in capsys.readouterr().out
    assert main(["list", "lan_1gbit"]) == 0
    assert "IEEE 802.3" in capsys.readouterr().out
    for name in ("two_sites(nodes=3)", EXAMPLE):
        assert main(["list", name]) == 0
        cluster = load_cluster(name, where="test", folder=Path())
        assert capsys.readouterr().out == cluster_text(cluster)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draw", "a.png"], "give a cluster and a file: orchestra list lan_1gbit --draw lan.png"),
        (["wifi", "--ranks", "3"], "give a cluster and a file"),
        (["wifi", "--draw", "a.gif"], "--draw a.gif: is neither .png nor .svg"),
        (["wifi", "--draw", "a.svg", "--ranks", "0"], "--ranks 0: has to be 1 or more"),
        (["wfi", "--draw", "a.svg"], "unknown cluster 'wfi'; did you mean 'wifi'?"),
        (["LogNormal", "--draw", "a.svg"], "LogNormal is no cluster"),
        ([EXAMPLE, "--draw", "a.svg", "--ranks", "3"], "befalls rank 4, but ranks are 0 to 2"),
        (["wifi(7, 8, 9)"], "wifi(nodes, cores, speed, bandwidth, latency, jitter): too many"),
    ],
)
def test_bad_commands_are_answered_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not [*Path().iterdir()]
