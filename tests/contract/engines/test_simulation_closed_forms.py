"""What a step of each strategy takes, beside its formula.

A message of b bytes takes alpha + b beta; n are the bytes of the parameters, P, of which there are
so many that headers and the few numbers beside a gradient do not show. A gradient takes c, and
other work is charged by the element: an update u P, adding and mixing m P, a copy e P.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from tests.support.lab import some
from tests.support.simulated import FREE, cluster
from tests.support.step_times import Figures, Timed
from torch import nn

from orchestra.cluster import Cluster
from orchestra.engines.simulation.simulate import Simulation
from orchestra.records.report import RankReport
from orchestra.strategies.pipeline import Pipeline
from orchestra.tasks import Task
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run, Training
from orchestra.transports import collective
from orchestra.worker.runtime import SilentReporter

ALPHA, BETA = 0.5, 1 / 125e6
"""Seconds: of the two links between two nodes together, and of a byte."""
ON = 'lan_1gbit(nodes=32, latency="250 ms")'
ELEMENTS = 3 * 2**28
BYTES = 4 * ELEMENTS
CROSSING = BYTES * BETA
"""n beta: 26 s."""

GRADIENT, EACH = 20.0, 2e-9
FIGURES = Figures(gradient=GRADIENT, update=EACH)
UPDATE = EACH * ELEMENTS


@pytest.fixture(autouse=True)
def _whole_messages() -> Iterator[None]:
    """A run of pieces leaves as one message, however long."""
    with mock.patch.object(collective, "SEGMENT_BYTES", 1 << 40):
        yield


def timed(strategy: str, workers: int, figures: Figures = FIGURES, on: str | Cluster = ON) -> Timed:
    return Timed(strategy, workers, ELEMENTS, figures, on)


def check(strategy: str, workers: int, formula: float, figures: Figures = FIGURES) -> None:
    assert timed(strategy, workers, figures).step_seconds() == pytest.approx(formula, rel=1e-6)


def rounds(count: float, bytes_of_each: float = BYTES) -> float:
    """So many rounds after one another, in each of which a rank sends and receives so much."""
    return count * (ALPHA + bytes_of_each * BETA)


# Every all-reduce: c + T + u P


def ring(workers: int) -> float:
    """2 (N - 1) (alpha + n beta / N)"""
    return rounds(2 * (workers - 1), BYTES / workers)


def halving_doubling(workers: int) -> float:
    """2 sum_k (alpha + n beta / 2^k), k = 1 .. log2 p; with others 2 (alpha + n beta) more"""
    levels = int(math.log2(workers))
    folded = rounds(2) if workers > 2**levels else 0.0
    return folded + 2 * sum(rounds(1, BYTES / 2**k) for k in range(1, levels + 1))


def butterfly(workers: int) -> float:
    """log2 p (alpha + n beta); with two others 2 (alpha + n beta) more, and n beta: the pair that
    none is folded into is a round ahead, and shares the link of those who are not"""
    levels = int(math.log2(workers))
    return rounds(levels) if workers == 2**levels else rounds(levels + 2) + CROSSING


def tree(workers: int) -> float:
    """2 log2((N + 1) / 2) (alpha + 2 n beta): two children share their parent's link"""
    return rounds(2 * (math.log2(workers + 1) - 1), 2 * BYTES)


def ring_gather(workers: int) -> float:
    """(N - 1) (alpha + n beta)"""
    return rounds(workers - 1)


def parallel(workers: int) -> float:
    """alpha + (N - 1) n beta"""
    return rounds(1, (workers - 1) * BYTES)


def reduce_to_one(workers: int) -> float:
    """2 (alpha + (N - 1) n beta)"""
    return rounds(2, (workers - 1) * BYTES)


SIZES: list[tuple[Callable[[int], float], tuple[int, ...]]] = [
    (ring, (2, 3, 16)),
    (halving_doubling, (2, 16, 6)),
    (butterfly, (2, 16, 6)),
    (tree, (3, 15)),
    (ring_gather, (2, 5)),
    (parallel, (2, 5)),
    (reduce_to_one, (2, 5)),
]
CASES = [(form, workers) for form, sizes in SIZES for workers in sizes]


@pytest.mark.parametrize(
    ("form", "workers"), some(CASES), ids=lambda case: getattr(case, "__name__", case)
)
def test_all_reduce(form: Callable[[int], float], workers: int) -> None:
    check(f"AllReduce({form.__name__!r})", workers, GRADIENT + form(workers) + UPDATE)


def test_native() -> None:
    """That of the ring: c + 2 (N - 1) (alpha + n beta / N) + u P"""
    check("AllReduce('native')", 5, GRADIENT + ring(5) + UPDATE)


def test_sharded_optimizer() -> None:
    """c + ring + log2(N) alpha (the numbers beside the gradient) + u P / N"""
    formula = GRADIENT + ring(8) + 3 * ALPHA + UPDATE / 8
    check("AllReduce(shard='optimizer')", 8, formula)


def test_hierarchical() -> None:
    """M nodes of G ranks, which share the node's memory, at no cost here, and its link:
    c + 2 (M - 1) (alpha + n beta / M) + u P"""
    nodes, inside = 4, 4
    order = tuple(node + nodes * place for node in range(nodes) for place in range(inside))
    strategy = f"AllReduce('hierarchical', ranks_per_node={inside}, order={order})"
    seconds = timed(strategy, nodes * inside, on=ON.replace("32", "4")).step_seconds()
    between = rounds(2 * (nodes - 1), BYTES / nodes)
    assert seconds == pytest.approx(GRADIENT + between + UPDATE, rel=1e-6)


@pytest.mark.parametrize("buffer_bytes", [0, 1 << 40])
def test_buckets_leave_during_the_backward_pass(buffer_bytes: int) -> None:
    """end_i = max(ready_i, end_(i-1)) + T(n_i), and the update follows the last one"""
    workers, tensors = 4, 6
    for gradient in (10.0, 60.0, 600.0):
        end = 0.0
        for number in range(tensors):
            ready = gradient * (number + 1) / tensors
            end = max(ready, end) + rounds(2 * (workers - 1), BYTES / tensors / workers)
        figures = replace(FIGURES, gradient=gradient, tensors=tensors)
        several = replace(
            timed("AllReduce()", workers, figures),
            bucket_megabytes=1.0,
            overhead=replace(FREE, buffer=buffer_bytes),
        )
        # A rank that begins early lets another one end early, and the other way round in the next
        # step: an even number of steps counts.
        assert several.step_seconds(2, 4) == pytest.approx(end + UPDATE, rel=1e-6)


# Servers


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 1), (4, 2), (4, 4), (2, 6)])
def test_synchronous_servers(workers: int, servers: int) -> None:
    """c + 2 (alpha + max(N / S, 1) n beta) + (2 N m + u) P / S, without m for one worker"""
    mix = 5e-10
    adding = 2 * workers * mix * ELEMENTS if workers > 1 else 0.0
    ways = rounds(2, max(workers / servers, 1) * BYTES)
    formula = GRADIENT + ways + (adding + UPDATE) / servers
    check(f"ParameterServer(servers={servers})", workers, formula, replace(FIGURES, mix=mix))


def test_a_server_beside_each_worker() -> None:
    """As the ring, in two rounds: c + 2 (alpha + (N - 1) / N n beta) + u P / N"""
    formula = GRADIENT + rounds(2, 3 / 4 * BYTES) + UPDATE / 4
    check("ParameterServer(placement='beside', servers=4)", 4, formula)


def test_a_server_copies_for_one_worker_after_the_other() -> None:
    """c + 2 (alpha + n beta) + (u + N e) P: who got a copy first has pushed before the next does"""
    copy = 2 * CROSSING / ELEMENTS
    formula = GRADIENT + rounds(2) + UPDATE + 3 * copy * ELEMENTS
    check("ParameterServer()", 3, formula, replace(FIGURES, encode=copy))


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_asynchronous_server(workers: int) -> None:
    """max(N (u + e) P, c + 2 (alpha + n beta) + (u + e) P): the server is busy, or nobody waits"""
    busy = 1.5 * CROSSING  # so that pushes and pulls follow each other on the server's link
    figures = Figures(gradient=60.0, update=busy / ELEMENTS / 2, encode=busy / ELEMENTS / 2)
    formula = max(workers * busy, 60.0 + rounds(2) + busy)
    check("ParameterServer(consistency='asynchronous')", workers, formula, figures)


def test_pushes_of_equal_workers_are_as_stale_as_there_are_others() -> None:
    """N - 1 updates between a read and its push; worker i's first push comes after i others"""
    workers, steps = 8, 3
    found: Counter[int] = Counter()
    for report in timed("ParameterServer(consistency='asynchronous')", workers).reports(steps):
        found.update({int(staleness): count for staleness, count in report.staleness.items()})
    pushes = steps * (workers + 1) * workers
    first = dict.fromkeys(range(workers - 1), 1)
    assert found == {**first, workers - 1: pushes - (workers - 1)}


@pytest.mark.parametrize("strategy", ["AllReduce()", "ParameterServer(placement='beside')",
                                      "ParameterServer(consistency='bounded', staleness=2)",
                                      "Gossip()", "LocalSGD(1)"])  # fmt: skip
def test_the_slowest_worker_sets_the_pace(strategy: str) -> None:
    """max_i c / speed_i, where messages take no time"""
    on = unequal([1.0, 0.25, 0.5, 1.0, 1.0, 1.0])
    seconds = Timed(strategy, 4, 64, Figures(gradient=1.0), on).step_seconds()
    assert seconds == pytest.approx(4.0, rel=1e-6)


def unequal(speeds: list[float]) -> Cluster:
    """Nodes of these speeds, with links that take next to no time."""
    like = cluster(f'lan_1gbit(nodes={len(speeds)}, latency="1 ps", bandwidth="100 Tbit/s")')
    nodes = tuple(replace(n, speed=speed) for n, speed in zip(like.nodes, speeds, strict=True))
    return like.with_setting("nodes", nodes)


# Replicas


@pytest.mark.parametrize(
    ("strategy", "peers"),
    [("Gossip()", 2), ("Gossip(Exponential(peers=1))", 1), ("Gossip(Complete())", 7)],
)
def test_gossip(strategy: str, peers: int) -> None:
    """With k neighbours: max(c, alpha + k n beta + k m P) + u P"""
    mix = 5e-10
    mixing = rounds(1, peers * BYTES) + peers * mix * ELEMENTS
    formula = max(GRADIENT, mixing) + UPDATE
    check(strategy, 8, formula, replace(FIGURES, mix=mix))


@pytest.mark.parametrize("mix", [5e-10, 1e-7])
def test_stochastic_gradient_push(mix: float) -> None:
    """Share, scale the rest while it travels, add: c + (u + 2 m) P + max(m P, alpha + n beta)"""
    each = mix * ELEMENTS
    formula = GRADIENT + UPDATE + 2 * each + max(each, rounds(1))
    check("StochasticGradientPush()", 8, formula, replace(FIGURES, mix=mix))


def test_overlapped_push() -> None:
    """c + u P + 2 m P: a share is made behind, and a message is there before it is due"""
    mix = 5e-10
    formula = 2 * GRADIENT + UPDATE + 2 * mix * ELEMENTS
    figures = replace(FIGURES, mix=mix, gradient=2 * GRADIENT)
    check("StochasticGradientPush(overlap=1)", 8, formula, figures)


def test_pairs_average_while_they_compute() -> None:
    """c + u P + 2 e P: giving x away and taking it back, with c above 2 (alpha + n beta) + m P"""
    figures = Figures(gradient=80.0, update=EACH, encode=EACH / 4, mix=5e-10)
    check("PairwiseAveraging()", 2, 80.0 + UPDATE + 2 * UPDATE / 4, figures)


@pytest.mark.parametrize("every", [1, 5])
def test_local_sgd(every: int) -> None:
    """A round: H (c + u P) + e P + 2 (N - 1) (alpha + n beta / N)"""
    figures = replace(FIGURES, encode=EACH / 4)
    seconds = timed(f"LocalSGD({every})", 4, figures).step_seconds(2 * every, 4 * every)
    formula = every * (GRADIENT + UPDATE) + UPDATE / 4 + ring(4)
    assert every * seconds == pytest.approx(formula, rel=1e-6)


@pytest.mark.parametrize("gradient", [1.0, 60.0])
def test_an_average_of_replicas_behind_steps(gradient: float) -> None:
    """A round: (H - tau) (c + u P) + e P + max(tau (c + u P), 2 (N - 1) (alpha + n beta / N))"""
    step = gradient + UPDATE
    figures = replace(FIGURES, gradient=gradient, encode=EACH / 4)
    seconds = timed("LocalSGD(5, overlap=2)", 4, figures).step_seconds(10, 20)
    formula = 3 * step + UPDATE / 4 + max(2 * step, ring(4))
    assert 5 * seconds == pytest.approx(formula, rel=1e-6)


# Pipelines


def layers() -> Task:
    """Four layers, which `Pipeline` cuts into stages."""
    from tests.support.tasks_for_tests import images

    def model() -> nn.Module:
        wide = (nn.Linear(64, 64) for _ in range(3))
        return nn.Sequential(nn.Flatten(), *wide, nn.Linear(64, 4))

    return replace(images(), model=model)


def pipelined(stages: int, parts: int, schedule: str, steps: int, on: Cluster,
              folder: Path) -> list[RankReport]:  # fmt: skip
    """With a second for each sample's forward pass and two for its backward pass."""
    cuts = tuple(str(layer) for layer in range(2, stages + 1))
    strategy = Pipeline(stages, parts, schedule=schedule, cuts=cuts)  # type: ignore[arg-type]
    training = Training(ranks=stages, batch_size=8, steps=steps, snapshots=0, trace_steps=0)
    run = Run("test", f"{__name__}:layers", strategy, 0, training)
    figures = Figures(forward=1.0, backward=2.0)
    outcome = Simulation(on, stages, figures, FREE, SilentReporter()).run(
        lambda runtime: train(runtime, (run, folder))
    )
    assert (outcome.failure, outcome.bad_input) == (None, None)
    return list(outcome.results)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("stages", "parts"), some([(1, 4), (2, 1), (2, 4), (3, 4), (4, 4), (4, 16)])
)
def test_bubble_of_a_pipeline(stages: int, parts: int, schedule: str, tmp_path: Path) -> None:
    """Of its time a stage is idle for (S - 1) / (M + S - 1)"""
    on = unequal([1.0] * stages)
    for report in pipelined(stages, parts, schedule, 2, on, tmp_path):
        idle = 1 - report.seconds["compute"] / report.train_seconds
        assert idle == pytest.approx((stages - 1) / (parts + stages - 1), rel=1e-6, abs=1e-6)


def test_latency_in_a_pipeline(tmp_path: Path) -> None:
    """GPipe: (M + S - 1) (f + b) + 2 (S - 1) alpha, and log2(S) alpha to agree on the loss"""
    stages, parts, part = 4, 8, 4 * 8 // 8
    on = cluster(f'lan_1gbit(nodes={stages}, latency="250 ms", bandwidth="100 Tbit/s")')
    few, many = (
        max(r.train_seconds for r in pipelined(stages, parts, "gpipe", n, on, tmp_path / str(n)))
        for n in (1, 3)
    )
    formula = (parts + stages - 1) * 3.0 * part + 2 * (stages - 1) * ALPHA + 2 * ALPHA
    assert (many - few) / 2 == pytest.approx(formula, rel=1e-6)
