"""An asynchronous server as a closed queueing network, beside exact mean-value analysis.

Reiser and Lavenberg, Mean-Value Analysis of Closed Multichain Queuing Networks, JACM 27, 1980. The
customers are the workers; one class. Stations, in the order of a step:

- the gradient, at the worker itself: a delay, which may have any distribution;
- the push, on the server's link down, and the answer, on its link up: the messages on a link share
  it evenly (processor sharing), so that sizes may have any distribution, too. A worker's link is as
  fast as the server's: a message alone has all of it;
- the update: one after the other as they come, with exponential seconds.

That is a product-form network (Baskett, Chandy, Muntz and Palacios, JACM 22, 1975).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, stdev

import pytest
from tests.support.lab import some
from tests.support.simulated import cluster
from tests.support.step_times import Figures, Timed

from orchestra.cluster import Cluster
from orchestra.cluster.nodes import ASSUMED, Jitter, LogNormal

ELEMENTS, BANDWIDTH = 6_000_000, 100e6
CROSSING = 4 * ELEMENTS / BANDWIDTH  # 24 MB in 0.24 s
ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"
ERRORS = 4.0


@dataclass(frozen=True, repr=False)
class Exponential(Jitter):
    """An exponential distribution with mean 1."""

    def factor(self, uniform: float) -> float:
        return -math.log1p(-uniform)


def cycle_seconds(workers: int, think: float, demands: Sequence[float]) -> float:
    """Of a customer, by mean-value analysis: one that arrives sees the mean queue of the network
    without itself."""
    queues, cycle = [0.0] * len(demands), think
    for customers in range(1, workers + 1):
        stays = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        cycle = think + sum(stays)
        queues = [customers * stay / cycle for stay in stays]
    return cycle


def network(workers: int, of_workers: Jitter | None, of_server: Jitter | None) -> Cluster:
    """The server is on the last node."""
    bandwidth = f'bandwidth="{BANDWIDTH / 1e6} MB/s", latency="1 ps"'
    lan = cluster(f"lan_1gbit({workers + 1}, {bandwidth})")
    jitters = [of_workers] * workers + [of_server]
    nodes = (replace(node, jitter=jitter) for node, jitter in zip(lan.nodes, jitters, strict=True))
    return replace(lan, nodes=tuple(nodes))


def cycles(timed: Timed, steps: int) -> list[float]:
    """Seconds a step of a worker in each eighth of the run, between snapshots; not in the first and
    the last two, when workers begin together and leave one after the other."""
    (leader,) = (report.leader for report in timed.reports(steps) if report.leader is not None)
    return [
        timed.workers * (after.seconds - before.seconds) / (after.samples - before.samples)
        for before, after in pairwise(leader.curve[:-2])
    ]


@pytest.mark.parametrize(
    ("workers", "think", "update"),
    some([(2, 0.3, 0.1), (4, 0.5, 0.3), (6, 1.2, 0.05)]),
    ids=["links and server", "the server most of all", "the links most of all"],
)
def test_an_asynchronous_server_is_a_closed_network(
    workers: int, think: float, update: float
) -> None:
    figures = Figures(gradient=think, update=update / ELEMENTS)
    on = network(workers, LogNormal(0.5), Exponential())
    timed = Timed(ASYNCHRONOUS, workers, ELEMENTS, figures, on)
    steps = round(150 / (workers + 1))  # times the number of ranks: of each worker
    found = [cycle for seed in range(3) for cycle in cycles(replace(timed, seed=seed), steps)]
    expected = cycle_seconds(workers, think, [CROSSING, update, CROSSING])
    error = ERRORS * stdev(found) / math.sqrt(len(found))
    assert error < 0.06 * expected  # it can tell
    assert fmean(found) == pytest.approx(expected, abs=error)


def test_equal_workers_do_not_lock_in_phase() -> None:
    """Without jitter all push, and then all pull, so that links up and down are never in use at the
    same time; with the jitter that is assumed by default mean-value analysis tells the time.

    So small a jitter decides little in a few steps: durations of many are correlated.
    """
    workers, think = 8, 2.0
    figures = Figures(gradient=think)
    expected = cycle_seconds(workers, think, [CROSSING, CROSSING])
    varying = Timed(ASYNCHRONOUS, workers, ELEMENTS, figures, network(workers, ASSUMED, ASSUMED))
    assert fmean(cycles(varying, 20)) == pytest.approx(expected, rel=0.05)
    locked = replace(varying, on=network(workers, None, None))
    # Later on: in the beginning one of equal messages may get ahead of the others.
    assert locked.step_seconds(12, 24) == pytest.approx(think + 2 * workers * CROSSING, rel=1e-3)
