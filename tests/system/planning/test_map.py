"""`orchestra map`: the clusters of a plane, who is first where, and the figure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.plans import RECORD, experiment
from tests.support.recorded import changed

from orchestra.cli.main import main
from orchestra.cli.plan import print_map
from orchestra.engines.simulation.trials import Tried
from orchestra.errors import InputError
from orchestra.planning import candidates
from orchestra.planning.map import (
    Axis,
    Check,
    Map,
    MapPoint,
    Plane,
    gap,
    loaded,
    longest_link,
    read_axis,
    slowest_link,
    spread,
)
from orchestra.planning.map_survey import (
    NEAR,
    Survey,
    _coarse_first,
    draw_map,
    learned_there,
    mapped,
    name_of,
)
from orchestra.planning.page import _contours, _grid, map_figure
from orchestra.planning.race import SearchBudget
from orchestra.planning.standing import Length
from orchestra.records.report import Point
from orchestra.trainer.settings import Target

LAN = "lan_1gbit(nodes=4)"
GIGABIT = 125e6


def axis(text: str, cluster: str = LAN, points: int = 5) -> Axis:
    return read_axis(text, loaded(cluster), points, where="--x")


def test_a_range_is_divided_in_equal_ratios() -> None:
    bandwidth = axis("bandwidth=10 Mbit/s..1 Gbit/s", points=3)
    assert bandwidth.values == pytest.approx((1.25e6, 12.5e6, 125e6))
    assert [bandwidth.text(value) for value in bandwidth.values] == [
        "10 Mbit/s", "100 Mbit/s", "1 Gbit/s",
    ]  # fmt: skip
    assert axis("nodes=2..16", points=4).values == (2, 4, 8, 16)
    assert axis("nodes=16,2,3").values == (2, 3, 16)
    assert axis("slowest_node").values[-1] == 1
    low, *_, high = axis("bandwidth").values
    assert low < GIGABIT < high


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bandwith", "bandwidth"),
        ("bandwidth=10..100 Mbit/s", "has no unit"),
        ("bandwidth=1 Gbit/s", "2 to 64 values"),
        ("bandwidth=1 Gbit/s..1 Gbit/s", "a larger one"),
        ("slowest_node=0.5..2", "up to 1"),
        ("nodes=2..5000", "up to 1024"),
        ("nodes=two,three", "is no number"),
        ("latency=0 s..1 ms", "above 0"),
        ("nodes.worker.speed", "needs its values"),
        ("slowest_node=nan,1", "no finite number"),
    ],
)
def test_a_wrong_axis_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        axis(text)
    assert str(error.value).startswith("--x: ")
    assert "\n" not in str(error.value)


def plane(x: str, y: str, cluster: str = LAN) -> Plane:
    return Plane(cluster, axis(x, cluster), axis(y, cluster))


def test_links_change_in_proportion(tmp_path: Path) -> None:
    path = tmp_path / "unlike.yaml"
    path.write_text(
        "all_nodes: {cores: 1, speed: 1, loopback: {bandwidth: 1 GB/s, latency: 1 us}}\n"
        "nodes:\n"
        "  near: {link: {bandwidth: 1 Gbit/s, latency: 100 us}}\n"
        "  far: {link: {bandwidth: 100 Mbit/s, latency: 5 ms}}\n"
        "ranks: spread\n"
    )
    cluster = plane("bandwidth", "latency", str(path)).cluster(25e6, 1e-3)
    near, far = (node.up for node in cluster.nodes)
    assert near is not None
    assert far is not None
    assert (near.bandwidth, far.bandwidth) == pytest.approx((250e6, 25e6))
    assert (near.latency, far.latency) == pytest.approx((20e-6, 1e-3))
    assert slowest_link(cluster) == pytest.approx(25e6)
    assert longest_link(cluster) == pytest.approx(1e-3)
    assert cluster.nodes[0].loopback.bandwidth == 1e9


def test_one_node_is_slow() -> None:
    cluster = plane("slowest_node", "bandwidth").cluster(0.25, GIGABIT)
    speeds = [node.speed for node in cluster.nodes]
    assert speeds == [speeds[0]] * 3 + [pytest.approx(0.25 * (speeds[0] or 0))]


def test_nodes_repeat_beyond_the_last_one() -> None:
    made = plane("nodes", "bandwidth").cluster(9, GIGABIT).nodes
    assert len({node.name for node in made}) == 9
    assert len(plane("nodes", "bandwidth").cluster(2, GIGABIT).nodes) == 2


def test_a_cluster_is_read_as_every_command_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "all_nodes: {loopback: {bandwidth: 1 GB/s, latency: 1 us}}\n"
        "nodes:\n"
        "  on: {cores: 1, speed: 5e-1, link: {bandwidth: 1 Gbit/s, latency: 20 us}}\n"
        "  off: {cores: 1, speed: 1.0, link: {bandwidth: 1 Gbit/s, latency: 20 us}}\n"
        "ranks: spread\n"
    )
    cluster = plane("nodes.off.cores=2,8", "bandwidth", str(path)).cluster(8, GIGABIT)
    assert [(node.name, node.speed) for node in cluster.nodes] == [("on", 0.5), ("off", 1.0)]


def test_a_place_in_the_file_is_a_side() -> None:
    key = "nodes.worker.cores"
    made = plane(f"{key}=2,8", "bandwidth").cluster(8, GIGABIT)
    assert {node.cores for node in made.nodes} == {8}
    with pytest.raises(InputError, match=r"nodes\.werker\.cores: there is no 'werker'.*worker"):
        plane("nodes.werker.cores=2,8", "bandwidth").cluster(8, GIGABIT)
    with pytest.raises(InputError, match=r"nodes\.worker\.cors"):
        plane("nodes.worker.cors=2,8", "bandwidth").cluster(8, GIGABIT)


def test_one_node_has_nothing_to_map() -> None:
    with pytest.raises(InputError, match="no links between nodes"):
        loaded("one_host(cores=4)")


def test_the_corners_are_first() -> None:
    places = [(x, y) for x in range(8) for y in range(8)]
    order = _coarse_first([(float(x), float(y)) for x, y in places])
    assert sorted(order) == sorted((float(x), float(y)) for x, y in places)
    assert {(0.0, 0.0), (4.0, 0.0), (0.0, 4.0), (4.0, 4.0)} == set(order[:4])


def made(seconds: Callable[[float, float], dict[str, float]], side: int = 5) -> Map:
    """A map of 1 to 100 along both sides."""
    values = tuple(np.geomspace(1, 100, side).tolist())
    x, y = Axis("nodes.a.speed", values), Axis("nodes.b.speed", values)
    points = [MapPoint(u, v, seconds(u, v)) for u in values for v in values]
    target = Target("accuracy", at_least=0.9)
    return Map("t", Plane(LAN, x, y), target, {}, {}, points, [], "", Path())


def test_a_map_is_printed_with_the_first_strategy_at_each_point(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn = made(lambda x, y: {"ring": x, "server": 20.0}, side=3)
    notations = {"ring": "AllReduce('ring')", "server": "ParameterServer()"}
    print_map(replace(drawn, strategies=notations, points=drawn.points[:-1]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    place = lines.index(["1", "10", "100"])
    assert lines[place + 1 : place + 4] == [
        ["100", "A", "1.00", "A", "10.0", "-"],
        ["10", "A", "1.00", "A", "10.0", "B", "20.0"],
        ["1", "A", "1.00", "A", "10.0", "B", "20.0"],
    ]
    assert lines[place + 4][:2] == ["A", "ring:"]


def test_regions_meet_where_times_are_equal() -> None:
    drawn = made(lambda x, y: {"ring": x, "server": 10.0, "tree": 1e9})
    assert drawn.winners == ["ring", "server"]
    spec = map_figure(drawn).spec
    rectangles = next(v for v in spec["datasets"].values() if "strategy" in v[0])
    rings = [each for each in rectangles if each["strategy"] == "ring"]
    assert min(each["x"] for each in rings) == pytest.approx(1)
    for each in rings:
        assert each["x2"] == pytest.approx(10, rel=0.06)
    whole = {round(each["y"], 6) for each in rings}
    assert len(whole) == len(rings)  # each row once


def test_lines_are_where_the_time_is_theirs() -> None:
    drawn = made(lambda x, y: {"ring": x * y})
    _, (best,) = _grid(drawn)
    side = np.array(drawn.plane.x.values)
    for segment in _contours(best, (side, side)):
        for x, y in ((segment["x"], segment["y"]), (segment["x2"], segment["y2"])):
            decade = 10.0 ** math.floor(math.log10(x * y) + 1e-9)
            assert any(x * y == pytest.approx(digit * decade) for digit in (1, 2, 5, 10))


def test_one_process_is_first_among_equals() -> None:
    assert MapPoint(1, 1, {"ring": 1.0, "one process": 1.01}).winner == "one process"
    assert MapPoint(1, 1, {"ring": 1.0, "one process": 1.1}).winner == "ring"


def test_a_tie_does_not_refute() -> None:
    predicted = {"ring": 1.0, "server": 2.0}
    assert Check(1, 1, predicted, {"ring": 1.04, "server": 1.0}).agrees is True
    assert Check(1, 1, predicted, {"ring": 1.06, "server": 1.0}).agrees is False
    assert Check(1, 1, predicted, {"ring": None, "server": 1.0}).agrees is False
    assert Check(1, 1, predicted, {"ring": None, "server": None}).agrees is None
    assert Check(1, 1, predicted, failure="no root").agrees is None


@pytest.mark.parametrize("minutes", [0.0, 200_000.0])
def test_minutes_beyond_use_are_refused(minutes: float, tmp_path: Path) -> None:
    plane = Plane(LAN, axis("bandwidth"), axis("nodes"))
    with pytest.raises(InputError, match="is not above 0, or above 100000"):
        draw_map(experiment(), plane, tmp_path, minutes, lambda what, part: None, 0)


def test_checked_points_are_far_from_one_another() -> None:
    drawn = made(lambda x, y: {"ring": 1.0})
    chosen = [(point.x, point.y) for point in spread(drawn, 5)]
    corners = {(u, v) for u in (1.0, 100.0) for v in (1.0, 100.0)}
    assert chosen[0] == pytest.approx((10, 10))
    assert set(chosen[1:]) == corners


class Answered(Survey):
    """A survey whose runs are answered by `points_of`, snapshots every 100 samples of 1000."""

    def hand_out(self, trial, told, until, many):  # type: ignore[no-untyped-def]
        while (item := trial()) is not None:
            request = item[0]
            name, seed, samples = request.entry.name, request.run.seed, round(1000 * request.part)
            curve = [
                Point(n, n / 10, {"accuracy": self.accuracy(name, seed, n)})
                for n in range(100, samples + 1, 100)
            ]
            told(request, Tried(changed(RECORD, samples=samples), curve))
        return False

    def accuracy(self, name: str, seed: int, samples: int) -> float:
        raise NotImplementedError


class Played(Answered):
    """A survey in which gossip needs 600 samples, and with seed 1 never learns."""

    asked_for: list[tuple[str, int]]

    def accuracy(self, name: str, seed: int, samples: int) -> float:
        self.asked_for.append((name, seed))
        if "gossip" in name:
            return 0.0 if seed == 1 else 0.9 * samples / 600
        return 0.9 * samples / (300 + 200 * seed)


def test_who_misses_the_target_with_a_seed_is_out(tmp_path: Path) -> None:
    every = mapped(experiment(), loaded("lan_1gbit(nodes=2)"), tmp_path)
    names = ("one process", "gossip on 2 nodes", "ring on 2 nodes")
    survey = Played(
        [each for each in every if each.name in names], Target("accuracy", at_least=0.9),
        Length(1000, 10), tmp_path, SearchBudget(0.0, 1e12),
        lambda what, part: None, seeds=(0, 1, 2),
    )  # fmt: skip
    survey.asked_for = []
    survey.learn(1e12)
    single, gossip, ring = (survey.entries[name] for name in names)
    assert survey.samples_of(single) == pytest.approx(500)  # of 300, 500 and 700
    assert survey.samples_of(ring) == survey.samples_of(single)  # it learns the same
    assert survey.samples_of(gossip, [0]) == pytest.approx(600)
    assert survey.samples_of(gossip) is None
    assert survey.fell_short(gossip)
    assert not survey.fell_short(single)
    gossip.curves[1] = gossip.curves[1][:3]  # there was no time for more
    assert survey.samples_of(gossip) == pytest.approx(600)
    assert "ring on 2 nodes" not in {name for name, _ in survey.asked_for}


class Speeds(Answered):
    """An asynchronous server needs twice the samples where links are fast, and never learns where
    they are faster still; other strategies are not trained."""

    def accuracy(self, name: str, seed: int, samples: int) -> float:
        assert "asynchronous" in name
        bandwidth = float(name.rpartition(" at ")[2].partition(",")[0])
        whole = {1: 400, 2: 400, 3: 800, 4: math.inf}[round(bandwidth)] + 40 * seed
        return 0.9 * samples / whole


def test_who_learns_by_speed_is_trained_where_it_is_first(tmp_path: Path) -> None:
    beside = "asynchronous beside"
    every = mapped(experiment(), loaded("lan_1gbit(nodes=2)"), tmp_path)
    by_name = {name_of(each): each for each in every}
    survey = Speeds(
        every, Target("accuracy", at_least=0.9), Length(1000, 10), tmp_path,
        SearchBudget(0.0, 1e12), lambda what, part: None, seeds=(0, 1),
    )  # fmt: skip
    samples = {"one process": 500.0, beside: 420.0}
    points = [
        MapPoint(x, 0.0, {"one process": 5.0, beside: 4.2 if x > 1 else 9.0}, samples)
        for x in (1, 2, 3, 4)
    ]
    found, notes = learned_there(
        survey, points, lambda point: ((point.x - 1) / 3, 0.0),
        lambda point, name: replace(by_name[name], name=f"{name} at {point.x}, 0"), 1e12,
    )  # fmt: skip
    assert [point.winner for point in found] == [
        "one process", beside, "one process", "one process",
    ]  # fmt: skip
    assert found[1].seconds[beside] == pytest.approx(4.2)
    assert found[2].seconds[beside] == pytest.approx(8.2)  # 820 samples
    assert beside not in found[3].seconds  # it missed the target there
    assert found[0].samples[beside] == pytest.approx(420)  # of the nearest, not trained for itself
    (note,) = notes
    assert "trained at 3 points): 420 to 820 samples to the target, and missed it at 1" in note


def test_what_there_was_no_time_to_learn_is_said(tmp_path: Path) -> None:
    every = mapped(experiment(), loaded("lan_1gbit(nodes=2)"), tmp_path)
    by_name = {name_of(each): each for each in every}
    survey = Speeds(
        every, Target("accuracy", at_least=0.9), Length(1000, 10), tmp_path,
        SearchBudget(0.0, 1e12), lambda what, part: None,
    )  # fmt: skip
    point = MapPoint(1, 0.0, {"asynchronous beside": 1.0}, {"asynchronous beside": 100.0})
    found, notes = learned_there(
        survey, [point], lambda point: (0.0, 0.0), lambda point, name: by_name[name], until=0.0
    )
    assert found == [point]
    assert "no time to find what it learns at 1 point" in notes[0]


def test_who_was_never_trained_is_as_far_as_can_be() -> None:
    assert gap((0, 0), ()) == math.inf
    assert gap((0, 0), [(0, 1), (NEAR, 0)]) == NEAR


FEW = ("ring", "server beside", "gossip")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A map of two by two points, of one process and a few strategies."""
    folder = tmp_path_factory.mktemp("map") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "EVERYWHERE", {name: candidates.EVERYWHERE[name] for name in FEW})
        status = main([
            "map", "--task", "digits", "--cluster", "lan_1gbit(nodes=2)", "--x",
            "bandwidth=1 Mbit/s..10 Gbit/s", "--y", "slowest_node=0.1..1", "--points", "2",
            "--minutes", "10", "--target", "loss<=1.5", "--out", str(folder), "--set", "epochs=3",
            "--set", "batch_size=64", "--set", "optimizer=SGD(lr=0.05, momentum=0.9)",
            "--set", "calibration=none",
            "--set", "seeds=[0]",
        ])  # fmt: skip
    assert status == 0
    return folder


def test_a_map_says_who_is_first(folder: Path) -> None:
    record = json.loads((folder / "map.json").read_text())
    assert (folder / "map.png").stat().st_size > 10_000
    assert len(record["points"]) == 4
    slow = [point for point in record["points"] if point["x"] == min(record["x"]["values"])]
    assert {point["winner"] for point in slow} == {"one process"}
    for point in record["points"]:
        least = min(point["seconds"].values())
        assert point["seconds"][point["winner"]] <= 1.02 * least
        assert "ring" in point["seconds"]


def test_a_link_that_is_faster_makes_no_strategy_slower(folder: Path) -> None:
    record = json.loads((folder / "map.json").read_text())
    times = {(p["x"], p["y"]): p["seconds"] for p in record["points"]}
    (slow, fast), ys = sorted(record["x"]["values"]), record["y"]["values"]
    for y in ys:
        for name in FEW:
            assert times[fast, y][name] < times[slow, y][name]
        assert times[slow, y]["one process"] == pytest.approx(times[fast, y]["one process"])


def test_a_target_out_of_reach_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "EVERYWHERE", {"ring": candidates.EVERYWHERE["ring"]})
    status = main([
        "map", "--task", "digits", "--cluster", "lan_1gbit(nodes=2)", "--x", "bandwidth", "--y",
        "latency", "--points", "2", "--minutes", "10", "--target", "loss<=0.00001", "--out",
        str(tmp_path / "out"), "--set", "steps=4", "--set", "calibration=none", "--set",
        "seeds=[0]",
    ])  # fmt: skip
    assert status == 1
    assert "did not reach the target with every seed" in " ".join(capsys.readouterr().out.split())


def test_both_sides_alike_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cluster", LAN, "--x", "bandwidth", "--y", "bandwidth"]
    assert main(["map", "--task", "digits", "--set", "steps=4", *options]) == 2
    assert "on the other side already" in capsys.readouterr().err


def test_one_node_at_every_point_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cluster", "lan_1gbit(nodes=1)", "--x", "bandwidth", "--y", "latency"]
    assert main(["map", "--task", "digits", "--set", "steps=4", *options]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "cluster: lan_1gbit(nodes=1) is one node" in line
    assert "give several, such as lan_1gbit(nodes=8), or --y nodes=1,2,4" in line
