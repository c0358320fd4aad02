"""What the sharing of the network costs the simulation, a message: the best of several rounds.

python -m tests.support.scripts.fluid_speed [ROUNDS]
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence

from tests.support.virtual_clock import VirtualClock

from orchestra.engines.simulation.fluid import Fluid, Resource

NODES = 32
GIGABIT = 1.25e8

Case = Callable[[Fluid, VirtualClock], int]
"""Lets a number of messages cross the network, and says how many."""


def star() -> Sequence[tuple[Resource, Resource]]:
    """The two directions of each node's link to one switch."""
    return [(Resource(f"{n} up", GIGABIT), Resource(f"{n} down", GIGABIT)) for n in range(NODES)]


def route(links: Sequence[tuple[Resource, Resource]], source: int, target: int) -> list[Resource]:
    return [links[source][0], links[target][1]]


def one_after_the_other(fluid: Fluid, clock: VirtualClock, messages: int = 20_000) -> int:
    """One pair of nodes."""
    way = route(star(), 0, 1)
    left = messages

    def following() -> None:
        nonlocal left
        if left:
            left -= 1
            fluid.start(1e6, way, following)

    following()
    clock.run()
    return messages


def ring(fluid: Fluid, clock: VirtualClock, rounds: int = 600) -> int:
    """Each node sends to the next one, again and again: no two messages share a link."""
    links = star()
    ways = [route(links, node, (node + 1) % NODES) for node in range(NODES)]
    left = [rounds] * NODES

    def following(node: int) -> None:
        if left[node]:
            left[node] -= 1
            fluid.start(1e6, ways[node], lambda: following(node))

    for node in range(NODES):
        following(node)
    clock.run()
    return rounds * NODES


def cores(fluid: Fluid, clock: VirtualClock, rounds: int = 1000) -> int:
    """16 threads, each with a rate of its own, on a node with 16 cores."""
    node = Resource("cores", 16 * 0.7)
    own = [Resource(f"thread {thread}", 0.7) for thread in range(16)]
    draw = random.Random(0)
    left = [rounds] * 16

    def following(thread: int) -> None:
        if left[thread]:
            left[thread] -= 1
            way = [node, own[thread]]
            fluid.start(draw.random(), way, lambda: following(thread))

    for thread in range(16):
        following(thread)
    clock.run()
    return rounds * 16


def all_to_all(fluid: Fluid, clock: VirtualClock, sizes: Callable[[], float]) -> int:
    """Every node to every other, all at once."""
    links = star()
    pairs = [(a, b) for a in range(NODES) for b in range(NODES) if a != b]
    for a, b in pairs:
        fluid.start(sizes(), route(links, a, b), done)
    clock.run()
    return len(pairs)


def done() -> None:
    pass


def equal(fluid: Fluid, clock: VirtualClock) -> int:
    return sum(all_to_all(fluid, clock, lambda: 1e6) for _ in range(10))


def unequal(fluid: Fluid, clock: VirtualClock) -> int:
    draw = random.Random(0)
    return all_to_all(fluid, clock, lambda: draw.uniform(0.5e6, 1.5e6))


def server(fluid: Fluid, clock: VirtualClock, rounds: int = 60) -> int:
    """An asynchronous parameter server: 31 nodes send to one, which answers, each at its pace."""
    links = star()
    draw = random.Random(0)

    def push(node: int, left: int) -> None:
        fluid.start(1e6, route(links, node, 0), lambda: pull(node, left))

    def pull(node: int, left: int) -> None:
        fluid.start(1e6, route(links, 0, node), lambda: compute(node, left))

    def compute(node: int, left: int) -> None:
        if left:
            clock.after(draw.uniform(0.05, 0.15), lambda: push(node, left - 1))

    for node in range(1, NODES):
        compute(node, rounds)
    clock.run()
    return 2 * rounds * (NODES - 1)


CASES: Sequence[tuple[str, Case]] = (
    ("one after the other, alone", one_after_the_other),
    ("ring of 32, nothing shared", ring),
    ("computations, 16 on 16 cores", cores),
    ("all to all of 32, equal sizes", equal),
    ("all to all of 32, unequal sizes", unequal),
    ("31 workers and a server", server),
)


def main(rounds: int = 5) -> None:
    print(f"{'':34}{'us each':>9}{'events':>9}{'shares':>9}   (each: a message)")
    for name, case in CASES:
        best = float("inf")
        for _ in range(rounds):
            clock = VirtualClock()
            fluid = Fluid(clock)
            started = time.process_time()
            messages = case(fluid, clock)
            best = min(best, (time.process_time() - started) / messages)
        each = [count / messages for count in (clock.events, fluid.shares)]
        print(f"{name:34}{1e6 * best:9.2f}{each[0]:9.3f}{each[1]:9.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
