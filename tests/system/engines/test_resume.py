"""Runs that are killed or stopped, and go on from their newest whole checkpoint."""

from __future__ import annotations

import functools
import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import rank_pids, run, started
from tests.support.resumed import (
    EPOCHS,
    assert_same,
    columns,
    command,
    curve,
    kill_launcher,
    newest,
    training,
)
from tests.support.training import step_lines
from tests.support.waiting import wait_until

from orchestra.records.record import RunRecord

SYNCHRONOUS = {
    "ring": "AllReduce('ring')",
    "server": "ParameterServer",
    "beside": "ParameterServer(servers=2, placement='beside')",
    "switch": "Switch(AllReduce('ring'), ParameterServer, when=AfterSteps(60))",
    "pipeline": "Pipeline",
    "gossip": "Gossip(Exponential(peers=1))",  # not synchronous, but as sure to repeat
    "own": "examples.own_strategy:DynamicAveraging(0.1)",  # nor is this
}
IN_LAB = ("server", "beside", "switch", "own", "pipeline", "gossip")
ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"


def kill_rank(strategy: str, out: Path, at: int, rank: int, **changes: Any) -> str:
    """SIGKILL for one rank once checkpoint `at` is there; what the user is told."""
    running = training(strategy, out, **changes)
    running.wait_until(lambda: newest(out) >= at, f"checkpoint {at}")
    running.signal(rank, signal.SIGKILL)
    return running.failure()


Whole = tuple[Path, RunRecord]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """The uninterrupted run of a strategy, which is made when it is first asked for."""
    folder = tmp_path_factory.mktemp("whole")

    @functools.cache
    def made(label: str) -> Whole:
        out = folder / label
        return out, training(SYNCHRONOUS[label], out).record()

    return made


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=pytest.mark.lab if label in IN_LAB else ())
        for label in SYNCHRONOUS
    ],
)
def test_killed_twice_and_resumed_bit_for_bit(
    label: str, whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    strategy = SYNCHRONOUS[label]
    kill_launcher(strategy, out, at=3)
    failure = kill_rank(strategy, out, at=12, rank=1)
    assert failure.startswith("rank 1 on ")
    assert "was killed by SIGKILL" in failure.splitlines()[0]
    assert_same(out, training(strategy, out).record(), *whole(label))


USUAL = ["ring", "switch"]


@pytest.mark.parametrize("labels", [USUAL, pytest.param(list(SYNCHRONOUS), marks=pytest.mark.lab)])
def test_the_uninterrupted_runs_learn_and_differ(
    labels: list[str], whole: Callable[[str], Whole]
) -> None:
    """What is compared above is worth comparing."""
    assert whole("switch")[1].switching.at_step == 60
    records = [whole(label)[1] for label in labels]
    assert len({record.learned.parameters_sha256 for record in records}) == len(labels)
    assert all(record.learned.metrics["accuracy"] > 0.5 for record in records)


def test_the_same_command_resumes_and_then_shows_its_record(
    whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill_launcher(SYNCHRONOUS["ring"], out, at=3)
    resumed = run(command(SYNCHRONOUS["ring"], out), tmp_path)
    assert resumed.status == 0, resumed.err
    assert f"{out}: going on with this run" in resumed.out
    assert resumed.err.startswith("orchestra: resumed from checkpoint ")
    (entry,) = json.loads((out / "summary.json").read_text())["runs"]
    assert entry["parameters_sha256"] == whole("ring")[1].learned.parameters_sha256
    again = run(command(SYNCHRONOUS["ring"], out), tmp_path)
    assert (again.status, again.err) == (0, "")
    assert "this run was completed before; its record:" in again.out
    (ranks,) = json.loads((out / "summary.json").read_text())["runs"]
    fewer = run([*command(SYNCHRONOUS["ring"], out), "--ranks", "1"], tmp_path)
    assert fewer.status == 0, fewer.err
    assert f"this run was completed before with {ranks['ranks']} ranks; its record:" in fewer.out


def test_a_different_experiment_is_refused(whole: Callable[[str], Whole], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole("ring")[0], out)
    before = (out / "summary.json").read_bytes()
    refused = run(command(SYNCHRONOUS["ring"], out, batch_size=17), tmp_path)
    assert refused.status == 2
    assert refused.err == (
        f"orchestra: {out}: holds a different experiment (in batch_size); "
        "choose another --out, or none for a new folder\n"
    )
    assert (out / "summary.json").read_bytes() == before


@pytest.mark.parametrize("damage", ["changed", pytest.param("missing", marks=pytest.mark.lab)])
def test_a_damaged_checkpoint_is_refused_by_name(
    damage: str, whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill_rank(SYNCHRONOUS["ring"], out, at=4, rank=0)
    index = newest(out)
    file = out / "checkpoints" / f"{index:04d}" / "rank-2.safetensors"
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    match damage:
        case "changed":
            file.write_bytes(content)
        case "missing":
            file.unlink()
    record = training(SYNCHRONOUS["ring"], out).record()
    assert any(f"checkpoint refused: {file}" in notice for notice in record.ending.notices)
    assert any(
        f"resumed from checkpoint {index - 1}," in notice for notice in record.ending.notices
    )
    assert_same(out, record, *whole("ring"))


def test_a_damaged_snapshot_is_left_out_of_the_curve(
    whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill_rank(SYNCHRONOUS["ring"], out, at=12, rank=1)  # half of the samples are behind it
    file, *others = (out / "checkpoints" / f"{newest(out):04d}").glob("rank-0-*")
    assert not others
    file.write_bytes(file.read_bytes()[:-1])
    resumed = run(command(SYNCHRONOUS["ring"], out), tmp_path)
    assert resumed.status == 0, resumed.err
    notice, _ = resumed.err.splitlines()
    assert notice == f"orchestra: a snapshot is left out of the curve: {file} is missing or damaged"
    (point,), (_, expected) = curve(out), curve(whole("ring")[0])
    assert {**point, "seconds": 0} == {**expected, "seconds": 0}
    (entry,) = json.loads((out / "summary.json").read_text())["runs"]
    assert entry["parameters_sha256"] == whole("ring")[1].learned.parameters_sha256


def test_with_every_checkpoint_damaged_it_begins_anew(
    whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill_rank(SYNCHRONOUS["ring"], out, at=3, rank=0)
    manifests = list((out / "checkpoints").glob("[0-9]*/manifest.json"))
    for manifest in manifests:
        manifest.write_text("{")
    record = training(SYNCHRONOUS["ring"], out).record()
    refused = [notice for notice in record.ending.notices if "manifest.json" in notice]
    assert len(refused) == len(manifests)
    assert not any("resumed" in notice for notice in record.ending.notices)
    assert_same(out, record, *whole("ring"))


@pytest.mark.lab
def test_killed_at_any_moment_there_is_something_to_resume_from(
    whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    """With a checkpoint after each step, many a kill hits one that is being written."""
    out = tmp_path / "out"
    draw = random.Random(5)
    changes: dict[str, Any] = {"checkpoint_every": 1, "epochs": 2}
    expected = training(SYNCHRONOUS["ring"], tmp_path / "whole", **changes).record()
    at = 0
    for _ in range(3):
        at = newest(out) + draw.randrange(2, 8)
        kill_rank(SYNCHRONOUS["ring"], out, at=at, rank=draw.randrange(3), **changes)
    record = training(SYNCHRONOUS["ring"], out, **changes).record()
    (notice,) = record.ending.notices
    assert int(notice.split()[3].rstrip(",")) >= at
    assert_same(out, record, tmp_path / "whole", expected)


def interrupted(strategy: str, out: Path, at: int, **changes: Any) -> Any:
    """Ctrl-C for the command once checkpoint `at` is there; what it left."""
    with started(command(strategy, out, **changes), out.parent) as launched:
        wait_until(lambda: newest(out) >= at or launched.process.poll() is not None, "checkpoints")
        launched.process.send_signal(signal.SIGINT)
        return launched.end()


@pytest.fixture(
    params=[*(pytest.param(each, marks=pytest.mark.lab) for each in ("ring", "beside")), "switch"]
)
def stopped(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    label = str(request.param)
    out = tmp_path / "out"
    at = 10 if label == "switch" else 3
    ended = interrupted(SYNCHRONOUS[label], out, at)
    assert ended.status == 1, ended
    assert ended.err == ("orchestra: stopping in good order; press Ctrl-C again to end at once\n")
    assert "status           stopped" in ended.out
    return label, out


def test_ctrl_c_stops_in_good_order_and_can_be_resumed(
    stopped: tuple[str, Path], whole: Callable[[str], Whole]
) -> None:
    label, out = stopped
    path, expected = whole(label)
    (entry,) = json.loads((out / "summary.json").read_text())["runs"]
    assert entry["status"] == "stopped"
    assert 0 < entry["steps"] < expected.learned.steps
    assert 0 < entry["samples"] < expected.learned.samples
    assert (out / "parameters.safetensors").is_file()
    assert entry["parameters_sha256"]
    assert len(step_lines(out, 0)) == entry["steps"]
    record = training(SYNCHRONOUS[label], out).record()
    (notice,) = record.ending.notices
    assert notice.endswith(f"step {entry['steps']}")
    assert (record.ending.status, record.learned.steps) == ("completed", expected.learned.steps)
    assert record.learned.parameters_sha256 == expected.learned.parameters_sha256
    assert columns(out) == columns(path)


@pytest.mark.parametrize(
    ("strategy", "every"),
    [
        pytest.param(ASYNCHRONOUS, 1, marks=pytest.mark.lab),
        (ASYNCHRONOUS, 7),
        pytest.param("PairwiseAveraging", 7, marks=pytest.mark.lab),
        pytest.param("StochasticGradientPush(overlap=2)", 7, marks=pytest.mark.lab),
    ],
)
def test_an_asynchronous_run_stops_and_goes_on(strategy: str, every: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = interrupted(strategy, out, at=3, checkpoint_every=every)
    assert ended.status == 1, ended
    assert "status           stopped" in ended.out
    (entry,) = json.loads((out / "summary.json").read_text())["runs"]
    assert 0 < entry["samples"] < EPOCHS * 1198
    record = training(strategy, out, checkpoint_every=every).record()
    assert record.ending.notices[0].startswith("resumed from checkpoint ")
    assert (record.ending.status, record.learned.samples) == ("completed", EPOCHS * 1198)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.lab), 2])
def test_an_asynchronous_run_resumes_and_completes_its_budget(victim: int, tmp_path: Path) -> None:
    """A run that lost its server, or its launcher, goes on; each sample counts once."""
    out = tmp_path / "out"
    if victim == 2:
        assert kill_rank(ASYNCHRONOUS, out, at=3, rank=2).startswith("rank 2 ")
    else:
        kill_launcher(ASYNCHRONOUS, out, at=3)
    record = training(ASYNCHRONOUS, out).record()
    assert record.ending.notices[0].startswith("resumed from checkpoint ")
    assert (record.ending.status, record.learned.samples) == ("completed", EPOCHS * 1198)
    for rank in (0, 1):
        lines = step_lines(out, rank)
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    consumed = [line["consumed"] for rank in (0, 1) for line in step_lines(out, rank)]
    assert max(consumed) == EPOCHS * 1198


def test_nothing_is_left_of_a_run() -> None:
    assert rank_pids() == []
