"""A cluster's routes, ranks, jitter and what changes with time, against brute force."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import subprocess
import sys
from collections import deque
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra.cluster import (
    Cluster,
    Death,
    Delay,
    ExponentialTail,
    Fault,
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
)
from orchestra.cluster.faults import FAULTS, Lasting
from orchestra.errors import InputError
from orchestra.settings.base import settings_of

LOOPBACK = Link(3e9, 1e-6)


def node(name: str, switch: str = "switch", cores: int = 2, devices: int = 0) -> Node:
    """A node whose links differ from every other one's."""
    number = 1 + sum(map(ord, name))
    return Node(
        name, cores, speed=1, devices=devices, switch=switch, loopback=LOOPBACK,
        up=Link(number * 1e6, number * 1e-6), down=Link(number * 2e6, number * 3e-6),
    )  # fmt: skip


def star(*faults: Fault, nodes: int = 3, cores: int = 2, placement: object = "spread") -> Cluster:
    return Cluster(
        "star", tuple(node(f"w-{i}", cores=cores) for i in range(nodes)),
        (NetworkSwitch("switch"),),
        placement=placement, faults=faults,  # type: ignore[arg-type]
    )  # fmt: skip


def random_tree(seed: int) -> Cluster:
    stream = random.Random(seed)
    switches = [NetworkSwitch("s0", shared=1e9)]
    for i in range(1, stream.randint(1, 7)):
        links = {"up": Link(i * 1e7, i * 1e-3), "down": Link(i * 2e7, i * 2e-3)}
        shared = stream.choice([None, i * 1e5])
        switches.append(
            NetworkSwitch(f"s{i}", to=f"s{stream.randrange(i)}", shared=shared, **links)
        )
    stream.shuffle(switches)
    nodes = [node(f"n{i}", stream.choice(switches).name) for i in range(stream.randint(2, 9))]
    return Cluster("tree", tuple(nodes), tuple(switches), placement="spread")


def parts(cluster: Cluster) -> list[Node | NetworkSwitch]:
    return [*cluster.nodes, *cluster.switches]


def shortest(cluster: Cluster, source: Node, target: Node) -> list[str]:
    """The channels from node to node by breadth-first search over every link there is."""
    ways: dict[str, list[tuple[str, str]]] = {}
    for part in parts(cluster):
        above = part.switch if isinstance(part, Node) else part.to
        if above is not None:
            ways.setdefault(part.name, []).append((above, f"{part.name} up"))
            ways.setdefault(above, []).append((part.name, f"{part.name} down"))
    shared = {switch.name for switch in cluster.switches if switch.shared is not None}
    waiting: deque[tuple[str, list[str]]] = deque([(source.name, [])])
    seen = {source.name}
    while waiting:
        at, crossed = waiting.popleft()
        if at == target.name:
            return crossed
        through = [*crossed, f"{at} shared"] if at in shared else crossed
        for following, channel in ways.get(at, ()):
            if following not in seen:
                seen.add(following)
                waiting.append((following, [*through, channel]))
    raise AssertionError(f"no way from {source.name} to {target.name}")


@pytest.mark.parametrize("seed", range(30))
def test_routes_are_those_of_a_search(seed: int) -> None:
    cluster = random_tree(seed)
    for source in cluster.nodes:
        for target in cluster.nodes:
            path = cluster.path(source, target)
            names = [channel.name for channel in path.channels]
            if source is target:
                assert names == [f"{source.name} loopback"]
            else:
                assert names == shortest(cluster, source, target)
            assert path.latency == pytest.approx(sum(c.latency for c in path.channels))
            assert cluster.path(source, target) is path


def test_a_channel_is_the_link_of_its_name() -> None:
    cluster = random_tree(3)
    for part in parts(cluster):
        for direction, link in (("up", part.up), ("down", part.down)):
            channel = cluster.channels.get(f"{part.name} {direction}")
            assert (channel is None) == (link is None)
            if channel is not None and link is not None:
                assert (channel.bandwidth, channel.latency) == (link.bandwidth, link.latency)
    assert cluster.channels["s0 shared"].bandwidth == 1e9
    assert len({*cluster.channels.values()}) == len(cluster.channels)


@pytest.mark.parametrize(
    ("placement", "ranks", "names"),
    [
        ("spread", 2, "0 1"),
        ("spread", 7, "0 1 2 0 1 2 0"),
        ("packed", 2, "0 0"),
        ("packed", 5, "0 0 1 1 2"),
        ("packed", 8, "0 0 1 1 2 2 0 0"),
        (("w-2", "w-0", "w-2"), 3, "2 0 2"),
    ],
)
def test_placement(placement: object, ranks: int, names: str) -> None:
    cluster = star(placement=placement)
    expected = [f"w-{name}" for name in names.split()]
    assert [node.name for node in cluster.nodes_of(ranks)] == expected


def test_ranks_of_a_node_with_devices_take_one_each() -> None:
    nodes = (node("gpus", cores=16, devices=2), node("cpu", cores=3))
    cluster = Cluster("mixed", nodes, (NetworkSwitch("switch"),), placement="packed")
    assert [each.name for each in cluster.nodes_of(5)] == ["gpus"] * 2 + ["cpu"] * 3


def test_a_list_of_nodes_has_to_be_as_long_as_the_ranks() -> None:
    with pytest.raises(InputError, match="places 1 ranks, but there are 2; name a node for each"):
        star(placement=("w-0",)).nodes_of(2)


@pytest.mark.parametrize(
    "fault",
    [Death("rank 3", at=1), Pause("rank 3", at=1, seconds=1), Delay(1, target="rank 3", at=1)],
)
def test_a_fault_of_a_rank_that_is_not_there_is_refused(fault: Fault) -> None:
    cluster = star(fault)
    assert len(cluster.nodes_of(4)) == 4
    with pytest.raises(InputError, match="befalls rank 3, but ranks are 0 to 2"):
        cluster.nodes_of(3)


# What changes with time

spans = st.tuples(
    st.integers(0, 20), st.one_of(st.none(), st.integers(1, 10)), st.sampled_from([2.0, 4.0, 8.0])
)


@given(st.lists(spans, max_size=6))
def test_speed_is_the_product_of_what_holds(drawn: list[tuple[int, int | None, float]]) -> None:
    faults = [
        SlowDown("w-1", factor, at=at, until=None if length is None else at + length)
        for at, length, factor in drawn
    ]
    cluster = star(*faults)
    slow, other = cluster.nodes[1], cluster.nodes[0]
    changes = cluster.speed_changes(slow)
    assert changes[0][0] == 0
    assert [time for time, _ in changes] == sorted({time for time, _ in changes})
    assert all(a[1] != b[1] for a, b in itertools.pairwise(changes))
    for time in numpy.arange(0, 40, 0.5):
        expected = 1.0
        for at, length, factor in drawn:
            if at <= time and (length is None or time < at + length):
                expected /= factor
        now = next(f for begin, f in reversed(cluster.speed_changes(slow)) if begin <= time)
        assert now == expected
    assert cluster.speed_changes(other) == ((0, 1),)


def test_bandwidth_changes_concern_both_directions_of_one_link() -> None:
    cluster = star(
        LinkSlow("w-0", 4, at=10, until=20), LinkCut("w-0", at=12, until=14), LinkCut("w-2", at=5)
    )
    channels = cluster.channels
    expected = ((0.0, 1.0), (10.0, 0.25), (12.0, 0.0), (14.0, 0.25), (20.0, 1.0))
    assert cluster.bandwidth_changes(channels["w-0 up"]) == expected
    assert cluster.bandwidth_changes(channels["w-0 down"]) == expected
    assert cluster.bandwidth_changes(channels["w-2 up"]) == ((0, 1), (5, 0))
    for untouched in ("w-0 loopback", "w-1 up"):
        assert cluster.bandwidth_changes(channels[untouched]) == ((0, 1),)


def test_pauses_of_a_rank_and_of_its_node_join() -> None:
    cluster = star(
        Pause("rank 4", at=3, seconds=2),
        Pause("w-1", at=1, seconds=1),
        Pause("w-1", at=4, seconds=9),
    )
    assert cluster.pauses(4, 6) == ((1, 2), (3, 13))
    assert cluster.pauses(1, 6) == ((1, 2), (4, 13))
    assert cluster.pauses(0, 6) == ()


def test_the_first_death_counts() -> None:
    cluster = star(Death("w-0", at=9), Death("rank 3", at=5), Death("rank 0", at=20))
    assert [cluster.death(rank, 5) for rank in range(5)] == [9, None, None, 5, None]


def test_ranks_that_join_follow_those_of_the_start_by_their_times() -> None:
    cluster = star(Join("w-2", at=9), Death("w-1", at=5), Join("w-1", at=5), Death("rank 3", at=8))
    assert [node.name for node in cluster.nodes_of(3)] == ["w-0", "w-1", "w-2", "w-1", "w-2"]
    assert [cluster.death(rank, 3) for rank in range(5)] == [None, 5, None, 8, None]
    assert cluster.threads_of(3) == (2, 2, 2, 1, 1)
    with pytest.raises(InputError, match="Death befalls rank 3 at 8 s, before it has joined"):
        star(Join("w-2", at=9), Death("rank 3", at=8)).nodes_of(3)


def test_delays_add_up_for_those_they_name() -> None:
    cluster = star(
        Delay(0.5, source="w-0", at=10, until=20),
        Delay(0.25, target="rank 2", at=0),
        Delay(2, source="rank 0", target="rank 1", at=0, until=11),
    )
    assert cluster.delay(0, 1, 4, 10) == 2.5
    assert cluster.delay(0, 1, 4, 11) == 0.5
    assert cluster.delay(3, 2, 4, 10) == 0.75
    assert cluster.delay(3, 2, 4, 20) == 0.25
    assert cluster.delay(1, 0, 4, 10) == 0


@pytest.mark.parametrize("cls", FAULTS.values(), ids=lambda cls: cls.__name__)
def test_every_fault_says_in_words_what_happens_when(cls: type[Fault]) -> None:
    values = {"of": "w-0", "node": "w-0", "factor": 3.0, "seconds": 0.25, "source": "w-0"}
    fields = {field.name for field in settings_of(cls)}
    given: dict[str, Any] = {name: value for name, value in values.items() if name in fields}
    given["at"] = 7.0
    fault = cls(**given)
    assert "7 s" in fault.words
    assert "w-0" in fault.names
    if isinstance(fault, Lasting):
        assert "7 s to 9 s" in fault.with_setting("until", 9.0).words
        with pytest.raises(InputError, match="ends at 7 s, not after it begins at 7 s"):
            fault.with_setting("until", 7.0)


# Jitter

JITTERS: dict[Jitter, tuple[float, float, float]] = {
    Normal(0.05): (1, 0.1, 1.9),
    Normal(0.8): (1, 0.1, 1.9),
    Normal(50): (1, 0.1, 1.9),
    LogNormal(0.2): (1, 0, math.inf),
    LogNormal(1): (1, 0, math.inf),
    ExponentialTail(2): (3, 1, math.inf),
}
"""With the mean of the factor, the least one and the largest."""


@pytest.mark.parametrize("jitter", JITTERS, ids=repr)
def test_jitter_has_its_mean_and_support(jitter: Jitter) -> None:
    mean, low, high = JITTERS[jitter]
    extremes = [2.0**-54, 2.0**-53, 1e-9, 0.5, 1 - 1e-9, 1 - 2.0**-53]
    for uniform in extremes:
        factor = jitter.factor(uniform)
        assert math.isfinite(factor)
        assert factor > 0
        assert low <= factor <= high
    steps = 200_000
    factors = [jitter.factor((i + 0.5) / steps) for i in range(steps)]
    assert factors == sorted(factors)
    assert statistics.fmean(factors) == pytest.approx(mean, rel=2e-4)


def test_small_deviations_are_those_of_the_normal_distribution() -> None:
    assert Normal(0.05).factor(statistics.NormalDist().cdf(-2)) == pytest.approx(0.9)
    assert Normal(0.05).factor(statistics.NormalDist().cdf(1)) == pytest.approx(1.05)
    logs = [math.log(LogNormal(0.3).factor((i + 0.5) / 10_000)) for i in range(10_000)]
    assert statistics.stdev(logs) == pytest.approx(0.3, rel=1e-3)
    assert ExponentialTail(2).factor(1 - math.exp(-3)) == pytest.approx(7)


@pytest.mark.parametrize("jitter", JITTERS, ids=repr)
def test_a_draw_takes_one_number_of_the_generator(jitter: Jitter) -> None:
    drawing, counting = numpy.random.default_rng(5), numpy.random.default_rng(5)
    assert [jitter.draw(drawing) for _ in range(4)] == [
        jitter.factor(counting.random()) for _ in range(4)
    ]


def test_a_zero_of_the_generator_is_no_zero_of_the_factor() -> None:
    class Zero(numpy.random.Generator):
        def random(self) -> float:  # type: ignore[override]
            return 0.0

    for jitter in JITTERS:
        assert jitter.draw(Zero(numpy.random.PCG64(0))) > 0


# Refused in Python as well

GOOD = node("w-0")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(0, 0), "Link.bandwidth: 0.0 is not above 0"),
        (lambda: Link(1, -1), "Link.latency: -1.0 is below 0"),
        (lambda: Link(math.inf, 0), "Link.bandwidth: inf is not a finite number"),
        (lambda: Node("a b", 1, speed=1, loopback=LOOPBACK), "'a b' is no name"),
        (lambda: Node("a", 0, speed=1, loopback=LOOPBACK), "Node.cores: 0 is below 1"),
        (lambda: Node("a", 1, loopback=LOOPBACK), "node a lacks a speed; give speed: 1 or flops"),
        (lambda: Node("a", 1, speed=1, flops=1, loopback=LOOPBACK), "both speed and flops"),
        (lambda: Node("a", 1, speed=1, switch="s", loopback=LOOPBACK), "needs all of switch, up"),
        (lambda: NetworkSwitch("s", up=LOOPBACK), "switch s has a link, but not to what; give to"),
        (lambda: NetworkSwitch("s", to="t", up=LOOPBACK), "lacks a link to t; give up and down"),
        (lambda: Cluster("c", (), placement="spread"), "needs at least one node"),
        (lambda: star(placement="sperad"), "did you mean 'spread'?"),
        (lambda: star(placement=("w-7",)), "there is no node 'w-7'; did you mean"),
        (lambda: star(Delay(1, at=0)), "Delay has neither source nor target"),
        (lambda: star(SlowDown("w-0", 0.5, at=0)), "SlowDown.factor: 0.5 is not above 1"),
        (lambda: star(SlowDown("rank 0", 2, at=0)), "there is no node 'rank 0'"),
        (lambda: star(LinkCut("switch", at=0)), "no link of 'switch'; known: w-0, w-1, w-2"),
        (lambda: star(Death("switch", at=0)), "there is no node 'switch'"),
        (
            lambda: Cluster("c", (GOOD, GOOD), (NetworkSwitch("switch"),), placement="spread"),
            "the name w-0 is given twice",
        ),
        (
            lambda: Cluster("c", (node("switch"),), (NetworkSwitch("switch"),), placement="spread"),
            "the name switch is given twice",
        ),
        (lambda: Cluster("c", (GOOD,), placement="spread"), "no switch 'switch'; there is none"),
        (
            lambda: Cluster(
                "c", (GOOD,), (NetworkSwitch("switch"), NetworkSwitch("b")), placement="spread"
            ),
            "b and switch have no switch above; join them",
        ),
        (
            lambda: Cluster(
                "c",
                (GOOD,),
                (
                    NetworkSwitch("switch"),
                    NetworkSwitch("a", to="b", up=LOOPBACK, down=LOOPBACK),
                    NetworkSwitch("b", to="a", up=LOOPBACK, down=LOOPBACK),
                ),
                placement="spread",
            ),
            "a leads into a circle",
        ),
        (
            lambda: Cluster(
                "c",
                (GOOD, Node("lone", 1, speed=1, loopback=LOOPBACK)),
                (NetworkSwitch("switch"),),
                placement="spread",
            ),
            "lone has no link to a switch",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(InputError) as refused:
        make()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_loads_without_torch_and_numpy() -> None:
    script = (
        "import sys; from pathlib import Path; from orchestra.cluster import load_cluster; "
        "load_cluster('stragglers(4)', where='x', folder=Path()); "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
