"""Activities that share resources: figures known beforehand, and what is computed for them."""

from __future__ import annotations

import itertools
import math
from functools import partial
from math import inf
from random import Random

import pytest
from tests.support.laboratory import Laboratory

from orchestra.engines.simulation.fluid import Activity, Resource


@pytest.fixture
def lab() -> Laboratory:
    return Laboratory()


# One resource


def test_alone_an_activity_has_the_least_capacity_on_its_way(lab: Laboratory) -> None:
    wide, narrow = Resource("wide", 7.0), Resource("narrow", 0.3)
    lab.start("a", 1.7, wide, narrow)
    assert lab.run() == {"a": 1.7 / 0.3}
    lab.start("b", 1.7, wide, bound=0.7)
    assert lab.run()["b"] == 1.7 / 0.3 + 1.7 / 0.7
    assert lab.fluid.shares == 0


@pytest.mark.parametrize("flows", [2, 3, 7, 50])
def test_equal_flows_over_one_link_end_together(lab: Laboratory, flows: int) -> None:
    link = Resource("link", 10.0)
    for number in range(flows):
        lab.start(str(number), 30.0, link)
    ended = lab.run()
    assert ended == {str(number): pytest.approx(3.0 * flows, rel=1e-14) for number in range(flows)}
    assert len({*ended.values()}) == 1


def test_unequal_flows_over_one_link(lab: Laboratory) -> None:
    link = Resource("link", 1.0)
    sizes = [3.0, 1.0, 4.0, 1.5, 9.0]
    for size in sizes:
        lab.start(str(size), size, link)
    # When the k-th smallest ends, each larger one has had as much as it
    ends, carried = {}, 0.0
    for number, size in enumerate(sorted(sizes)):
        carried += size
        ends[str(size)] = carried + size * (len(sizes) - number - 1)
    assert lab.run() == {name: pytest.approx(end, rel=1e-14) for name, end in ends.items()}


def test_jobs_share_the_cores_of_a_node(lab: Laboratory) -> None:
    cores = Resource("cores", 2.0)
    for work in (1.0, 1.0, 1.0, 3.0):
        lab.start(str(work), work, cores, bound=1.0)
    assert lab.run() == {"1.0": 2.0, "3.0": 4.0}  # of half a core, and then a whole one


def test_as_many_jobs_as_cores_do_not_share(lab: Laboratory) -> None:
    for speed, count in itertools.product((1.0, 0.7, 0.1, 1 / 3), (1, 2, 3, 6, 7, 16)):
        cores = Resource("cores", count * speed)
        jobs = [lab.start("job", 1.0, cores, bound=speed) for _ in range(count)]
        lab.clock.run(lab.clock.now())
        assert {job.rate for job in jobs} == {speed}
        assert {job.finish for job in jobs} == {jobs[0].finish}
        lab.run()
    assert lab.fluid.shares == 0


def test_rounding_does_not_tell_equal_shares_apart(lab: Laboratory) -> None:
    for speed, count in itertools.product((0.7, 0.1, 1 / 3), (2, 3, 6, 7, 16)):
        cores = Resource("cores", count * speed)
        jobs = [lab.start("job", 1.0, cores, bound=speed) for _ in range(count - 1)]
        jobs.append(lab.start("unbound", 1.0, cores))
        lab.clock.run(lab.clock.now())
        assert {job.rate for job in jobs} == {speed}
        lab.run()


def test_a_job_with_several_threads_has_what_the_others_leave(lab: Laboratory) -> None:
    cores = Resource("cores", 4.0)
    lab.start("wide", 6.0, cores, bound=4.0)
    lab.start("single", 1.0, cores, bound=1.0)
    assert lab.run() == {"single": 1.0, "wide": 1.0 + 3.0 / 4.0}


# What changes meanwhile


def test_a_link_that_is_cut_slow_and_restored(lab: Laboratory) -> None:
    link = Resource("link", 2.0)
    flow = lab.start("flow", 20.0, link)
    for time, capacity in ((4.0, 0.0), (7.0, 0.5), (11.0, 2.0)):
        lab.clock.at(time, partial(lab.fluid.set_capacity, link, capacity))
    lab.clock.run(5.0)
    assert flow.left_at(5.0) == 12.0
    lab.start("during the cut", 1.0, link)
    assert lab.run() == {"during the cut": 7.0 + 1.0 / 0.25, "flow": 11.0 + (12.0 - 1.0) / 2.0}


def test_what_stalls_leaves_its_way_to_others(lab: Laboratory) -> None:
    cut, other = Resource("cut", 1.0), Resource("other", 1.0)
    lab.fluid.set_capacity(cut, 0.0)
    stalled = lab.start("stalled", 1.0, cut, other)
    lab.start("passing", 1.0, other)
    assert lab.run() == {"passing": 1.0}
    assert stalled.finish == inf
    lab.fluid.set_capacity(cut, 0.5)
    assert lab.run()["stalled"] == 3.0


def test_a_cancelled_flow_leaves_its_share_to_the_others(lab: Laboratory) -> None:
    link = Resource("link", 1.0)
    doomed = lab.start("doomed", 10.0, link)
    lab.start("other", 10.0, link)
    lab.clock.at(6.0, lambda: lab.fluid.cancel(doomed))
    assert lab.run() == {"other": 13.0}
    lab.fluid.cancel(doomed)  # it has ended
    assert not link.activities


def test_rates_that_change_often_leave_no_drift(lab: Laboratory) -> None:
    narrow, wide = Resource("narrow", 0.1), Resource("wide", 1.0)
    steady = lab.start("steady", 1000.0, narrow, wide)
    crowd = 0

    def come() -> None:
        nonlocal crowd
        if crowd < 3000:
            crowd += 1
            # At the same instant, but too late to take the place of the one that ends.
            lab.start("one of many", 0.3, wide, then=lambda: lab.clock.at(lab.clock.now(), come))

    come()
    come()
    lab.clock.run(500.0)
    assert steady.updated_at == 0.0
    ended = lab.run()
    assert crowd == 3000
    assert ended["steady"] == 1000.0 / 0.1
    assert lab.fluid.shares > 3000
    assert max(ended.values()) == ended["steady"]


def test_an_end_that_was_put_off_does_not_come_with_another_at_its_time(lab: Laboratory) -> None:
    link = Resource("link", 1.0)
    lab.start("on time", 2.0, Resource("own", 1.0))
    lab.start("put off", 2.0, link)
    lab.clock.at(1.0, lambda: lab.start("in the way", 1.0, link))
    lab.run()
    assert lab.ended == [("on time", 2.0), ("put off", 3.0), ("in the way", 3.0)]


# One instant


@pytest.mark.parametrize("amount", [0.1, 0.3, 0.7, 1.1, 1.7, 1.9])
def test_nothing_is_left_at_the_time_of_the_end(lab: Laboratory, amount: float) -> None:
    link = Resource("link", 0.3)
    seen = []
    lab.clock.run(0.1)
    lab.clock.at(0.1 + amount / 0.3, lambda: seen.append(flow.left_at(lab.clock.now())))
    flow = lab.start("flow", amount, link)
    assert flow.left_at(0.1 + amount / 0.3) == 0.0
    lab.run()
    assert seen == [0.0]


def test_rounding_does_not_leave_less_than_nothing(lab: Laboratory) -> None:
    lab.clock.run(0.8383719455510963)
    flow = lab.start("flow", 0.979796482999033, Resource("link", 0.38335344140431904))
    time = math.nextafter(flow.finish, 0)
    assert flow.left - flow.rate * (time - flow.updated_at) < 0
    assert flow.left_at(time) == 0


def test_what_has_nothing_left_ends_although_its_link_is_cut(lab: Laboratory) -> None:
    lab.clock.run(1e9)
    link, own = Resource("link", 1.0), Resource("own", 1.0)
    for _ in range(2):
        lab.start("flow", 1.0, link)  # a sharing is due before the end of the tiny one
    lab.start("tiny", 1e-9, own)
    lab.fluid.set_capacity(own, 0.0)
    assert lab.run()["tiny"] == 1e9


def test_what_ends_together_does_so_in_the_order_of_the_start(lab: Laboratory) -> None:
    shared, own = Resource("shared", 1.0), Resource("own", 1.0)
    lab.start("a", 4.0, shared)
    lab.start("b", 8.0, own)
    lab.start("c", 4.0, shared)
    lab.clock.at(7.0, lambda: lab.start("d", 0.5, Resource("late", 0.5)))
    lab.clock.at(7.5, lambda: lab.fluid.set_capacity(shared, 1.0))
    lab.run()
    assert lab.ended == [(name, 8.0) for name in "abcd"]
    assert lab.clock.events <= 5


def test_all_to_all_is_one_sharing(lab: Laboratory) -> None:
    nodes = range(13)
    up, down = ([Resource(f"{n} {way}", 0.7) for n in nodes] for way in ("up", "down"))
    for a, b in itertools.permutations(nodes, 2):
        lab.start(f"{a} to {b}", 1.3, up[a], down[b])
    ended = lab.run()
    assert [name for name, _ in lab.ended] == [
        f"{a} to {b}" for a, b in itertools.permutations(nodes, 2)
    ]
    assert {*ended.values()} == {1.3 / (0.7 / 12)}
    assert lab.fluid.shares == 13 * 12
    assert lab.clock.events == 2


def test_an_amount_of_nothing_ends_now_but_later(lab: Laboratory) -> None:
    link = Resource("link", 1.0)
    flow = lab.start("flow", 2.0, link)
    lab.clock.run(1.0)
    lab.start("nothing", 0.0, link, then=lambda: lab.start("more", 0.0, link))
    assert lab.ended == []
    assert flow.rate == 1.0
    lab.clock.run(1.0)
    assert lab.ended == [("nothing", 1.0), ("more", 1.0)]
    assert lab.run()["flow"] == 2.0
    assert lab.fluid.shares == 0


def test_nothing_ends_on_a_cut_link_too(lab: Laboratory) -> None:
    link = Resource("link", 1.0)
    lab.fluid.set_capacity(link, 0.0)
    lab.start("nothing", 0.0, link)
    assert lab.run() == {"nothing": 0.0}


def test_what_is_cancelled_by_another_that_ends_at_that_time_is_not_called(
    lab: Laboratory,
) -> None:
    link = Resource("link", 1.0)
    second: list[Activity] = []
    lab.start("first", 1.0, link, then=lambda: lab.fluid.cancel(second[0]))
    second.append(lab.start("second", 1.0, link))
    assert lab.run() == {"first": 2.0}
    assert not link.activities


def test_those_that_end_together_are_gone_before_one_that_follows(lab: Laboratory) -> None:
    link = Resource("link", 1.0)
    for name in ("first", "second"):
        lab.start(name, 1.0, link, then=lambda: lab.start("next", 1.0, link))
    lab.clock.run(2.0)
    assert [a.rate for a in link.activities] == [0.5, 0.5]


# Only what is connected is computed


def test_when_the_crowd_has_gone_nothing_is_computed_any_more(lab: Laboratory) -> None:
    cores = Resource("cores", 2.0)
    for work in (1.0, 2.0, 9.0):
        lab.start(str(work), work, cores, bound=1.0)
    lab.clock.run(2.0)
    assert lab.fluid.shares == 3 + 2
    lab.clock.at(5.0, lambda: lab.start("later", 1.0, cores, bound=1.0))
    assert lab.run()["later"] == 6.0
    assert lab.fluid.shares == 3 + 2


def test_what_is_alone_after_a_crowd_makes_room_without_computing(lab: Laboratory) -> None:
    link = Resource("link", 1.0)
    lab.start("slow", 3.0, link, bound=0.25)
    lab.start("fast", 0.75, link)
    lab.clock.at(2.0, lambda: lab.start("slow too", 3.0, link, bound=0.25))
    assert lab.run() == {"fast": 1.0, "slow": 12.0, "slow too": 14.0}
    assert lab.fluid.shares == 2 + 1


def test_several_changes_of_the_connected_are_one_sharing(lab: Laboratory) -> None:
    first, second = Resource("first", 1.0), Resource("second", 1.0)
    lab.start("a", 1.0, first, second)
    lab.start("b", 1.0, second)
    lab.clock.run(0.5)
    for resource in (second, first):
        lab.fluid.set_capacity(resource, 2.0)
    lab.clock.run(0.5)
    assert lab.fluid.shares == 2 + 2


def test_only_the_connected_are_computed(lab: Laboratory) -> None:
    groups = [[Resource(f"{g}.{n}", 1.0) for n in range(3)] for g in range(5)]
    flows = [
        [lab.start("flow", 100.0, a, b) for a, b in itertools.permutations(group, 2)]
        for group in groups
    ]
    lab.clock.run(1.0)
    assert lab.fluid.shares == 30
    before = [[(f.finish, f.updated_at) for f in group] for group in flows]

    lab.start("one more", 1.0, groups[2][0])
    lab.clock.run(1.0)
    assert lab.fluid.shares == 30 + 7
    lab.fluid.cancel(flows[3][0])
    lab.clock.run(1.0)
    assert lab.fluid.shares == 37 + 5
    lab.fluid.set_capacity(groups[4][0], 0.5)
    lab.clock.run(1.0)
    assert lab.fluid.shares == 42 + 6

    after = [[(f.finish, f.updated_at) for f in group] for group in flows]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, False, False]


def test_two_groups_become_one_and_two_again(lab: Laboratory) -> None:
    left, right = Resource("left", 1.0), Resource("right", 1.0)
    for _ in range(2):
        lab.start("left", 100.0, left)
        lab.start("right", 100.0, right)
    lab.clock.run(1.0)
    bridge = lab.start("bridge", 100.0, left, right)
    lab.clock.run(1.0)
    assert lab.fluid.shares == 4 + 5
    lab.fluid.cancel(bridge)
    lab.clock.run(1.0)
    assert lab.fluid.shares == 9 + 4


def test_what_takes_nothing_from_others_is_not_computed(lab: Laboratory) -> None:
    backbone = Resource("backbone", 10.0)
    for number in range(10):
        lab.start("flow", 1.0 + number, Resource(f"up {number}", 1.0), backbone)
    assert lab.run()["flow"] == 10.0
    assert lab.fluid.shares == 0


def test_what_holds_nobody_back_passes_no_change_on(lab: Laboratory) -> None:
    """Four servers answer forty clients each: what a server does is felt by its own clients."""
    servers = [Resource(f"server {number}", 40.0) for number in range(4)]
    clients = [Resource(f"client {number}", 40.0) for number in range(40)]
    for number, server in enumerate(servers):
        for client in clients:
            lab.start(f"from {number}", 100.0, server, client)
    lab.clock.run(1.0)
    assert lab.fluid.shares == 160
    lab.start("one more", 10.0, servers[0], clients[0])
    lab.clock.run(1.0)
    assert lab.fluid.shares == 160 + 41  # from now on these are known to have equal shares
    lab.start("another one", 10.0, servers[0], clients[0])
    lab.clock.run(1.0)
    assert lab.fluid.shares == 201 + 2
    found = lab.run()
    assert found["from 0"] == pytest.approx(100.5)
    assert [found[f"from {number}"] for number in (1, 2, 3)] == [100.0] * 3
    assert lab.fluid.shares < 203 + 10


def test_what_comes_to_hold_somebody_back_passes_changes_on(lab: Laboratory) -> None:
    """As its servers have fewer clients, the link of one of them is too little for its answers."""
    servers = [Resource(f"server {number}", 40.0) for number in range(4)]
    slow = Resource("slow", 6.0)
    for number, server in enumerate(servers):
        lab.start(f"slow {number}", 24.0, server, slow)
        for _ in range(39):
            lab.start(f"others {number}", 10.0, server)
    found = lab.run()
    assert [found[f"others {number}"] for number in range(4)] == [10.0] * 4
    # Each has 1 a second for 10 s, and 6 / 4 after that.
    assert [found[f"slow {number}"] for number in range(4)] == [pytest.approx(10 + 14 / 1.5)] * 4


def test_ends_that_were_computed_and_changed_do_not_pile_up(lab: Laboratory) -> None:
    link = Resource("link", 1.0)
    for number in range(50):
        lab.start("flow", 1e6 + number, link)
    for number in range(1000):
        lab.clock.at(number, lambda: lab.start("short", 1e-3, link))
    lab.clock.run(1000.0)
    assert len(lab.fluid._ends) < 300


@pytest.mark.parametrize("streams", [6, 80])  # fewer than share equally, and more
def test_what_follows_at_once_takes_the_place_of_what_ends(streams: int) -> None:
    """As if it began by an event of its own, when all is shared out anew."""

    def run(lab: Laboratory, *, at_once: bool) -> dict[str, float]:
        def follow(name: str, way: tuple[Resource, ...], amounts: list[float]) -> None:
            if amounts:
                again = partial(follow, name, way, amounts[1:])
                then = again if at_once else lambda: lab.clock.at(lab.clock.now(), again)
                lab.start(f"{name}, {len(amounts)} left", amounts[0], *way, then=then)

        random = Random(streams)
        up = [Resource(f"up {number}", 4.0) for number in range(streams // 2)]
        down = [Resource("down", 3.0), Resource("other", 5.0)]
        for number in range(streams):
            way = up[number % len(up)], down[random.random() < 0.2]
            follow(str(number), way, [random.uniform(0.1, 2.0) for _ in range(4)])
        return lab.run()

    labs = Laboratory(), Laboratory()
    ends = run(labs[0], at_once=True)
    assert ends == pytest.approx(run(labs[1], at_once=False), rel=1e-12)
    assert 2 * labs[0].fluid.shares < labs[1].fluid.shares
