"""Gossip against the equations of D-PSGD, and what it leaves at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.d_psgd import STEPS, d_psgd
from tests.support.decentralized import distance_between, replicas_of, train_quadratic
from tests.support.lab import some
from tests.support.mixing import Given
from tests.support.threads import ask_to_stop
from tests.support.training import Trained, equal, train_threads

from orchestra.errors import InputError
from orchestra.settings import parse, write
from orchestra.strategies.gossip import DPSGDMember, Gossip
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.single import Single
from orchestra.topologies import Complete, Exponential, RandomRegular, Ring, Star, Topology
from orchestra.worker.worker import Worker


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("topology", "ranks"),
    some([(Ring(), 5), (Ring(), 2), (Star(), 4), (Complete(), 3), (Exponential(), 5),
     (Exponential(peers=1), 4), (RandomRegular(3), 6)]),
)  # fmt: skip
def test_it_follows_the_equations_of_the_paper(
    topology: Topology, ranks: int, momentum: float, tmp_path: Path
) -> None:
    optimizer = f"SGD(lr=0.1, momentum={momentum})"
    result = train_quadratic(Gossip(topology), ranks, STEPS, tmp_path, optimizer=optimizer)
    expected = d_psgd(topology, ranks, momentum)
    assert distance_between(replicas_of(result), expected) < 1e-12
    assert np.ptp(expected, axis=0).max() > 1e-3 or topology == Complete()
    assert distance_between(result.final["x"].numpy(), expected.mean(0)) < 1e-12


def test_one_worker_equals_single_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "SGD(lr=0.05, momentum=0.9, weight_decay=0.01)"}
    alone = train_threads(Single(), 1, tmp_path / "single", "images()", **options)
    for topology in (Ring(), Star(), Complete(), Exponential(peers=1), RandomRegular()):
        gossip = train_threads(
            Gossip(topology), 1, tmp_path / repr(topology), "images()", **options
        )
        assert equal(gossip.final, alone.final)


def test_replicas_end_at_their_mean_buffers_included(tmp_path: Path) -> None:
    task = "images(samples=104, model='normalised')"  # the last step leaves one rank without data
    result = train_threads(Gossip(), 3, tmp_path, task, batch_size=17, snapshots=2)
    parameters = {name for name, _ in result.modules[0].named_parameters()}
    for name in parameters:
        assert all(replica[name].equal(result.final[name]) for replica in result.replicas)
    assert sum(report.samples for report in result.reports) == 104


def test_it_is_named_by_its_topology() -> None:
    strategy = parse("Gossip(Exponential(peers=1))", STRATEGIES, where="here")
    assert strategy == Gossip(Exponential(peers=1))
    assert parse("Gossip(topology=Star)", STRATEGIES, where="here") == Gossip(Star())
    assert write(strategy, STRATEGIES) == "Gossip(Exponential(peers=1))"
    assert repr(Gossip()) == "Gossip(Ring())"


def test_a_graph_that_falls_apart_or_has_no_weights_is_refused() -> None:
    with pytest.raises(InputError, match="does not connect 4 ranks"):
        Gossip(Given(((1,), (0,), (3,), (2,)))).roles(4)
    with pytest.raises(InputError, match="take StochasticGradientPush"):
        Gossip(Given(((1, 2), (2,), (0,)))).roles(3)


@dataclass(frozen=True, repr=False)
class Stopped(Gossip):
    """The user's stop reaches each rank before another step: rank r before step `at` + 3 r."""

    at: int = 1

    def member(self, worker: Worker) -> StoppedMember:
        return StoppedMember(self, worker, worker.local_optimizer())


@dataclass(eq=False)
class StoppedMember(DPSGDMember):
    def begin(self) -> None:
        assert isinstance(self.strategy, Stopped)
        if self.step + 2 >= self.strategy.at + 3 * self.worker.rank:
            ask_to_stop(self.worker)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("at", [2, 6, 11])
def test_all_leave_after_one_step_when_the_user_stops(ranks: int, at: int, tmp_path: Path) -> None:
    result = train_quadratic(Stopped(at=at), ranks, 60, tmp_path)
    steps = {len(result.lines(rank)) for rank in range(ranks)}
    assert len(steps) == 1
    assert at <= steps.pop() < at + 12
    assert all(report.stopped for report in result.reports)
    assert (tmp_path / "checkpoints" / "0001" / "manifest.json").exists()


def test_a_stop_near_the_end_is_the_end(tmp_path: Path) -> None:
    result = train_quadratic(Stopped(at=9), 3, 10, tmp_path)
    assert [len(result.lines(rank)) for rank in range(3)] == [10, 10, 10]


def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "SGD(lr=0.1, momentum=0.9)"}
    topology = Exponential(peers=1)
    whole = train_quadratic(Gossip(topology), 4, 40, tmp_path / "whole", **options)
    stopped = train_quadratic(Stopped(topology, at=7), 4, 40, tmp_path / "other", **options)
    assert len(stopped.lines(0)) < 40
    resumed = train_quadratic(Gossip(topology), 4, 40, tmp_path / "other", **options)
    assert equal(resumed.final, whole.final)
    assert [loss(resumed, rank) for rank in range(4)] == [loss(whole, rank) for rank in range(4)]


def loss(result: Trained, rank: int) -> list[float]:
    return [line["loss"] for line in result.lines(rank)]
