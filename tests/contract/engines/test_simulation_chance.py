"""Where durations vary: means over many steps, beside what probability theory says of them.

Seeds are fixed, so that a test either passes always or never; four standard errors are allowed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from tests.support.lab import some
from tests.support.simulated import FREE, cluster, run_ranks, simulated
from tests.support.step_times import Figures, Timed

from orchestra.cluster.nodes import ASSUMED, Drift, ExponentialTail, Jitter, LogNormal, Normal, Tcp
from orchestra.collectives import Group, all_reduce
from orchestra.optimizers.settings import Optimizer
from orchestra.strategies.all_reduce import AllReduce
from orchestra.trainer.settings import Run, Training
from orchestra.worker.runtime import Runtime

ERRORS = 4.0
ON = 'lan_1gbit(nodes=32, latency="1 ps", bandwidth="100 Tbit/s")'
SECOND = Figures(gradient=1.0)


def moments_of_largest(jitter: Jitter, count: int) -> tuple[float, float]:
    """Mean and deviation of the largest of `count` factors: F(x)^N has the quantile q(v^(1/N))."""
    mean, square = (
        quad(lambda v, k=power: jitter.factor(v ** (1 / count)) ** k, 0, 1, limit=200)[0]
        for power in (1, 2)
    )
    return mean, sqrt(square - mean**2)


def harmonic(count: int) -> float:
    return sum(1 / k for k in range(1, count + 1))


LARGEST_NORMAL = {4: 1.02938, 8: 1.42360, 32: 2.06967}
"""The mean of the largest of so many standard normal numbers (Teichroew, 1956)."""


@pytest.mark.parametrize("workers", some([4, 8, 32]))
@pytest.mark.parametrize("jitter", [ExponentialTail(0.5), Normal(0.1), LogNormal(0.2)], ids=repr)
def test_a_synchronous_step_takes_as_long_as_the_slowest_worker(
    jitter: Jitter, workers: int
) -> None:
    """Exponential: 1 + m H_N. Normal: 1 + sigma E[max of N]. Any: the integral of x d F(x)^N"""
    steps = 300 if workers < 32 else 100
    mean, deviation = moments_of_largest(jitter, workers)
    if isinstance(jitter, ExponentialTail):
        assert mean == pytest.approx(1 + jitter.mean * harmonic(workers), rel=1e-4)
    if isinstance(jitter, Normal):
        expected = 1 + jitter.sigma * LARGEST_NORMAL[workers]
        assert mean == pytest.approx(expected, rel=1e-4)
    timed = Timed("AllReduce()", workers, 64, SECOND, ON, jitter=jitter)
    seconds = timed.reports(steps)[0].train_seconds / steps
    assert seconds == pytest.approx(mean, abs=ERRORS * deviation / sqrt(steps))
    assert abs(seconds - 1) > ERRORS * deviation / sqrt(steps)  # it can tell


def test_between_two_averages_only_the_sum_of_the_steps_counts() -> None:
    """The largest of N sums of H durations: 1 + sigma E[max of N] / sqrt(H) a step"""
    every, workers, steps, sigma = 16, 8, 1600, 0.1
    timed = Timed(f"LocalSGD({every})", workers, 64, SECOND, ON, jitter=Normal(sigma))
    seconds = timed.reports(steps)[0].train_seconds / steps
    formula = 1 + sigma * LARGEST_NORMAL[workers] / sqrt(every)
    error = ERRORS * sigma / sqrt(every) / sqrt(steps / every)
    assert seconds == pytest.approx(formula, abs=error)
    assert seconds < 1 + sigma * LARGEST_NORMAL[workers] - error


ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"


def test_asynchronous_workers_wait_for_nobody() -> None:
    """Each takes the mean of its own durations, in which there is no maximum: 1 + m a step"""
    workers, jitter = 8, ExponentialTail(0.5)
    timed = Timed(ASYNCHRONOUS, workers, 64, SECOND, ON, jitter=jitter)
    reports = [report for report in timed.reports(40) if report.role == "worker"]
    steps = reports[0].steps
    means = [report.seconds["compute"] / steps for report in reports]
    error = ERRORS * jitter.mean / sqrt(steps * workers)
    assert np.mean(means) == pytest.approx(1 + jitter.mean, abs=error)
    longest = max(report.train_seconds for report in reports)
    assert longest == pytest.approx(max(means) * steps, rel=1e-6)


@pytest.mark.parametrize(
    ("jitter", "workers"),
    [
        (LogNormal(0.3), 2),
        (ExponentialTail(1.0), 8),
        pytest.param(LogNormal(0.3), 8, marks=pytest.mark.lab),
        pytest.param(ExponentialTail(1.0), 2, marks=pytest.mark.lab),
    ],
    ids=repr,
)
def test_the_mean_staleness_of_equal_workers(jitter: Jitter, workers: int) -> None:
    """N - 1, however durations vary: an update lies between a read and a push of each other worker.

    But for the last workers at the end, when others have left: they take longer by a few standard
    errors of a worker's time.
    """
    timed = Timed(ASYNCHRONOUS, workers, 64, SECOND, ON, jitter=jitter)
    reports = timed.reports(40)
    found: Counter[int] = Counter()
    for report in reports:
        found.update({int(behind): count for behind, count in report.staleness.items()})
    steps = reports[0].steps
    assert sum(found.values()) == steps * workers
    mean = sum(behind * count for behind, count in found.items()) / sum(found.values())
    factors = [jitter.factor(u) for u in np.arange(0.0005, 1, 0.001)]
    variation = np.std(factors) / np.mean(factors)
    error = ERRORS * variation / sqrt(steps)
    assert (workers - 1) * (1 - error) <= mean <= workers - 1
    assert len(found) > workers  # not always the same


def test_another_seed_draws_others() -> None:
    timed = Timed("AllReduce()", 4, 64, SECOND, ON, jitter=LogNormal(0.2))
    one, again, other = (
        replace(timed, seed=seed).reports(20)[0].train_seconds for seed in (0, 0, 1)
    )
    assert one == again != other


def test_the_stopwatch_of_the_sender_decides_whether_shares_are_drawn() -> None:
    """Rank 0 asks for what the others send before they have started their stopwatches."""

    def program(runtime: Runtime, *, early: bool) -> float:
        transport = runtime.transport
        if runtime.rank == 0 or early:
            runtime.stopwatch(True)
        if runtime.rank == 0:
            for other in (1, 2):
                transport.send(torch.zeros(1), other, 7)
        else:
            transport.receive(0, 7).wait()
            runtime.stopwatch(True)
        all_reduce(transport, torch.zeros(10_000), "parallel", Group((0, 1, 2)), 8)
        return transport.now()

    on, chance = "stragglers(nodes=3)", replace(FREE, tcp=Tcp())
    early, late = (
        run_ranks(3, partial(program, early=early), on, chance) for early in (True, False)
    )
    assert early.failure is None
    assert late.results == early.results


def test_durations_vary_unless_the_cluster_is_exact(tmp_path: Path) -> None:
    """Without a calibration the slowest of four takes 1 + sigma E[max of 4] times as long."""
    training = Training(
        ranks=4, batch_size=8, steps=200, optimizer=Optimizer("SGD", {"lr": 0.1}),
        engine="simulation", tensors="shapes",
    )  # fmt: skip
    run = Run("test", "synthetic(100, tensors=1, sample_flops=1e9)", AllReduce(), 0, training)
    exact, again, varying, twice = (
        simulated(run, tmp_path, on).time.training or 0.0
        for on in (*["lan_1gbit(4, jitter=None)"] * 2, *["lan_1gbit(4)"] * 2)
    )
    assert exact == again
    assert varying == twice
    expected = 1 + ASSUMED.sigma * LARGEST_NORMAL[4]
    assert varying / exact == pytest.approx(expected, abs=ERRORS * ASSUMED.sigma / sqrt(200))


def test_a_drift_is_a_stationary_process_with_a_memory() -> None:
    """log f is normal with deviation sigma, and its correlation over t is exp(-t / T)."""
    drift = Drift(0.2, 60.0)
    factors = drift.factors(np.random.default_rng(0))
    count = 20_000
    logs = np.log([factors(6.0 * place) for place in range(count)])
    error = ERRORS * sqrt(2 * 10 / count)  # of a mean: 20 steps are worth one that is independent
    assert np.mean(logs) == pytest.approx(-(drift.sigma**2) / 2, abs=error * drift.sigma)
    assert np.std(logs) == pytest.approx(drift.sigma, rel=error)
    correlation = np.corrcoef(logs[:-10], logs[10:])[0, 1]
    assert correlation == pytest.approx(np.exp(-1), abs=error)
    other = drift.factors(np.random.default_rng(0))
    assert other(600.0) == factors(600.0)  # whatever was asked before


def test_ranks_of_a_node_drift_together_and_nodes_apart() -> None:
    lan = cluster("lan_1gbit(2, cores=2)")
    nodes = tuple(replace(node, drift=Drift(0.3, 10.0)) for node in lan.nodes)
    timed = Timed("LocalSGD(None)", 4, 64, SECOND, replace(lan, nodes=nodes))
    seconds = [report.seconds["compute"] for report in timed.reports(50)]
    assert seconds[0] == seconds[2] != seconds[1] == seconds[3]
    assert seconds == [report.seconds["compute"] for report in timed.reports(50)]
