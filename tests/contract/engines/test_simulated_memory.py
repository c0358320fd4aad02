"""Collectives in shared memory in virtual time: times by hand, values, and who shares what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from tests.support.simulated import FREE, cluster, run_ranks

from orchestra.cluster import Cluster, Death, SlowDown
from orchestra.cluster.nodes import Line, MemoryCosts, Overhead
from orchestra.collectives import execute
from orchestra.engines.simulation.plan import node_stages
from orchestra.errors import PeerLost
from orchestra.schedules import (
    ALL_REDUCE,
    Schedule,
    broadcast,
    hierarchical,
    ring_all_gather,
    ring_reduce_scatter,
)
from orchestra.transports.protocol import Group
from orchestra.transports.shared_memory import CHUNK_BYTES, SMALL_BYTES
from orchestra.worker.runtime import Runtime, Work

COSTS = MemoryCosts(collective=2.0, barrier=3.0, copy=1e-6, wake=0.5)
OVERHEAD = replace(FREE, in_memory=COSTS)
SMALL, LARGE = SMALL_BYTES // 4, 5 * CHUNK_BYTES // 8  # elements; two chunks and a half
BYTES = 4.0 * LARGE
TAG, GROUP = 7, Group((0, 1, 2))


def ends(
    schedule: Schedule,
    elements: int,
    on: str | Cluster,
    delays: Sequence[float] = (),
    overhead: Overhead = OVERHEAD,
) -> list[float]:
    """When each rank is through with a collective that it begins after its delay."""

    def program(runtime: Runtime) -> float:
        if delays:
            work = Work("gradient", cast(int, delays[runtime.rank]))
            runtime.compute.run(work, lambda: None)
        vector = torch.ones(elements, device="meta")
        execute(runtime.transport, vector, schedule, Group(tuple(range(runtime.ranks))), TAG)
        return runtime.transport.now()

    outcome = run_ranks(schedule.ranks, program, on, overhead)
    assert outcome.failure is None, outcome.failure
    return list(outcome.results)


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_of_a_small_vector_each_rank_adds_up_all(name: str) -> None:
    """collective + show + (n - 1) barrier + wake + n passes"""
    one_pass = 1e-6 * SMALL_BYTES
    expected = 2 + one_pass + 2 * 3 + 0.5 + 3 * one_pass
    assert ends(ALL_REDUCE[name](3), SMALL, "one_host(3)") == pytest.approx([expected] * 3)


@pytest.mark.parametrize("name", ["ring", "tree"])
def test_of_a_large_vector_each_rank_makes_three_passes(name: str) -> None:
    """collective + 3 passes + 4 barriers of 3 chunks, each with those who wake up"""
    expected = 2 + 3 * 1e-6 * BYTES + 4 * (3 * 3 + 0.5)
    on = cluster("one_host(4)")
    assert ends(ALL_REDUCE[name](4), LARGE, on) == pytest.approx([expected] * 4)
    # Where faults may come ranks do it in flows of their own, stage by stage.
    on = replace(on, faults=(SlowDown("host", factor=2, at=1e9),))
    assert ends(ALL_REDUCE[name](4), LARGE, on) == pytest.approx([expected] * 4)


def test_all_go_on_after_the_last_to_come() -> None:
    """Who comes early has shown the first of three chunks by then."""
    chunk = 1e-6 * BYTES / 3
    last = 1000.0
    expected = last + 2 + 3 * 1e-6 * BYTES + 4 * (3 + 0.5)
    arrivals = [0.0001, last]
    assert ends(ALL_REDUCE["ring"](2), LARGE, "one_host(2)", arrivals) == pytest.approx(
        [expected] * 2
    )
    # Where that takes longer than until the last one comes, who does nothing but that waits less.
    slow = last - chunk / 2
    arrivals = [slow, last]
    assert ends(ALL_REDUCE["ring"](2), LARGE, "one_host(2)", arrivals) == pytest.approx(
        [expected] * 2
    )


def test_more_ranks_than_cores_take_turns() -> None:
    """Two for each core: all that they compute takes twice as long, and who sleeps does not."""
    expected = 2 * (2 + 3 * 1e-6 * BYTES + 4 * 3 * 3) + 4 * 0.5
    assert max(ends(ALL_REDUCE["ring"](4), LARGE, "one_host(2)")) == pytest.approx(expected)


def test_a_slow_node_computes_them_slowly() -> None:
    expected = 4 * (2 + 3 * 1e-6 * BYTES + 4 * 3) + 4 * 0.5
    on = "one_host(2, speed=0.25)"
    assert ends(ALL_REDUCE["ring"](2), LARGE, on) == pytest.approx([expected] * 2)


def test_between_nodes_there_are_messages() -> None:
    """Two nodes of two ranks: half of the vector is formed by each rank, a quarter of it goes to
    the other node and back, and then each rank takes the other's half."""
    on = replace(cluster("lan_1gbit(nodes=2, cores=2)"), placement="packed")
    barriers = 4 * (3 + 0.5)
    one_pass = 1e-6 * BYTES
    # Each shows the half that the other forms; and both read two halves for one of the sum.
    scatter = 2 + one_pass + one_pass + barriers
    # Each shows the half that it has, of which the other makes a copy.
    gather = 2 + one_pass / 2 + one_pass / 2 + barriers
    between = 2 * (100e-6 + 2 * (BYTES / 4 + 27) / 125e6)  # both ranks of a node at a time
    found = ends(hierarchical((2, 2)), LARGE, on)
    assert found == pytest.approx([scatter + between + gather] * 4, rel=1e-6)


def test_without_shared_memory_messages_cross_the_loopback() -> None:
    on = "one_host(2, shared_memory=False)"
    expected = 2 * (15e-6 + (BYTES / 2 + 27) / 3e9 * 2)
    assert ends(ALL_REDUCE["ring"](2), LARGE, on) == pytest.approx([expected] * 2, rel=1e-4)
    on_devices = cluster("one_host(2)")
    nodes = tuple(replace(node, devices=2) for node in on_devices.nodes)
    found = ends(ALL_REDUCE["ring"](2), LARGE, replace(on_devices, nodes=nodes))
    assert found == pytest.approx([expected] * 2, rel=1e-4)


NEAR = replace(
    FREE,
    send=Line(1.0, 1e-6),
    receive=Line(2.0, 2e-6),
    in_memory=replace(COSTS, send=Line(0.1, 1e-7), receive=Line(0.2, 2e-7)),
)
"""With messages in memory that cost a tenth of those over sockets."""


def test_a_message_in_memory_costs_what_was_measured_there() -> None:
    """Its sender is free at once, though nothing is buffered; between nodes when it has arrived."""

    def program(runtime: Runtime) -> list[float]:
        transport, vector = runtime.transport, torch.ones(LARGE, device="meta")
        if runtime.rank == 0:
            handle = transport.send(vector, 1, TAG)
            sent = transport.now()
            handle.wait()
            return [sent, transport.now()]
        transport.receive(0, TAG).wait()
        return [transport.now()]

    size = BYTES + 27
    near = run_ranks(2, program, "one_host(2)", NEAR).results
    assert near[0] == pytest.approx([0.1 + 1e-7 * size] * 2, rel=1e-6)
    arrives = 0.1 + 15e-6
    assert near[1] == pytest.approx([arrives + 0.2 + 2e-7 * size], rel=1e-6)
    far = run_ranks(2, program, "one_host(2, shared_memory=False)", NEAR).results
    sent = 1 + 1e-6 * size
    assert far[0] == pytest.approx([sent, max(sent, 1 + 15e-6 + size / 3e9)], rel=1e-6)
    assert far[1] == pytest.approx([1 + 15e-6 + 2 + 2e-6 * size], rel=1e-6)


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "tree", "parallel"])
@pytest.mark.parametrize("buffer", [0, 1 << 20])
def test_messages_in_memory_and_between_nodes_agree_with_those_one_by_one(
    name: str, buffer: int
) -> None:
    on = replace(cluster("lan_1gbit(nodes=2, cores=2)"), placement="packed")
    delays = [0.25, 1.0, 3.0, 0.5]

    def found(costs: Overhead, on: Cluster) -> list[float]:
        return ends(ALL_REDUCE[name](4), LARGE, on, delays, replace(costs, buffer=buffer))

    at_once = found(NEAR, on)
    one_by_one = found(NEAR, replace(on, faults=(SlowDown("worker-0", factor=2, at=1e9),)))
    assert at_once == pytest.approx(one_by_one, rel=1e-9)
    as_over_sockets = found(replace(NEAR, in_memory=COSTS), on)
    # All messages of halving-doubling are between nodes here.
    assert (max(at_once) < max(as_over_sockets)) == (name != "halving_doubling")


SCHEDULES = [
    [ring_reduce_scatter(4), ring_all_gather(4)],
    [broadcast(4, 1)],
    [hierarchical((2, 2))],
    [ALL_REDUCE["tree"](4)],
]


@pytest.mark.parametrize("schedules", SCHEDULES, ids=lambda each: each[0].name)
@pytest.mark.parametrize("length", [7, 1000, 40_000])
def test_values_and_traffic_are_those_of_messages(
    schedules: Sequence[Schedule], length: int
) -> None:
    def program(runtime: Runtime) -> Any:
        random = torch.Generator().manual_seed(runtime.rank)
        vector = torch.randn(length, generator=random)
        for schedule in schedules:
            execute(runtime.transport, vector, schedule, Group((0, 1, 2, 3)), TAG)
        traffic = runtime.transport.traffic
        counted = traffic.bytes_sent, traffic.messages_sent, traffic.bytes_received
        return vector.tolist(), counted, runtime.transport.bytes_sent

    plain = run_ranks(4, program, "lan_1gbit(4)", OVERHEAD).results
    for on in ("one_host(4)", "lan_1gbit(2, cores=2)"):
        packed = replace(cluster(on), placement="packed")
        assert run_ranks(4, program, packed, OVERHEAD).results == plain


def test_who_waits_for_one_that_dies_learns_of_it() -> None:
    learnt = []

    def program(runtime: Runtime) -> None:
        runtime.reporter.expendable(True)
        runtime.compute.run(Work("gradient", 9 if runtime.rank == 1 else 1), lambda: None)
        try:
            execute(runtime.transport, torch.ones(4), ALL_REDUCE["ring"](3), GROUP, TAG)
        except PeerLost as lost:
            learnt.append((runtime.rank, lost.rank))

    on = replace(cluster("one_host(3)"), faults=(Death("rank 1", at=5),))
    assert run_ranks(3, program, on, OVERHEAD).failure is None
    assert learnt == [(0, 1), (2, 1)]


def test_rank_begins_next_collective_while_others_leave_the_last() -> None:
    """The root of a broadcast reads nothing. With a fault about, flows carry out what they have in
    memory."""

    def program(runtime: Runtime) -> list[float]:
        found = []
        for value in (1.0, 2.0):
            vector = torch.full((4,), 0.0 if runtime.rank else value)
            execute(runtime.transport, vector, broadcast(3, 0), GROUP, TAG)
            found.append(vector[0].item())
        return found

    on = replace(cluster("one_host(3)"), faults=(SlowDown("host", factor=2, at=1000),))
    outcome = run_ranks(3, program, on, OVERHEAD)
    assert outcome.failure is None, outcome.failure
    assert outcome.results == ([1.0, 2.0],) * 3


def test_many_nodes_and_many_ranks_of_one_are_found_at_once() -> None:
    """No schedule of a thousand ranks is run on names, as long as it is one of a single node."""
    found = node_stages(ALL_REDUCE["ring"](1024), ("host",) * 1024)
    assert {len(sections) for sections in found.sections.values()} == {1}
    assert not node_stages(ALL_REDUCE["ring"](1024), tuple(f"{n // 8}" for n in range(1024)))
    several = node_stages(hierarchical((8,) * 16), tuple(f"{n // 8}" for n in range(128)))
    assert len(several.sections) == 128
    assert len(several.numbers) == 2 * 16
