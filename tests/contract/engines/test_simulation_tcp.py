"""What TCP takes of links in virtual time: against formulas, measurements and SimGrid."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf, log, sqrt
from statistics import fmean
from typing import Any

import pytest
import torch
from tests.support.simulated import FREE, Second, run_ranks
from tests.support.virtual_clock import VirtualClock

from orchestra.cluster import Cluster, Jitter, Link, NetworkSwitch, Node
from orchestra.cluster.nodes import LogNormal, Tcp
from orchestra.collectives import Group, all_reduce
from orchestra.engines.simulation import placed
from orchestra.engines.simulation.evaluate import evaluate
from orchestra.engines.simulation.fluid import Fluid, Resource
from orchestra.engines.simulation.simulate import Simulation
from orchestra.engines.simulation.stream import SlowStart
from orchestra.transports.framing import header_bytes
from orchestra.transports.protocol import Transport
from orchestra.worker.runtime import Runtime, SilentReporter

SHARE = 0.029
TAG = 7
ONLY_ACKNOWLEDGEMENTS = replace(FREE, wire=1.06, tcp=replace(FREE.tcp, acknowledgements=SHARE))
BANDWIDTH = 5e6  # 40 Mbit/s
LENGTH = 275_000
SECONDS = (4 * LENGTH + header_bytes(1)) * 1.06 / BANDWIDTH
LATENCY = 50e-6


def nodes(count: int, latency: float = LATENCY, **more: object) -> Cluster:
    link = Link(BANDWIDTH, latency)
    each = tuple(
        Node(
            f"n-{i}", 2, speed=1, jitter=None, switch="s", up=link, down=link, loopback=link,
            shared_memory=False,
        )
        for i in range(count)
    )  # fmt: skip
    return Cluster("test", each, (NetworkSwitch("s"),), placement="spread", **more)  # type: ignore[arg-type]


def seconds(ranks: int, messages: Sequence[tuple[int, int]], on: Cluster) -> list[float]:
    """When each rank has what is sent to it, if each of `messages` is sent at the beginning."""

    def program(runtime: Runtime) -> float:
        transport: Transport = runtime.transport
        own = runtime.rank
        there = [transport.receive(source, TAG) for source, to in messages if to == own]
        sends = [transport.send(torch.zeros(LENGTH), to, TAG) for s, to in messages if s == own]
        for receive in there:
            receive.wait()
        arrived = transport.now()
        for handle in sends:
            handle.wait()
        return arrived

    outcome = run_ranks(ranks, program, on, ONLY_ACKNOWLEDGEMENTS)
    assert outcome.failure is None, outcome.failure
    return list(outcome.results)


def test_acknowledgements_take_nothing_where_nothing_else_goes_their_way() -> None:
    assert seconds(2, [(0, 1)], nodes(2))[1] == pytest.approx(SECONDS + 2 * LATENCY)
    assert seconds(3, [(0, 2), (1, 2)], nodes(3))[2] == pytest.approx(2 * SECONDS + 2 * LATENCY)


# The kernel buffers a message, and shares depend on chance


@pytest.mark.parametrize("buffer", [0, 300_000, 2_000_000])
def test_a_sender_is_free_at_once_up_to_the_kernels_buffer(buffer: int) -> None:
    size = 4 * LENGTH + header_bytes(1)

    def program(runtime: Runtime) -> float:
        transport: Transport = runtime.transport
        if runtime.rank:
            transport.receive(0, TAG).wait()
        else:
            transport.send(torch.zeros(LENGTH), 1, TAG).wait()
        return transport.now()

    outcome = run_ranks(2, program, nodes(2), replace(ONLY_ACKNOWLEDGEMENTS, buffer=buffer))
    free, there = outcome.results
    assert there == pytest.approx(SECONDS + 2 * LATENCY)
    assert free == pytest.approx(there if size > buffer else 0.0, abs=1e-9)


JITTER = LogNormal(0.1)


def shared_by_chance(
    seed: int, unfairness: float, jitter: Jitter | None = JITTER, *, measured: bool = True
) -> list[float]:
    """When each of two messages that share a link, sent by ranks 0 and 1, is there."""
    on = nodes(3)
    on = replace(on, nodes=tuple(replace(node, jitter=jitter) for node in on.nodes))

    def program(runtime: Runtime) -> list[float]:
        transport: Transport = runtime.transport
        runtime.stopwatch(measured)
        if runtime.rank < 2:
            transport.send(torch.zeros(LENGTH), 2, TAG).wait()
            return []
        tasks = [transport.spawn(partial(arrival, source)) for source in range(2)]
        return [task.wait() for task in tasks]

    def arrival(source: int, flow: Transport) -> float:
        flow.receive(source, TAG).wait()
        return flow.now()

    tcp = replace(ONLY_ACKNOWLEDGEMENTS.tcp, unfairness=unfairness)
    outcome = Simulation(
        on, 3, Second(), replace(ONLY_ACKNOWLEDGEMENTS, tcp=tcp), SilentReporter(),
        seed_number=seed,
    ).run(program)  # fmt: skip
    assert outcome.failure is None, outcome.failure
    return list(outcome.results[2])


def test_two_messages_on_a_link_have_unlike_shares() -> None:
    """The last is there when the link has carried both, whoever was first."""
    both = 2 * SECONDS + 2 * LATENCY
    assert shared_by_chance(1, 0.0) == pytest.approx([both, both])
    assert shared_by_chance(1, 0.4, jitter=None) == pytest.approx([both, both])
    assert shared_by_chance(1, 0.4, measured=False) == pytest.approx([both, both])
    firsts = []
    for seed in range(40):
        found = shared_by_chance(seed, 0.4)
        assert found == shared_by_chance(seed, 0.4)
        assert max(found) == pytest.approx(both)
        firsts.append((min(found) - 2 * LATENCY) / SECONDS)
    # Of two with weights a > b the first has a / (a + b) of the link, so it takes 1 + b / a.
    ratios = [log(1 / (first - 1)) for first in firsts]
    assert 0.4 * sqrt(2) * 0.7 < sqrt(fmean(r * r for r in ratios)) < 0.4 * sqrt(2) * 1.3


def test_messages_that_go_both_ways_share_links_with_acknowledgements() -> None:
    """Measured with CUBIC at 40 Mbit/s, without preambles: 2.2 % (python -m benchmarks.links)."""
    both = seconds(2, [(0, 1), (1, 0)], nodes(2))
    assert both == pytest.approx([SECONDS * (1 + SHARE) + 2 * LATENCY] * 2)
    ring = seconds(3, [(0, 1), (1, 2), (2, 0)], nodes(3))
    assert ring == pytest.approx([SECONDS * (1 + SHARE) + 2 * LATENCY] * 3)


def test_what_is_left_goes_on_alone() -> None:
    """Rank 0 gets two messages while it sends one: the second half has the whole link."""
    found = seconds(2, [(0, 1), (1, 0), (1, 0)], nodes(2))
    assert found[1] == pytest.approx(SECONDS * (1 + SHARE) + 2 * LATENCY)
    assert found[0] == pytest.approx(SECONDS * (2 + SHARE) + 2 * LATENCY)


def test_loopback_has_neither_headers_nor_acknowledgements() -> None:
    on = replace(nodes(1), placement=("n-0", "n-0"))
    each = (4 * LENGTH + header_bytes(1)) / BANDWIDTH
    both = seconds(2, [(0, 1), (1, 0)], on)
    assert both == pytest.approx([2 * each + LATENCY] * 2)  # one loopback for both


def test_native_networks_have_neither() -> None:
    each = (4 * LENGTH + header_bytes(1)) / BANDWIDTH
    assert seconds(2, [(0, 1), (1, 0)], nodes(2, tcp=False)) == pytest.approx(
        [each + 2 * LATENCY] * 2
    )


def all_reduced(name: str, ranks: int, on: Cluster, tcp: Tcp) -> list[float]:
    def program(runtime: Runtime) -> float:
        all_reduce(runtime.transport, torch.zeros(LENGTH), name, Group(tuple(range(ranks))), TAG)
        return runtime.transport.now()

    outcome = run_ranks(ranks, program, on, replace(FREE, tcp=tcp))
    assert outcome.failure is None, outcome.failure
    return list(outcome.results)


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "parallel"])
def test_collectives_go_both_ways(name: str) -> None:
    without = all_reduced(name, 4, nodes(4, 0.0), FREE.tcp)
    beside = all_reduced(name, 4, nodes(4, 0.0), replace(FREE.tcp, acknowledgements=SHARE))
    assert beside == pytest.approx([each * (1 + SHARE) for each in without])


def test_a_tree_of_two_goes_one_way_at_a_time() -> None:
    without = all_reduced("tree", 2, nodes(2), FREE.tcp)
    beside = all_reduced("tree", 2, nodes(2), replace(FREE.tcp, acknowledgements=SHARE))
    assert beside == without


# Long links


def test_slow_start_is_the_sum_of_the_round_trips_that_it_waits() -> None:
    """10 segments, then 20, 40, ...: 100 Mbit/s and 20 ms need 250 kB in flight, after five
    round trips; 14,480 bytes leave in 1.2 ms, and the rest of each round trip passes."""
    tcp, bandwidth, round_trip = Tcp(), 12.5e6, 0.02
    start = SlowStart(tcp, bandwidth, round_trip)
    stalled = sum(round_trip - 14480 * 2**k / bandwidth for k in range(5))
    assert start.stall(1e6, 0.0) == pytest.approx(stalled)
    assert start.stall(1e6, 0.1) == 0.0  # the connection keeps its window
    assert start.stall(1e6, 0.1 + round_trip + 0.21) == pytest.approx(stalled)  # unless it idles


def test_a_short_message_waits_for_few_round_trips() -> None:
    start = SlowStart(Tcp(), 12.5e6, 0.02)
    assert start.stall(14480, 0.0) == 0.0
    assert start.stall(14480, 0.0) == 0.0  # 28,960 may be in flight by now
    assert SlowStart(Tcp(), 12.5e6, 0.02).stall(15000, 0.0) == pytest.approx(0.02 - 14480 / 12.5e6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_all_reduce_over_a_long_link_starts_slowly_once(ranks: int) -> None:
    """Evaluated at once it takes the same time, once connections have started."""
    tcp = replace(Tcp(), acknowledgements=0.0, window=1e18)
    on = nodes(ranks, 0.02)  # 80 ms and 5 MB/s: 400 kB in flight

    def program(runtime: Runtime) -> list[float]:
        group, found, before = Group(tuple(range(ranks))), [], 0.0
        for _ in range(3):
            all_reduce(runtime.transport, torch.zeros(LENGTH), "ring", group, TAG)
            found.append(runtime.transport.now() - before)
            before = runtime.transport.now()
        return found

    outcome = run_ranks(ranks, program, on, replace(FREE, tcp=tcp))
    assert outcome.failure is None, outcome.failure
    rounds, piece = 2 * (ranks - 1), 4 * LENGTH / ranks
    stalls = SlowStart(tcp, BANDWIDTH, 0.08)
    expected = [stalls.stall(piece, 0.0) for _ in range(rounds)]
    even = rounds * (0.04 + piece / BANDWIDTH)
    for first, *later in outcome.results:
        assert first == pytest.approx(even + sum(expected), rel=1e-3)
        assert later == pytest.approx([even] * 2, rel=1e-3)


def test_no_more_than_a_window_is_in_flight() -> None:
    on = nodes(2, 0.5)  # a round trip of 2 s: 10 MB would fill it

    def program(runtime: Runtime) -> float:
        if runtime.rank == 0:
            runtime.transport.send(torch.zeros(LENGTH), 1, TAG).wait()
        else:
            runtime.transport.receive(0, TAG).wait()
        return runtime.transport.now()

    tcp = replace(FREE.tcp, window=1e6)
    outcome = run_ranks(2, program, on, replace(FREE, tcp=tcp))
    assert outcome.failure is None, outcome.failure
    assert outcome.results[1] == pytest.approx(1.0 + 4 * LENGTH / (1e6 / 2.0), rel=1e-3)


# SimGrid

SIMGRID = """
import json, sys, simgrid
share, sizes = json.load(sys.stdin)
names = {"network/model": "CM02", "network/latency-factor": 1, "network/bandwidth-factor": 1,
         "network/crosstraffic": 1, "network/weight-S": 0, "network/TCP-gamma": 0}
engine = simgrid.Engine(["flows", *(f"--cfg={name}:{value}" for name, value in names.items())])
zone = engine.netzone_root.add_netzone_full("zone")
hosts = [zone.add_host(str(n), 1e9) for n in range(2)]
link = zone.add_split_duplex_link("link", 5e6)
zone.add_route(hosts[0], hosts[1],
               [simgrid.LinkInRoute(link, simgrid.LinkInRoute.Direction.UP)], True)
ends = {}
def send(number, size):
    simgrid.Mailbox.by_name(str(number)).put(number, size)
def receive(number):
    simgrid.Mailbox.by_name(str(number)).get()
    ends[number] = simgrid.Engine.clock
for number, size in enumerate(sizes):
    if size:
        hosts[number].add_actor("s", send, number, size)
        hosts[1 - number].add_actor("r", receive, number)
zone.seal()
engine.run()
print(json.dumps([ends[n] for n in sorted(ends)]))
"""
SIMGRIDS_SHARE = 0.05


@pytest.mark.skipif(importlib.util.find_spec("simgrid") is None, reason="needs SimGrid for Python")
@pytest.mark.parametrize("sizes", [(1_000_000, 0), (1_000_000, 1_000_000), (1_000_000, 400_000)])
def test_flows_both_ways_end_when_simgrid_says(sizes: tuple[int, int]) -> None:
    """CM02 with its cross-traffic."""
    given = json.dumps([SIMGRIDS_SHARE, sizes])
    done = subprocess.run(
        [sys.executable, "-c", SIMGRID],
        input=given,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    clock = VirtualClock()
    fluid = Fluid(clock, SIMGRIDS_SHARE)
    ways = [Resource("up", 5e6), Resource("down", 5e6)]
    found: list[float | None] = [None, None]
    for number, size in enumerate(sizes):
        if size:
            fluid.start(
                size,
                [ways[number]],
                lambda number=number: found.__setitem__(number, clock.now()),  # type: ignore[misc]
                (ways[1 - number],),
            )
    clock.run(inf)
    wanted = json.loads(done.stdout.splitlines()[-1])
    assert wanted == pytest.approx([end for end in found if end is not None], rel=1e-6)


SIMGRIDS_WEIGHTS = """
import json, sys, simgrid
names = {"network/model": "CM02", "network/latency-factor": 1, "network/bandwidth-factor": 1,
         "network/crosstraffic": 0, "network/weight-S": 20537, "network/TCP-gamma": 0}
engine = simgrid.Engine(["flows", *(f"--cfg={name}:{value}" for name, value in names.items())])
zone = engine.netzone_root.add_netzone_full("zone")
last, target = zone.add_link("last", 5e6), zone.add_host("target", 1e9)
ends = {}
def send(number, size):
    simgrid.Mailbox.by_name(str(number)).put(number, size)
def receive(number):
    simgrid.Mailbox.by_name(str(number)).get()
    ends[number] = simgrid.Engine.clock
for number, latency in enumerate(json.load(sys.stdin)):
    host = zone.add_host(str(number), 1e9)
    link = zone.add_link(f"first {number}", 50e6)
    link.set_latency(latency)
    way = [simgrid.LinkInRoute(each) for each in (link, last)]
    zone.add_route(host, target, way, False)
    host.add_actor("s", send, number, 1_000_000)
    target.add_actor("r", receive, number)
zone.seal()
engine.run()
print(json.dumps([ends[n] for n in sorted(ends)]))
"""
UNLIKE = (0.001, 0.01)
ENDS_OF_UNLIKE = [0.273597, 0.401]
"""Of 1 MB each from 1 and 10 ms away through 5 MB/s: shares are as 2.6 to 1, since queues make
up 4.5 ms of both ways."""


def test_flows_with_unlike_latencies_share_unequally() -> None:
    links = [Link(50e6, latency) for latency in UNLIKE]
    far = [
        Node(f"n-{i}", 2, speed=1, jitter=None, switch="s", up=link, down=link, loopback=link)
        for i, link in enumerate(links)
    ]
    last = Link(5e6, 0.0)
    target = replace(far[0], name="n-2", up=last, down=last)
    on = Cluster("test", (*far, target), (NetworkSwitch("s"),), placement="spread")
    tcp = replace(FREE.tcp, queue=20537)

    def program(runtime: Runtime) -> list[float]:
        transport, found = runtime.transport, []
        if runtime.rank < 2:
            transport.send(torch.zeros(250_000 - header_bytes(1) // 4), 2, TAG).wait()
        else:
            for source in (0, 1):
                transport.receive(source, TAG).wait()
                found.append(transport.now())
        return found

    outcome = run_ranks(3, program, on, replace(FREE, tcp=tcp))
    assert outcome.failure is None, outcome.failure
    assert outcome.results[2] == pytest.approx(ENDS_OF_UNLIKE, rel=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("simgrid") is None, reason="needs SimGrid for Python")
def test_they_do_in_simgrid() -> None:
    command = [sys.executable, "-c", SIMGRIDS_WEIGHTS]
    done = subprocess.run(
        command, input=json.dumps(UNLIKE), capture_output=True, text=True, check=True, timeout=60
    )
    ends = json.loads(done.stdout.splitlines()[-1])
    assert ends == pytest.approx(ENDS_OF_UNLIKE, rel=1e-4)


def test_a_slow_trunk_does_not_lower_shares_of_other_links() -> None:
    """One message comes over a trunk of 5 MB/s, another from beside: both get what is fair, as
    emulated nodes do, though the first one's queue is longer."""
    fast, slow, none = Link(12.5e6, 250e-6), Link(5e6, 250e-6), Link(3e9, 0.0)

    def node(name: str, switch: str) -> Node:
        return Node(name, 2, speed=1, jitter=None, switch=switch, up=fast, down=fast, loopback=none)

    rack = NetworkSwitch("rack", to="top", up=slow, down=slow)
    members = node("near", "top"), node("target", "top"), node("far", "rack")
    on = Cluster("test", members, (NetworkSwitch("top"), rack), placement="spread")
    size = 1_000_000

    def program(runtime: Runtime) -> float:
        transport = runtime.transport
        if runtime.rank != 1:
            transport.send(torch.zeros((size - header_bytes(1)) // 4), 1, TAG).wait()
            return 0.0
        transport.receive(2, TAG).wait()
        return transport.now()

    outcome = run_ranks(3, program, on, replace(FREE, tcp=replace(FREE.tcp, queue=20537)))
    assert outcome.failure is None, outcome.failure
    assert outcome.results[1] == pytest.approx(size / 5e6, rel=0.01)


def test_rings_are_evaluated_at_once_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With acknowledgements."""
    evaluated = []

    def counting(*arguments: Any) -> None:
        evaluated.append(arguments)
        evaluate(*arguments)

    monkeypatch.setattr(placed, evaluate.__name__, counting)
    all_reduced("ring", 4, nodes(4), Tcp())
    assert len(evaluated) == 1
