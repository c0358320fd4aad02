"""How long a message takes to a rank that computes: emulated nodes beside the simulation.

Rank 0 of two sends a message at once; rank 1 computes first, and receives it then. All times are
seconds since both began: when rank 1 has the message, and when rank 0 may go on. Linux, root.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from orchestra.bench.timing import run_ranks
from orchestra.cluster import Cluster, load_cluster
from orchestra.engines.emulation.nodes import EmulatedCluster
from orchestra.engines.simulation.costs import OVERHEAD
from orchestra.engines.simulation.simulate import Simulation
from orchestra.transports.protocol import Transport
from orchestra.worker.runtime import Runtime, SilentReporter, Work

TAG = 7
CASES = ((2, 1.0), (5, 0.2), (5, 1.0), (20, 1.0), (20, 3.0))
"""MB of the message, and seconds for which its receiver computes."""
ENDLESS = 1e18
"""Bytes that no message has."""


class Seconds:
    """An amount of work takes as many seconds on a node of `speed`."""

    flops = 1e9

    def __init__(self, speed: float) -> None:
        self._speed = speed

    def seconds(self, work: Work, threads: int = 1) -> float:
        return float(work.amount) * self._speed

    def needed(self, slot: int) -> float:
        return 0.0

    def ready(self, slot: int) -> float:
        return 1.0


def exchange(runtime: Runtime, how: tuple[int, bool]) -> list[list[float]]:
    """On both ranks: the seconds of each case, in each of some rounds. The first one warms up.

    A rank that computes sleeps, if it is not in virtual time.
    """
    rounds, sleeps = how
    runtime.stopwatch(True)
    times: list[list[float]] = [[] for _ in CASES]
    for _ in range(rounds + 1):
        for place, (megabytes, seconds) in enumerate(CASES):
            content = torch.zeros(round(megabytes * 1e6 / 4))
            times[place].append(_one(runtime, content, seconds, sleeps))
    return [each[1:] or each for each in times]


def _one(runtime: Runtime, content: torch.Tensor, seconds: float, sleeps: bool) -> float:
    transport: Transport = runtime.transport
    if runtime.rank == 0:
        _meet(transport, first=True)
        began = transport.now()
        transport.send(content, 1, TAG).wait()
        taken = transport.now() - began
        _meet(transport, first=True)
        return taken
    _meet(transport, first=False)
    began = transport.now()
    work = Work("gradient", seconds)  # type: ignore[arg-type]
    runtime.compute.run(work, lambda: time.sleep(seconds) if sleeps else None)
    transport.receive(0, TAG, content).wait()
    taken = transport.now() - began
    _meet(transport, first=False)
    return taken


def _meet(transport: Transport, *, first: bool) -> None:
    """Both ranks go on at about the same time."""
    if first:
        transport.send(torch.zeros(1), 1, TAG).wait()
    transport.receive(1 if first else 0, TAG).wait()
    if not first:
        transport.send(torch.zeros(1), 0, TAG).wait()


def predicted(cluster: Cluster, unread: float | None = None) -> tuple[Sequence[float], ...]:
    """The seconds of each case in the simulation, of rank 0 and of rank 1."""
    tcp = OVERHEAD.tcp if unread is None else replace(OVERHEAD.tcp, unread=unread)
    costs = Seconds(cluster.nodes_of(2)[1].speed or 1.0)
    outcome = Simulation(
        cluster, 2, costs, replace(OVERHEAD, tcp=tcp), SilentReporter()
    ).run(lambda runtime: exchange(runtime, (0, False)))  # fmt: skip
    assert outcome.failure is None, outcome.failure
    return tuple([each[0] for each in times] for times in outcome.results)


def main(arguments: list[str]) -> int:
    """Measure, simulate, and print a line for each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.receiver", description=__doc__)
    parser.add_argument("--cluster", default="studies/clusters/emulated_equal.yaml")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    cluster = load_cluster(options.cluster, where="--cluster", folder=Path())
    with EmulatedCluster(cluster, 2, 1) as emulated:
        places = emulated.places()
        steps = options.rounds + 1
        sender, receiver = run_ranks(
            exchange, (options.rounds, True), 2, steps=steps, shared_memory=False, places=places
        )
    with_buffer, without = predicted(cluster), predicted(cluster, ENDLESS)
    print("MB, computing |   there: measured           predicted whole | free: measured predicted")
    for place, (megabytes, seconds) in enumerate(CASES):
        there, free = receiver[place], statistics.median(sender[place])
        print(
            f"{megabytes:2} MB, {seconds:3.1f} s  | {statistics.median(there):6.2f} s "
            f"({min(there):.2f} to {max(there):.2f}) {with_buffer[1][place]:8.2f} "
            f"{without[1][place]:6.2f} | {free:6.2f} {with_buffer[0][place]:6.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
