"""Simulated runs that lose ranks and go on with those that are left."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.recorded import changed
from tests.support.simulated import simulated
from tests.support.simulated_losses import (
    ASYNCHRONOUS,
    CHANGED,
    RING,
    kill,
    kill_after_all,
    lan,
    run_of,
    steps,
)
from tests.support.training import step_lines

from orchestra.cluster.faults import Death, Fault, LinkCut, Pause
from orchestra.engines.injection import VARIABLE
from orchestra.engines.run import train_run
from orchestra.errors import InputError, RunFailed
from orchestra.records.record import RunRecord

CHECKPOINTS = {"checkpoint_every": 4}
KEPT = {"steps": 40, "optimizer": "SGD(lr=0.05)"}
lab = pytest.mark.lab


@pytest.mark.parametrize(
    ("strategy", "gradients", "training"),
    [
        pytest.param("AllReduce('ring')", (7, 13), {}, marks=lab),
        pytest.param("AllReduce('tree')", (7, 13), {}, marks=lab),
        pytest.param(
            "AllReduce('halving_doubling', compression=PowerSGD(2))", (7, 13), {}, marks=lab
        ),
        ("AllReduce('ring', compression=TopK(0.1))", (7, 13), {"bucket_megabytes": 0.01}),
        pytest.param("LocalSGD(4)", (7, 13), {}, marks=lab),
        ("LocalSGD(4, outer=Nesterov(0.7, 0.9))", (7, 13), {}),
        pytest.param("LocalSGD(4, fragments=2)", (25, 29), KEPT, marks=lab),
        pytest.param("Gossip(Ring())", (25, 29), KEPT, marks=lab),
        pytest.param("StochasticGradientPush", (25, 29), KEPT, marks=lab),
        ("ParameterServer", (7, 13), CHECKPOINTS),
        pytest.param("AllReduce('ring', shard='optimizer')", (7, 13), CHECKPOINTS, marks=lab),
    ],
)
def test_it_equals_a_real_run_that_loses_the_same_ranks(
    strategy: str,
    gradients: tuple[int, int],
    training: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, killed in the same gradients."""
    faults = f"{kill_after_all(2, gradients[0])}; {kill_after_all(0, gradients[1])}"
    monkeypatch.setenv(VARIABLE, faults)
    run = run_of(strategy, **training)
    real = train_run(run, tmp_path / "real", quiet=True)
    virtual = simulated(run, tmp_path / "virtual")
    assert virtual.ending.left_out == real.ending.left_out
    changes, expected = (
        [{name: getattr(change, name) for name in CHANGED} for change in record.ending.regroupings]
        for record in (virtual, real)
    )
    assert changes == expected
    assert [change["lost"] for change in changes] == [(2,), (0,)]
    assert virtual.learned.parameters_sha256 == real.learned.parameters_sha256
    assert virtual.learned.samples == real.learned.samples
    for rank in (1, 3):
        assert steps(virtual, rank) == steps(real, rank)


@pytest.fixture
def usual(tmp_path: Path) -> RunRecord:
    return simulated(run_of(RING), tmp_path / "usual", on=lan(tmp_path / "usual"))


def lossy(folder: Path, *faults: Fault, strategy: str = RING, **training: Any) -> RunRecord:
    return simulated(run_of(strategy, **training), folder, on=lan(folder, *faults))


def test_each_repetition_is_the_same(tmp_path: Path) -> None:
    dies = Death("rank 2", at=0.01)
    first, second = (lossy(tmp_path / name, dies) for name in ("first", "second"))
    assert first.ending.regroupings
    assert changed(first, folder=second.folder, cluster="", wall_seconds=0.0) == changed(
        second, cluster="", wall_seconds=0.0
    )
    for rank in range(4):
        assert step_lines(first.folder, rank) == step_lines(second.folder, rank)


def test_death_is_noticed_at_once(usual: RunRecord, tmp_path: Path) -> None:
    assert usual.time.training is not None
    record = lossy(tmp_path, Death("rank 2", at=usual.time.training / 2))
    (change,) = record.ending.regroupings
    assert change.noticed < usual.time.training / 2
    assert change.steps_voided <= 1
    # Orders, answers, two round trips for each connection, and the state for whoever is behind.
    assert 8 * 100e-6 < change.seconds < 0.01
    assert record.time.training is not None
    assert record.time.training > usual.time.training
    assert record.learned.samples == usual.learned.samples


def test_stopped_rank_is_given_up_after_the_silence(tmp_path: Path) -> None:
    record = lossy(tmp_path, Pause("rank 1", at=0.01, seconds=1000))
    assert record.ending.left_out == {"1": "is stopped (by SIGSTOP or its terminal)"}
    (change,) = record.ending.regroupings
    assert 3 < change.noticed < 4
    assert record.time.training is not None
    assert record.time.training < 5


def test_rank_behind_a_cut_link_is_given_up_after_the_patience(tmp_path: Path) -> None:
    record = lossy(tmp_path, LinkCut(of="worker-1", at=0.01))
    assert record.ending.left_out == {"1": "does not respond: no sign of life for 60 s"}
    assert 60 < record.ending.regroupings[0].noticed < 61


def test_group_waits_for_a_rank_behind_a_cut_link(tmp_path: Path) -> None:
    cut, dies = LinkCut(of="worker-1", at=0.01, until=5), Death("rank 2", at=1)
    record = lossy(tmp_path, cut, dies)
    assert list(record.ending.left_out) == ["2"]
    (change,) = record.ending.regroupings
    assert change.ranks == 3
    assert change.noticed < 1
    assert 5 < change.noticed + change.seconds < 5.6


def test_another_rank_dies_while_the_group_forms(usual: RunRecord, tmp_path: Path) -> None:
    once = lossy(tmp_path / "once", Death("rank 2", at=0.01))
    (change,) = once.ending.regroupings
    for part in (0.1, 0.3, 0.5, 0.7, 0.9):
        at = 0.01 + part * change.seconds
        record = lossy(tmp_path / str(part), Death("rank 2", at=0.01), Death("rank 3", at=at))
        (both,) = record.ending.regroupings
        assert (both.lost, both.ranks) == ((2, 3), 2)
        assert both.step == change.step
        assert record.learned.samples == usual.learned.samples


def test_fewer_than_wanted_end_the_run(tmp_path: Path) -> None:
    message = "rank 2 on worker-2 was killed by SIGKILL; 3 ranks are left, of 4 at least"
    with pytest.raises(RunFailed) as failed:
        lossy(tmp_path, Death("rank 2", at=0.01), min_ranks=4)
    assert str(failed.value) == message


def test_a_loss_during_set_up_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="rank 2 on worker-2 was killed by SIGKILL"):
        lossy(tmp_path, Death("rank 2", at=0.0))


def test_ranks_of_one_node_go_on_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same parameters as over links."""
    monkeypatch.setenv(VARIABLE, f"{kill_after_all(2, 7)}; {kill_after_all(0, 13)}")
    run = run_of(RING)
    apart = simulated(run, tmp_path / "apart")
    together = simulated(run, tmp_path / "together", on="one_host(cores=4)")
    assert [change.lost for change in together.ending.regroupings] == [(2,), (0,)]
    assert together.learned.parameters_sha256 == apart.learned.parameters_sha256


def test_a_server_may_be_lost_after_a_worker_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{kill(1, 5)}; {kill(3, 80, 'send')}")
    record = simulated(run_of(ASYNCHRONOUS, checkpoint_every=2), tmp_path)
    first, second, third = record.ending.notices
    assert first == "rank 1 on worker-1 was killed by SIGKILL; going on without it"
    assert second == "rank 3 on worker-3 was killed by SIGKILL; going on with 2 ranks"
    assert third.startswith("resumed from checkpoint ")
    assert record.learned.samples == 20 * 4 * 8


def test_killed_rank_writes_nothing_more(tmp_path: Path) -> None:
    """It is unwound at the end of the run, when its program must not notice that."""
    record = lossy(tmp_path, Death("rank 2", at=0.01))
    assert step_lines(record.folder, 2) == []


def test_timeline_shows_the_loss_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, kill(2, 3))
    record = simulated(run_of(RING, trace_steps=6), tmp_path)
    trace = json.loads(gzip.decompress((record.folder / "trace.json.gz").read_bytes()))
    names = [event["name"] for event in trace["traceEvents"]]
    assert "lost rank 2" in names
    steps_shown = {name for name in names if name.startswith("step ")}
    assert {f"step {number}" for number in range(1, 7)} <= steps_shown


def test_faults_by_operation_stop_delay_and_raise(
    usual: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for action, message in (("stop", None), ("delay", None), ("raise", "injected at gradient 5")):
        fault = f'Inject("{action}", rank=1, at="gradient", number=5, seconds=2)'
        monkeypatch.setenv(VARIABLE, fault)
        if message is None:
            record = simulated(run_of(RING), tmp_path / action)
            assert record.learned.parameters_sha256 == usual.learned.parameters_sha256
            assert record.time.training is not None
            assert 2 < record.time.training < 2.1
        else:
            with pytest.raises(RunFailed, match=message):
                simulated(run_of(RING), tmp_path / action)


@pytest.mark.parametrize(
    "fault",
    [
        'Inject("cut", rank=1, at="send")',
        'Inject("kill", rank=1, at="write")',
        'Inject("kill", rank=1, target="launcher")',
    ],
)
def test_faults_of_processes_cannot_be_simulated(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, fault)
    with pytest.raises(InputError, match=r"ORCHESTRA_INJECT: Inject\(.*\) cannot be simulated"):
        simulated(run_of(RING), tmp_path)
