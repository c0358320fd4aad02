"""Ranks that join a simulated run under way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.joining import STEPS, held, join, told
from tests.support.lab import some
from tests.support.recorded import changed
from tests.support.simulated import cluster, simulated
from tests.support.simulated_losses import (
    ASYNCHRONOUS,
    CHANGED,
    RING,
    kill_after_all,
    lan,
    run_of,
    steps,
)
from tests.support.training import step_lines

from orchestra.cluster.faults import Death, Fault, Join
from orchestra.data import Dirichlet
from orchestra.engines.injection import VARIABLE
from orchestra.engines.run import train_run
from orchestra.engines.simulation.memory import Memory
from orchestra.errors import InputError
from orchestra.records.record import RunRecord

NODE = "worker-2"
lab = pytest.mark.lab


@pytest.mark.parametrize(
    ("strategy", "lost_at"),
    [
        (RING, 13),
        pytest.param("AllReduce('ring', compression=TopK(0.1))", 13, marks=lab),
        pytest.param("LocalSGD(2, outer=Nesterov(0.7, 0.9))", 13, marks=lab),
        pytest.param("Gossip(Ring())", 21, marks=lab),
        pytest.param("StochasticGradientPush", 21, marks=lab),
    ],
)
def test_it_equals_a_real_run_with_the_same_join_and_loss(
    strategy: str, lost_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: a rank joins after the third step, and another one is killed later."""
    loss = kill_after_all(1, lost_at)
    monkeypatch.setenv(VARIABLE, loss)
    with held(tmp_path, strategy, ranks=3) as training, join(tmp_path) as newcomer:
        told(tmp_path, "joins; going on with 4 ranks")
        (tmp_path / "go").touch()
        assert newcomer.end().status == 0
        real = training.record()
    waiting = [f'Inject("delay", rank={rank}, at="step", number=3)' for rank in range(3)]
    monkeypatch.setenv(VARIABLE, "; ".join([*waiting, loss]))
    task = f"tests.support.failing_tasks:gated({str(tmp_path)!r}, model='normalised')"
    run = run_of(strategy, ranks=3, equal="worker_batch", checkpoint_every=3, steps=STEPS)
    on = lan(tmp_path / "virtual", Join(NODE, at=0.5))
    virtual = simulated(replace(run, task=task), tmp_path / "virtual", on=on)
    changes, expected = (
        [{name: getattr(change, name) for name in CHANGED} for change in record.ending.regroupings]
        for record in (virtual, real)
    )
    assert changes == expected
    assert [(change["joined"], change["lost"]) for change in changes] == [((3,), ()), ((), (1,))]
    assert virtual.learned.parameters_sha256 == real.learned.parameters_sha256
    assert virtual.learned.samples == real.learned.samples
    for rank in (0, 2, 3):
        assert steps(virtual, rank) == steps(real, rank)


def run_with(folder: Path, *faults: Fault, strategy: str = RING, **training: Any) -> RunRecord:
    return simulated(run_of(strategy, **training), folder, on=lan(folder, *faults))


def test_each_repetition_is_the_same(tmp_path: Path) -> None:
    faults = Join(NODE, at=0.01), Death("rank 1", at=0.02), Join(NODE, at=0.005, spare=True)
    first, second = (run_with(tmp_path / name, *faults) for name in ("first", "second"))
    assert [(each.lost, each.joined) for each in first.ending.regroupings] == [
        ((), (5,)), ((1,), (4,)),
    ]  # fmt: skip
    assert first.ending.notices == (
        "rank 4 on worker-2 gets ready to join",
        "rank 5 on worker-2 gets ready to join",
        "rank 5 on worker-2 joins; going on with 5 ranks",
        "rank 1 on worker-1 was killed by SIGKILL; rank 4 on worker-2 takes its place; going on "
        "with 5 ranks",
    )
    assert changed(first, folder=second.folder, cluster="", wall_seconds=0.0) == changed(
        second, cluster="", wall_seconds=0.0
    )
    for rank in (0, 2, 3, 4, 5):
        assert step_lines(first.folder, rank) == step_lines(second.folder, rank)


@pytest.mark.parametrize(
    "strategy",
    [
        "ParameterServer",
        ASYNCHRONOUS,
        pytest.param("AllReduce('ring', shard='optimizer')", marks=lab),
    ],
)
def test_others_rest_to_take_a_rank_in(strategy: str, tmp_path: Path) -> None:
    """Nothing is done again: all go on from a checkpoint of the rest."""
    record = run_with(tmp_path, Join(NODE, at=0.01), strategy=strategy, checkpoint_every=5)
    (change,) = record.ending.regroupings
    assert (change.joined, change.ranks) == ((4,), 5)
    assert (change.steps_voided, change.samples_again) == (0, 0)
    assert record.learned.samples == 20 * 4 * 8
    assert [part.ranks for part in record.ending.ranks_history] == [4, 5]


def test_it_is_taken_in_soon(tmp_path: Path) -> None:
    """After orders, answers, two round trips for each connection, and the state."""
    record = run_with(tmp_path, Join(NODE, at=0.01))
    (change,) = record.ending.regroupings
    assert change.noticed < 0.02
    assert 8 * 100e-6 < change.seconds < 0.01
    assert change.steps_voided <= 1
    assert record.learned.samples == 20 * 4 * 8
    assert [step for step, _, _ in steps(record, 4)] == [*range(change.step + 1, 21)]


@pytest.mark.parametrize("at", some([0.0, 1000.0]))
def test_it_may_come_before_the_first_step_or_after_the_end(at: float, tmp_path: Path) -> None:
    on = lan(tmp_path, Join("worker-4", at=at), on="lan_1gbit(nodes=5)")
    record = simulated(run_of(RING), tmp_path, on=on)
    assert [each.joined for each in record.ending.regroupings] == ([] if at else [(4,)])
    assert record.learned.samples == 20 * 4 * 8
    assert ("worker-4" in record.machine.alone) == (not at)


def test_a_spare_that_is_not_needed_ends_with_the_run(tmp_path: Path) -> None:
    record = run_with(tmp_path, Join(NODE, at=0.01, spare=True))
    assert (record.ending.regroupings, record.ending.left_out) == ([], {})
    assert record.ending.notices == ("rank 4 on worker-2 gets ready to join",)
    assert not (record.folder / "steps-rank-4.jsonl").exists()


def test_one_that_has_joined_may_be_lost(tmp_path: Path) -> None:
    faults = Join(NODE, at=0.005), Death("rank 4", at=0.02)
    record = run_with(tmp_path, *faults, min_ranks=4)
    assert [(each.joined, each.lost) for each in record.ending.regroupings] == [
        ((4,), ()), ((), (4,)),
    ]  # fmt: skip
    assert record.ending.left_out == {"4": "is gone: its control connection closed"}
    assert record.learned.samples == 20 * 4 * 8


def test_a_spare_may_be_lost_before_it_is_needed(tmp_path: Path) -> None:
    faults = Join(NODE, at=0.005, spare=True), Death("rank 4", at=0.01)
    record = run_with(tmp_path, *faults)
    assert record.ending.notices[1] == "rank 4 on worker-2 is gone before it was taken in"
    assert record.learned.samples == 20 * 4 * 8


def test_one_whose_program_fails_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, 'Inject("raise", rank=4)')
    record = run_with(tmp_path, Join(NODE, at=0.01))
    assert record.ending.notices[1] == (
        "rank 4 on worker-2 is not taken in: failed: Injected: injected at start 1"
    )
    assert not record.ending.regroupings


def test_one_rank_too_many_is_not_taken_in(tmp_path: Path) -> None:
    record = run_with(
        tmp_path, Join(NODE, at=0.01), strategy="Pipeline(stages=2)", min_ranks=4,
        checkpoint_every=5,
    )  # fmt: skip
    assert record.ending.notices[-1] == (
        "rank 4 on worker-2 is not taken in: it would be one rank too many: Pipeline: 5 ranks are "
        "no whole number of pipelines of 2 stages: change ranks or stages"
    )
    assert not record.ending.regroupings


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"min_ranks": None}, "Join needs a run with min_ranks: set it, or leave out Join"),
        (
            {"tensors": "shapes", "engine": "simulation", "strategy": ASYNCHRONOUS},
            "Join hands over values: set tensors to real, or leave out Join",
        ),
        (
            {"sharding": Dirichlet(0.5), "strategy": ASYNCHRONOUS},
            "Join takes a run whose settings hold for another number of ranks: leave out Join, or",
        ),
    ],
)
def test_what_cannot_take_ranks_in_is_refused(
    training: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"cluster lan_1gbit\(4\): {message}"):
        run_with(tmp_path, Join(NODE, at=0.01), **training)


def test_one_without_room_is_refused() -> None:
    nodes = [node.with_setting("memory", 30e3) for node in cluster("lan_1gbit(nodes=4)").nodes]
    small = replace(cluster("lan_1gbit(nodes=4)"), nodes=tuple(nodes))
    memory = Memory(run_of(RING))
    memory.require_room(small, 4)
    with pytest.raises(InputError, match="memory: worker-2 has 30 kB, but its 2 ranks would need"):
        memory.require_room(replace(small, faults=(Join(NODE, at=1),)), 4)


def test_an_emulation_refuses_it(tmp_path: Path) -> None:
    run = run_of(RING, engine="emulation", cluster=lan(tmp_path, Join(NODE, at=1)))
    with pytest.raises(InputError, match="no rank joins an emulated run: leave out Join, or simul"):
        train_run(run, tmp_path, quiet=True)
