"""Collectives that are evaluated, followed and sent: the same values, times, bytes and counters."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.support.lab import by_turns, in_lab, some
from tests.support.simulated import FREE, Second, assert_agree, run_ranks
from tests.support.simulated_collectives import (
    COSTLY,
    FOREIGN,
    TAG,
    MessageByMessage,
    Trial,
    counted,
    followed,
    staggered,
)

from orchestra.cluster.calibration import Curve
from orchestra.cluster.nodes import Line, Overhead
from orchestra.collectives import Group, execute
from orchestra.engines.simulation import rendezvous
from orchestra.engines.simulation.loads import Loads
from orchestra.schedules import ALL_REDUCE, Schedule, hierarchical, ring_reduce_scatter
from orchestra.trainer.trace import SHOWN, Trace
from orchestra.transports import collective
from orchestra.transports.framing import header_bytes
from orchestra.transports.protocol import CollectiveCall, Transport
from orchestra.worker.interception import intercepted
from orchestra.worker.runtime import Runtime, Work

NAMES = [*ALL_REDUCE, "hierarchical"]
HEADER = header_bytes(1)


def check(trial: Trial) -> None:
    """All ways agree, times to 1e-12 of themselves and the rest exactly; the evaluation only where
    nobody else sends, or takes a core."""
    sent = trial.run("sent")
    alone = not trial.noise and not trial.spawn
    for run in [trial.run("followed"), *([trial.run()] if alone else [])]:
        for one, other in zip(run, sent, strict=True):
            assert_agree(_flat(one), _flat(other))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return _flat(list(value.values()))
    if isinstance(value, tuple | list):
        return [part for each in value for part in _flat(each)]
    return [value]


def together(ranks: int, rounds: int) -> list[list[float]]:
    return [[0.0] * ranks for _ in range(rounds)]


# Evaluated, followed and sent agree


@pytest.mark.parametrize(("name", "ranks"), by_turns(NAMES, [2, 3, 5, 8, 17]))
def test_every_schedule_agrees(name: str, ranks: int) -> None:
    with mock.patch.object(collective, "SEGMENT_BYTES", 256):
        check(Trial(name, ranks, 40 * ranks + 3, staggered(ranks)))


@st.composite
def trials(draw: st.DrawFn) -> Trial:
    ranks = draw(st.integers(2, 17))
    delay = st.one_of(st.just(0.0), st.floats(1e-9, 2e-3))
    delays = st.lists(st.lists(delay, min_size=ranks, max_size=ranks), min_size=1, max_size=3)
    lengths = st.one_of(st.integers(0, 2 * ranks), st.integers(0, 4000))
    clusters = ("lan_1gbit(nodes=32)", "lan_1gbit(nodes=4)", "wifi(nodes=17)")
    unlike = ("stragglers(nodes=17)", "two_sites(nodes=17)", "containers_10mbit(nodes=17)")
    return Trial(
        draw(st.sampled_from(NAMES)),
        ranks,
        draw(lengths),
        draw(delays),
        draw(st.sampled_from((*clusters, *unlike))),
        replace(
            COSTLY,
            buffer=draw(st.sampled_from((0, 700, 1 << 17))),
            send=Line(20e-6, draw(st.sampled_from((2e-10, 3e-8)))),  # also slower than the links
        ),
        noise=draw(st.sampled_from((0, 0, 5))),
    )


@pytest.mark.parametrize("number", [30, *in_lab([100])])
def test_any_trial_agrees(number: int) -> None:
    @hypothesis_settings(max_examples=number)
    @example(  # a flow of rank 9 begins to send before one that is ahead of virtual time
        Trial(
            "ring_gather",
            10,
            257,
            [[0.0] * 10],
            "two_sites(nodes=17)",
            replace(COSTLY, buffer=1 << 17),
            noise=5,
        )
    )
    @given(trials())
    def agrees(trial: Trial) -> None:
        with mock.patch.object(collective, "SEGMENT_BYTES", 1024):
            check(trial)

    agrees()


@pytest.mark.parametrize(
    ("second", "noise"), [([0.0, 0.0, 0.0, 0.5], 0), ([0.15] * 4, 3)], ids=["late", "disturbed"]
)
def test_a_connection_that_idles_starts_slowly_again(second: list[float], noise: int) -> None:
    """While others wait for a late rank, or before an all-reduce that is disturbed."""
    delays = [[0.0] * 4, second, [0.0] * 4]
    trial = Trial("ring", 4, 300_000, delays, "two_sites(nodes=4)", noise=noise, noise_after=0.7)
    with counted() as counts:
        trial.run()
    assert not counts["evaluated"]
    check(trial)


@pytest.mark.parametrize(("name", "length"), some(by_turns(NAMES, [0, 1, 2, 3, 4, 5, 7])))
def test_vectors_shorter_than_the_ranks_agree(name: str, length: int) -> None:
    check(Trial(name, 5, length, staggered(5)))


def test_processors_slower_than_the_links_agree() -> None:
    check(Trial("ring", 4, 9000, staggered(4), overhead=replace(COSTLY, send=Line(1e-6, 3e-8))))


def test_pieces_of_unequal_length_agree() -> None:
    check(Trial("ring", 4, 1000, staggered(4), edges=(0, 0, 10, 700, 1000)))


@pytest.mark.parametrize(
    ("name", "on"),
    by_turns(
        NAMES,
        ["one_host(cores=2)", "lan_1gbit(nodes=3)", "wifi(nodes=6)", "containers_10mbit(nodes=6)"],
    ),
)
def test_shared_cores_and_links_agree(name: str, on: str) -> None:
    check(Trial(name, 6, 3000, staggered(6), on))


@pytest.mark.parametrize("on", ["one_host(cores=2)", "lan_1gbit(nodes=4)"])
def test_costs_that_fall_with_the_size_agree(on: str) -> None:
    """As measured ones may, by chance."""
    falling = Curve(((1.0, 20e-6), (20_000.0, 1e-9)))
    check(Trial("ring", 4, 3000, staggered(4), on, replace(COSTLY, send=falling)))


def test_rounding_does_not_grow_on_a_shared_link() -> None:
    """There it would, by a factor for each of the eight."""
    overhead = replace(COSTLY, buffer=1 << 17)
    check(Trial("ring_gather", 17, 900, staggered(17, 8), "wifi(nodes=17)", overhead))


def test_stragglers_agree_where_rounds_overlap_on_a_link() -> None:
    delays = [[0.0] * 7 + [5e-4], [3e-3] + [0.0] * 7]
    check(Trial("halving_doubling", 8, 100_000, delays))


@pytest.mark.parametrize("buffer_bytes", [0, 1 << 20])
def test_an_all_reduce_follows_before_all_messages_of_the_last_one_are_there(
    buffer_bytes: int,
) -> None:
    """The one long piece is the last that rank 2 sends, while it has long got what it needs."""
    overhead = replace(COSTLY, buffer=buffer_bytes)
    edges = (0, 10, 20, 60_000, 60_010)
    check(Trial("ring", 4, 60_010, together(4, 4), overhead=overhead, edges=edges))


def in_microseconds(*ranks: int) -> list[float]:
    return [each * 1e-6 for each in ranks]


@pytest.mark.parametrize(
    ("name", "delays"),
    [
        # The second one is followed by messages, which queue up behind those of the first.
        (
            "halving_doubling",
            [
                in_microseconds(156, 29, 104, 172, 13, 244, 195, 94),
                in_microseconds(89, 106, 90, 225, 150, 158, 45, 274),
            ],
        ),
        # A message of the second one shares a link with one of the first, by another pair.
        (
            "butterfly",
            [
                in_microseconds(110, 71, 127, 260, 197, 198, 114, 94),
                in_microseconds(218, 43, 30, 165, 277, 0, 44, 174),
            ],
        ),
    ],
)
def test_messages_of_two_collectives_on_a_link_agree(name: str, delays: list[list[float]]) -> None:
    overhead = replace(COSTLY, buffer=1 << 22)
    check(Trial(name, 8, 50_000, delays, "lan_1gbit(nodes=8)", overhead))


# What is evaluated


@pytest.mark.parametrize(
    ("name", "ranks", "on", "evaluated"),
    [
        ("ring", 8, "lan_1gbit(nodes=8)", True),
        ("ring_gather", 8, "stragglers(nodes=8)", True),
        ("halving_doubling", 8, "lan_1gbit(nodes=8)", False),  # partners change
        ("tree", 8, "lan_1gbit(nodes=8)", False),
        ("ring", 8, "lan_1gbit(nodes=4)", False),  # two ranks have one link
        ("ring", 8, "wifi(nodes=8)", False),
        ("ring", 6, "containers_10mbit(nodes=4)", False),
        ("ring", 4, "two_sites(nodes=4)", False),  # connections start slowly
    ],
)
def test_what_is_evaluated(name: str, ranks: int, on: str, evaluated: bool) -> None:
    with counted() as counts:
        Trial(name, ranks, 600, staggered(ranks), on).run()
    assert (counts["evaluated"] == 3, counts["participants"] > 0) == (evaluated, not evaluated)


@pytest.mark.parametrize("name", ["halving_doubling", "butterfly", "hierarchical"])
@pytest.mark.parametrize(("length", "segment"), some([(600, 1 << 20), (9_000, 1024)]))
def test_partners_that_change_can_be_evaluated(name: str, length: int, segment: int) -> None:
    """As with many ranks. Where all come together no messages of two rounds are on one link."""
    with (
        mock.patch.object(collective, "SEGMENT_BYTES", segment),
        mock.patch.object(rendezvous, "MAX_FOLLOWED", 0),
        counted() as counts,
    ):
        check(Trial(name, 8, length, together(8, 3)))
    assert counts["evaluated"] == 3


@pytest.mark.parametrize("name", ["halving_doubling", "butterfly"])
def test_messages_of_two_rounds_on_a_link_cross_in_turn(name: str) -> None:
    """Followed messages share it. The last rank ends at about the same time."""
    trial = Trial(name, 8, 50_000, staggered(8), "lan_1gbit(nodes=8)")
    one_by_one = trial.run("followed")
    with mock.patch.object(rendezvous, "MAX_FOLLOWED", 0):
        evaluated = trial.run()
    last, last_followed = (max(result[3] for result in run) for run in (evaluated, one_by_one))
    assert last == pytest.approx(last_followed, rel=0.2)
    for one, other in zip(evaluated, one_by_one, strict=True):
        assert [given[1:] for given in one[0]] == [given[1:] for given in other[0]]


# Who sends over the links of a collective that was evaluated


def meeting(seconds: float, length: int) -> tuple[float, float]:
    """When a ring of four is over, and a message that rank 3 sends to rank 0 after so many."""

    def program(runtime: Runtime) -> tuple[float, float]:
        transport, rank = runtime.transport, runtime.rank

        def beside(flow: Transport) -> float:
            if rank == 3:
                runtime.compute.run(Work("gradient", cast(int, seconds)), lambda: None)
                flow.send(torch.zeros(length), 0, FOREIGN).wait()
            elif rank == 0:
                flow.receive(3, FOREIGN).wait()
            return flow.now()

        task = transport.spawn(beside)
        runtime.compute.run(Work("gradient", cast(int, 1e-3)), lambda: None)
        ring = ALL_REDUCE["ring"](4)
        execute(transport, torch.empty(1_000_000, device="meta"), ring, Group(tuple(range(4))), TAG)
        return transport.now(), task.wait()

    outcome = run_ranks(4, program, "lan_1gbit(nodes=4)")
    assert outcome.failure is None, outcome.failure
    return max(ended for ended, _ in outcome.results), outcome.results[0][1]


RING = 1e-3 + 6 * (100e-6 + (1_000_000 + header_bytes(1)) / 125e6)
"""When it is over if it is alone."""


def test_a_message_on_a_link_is_waited_for() -> None:
    """It began before the ring, and takes until 0.1 ms + 8 ms; the first one queues behind it."""
    ended, arrived = meeting(1e-9, 250_000)
    assert arrived == pytest.approx(100e-6 + 8e-3, rel=1e-3)
    assert ended == pytest.approx(RING + arrived - 1.1e-3, rel=1e-3)


def test_a_message_has_what_an_evaluated_collective_leaves() -> None:
    """A ring uses nearly all of a link, so that half is left; it is over as if it were alone."""
    ended, arrived = meeting(10e-3, 125_000)
    assert ended == pytest.approx(RING, rel=1e-6)
    assert arrived == pytest.approx(10e-3 + 100e-6 + 2 * 4e-3, rel=1e-3)


def test_a_connection_that_begins_on_a_loaded_link_knows_its_own_bandwidth() -> None:
    """Collectives over it are evaluated later, when the link has its capacity again."""

    def program(runtime: Runtime) -> float | None:
        transport: Any = runtime.transport

        def beside(flow: Transport) -> None:
            runtime.compute.run(Work("gradient", cast(int, 10e-3)), lambda: None)
            flow.send(torch.zeros(10_000), 1, FOREIGN).wait()  # against the ring
            flow.send(torch.zeros(10_000), 0, FOREIGN).wait()

        tasks = [transport.spawn(beside)] if runtime.rank == 2 else []
        ring, group = ALL_REDUCE["ring"](4), Group(tuple(range(4)))
        execute(transport, torch.empty(1_000_000, device="meta"), ring, group, TAG)
        for task in tasks:
            task.wait()
        if runtime.rank < 2:
            transport.receive(2, FOREIGN).wait()
        if not tasks:
            return None
        bandwidth: float = transport._port.net.stream(2, 0).bandwidth
        return bandwidth

    outcome = run_ranks(4, program, "lan_1gbit(nodes=4)")
    assert outcome.results[2] == 125e6


def test_a_link_is_whole_again_after_it() -> None:
    """The message begins 1 ms before the end of the ring."""
    ended, arrived = meeting(RING - 1e-3 - 100e-6, 125_000)
    assert ended == pytest.approx(RING, rel=1e-6)
    assert arrived == pytest.approx(RING - 1e-3 + 0.5e-3 + 4e-3, rel=1e-3)


def test_the_order_of_turns_does_not_matter_to_two_that_are_ready_at_once() -> None:
    """They are evaluated by rank and tag."""
    seen: list[int] = []
    usual = Loads.links_before

    def before(self: Loads, *given: Any) -> Any:
        seen.append(given[0].plan.length)
        return usual(self, *given)

    def program(runtime: Runtime) -> None:
        transport, group = runtime.transport, Group(tuple(range(3)))

        def reduce(flow: Transport, tag: int) -> None:
            vector = torch.empty(1000 + tag, device="meta")
            execute(flow, vector, ALL_REDUCE["ring"](3), group, tag)

        tags = [TAG, FOREIGN] if runtime.rank else [FOREIGN, TAG]
        for task in [transport.spawn(functools.partial(reduce, tag=tag)) for tag in tags]:
            task.wait()

    with mock.patch.object(Loads, "links_before", before):
        assert run_ranks(3, program, "lan_1gbit(nodes=3, cores=4)").failure is None
    assert seen == [1000 + TAG, 1000 + FOREIGN]


def test_a_message_that_is_on_its_way_already_is_not_forgotten() -> None:
    check(Trial("ring", 4, 5000, [[1e-3] * 4], noise=1, noise_length=200_000))


def test_arrivals_that_differ_little_are_computed_anew() -> None:
    check(Trial("ring", 4, 4000, [[1e-3] * 4, [1e-3, 1e-3 + 1e-7, 1e-3, 1e-3]]))


def test_a_flow_that_shares_the_core_from_the_beginning_agrees() -> None:
    trial = Trial("ring", 4, 20_000, together(4, 2), "containers_10mbit(nodes=4)", spawn=True)
    with counted() as counts:
        trial.run()
    assert counts["participants"]
    check(trial)


def test_two_all_reduces_of_the_same_ranks_at_a_time_agree() -> None:
    """Main and background flows have tags of their own, and the same links."""

    def program(runtime: Runtime, without_flows: bool) -> Any:
        group = Group(tuple(range(4)))

        def reduce(flow: Transport, tag: int, length: int) -> float:
            transport = flow if without_flows else cast(Transport, MessageByMessage(flow))
            vector = torch.full((length,), float(runtime.rank))
            execute(transport, vector, ALL_REDUCE["ring"](4), group, tag)
            assert vector.tolist() == [6.0] * length
            return flow.now()

        task = runtime.transport.spawn(lambda flow: reduce(flow, FOREIGN, 30_000))
        runtime.compute.run(Work("gradient", cast(int, 1e-4 * runtime.rank + 1e-6)), lambda: None)
        return reduce(runtime.transport, TAG, 20_000), task.wait()

    with followed():
        results = [
            run_ranks(4, lambda runtime, mode=mode: program(runtime, mode), overhead=COSTLY).results  # type: ignore[misc]
            for mode in (True, False)
        ]
    for one, other in zip(*results, strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_the_first_to_come_decides_for_all() -> None:
    """One rank traces and the others do not: nobody waits for a message that never comes."""

    def program(runtime: Runtime, tracing: int) -> list[float]:
        transport = runtime.transport
        if runtime.rank == tracing:
            transport = cast(Transport, MessageByMessage(transport))
        vector = torch.full((8,), float(runtime.rank))
        runtime.compute.run(Work("gradient", runtime.rank + 1), lambda: None)
        execute(transport, vector, ALL_REDUCE["ring"](3), Group((0, 1, 2)), TAG)
        return vector.tolist()

    for tracing in range(3):
        outcome = run_ranks(3, lambda runtime, who=tracing: program(runtime, who))  # type: ignore[misc]
        assert outcome.failure is None
        assert outcome.results == ([3.0] * 8,) * 3


def test_in_the_background_the_first_to_come_decides_for_all() -> None:
    """Those that need no flow for a collective send its messages where one wants to see them."""

    def program(runtime: Runtime, tracing: int) -> tuple[list[float], float]:
        transport, rank = runtime.transport, runtime.rank
        runtime.compute.run(Work("gradient", rank + 1), lambda: None)
        vectors = [torch.full((8,), float(rank + extra)) for extra in (0, 1)]
        tasks = [
            transport.collective(
                CollectiveCall(
                    ALL_REDUCE["ring"](3),
                    vector,
                    Group((0, 1, 2)),
                    TAG,
                    background=True,
                    message_by_message=rank == tracing,
                )
            )
            for vector in vectors
        ]
        for task in tasks:
            task.wait()
        transport.end_background()
        return [total for vector in vectors for total in vector.tolist()], transport.now()

    ended = []
    for tracing in (-1, 0, 1, 2):
        outcome = run_ranks(3, lambda runtime, who=tracing: program(runtime, who))  # type: ignore[misc]
        assert outcome.failure is None, outcome.failure
        assert all(values == [3.0] * 8 + [6.0] * 8 for values, _ in outcome.results)
        ended.append([time for _, time in outcome.results])
    for times in ended:
        assert times == pytest.approx(ended[0], rel=1e-12)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_who_is_through_before_others_begin_does_not_come_for_them(device: str) -> None:
    """All is one rank's piece: it sends it, and is through; an all-reduce of the same ranks, under
    the same tag, is next."""
    group = Group((0, 1, 2))

    def program(runtime: Runtime) -> float:
        runtime.compute.run(Work("gradient", 1 + 9 * runtime.rank), lambda: None)
        vector = torch.ones(4, device=device)
        scatter = ring_reduce_scatter(3)
        execute(runtime.transport, vector, scatter, group, TAG, edges=(0, 4, 4, 4))
        through = runtime.transport.now()
        execute(runtime.transport, vector, ALL_REDUCE["ring"](3), group, TAG)
        return through

    outcome = run_ranks(3, program, "lan_1gbit(nodes=3)")
    assert outcome.failure is None, outcome.failure
    assert [round(through) for through in outcome.results] == [1, 10, 19]


def test_a_rank_that_does_not_come_is_named() -> None:
    def program(runtime: Runtime) -> None:
        if runtime.rank == 2:
            runtime.transport.receive(2, FOREIGN).wait()
        execute(runtime.transport, torch.ones(9), ALL_REDUCE["ring"](3), Group((0, 1, 2)), TAG)

    outcome = run_ranks(3, program)
    assert outcome.failure is not None
    assert "rank 0 waits for rank 2 (to add up, tag 70)" in outcome.failure


def test_unlike_vectors_are_a_mistake() -> None:
    def program(runtime: Runtime) -> None:
        vector = torch.ones(9 + runtime.rank)
        execute(runtime.transport, vector, ALL_REDUCE["ring"](2), Group((0, 1)), TAG)

    outcome = run_ranks(2, program)
    assert outcome.failure is not None
    assert "tag 70: an all-reduce of unlike vectors" in outcome.failure


# Closed forms: latency alpha, seconds a byte beta, seconds a byte added gamma

ALPHA, BETA = 100e-6, 1 / 125e6
"""Two links of lan_1gbit, and its bandwidth."""


def seconds_of(schedule: Schedule, length: int, overhead: Overhead = FREE) -> float:
    """An all-reduce of so many float32 on equal nodes, all arriving at once."""

    def program(runtime: Runtime) -> float:
        ranks = Group(tuple(range(runtime.ranks)))
        execute(runtime.transport, torch.ones(length), schedule, ranks, TAG)
        return runtime.transport.now()

    outcome = run_ranks(schedule.ranks, program, overhead=overhead)
    assert outcome.failure is None, outcome.failure
    latest: float = max(outcome.results)
    return latest


def crossing(payload: float) -> float:
    return (payload + HEADER) * BETA


LENGTH = 16 * 3 * 5 * 7 * 300  # divisible by every number of pieces below
BYTES = 4 * LENGTH
FORMS: list[tuple[str, int, Callable[[int], float]]] = [
    ("ring", 16, lambda n: 2 * (n - 1) * (ALPHA + crossing(BYTES / n))),
    ("ring", 7, lambda n: 2 * (n - 1) * (ALPHA + crossing(BYTES / n))),
    (
        "halving_doubling",
        16,
        lambda n: 2 * sum(ALPHA + crossing(BYTES / 2**k) for k in range(1, int(math.log2(n)) + 1)),
    ),
    ("butterfly", 16, lambda n: math.log2(n) * (ALPHA + crossing(BYTES))),
    ("tree", 15, lambda n: 2 * (math.log2(n + 1) - 1) * (ALPHA + 2 * crossing(BYTES))),
    ("reduce_to_one", 5, lambda n: 2 * (ALPHA + (n - 1) * crossing(BYTES))),
    ("ring_gather", 5, lambda n: (n - 1) * (ALPHA + crossing(BYTES))),
    ("parallel", 5, lambda n: ALPHA + (n - 1) * crossing(BYTES)),
]


@pytest.mark.parametrize(("name", "ranks", "form"), FORMS, ids=lambda value: str(value)[:16])
def test_closed_forms(name: str, ranks: int, form: Callable[[int], float]) -> None:
    assert seconds_of(ALL_REDUCE[name](ranks), LENGTH) == pytest.approx(form(ranks), rel=1e-6)


def test_closed_form_of_two_levels() -> None:
    """Four nodes of four, each rank with a link of its own."""
    inside = 2 * 3 * (ALPHA + crossing(BYTES / 4))
    between = 2 * 3 * (ALPHA + crossing(BYTES / 16))
    seconds = seconds_of(hierarchical([4] * 4), LENGTH)
    assert seconds == pytest.approx(inside + between, rel=1e-6)


def test_adding_takes_time() -> None:
    gamma = 1e-9
    seconds = seconds_of(ALL_REDUCE["ring"](16), LENGTH, replace(FREE, add=gamma))
    form = FORMS[0][2](16) + 15 / 16 * BYTES * gamma
    assert seconds == pytest.approx(form, rel=1e-6)


def test_golden_ring() -> None:
    """16 ranks, 25 MB, 1 Gbit/s, links of 50 us: what SimGrid 3.32 gives with its model CM02."""
    assert seconds_of(ALL_REDUCE["ring"](16), 6_250_000) == pytest.approx(7.56 / 20, rel=2e-5)


# torch.distributed's own collectives


def test_native_is_a_ring_beside_the_main_flow() -> None:
    def program(runtime: Runtime) -> tuple[float, float, list[float], int]:
        vectors = [torch.full((40_000,), float(runtime.rank + k)) for k in range(2)]
        group, transport = Group(tuple(range(runtime.ranks))), runtime.transport
        works = [
            transport.collective(CollectiveCall(None, vector, group, TAG)) for vector in vectors
        ]
        runtime.compute.run(Work("gradient", cast(int, 1e-3)), lambda: None)
        computed = runtime.transport.now()
        for work in works:
            work.wait()
        results = [float(vector.mean()) for vector in vectors]
        return computed, runtime.transport.now(), results, runtime.transport.bytes_sent

    outcome = run_ranks(4, program)
    assert outcome.failure is None, outcome.failure
    one = 6 * (ALPHA + crossing(40_000))
    for computed, ended, results, sent in outcome.results:
        assert computed == pytest.approx(1e-3)
        assert ended == pytest.approx(2 * one, rel=1e-6)
        assert results == [6.0, 10.0]
        assert sent == 0  # a formula stands for them


# The timeline


@pytest.mark.parametrize("ranks", [SHOWN, SHOWN + 1])
def test_a_timeline_shows_messages_of_few_ranks(ranks: int) -> None:
    def program(runtime: Runtime) -> Counter[str]:
        tracer = Trace(runtime.transport.now, 1)
        transport = intercepted(runtime, tracer).transport
        tracer.start()
        tracer.open_for_steps(1)
        group = Group(tuple(range(ranks)))
        execute(transport, torch.ones(100), ALL_REDUCE["butterfly"](ranks), group, TAG)
        timeline = tracer.timeline("virtual")
        assert timeline is not None
        return Counter(piece.category for piece in timeline.slices)

    outcome = run_ranks(ranks, program, overhead=COSTLY)
    assert outcome.failure is None, outcome.failure
    for kinds in outcome.results:
        assert (kinds["native"], kinds["send"] > 0) == ((1, False) if ranks > SHOWN else (0, True))


def test_costs_are_those_of_the_tests() -> None:
    """A unit of work takes a second, so that a delay is one."""
    assert Second().seconds(Work("gradient", cast(int, 0.25))) == 0.25
