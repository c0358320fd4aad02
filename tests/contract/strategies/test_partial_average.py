"""Backup workers of `AllReduce`: the first gradients count, the late ones are dropped."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.lab import some
from tests.support.quadratic import Vector, final, mean_samples, start
from tests.support.training import (
    Trained,
    distance,
    equal,
    settings,
    train_processes,
    train_threads,
)
from tests.support.waiting import wait_until

from orchestra.settings import setting
from orchestra.strategies.all_reduce import AllReduce, BackupMember
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.switch import Switch
from orchestra.strategies.switch_rules import AfterSteps
from orchestra.worker.worker import Worker

RATE = 0.1
BATCH = 4


@dataclass(frozen=True, repr=False)
class Scripted(AllReduce):
    """Rank `late[k]` hands in its gradient of step k when that step's average has been made."""

    late: tuple[int, ...] = setting((), "of each step")

    def member(self, worker: Worker) -> Any:
        return ScriptedMember(**vars(super().member(worker)))


class ScriptedMember(BackupMember):
    def exchange(self) -> None:
        average: Any = self.average
        late, step = self.strategy.late, self.worker.step  # type: ignore[attr-defined]
        if late[average._step % len(late)] == self.worker.rank:
            average._outcome.wait()
        super().exchange()
        _agreed.append((step.loss, step.losses))


_agreed: list[tuple[float, tuple[float, ...]]] = []


def followed(late: tuple[int, ...], ranks: int) -> tuple[Vector, list[int]]:
    """x <- x - eta g, with g over the samples of those in time; how often each rank was late."""
    x, dropped = start(), [0] * ranks
    for step, parts in enumerate(mean_samples(ranks, BATCH)):
        slow = late[step % len(late)]
        in_time = [part for rank, part in enumerate(parts) if rank != slow]
        total = sum(count for _, count in in_time)
        x = x - RATE * sum(count / total * (x - mean) for mean, count in in_time)
        dropped[slow] += parts[slow][1] > 0
    return x, dropped


def train(strategy: AllReduce, ranks: int, folder: Path) -> Trained:
    return train_threads(
        strategy, ranks, folder, "tests.support.quadratic:quadratic()", batch_size=BATCH,
        optimizer=f"SGD(lr={RATE})",
    )  # fmt: skip


@pytest.mark.parametrize("algorithm", some(["ring", "butterfly", "ring_gather"]))
@pytest.mark.parametrize(
    ("ranks", "late"), [(2, (1,)), (2, (1, 0)), (3, (0, 2, 2, 1, 0)), (4, (3, 3, 1, 0, 2))]
)
def test_the_average_is_that_of_those_in_time(
    ranks: int, late: tuple[int, ...], algorithm: Any, tmp_path: Path
) -> None:
    _agreed.clear()
    trained = train(Scripted(algorithm, backup=1, late=late), ranks, tmp_path)
    expected, dropped = followed(late, ranks)
    for state in (trained.final, *trained.replicas):
        np.testing.assert_allclose(final(state), expected, rtol=1e-12)
    assert all(equal(replica, trained.final) for replica in trained.replicas)
    losses = [[line["loss"] for line in trained.lines(rank)] for rank in range(ranks)]
    assert all(one == losses[0] for one in losses), "everyone has everyone's loss"
    for loss, of_ranks in _agreed:  # all have equally many samples
        in_time = [own for own in of_ranks if own]
        assert len(in_time) == ranks - 1
        assert loss == pytest.approx(np.mean(in_time), rel=1e-12)
    assert [late_steps(trained, rank) for rank in range(ranks)] == dropped


def late_steps(trained: Trained, rank: int) -> int:
    """Gradients that were dropped, and those that were not even begun, since it was too late."""
    passed_over: int = sum(line["samples"] == 0 for line in trained.lines(rank))
    return trained.reports[rank].dropped + passed_over


def test_it_matters_who_is_late(tmp_path: Path) -> None:
    """What the test above compares differs from plain all-reduce, and between scripts."""
    ends = [
        train(Scripted(backup=1, late=(0,)), 3, tmp_path / "first").final,
        train(Scripted(backup=1, late=(2,)), 3, tmp_path / "last").final,
        train(AllReduce(), 3, tmp_path / "all").final,
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert distance(ends[one], ends[other]) > 1e-3


@dataclass(frozen=True, repr=False)
class Slow(AllReduce):
    """Rank `slow` spends on its first gradient the time that others take for seven steps."""

    slow: int = setting(0, "this one")

    def member(self, worker: Worker) -> Any:
        if worker.rank == 0:
            _done.clear()
            _computed.clear()
        _all_here.wait()
        return SlowMember(**vars(super().member(worker)))


class SlowMember(BackupMember):
    def begin(self) -> None:
        super().begin()
        rank, slow = self.worker.rank, self.strategy.slow  # type: ignore[attr-defined]
        steps = _computed.setdefault(rank, [])
        steps.append(_done.get(rank, 0))
        if rank == slow and len(steps) == 1:
            others = [rank for rank in self.worker.workers.ranks if rank != slow]
            end = steps[0] + 7
            wait_until(lambda: min(_done.get(rank, 0) for rank in others) >= end, "the others")

    def update(self) -> None:
        super().update()
        _done[self.worker.rank] = _done.get(self.worker.rank, 0) + 1


_done: dict[int, int] = {}
_computed: dict[int, list[int]] = {}
_all_here = threading.Barrier(3)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_worker_holds_up_nobody_and_leaves_out_what_it_missed(
    slow: int, tmp_path: Path
) -> None:
    """The first worker, too, whose background flow hears of the others."""
    trained = train_threads(
        Slow(backup=1, slow=slow), 3, tmp_path, "images(samples=480)", snapshots=3
    )
    assert all(equal(replica, trained.final) for replica in trained.replicas)
    assert {report.steps for report in trained.reports} == {20}
    first = _computed[slow][0]
    # Of the last of the seven averages this worker may not know yet when the others do.
    missed = set(range(first + 1, first + 6))
    assert not set(_computed[slow]) & missed, "averages that were there already"
    assert missed <= {k for k, line in enumerate(trained.lines(slow)) if not line["samples"]}
    assert trained.lines(slow)[first]["samples"] > 0
    assert trained.reports[slow].dropped > 0


def test_a_last_step_with_fewer_samples_than_workers(tmp_path: Path) -> None:
    """Two of three workers have none: there are no two gradients to wait for."""
    trained = train_threads(AllReduce(backup=1), 3, tmp_path, "images(samples=49)")
    assert {report.steps for report in trained.reports} == {3}
    assert [trained.lines(rank)[2]["samples"] for rank in range(3)] == [1, 0, 0]
    assert all(equal(replica, trained.final) for replica in trained.replicas)


@pytest.mark.parametrize("ranks", [2, 3])
def test_buffers_are_the_first_workers_in_the_end(ranks: int, tmp_path: Path) -> None:
    trained = train_threads(
        AllReduce(backup=1), ranks, tmp_path, "images(samples=96, model='normalised')"
    )
    assert all(equal(replica, trained.final) for replica in trained.replicas)


def test_all_workers_leave_the_phase_after_the_same_step(tmp_path: Path) -> None:
    switch = Switch(AllReduce(backup=1), ParameterServer(), when=AfterSteps(4), moments="reset")
    trained = train_threads(switch, 3, tmp_path, "images(samples=240)")
    assert {report.switched_at_step for report in trained.reports} == {4}
    assert all(equal(replica, trained.final) for replica in trained.replicas)


class Unlucky(AllReduce):
    """The background flow of the last rank fails in its third collective."""

    def member(self, worker: Worker) -> Any:
        member = super().member(worker)
        assert isinstance(member, BackupMember)
        calls: list[int] = []
        usual = member.open

        def opened(*, fresh: bool) -> None:
            usual(fresh=fresh)
            average: Any = member.average
            inner = average._collective

            class Failing:
                def begin(self, *arguments: Any) -> Any:
                    calls.append(1)
                    if worker.rank == worker.workers.ranks[-1] and len(calls) == 3:
                        raise OSError("no luck")
                    return inner.begin(*arguments)

            average._collective = Failing()

        member.open = opened  # type: ignore[method-assign]
        return member


def test_what_the_background_flow_raises_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no luck"):
        train_threads(Unlucky(backup=1), 3, tmp_path, "images(samples=240)")


def test_it_resumes_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    """The second run has the last two of ten steps to do; who is late is scripted."""
    strategy = Scripted(backup=1, late=(1, 0))
    options: dict[str, Any] = {"optimizer": "Adam(lr=0.01)", "checkpoint_every": 4}
    first = train_threads(strategy, 3, tmp_path, "images(samples=240)", **options)
    resumed = train_threads(strategy, 3, tmp_path, "images(samples=240)", **options)
    assert equal(resumed.final, first.final)
    assert [line["step"] for line in resumed.lines(0)] == list(range(1, 11))
    assert [state.average._step for state in resumed.states] == [2, 2, 2]


def test_real_processes_with_a_checkpoint(tmp_path: Path) -> None:
    run = settings(AllReduce(backup=1), 3, "images(samples=240)", checkpoint_every=4, snapshots=2)
    record = train_processes(run, tmp_path)
    assert (record.ending.status, record.learned.steps) == ("completed", 10)
    assert 160 <= record.learned.samples <= 240
    assert 0 <= record.updates.dropped <= 10
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*"))
