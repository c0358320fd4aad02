"""Ranks that join a run under way: `orchestra join`, on real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.support.commands import run
from tests.support.joining import SETTINGS, STEPS, held, join, pids_of_ranks, told
from tests.support.lab import in_lab
from tests.support.training import step_lines

import orchestra
from orchestra.engines.events import Event, Instruction, Regroup
from orchestra.engines.failure_detector import FailureDetector
from orchestra.engines.processes.training import invitation_to
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.settings import Run
from orchestra.trainer.settings import Training as TrainingSettings

# The gate is in the read of the fourth step; the first eight samples are read for the warm-up.
BEFORE = 3


@pytest.mark.parametrize(
    "strategy",
    [
        "AllReduce('ring')",
        pytest.param("AllReduce('tree')", marks=pytest.mark.lab),
        pytest.param("AllReduce('halving_doubling')", marks=pytest.mark.lab),
    ],
)
def test_it_equals_a_run_that_is_resumed_with_the_same_members(
    strategy: str, tmp_path: Path
) -> None:
    """Bit for bit, from the checkpoint of the last step before."""
    with held(tmp_path, strategy) as training, join(tmp_path) as newcomer:
        told(tmp_path, "joins; going on with 3 ranks")
        shutil.copytree(tmp_path / "run", tmp_path / "resumed")
        (tmp_path / "go").touch()
        ended = newcomer.end()
        record = training.record()
    assert (ended.status, f"after step {STEPS}" in ended.out) == (0, True)
    (change,) = record.ending.regroupings
    assert (change.lost, change.joined, change.ranks) == ((), (2,), 3)
    assert (change.step, change.steps_voided) == (BEFORE, 0)
    assert record.learned.samples == STEPS * 2 * 8
    lines = [
        [(line["step"], line["consumed"], line["loss"]) for line in step_lines(record.folder, rank)]
        for rank in range(3)
    ]
    assert lines[0] == lines[1]
    assert lines[0][BEFORE:] == lines[2]
    (tmp_path / "resumed" / "join.json").unlink()
    task = f"tests.support.failing_tasks:gated({str(tmp_path)!r}, model='normalised')"
    resumed = orchestra.train(task, strategy, 3, out=tmp_path / "resumed", quiet=True, **SETTINGS)
    assert [part.ranks for part in resumed.ending.ranks_history] == [2, 3]
    assert resumed.learned.parameters_sha256 == record.learned.parameters_sha256


@pytest.mark.parametrize(
    ("strategy", "step"),
    [
        pytest.param("LocalSGD(2)", 2, marks=pytest.mark.lab),
        ("LocalSGD(2, outer=Nesterov(0.7, 0.9))", 2),
        pytest.param("Gossip(Ring())", 0, marks=pytest.mark.lab),
        pytest.param("Gossip(Ring(), compression=TopK(0.5))", 0, marks=pytest.mark.lab),
        ("StochasticGradientPush", 0),
    ],
)
def test_those_with_replicas_of_their_own_take_a_rank_in(
    strategy: str, step: int, tmp_path: Path
) -> None:
    """From the last average of all, or the last copies of the replicas."""
    with held(tmp_path, strategy) as training, join(tmp_path) as newcomer:
        told(tmp_path, "joins; going on with 3 ranks")
        (tmp_path / "go").touch()
        assert newcomer.end().status == 0
        record = training.record()
    (change,) = record.ending.regroupings
    assert (change.joined, change.ranks, change.step) == ((2,), 3, step)
    assert record.learned.samples == STEPS * 2 * 8
    for rank in range(3):
        steps = [line["step"] for line in step_lines(record.folder, rank)]
        assert steps == list(range(step + 1 if rank == 2 else 1, STEPS + 1))


ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"


@pytest.mark.parametrize(
    "strategy",
    [
        "ParameterServer",
        ASYNCHRONOUS,
        pytest.param("AllReduce('ring', shard='parameters')", marks=pytest.mark.lab),
        pytest.param("LocalSGD(4, overlap=1)", marks=pytest.mark.lab),
        pytest.param("StochasticGradientPush(overlap=1)", marks=pytest.mark.lab),
        pytest.param("Hop(staleness=2)", marks=pytest.mark.lab),
        pytest.param("Prague(2)", marks=pytest.mark.lab),
        pytest.param("ElasticAveraging(1)", marks=pytest.mark.lab),
        pytest.param(
            f"Switch(AllReduce('ring'), {ASYNCHRONOUS}, when=AfterSteps(9))",
            marks=pytest.mark.lab,
        ),
        pytest.param("Pipeline", marks=pytest.mark.lab),
    ],
)
def test_others_rest_to_take_a_rank_in(strategy: str, tmp_path: Path) -> None:
    """Nothing is done again: all go on from a checkpoint of the rest."""
    ranks = 3 if "Parameter" in strategy or "Elastic" in strategy else 2  # with a server
    # Who waits there holds up the others where they wait for one another.
    readers = 1 if "Push" in strategy else 2
    with held(tmp_path, strategy, ranks, readers) as training, join(tmp_path) as newcomer:
        newcomer.wait_until(lambda: "orchestra: ready" in newcomer.err(), "it is ready")
        (tmp_path / "go").touch()
        assert newcomer.end().status == 0
        record = training.record()
    (change,) = record.ending.regroupings
    assert (change.joined, change.ranks) == ((ranks,), ranks + 1), record
    assert (change.steps_voided, change.samples_again) == (0, 0)
    assert record.learned.samples == STEPS * ranks * 8
    assert [part.ranks for part in record.ending.ranks_history] == [ranks, ranks + 1]


def test_one_joins_after_another_was_lost_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRA_INJECT", 'Inject("kill", rank=1, at="gradient", number=2)')
    with held(tmp_path, ASYNCHRONOUS, 4, readers=2) as training, join(tmp_path) as newcomer:
        newcomer.wait_until(lambda: "orchestra: ready" in newcomer.err(), "it is ready")
        (tmp_path / "go").touch()
        assert newcomer.end().status == 0
        record = training.record()
    (change,) = record.ending.regroupings
    assert (change.lost, change.joined, change.ranks) == ((1,), (4,), 4)
    assert (change.steps_voided, change.samples_again) == (0, 0)
    consumed = sum(
        line["samples"] for rank in (0, 2, 3, 4) for line in step_lines(record.folder, rank)
    )
    # What the lost rank had done, it had done
    assert STEPS * 4 * 8 - 2 * 8 <= consumed <= STEPS * 4 * 8


@pytest.mark.parametrize(
    ("strategy", "expected"), [("Single()", False), ("ParameterServer()", True)]
)
def test_a_run_of_one_process_invites_nobody(strategy: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").touch()
    training = TrainingSettings(ranks=2, min_ranks=2)
    run = Run("test", "digits", parse(strategy, STRATEGIES, where="test"), training=training)
    assert (invitation_to(run, tmp_path) is not None) == expected


def test_a_newcomer_has_a_residual_of_its_own(tmp_path: Path) -> None:
    with held(tmp_path, "AllReduce('ring', compression=TopK(0.1))") as training:
        with join(tmp_path) as newcomer:
            told(tmp_path, "joins; going on with 3 ranks")
            (tmp_path / "go").touch()
            assert newcomer.end().status == 0
        record = training.record()
    assert record.ending.status == "completed"
    losses = {
        tuple(line["loss"] for line in step_lines(record.folder, rank)[-5:]) for rank in range(3)
    }
    assert len(losses) == 1


def test_a_spare_takes_the_place_of_a_rank_that_is_lost(tmp_path: Path) -> None:
    with held(tmp_path, ranks=3) as training, join(tmp_path, "--spare") as spare:
        spare.wait_until(lambda: "waits until a rank is lost" in spare.err(), "it is ready")
        os.kill(pids_of_ranks(tmp_path)[1], signal.SIGKILL)
        told(tmp_path, "takes its place; going on with 3 ranks")
        (tmp_path / "go").touch()
        assert spare.end().status == 0
        record = training.record()
    (change,) = record.ending.regroupings
    assert (change.lost, change.joined, change.ranks) == ((1,), (3,), 3)
    assert record.learned.samples == STEPS * 3 * 8


class Logged(FailureDetector):
    """Keeps what it was told and asked, and what it said."""

    made: ClassVar[list[Logged]] = []

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.like = partial(FailureDetector, *arguments, **named)
        self.log: list[tuple[str, tuple[Any, ...], list[Instruction]]] = []
        Logged.made.append(self)

    def _logged(self, name: str, *arguments: Any) -> list[Instruction]:
        said: list[Instruction] = getattr(super(), name)(*arguments)
        self.log.append((name, arguments, said))
        return said

    def observe(self, now: float, event: Event) -> list[Instruction]:
        return self._logged("observe", now, event)

    def tick(self, now: float, stopped: Collection[int] = ()) -> list[Instruction]:
        return self._logged("tick", now, stopped)

    def noticed(self, text: str) -> list[Instruction]:
        return self._logged("noticed", text)


def test_the_events_of_a_run_lead_to_the_same_instructions_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestra.engines.processes.watcher.FailureDetector", Logged)
    monkeypatch.setattr(Logged, "made", [])
    with held(tmp_path, ranks=3) as training, join(tmp_path) as newcomer:
        told(tmp_path, "joins; going on with 4 ranks")
        os.kill(pids_of_ranks(tmp_path)[0], signal.SIGKILL)
        told(tmp_path, "going on with 3 ranks")
        (tmp_path / "go").touch()
        assert newcomer.end().status == 0
        training.record()
    (detector,) = Logged.made
    again = detector.like()
    for name, arguments, said in detector.log:
        assert getattr(again, name)(*arguments) == said
    regrouped = [each for _, _, said in detector.log for each in said if isinstance(each, Regroup)]
    assert [each.members for each in regrouped] == [(0, 1, 2, 3), (1, 2, 3)]


def test_a_spare_that_is_not_needed_ends_with_the_run(tmp_path: Path) -> None:
    with held(tmp_path) as training, join(tmp_path, "--spare") as spare:
        spare.wait_until(lambda: "waits until a rank is lost" in spare.err(), "it is ready")
        (tmp_path / "go").touch()
        ended = spare.end()
        record = training.record()
    assert (ended.status, ended.out) == (0, "the run is over; this rank was not needed\n")
    assert not record.ending.regroupings
    assert not record.ending.left_out
    assert not (record.folder / "steps-rank-2.jsonl").exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, *in_lab([signal.SIGKILL])])
def test_who_has_joined_may_leave(how: signal.Signals, tmp_path: Path) -> None:
    with held(tmp_path) as training, join(tmp_path) as newcomer:
        told(tmp_path, "joins; going on with 3 ranks")
        newcomer.process.send_signal(how)
        told(tmp_path, "going on with 2 ranks")
        (tmp_path / "go").touch()
        assert newcomer.end().status == (0 if how == signal.SIGTERM else -how)
        record = training.record()
    assert record.ending.status == "completed"
    expected = "has left" if how == signal.SIGTERM else "is gone: its control connection closed"
    assert record.ending.left_out == {"2": expected}


def test_a_newcomer_that_cannot_begin_disturbs_nobody(tmp_path: Path) -> None:
    with held(tmp_path) as training:
        ended = run(["join", str(tmp_path / "run")], tmp_path, ORCHESTRA_TEST_FAILS="yes")
        (tmp_path / "go").touch()
        record = training.record()
    assert ended.status == 1
    assert "failed: ValueError: no such data here" in ended.err
    assert any(
        "is not taken in: failed: ValueError: no such" in each for each in record.ending.notices
    )
    assert not record.ending.regroupings


def test_only_its_owner_can_read_the_secret_of_a_run(tmp_path: Path) -> None:
    with held(tmp_path) as training:
        entrance = tmp_path / "run" / "join.json"
        assert stat.S_IMODE(entrance.stat().st_mode) == 0o600
        told_of = json.loads(entrance.read_text())
        wrong = tmp_path / "wrong.json"
        wrong.write_text(json.dumps({**told_of, "secret": "0" * 64}))
        address = f"{told_of['host']}:{told_of['port']}"
        ended = run(["join", address, "--secret", str(wrong)], tmp_path)
        assert (ended.status, "no run can be joined there" in ended.err) == (1, True)
        (tmp_path / "go").touch()
        record = training.record()
    assert not entrance.exists()
    assert not record.ending.regroupings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["."], "join.json: there is no such file: the run is over, or cannot be joined"),
        (["nowhere"], "nowhere: is no folder, and no address such as 10.0.0.1:40123"),
        (["10.0.0.1:40123"], "give a copy of the run's join.json with --secret"),
    ],
)
def test_what_is_no_run_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    ended = run(["join", *arguments], tmp_path)
    assert ended.status == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1
