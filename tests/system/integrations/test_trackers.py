"""What MLflow and Weights & Biases are told of a run: by a stand-in, and by the libraries."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.commands import run as run_command
from tests.support.comparisons import experiment
from tests.support.simulated import simulated
from tests.support.training import step_lines

from orchestra.errors import InputError, RunFailed
from orchestra.experiments import tracking
from orchestra.experiments.experiment import Experiment, alone, only_run
from orchestra.experiments.run import make_run
from orchestra.experiments.tracking import About, Figures, Tracker, Tracking
from orchestra.trainer.settings import Run


class Noted(Tracker):
    """Keeps what it is told; the n-th run has the id "run-n"."""

    made: list[Noted]

    def __init__(self, about: About, known: str | None) -> None:
        self.about, self.known = about, known
        self.id = known or f"run-{len(self.made)}"
        self.logged: list[tuple[int, Figures]] = []
        self.ended: tuple[str, Figures] | None = None
        self.made.append(self)

    def log(self, rows: Sequence[tuple[int, Figures]]) -> None:
        self.logged += rows

    def finish(self, status: str, figures: Figures) -> None:
        self.ended = status, figures

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, figures[name]) for step, figures in self.logged if name in figures]


class Broken(Noted):
    """Takes a run, and then nothing more."""

    def log(self, rows: Sequence[tuple[int, Figures]]) -> None:
        raise ConnectionError("no\nroute")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    """What is made in place of a tracker of MLflow."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.util)
    monkeypatch.setattr(importlib.util, "origin", "there", raising=False)
    monkeypatch.setattr(tracking, "KINDS", {"mlflow": Noted})
    Noted.made = []
    return Noted.made


def wanted(**changes: Any) -> tuple[Run, Experiment]:
    given = {"strategies": {"ring": "AllReduce('ring')"}, "engine": "simulation", "snapshots": 3}
    whole = experiment(mlflow=True, cluster="lan_1gbit", **given | changes)
    run = only_run(whole, "test")
    return run, alone(whole, run)


def test_a_run_is_logged_under_the_names_that_users_expect(
    tmp_path: Path, noted: list[Noted]
) -> None:
    run, whole = wanted(steps=12)
    record = make_run(run, whole, tmp_path / "out", simulated)
    (one,) = noted
    lines = step_lines(tmp_path / "out", 0)
    assert one.of("train/loss") == [(line["step"], line["loss"]) for line in lines]
    assert one.of("train/learning_rate") == [(line["step"], 0.1) for line in lines]
    points = [json.loads(text) for text in (tmp_path / "out/curve.jsonl").read_text().splitlines()]
    assert one.of("eval/loss") == [
        (step, point["metrics"]["loss"]) for step, point in zip((4, 8, 12), points, strict=True)
    ]
    assert {"rank_0/loss", "rank_1/wait_share", "train/samples_per_second"} <= {
        name for _, figures in one.logged for name in figures
    }
    assert one.ended is not None
    status, final = one.ended
    assert status == "completed"
    assert final["test/loss"] == record.learned.loss
    assert one.about.settings["optimizer.lr"] == 0.1
    assert one.about.settings["strategy"] == "AllReduce('ring')"
    assert (one.about.name, one.about.tags[:2]) == (
        "ring, 2 ranks, seed 0",
        ["AllReduce", "simulation"],
    )


def test_numbers_that_a_strategy_logs_reach_the_tracker(tmp_path: Path, noted: list[Noted]) -> None:
    run, whole = wanted(steps=2, strategies={"own": "tests.support.tasks_for_tests:Logs()"})
    make_run(run, whole, tmp_path / "out", simulated)
    (one,) = noted
    assert one.of("logged/begun") == [(1, 1.0)]
    assert one.of("logged/norm") == [
        (line["step"], line["logged"]["norm"]) for line in step_lines(tmp_path / "out", 0)
    ]


def test_a_run_that_begins_anew_is_logged_once(tmp_path: Path, noted: list[Noted]) -> None:
    run, whole = wanted(steps=12, checkpoint_every=4)

    def cut_off(run: Run, folder: Path) -> Any:
        simulated(run, folder)
        path = folder / "steps-rank-0.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
        (folder / "curve.jsonl").unlink()
        shutil.rmtree(folder / "checkpoints")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_run(run, whole, tmp_path / "out", cut_off)
    make_run(run, whole, tmp_path / "out", simulated)
    before, after = noted
    assert before.ended is not None
    assert before.ended[0] == "stopped"
    assert (before.known, after.known) == (None, "run-0")
    assert [at for at, _ in before.of("train/loss") + after.of("train/loss")] == [*range(1, 13)]


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path,
    noted: list[Noted],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tracking, "KINDS", {"mlflow": Broken})
    run, whole = wanted()
    assert make_run(run, whole, tmp_path / "out", simulated).ending.status == "completed"
    told = "orchestra: MLflow failed, the run goes on without it: no route"
    assert capsys.readouterr().err.splitlines().count(told) == 1


def test_a_failed_run_is_one_there_too(tmp_path: Path, noted: list[Noted]) -> None:
    def fail(run: Run, folder: Path) -> Any:
        raise RunFailed("rank 1 is gone")

    run, whole = wanted()
    with pytest.raises(RunFailed):
        make_run(run, whole, tmp_path / "out", fail)
    assert noted[0].ended == ("failed", {})


def test_a_client_that_mlflow_refuses_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlflow-skinny does it where MLFLOW_TRACKING_URI names a database."""

    class MlflowException(Exception):
        pass

    def refuse() -> None:
        raise MlflowException("got unsupported URI 'sqlite:///mlflow.db'")

    names = {"MlflowClient": refuse, "Param": None, "MlflowException": MlflowException}
    for name in ("mlflow", "mlflow.entities", "mlflow.exceptions"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**names))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.util)
    monkeypatch.setattr(importlib.util, "origin", "there", raising=False)
    with pytest.raises(InputError, match=r"unsupported URI.*MLFLOW_TRACKING_URI") as error:
        Tracking(*wanted(), tmp_path)
    assert "\n" not in str(error.value)


# With the libraries ------------------------------------------------------------------------------

TRAIN = [
    "train", "--task", "regression", "--strategy", "AllReduce('ring')", "--ranks", "2", "--set",
    "steps=12", "--set", "checkpoint_every=8", "--set", "snapshots=2", "--out", "out",
]  # fmt: skip


def needs(library: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(library) is not None
    return pytest.mark.skipif(not there, reason=f"{library} is not installed")


def train_twice(tmp_path: Path, *arguments: str, **variables: str) -> list[dict[str, Any]]:
    """A run that is completed, and then again from its checkpoint; the lines of its first rank."""
    for _ in range(2):
        ended = run_command([*TRAIN, *arguments], tmp_path, **variables)
        assert ended.status == 0, ended.err
        (tmp_path / "out" / "summary.json").unlink()
    return step_lines(tmp_path / "out", 0)


@needs("mlflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own libraries
@pytest.mark.timeout(600)  # its imports take long
def test_mlflow_has_the_run(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    lines = train_twice(tmp_path, "--set", "mlflow=true", MLFLOW_TRACKING_URI=uri)
    client = MlflowClient(uri)
    there = client.get_experiment_by_name("regression")
    assert there is not None
    (run,) = client.search_runs([there.experiment_id])
    assert run.info.run_name == "AllReduce, 2 ranks, seed 0"
    assert run.info.status == "FINISHED"
    assert run.data.params["steps"] == "12"
    assert run.data.tags["orchestra.strategy"] == "AllReduce"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [
        (line["step"], line["loss"]) for line in lines
    ]
    assert {"eval/loss", "test/loss", "train_seconds"} <= run.data.metrics.keys()


def wandb_records(path: Path) -> Iterator[Any]:
    """The records in the log that Weights & Biases keeps offline (in the format of LevelDB)."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record


@needs("wandb")
@pytest.mark.timeout(600)
def test_wandb_has_the_run(tmp_path: Path) -> None:
    lines = train_twice(tmp_path, "--set", "wandb=true", WANDB_MODE="offline")
    logs = sorted((tmp_path / "out/wandb").glob("offline-run-*/run-*.wandb"))
    found = [record for path in logs for record in wandb_records(path)]
    (run_id,) = {each.run.run_id for each in found if each.WhichOneof("record_type") == "run"}
    assert run_id
    first = next(each.run for each in found if each.WhichOneof("record_type") == "run")
    assert (first.display_name, first.project, first.run_group, list(first.tags)) == (
        "AllReduce, 2 ranks, seed 0", "orchestra", "regression", ["AllReduce", "processes"],
    )  # fmt: skip
    config = {each.key: json.loads(each.value_json) for each in first.config.update}
    assert (config["steps"], config["optimizer.lr"]) == (12, 0.1)
    losses = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            items = {
                each.key or "/".join(each.nested_key): json.loads(each.value_json)
                for each in record.history.item
            }
            if "train/loss" in items:
                losses.append((items["train/global_step"], items["train/loss"]))
    assert losses == [(line["step"], pytest.approx(line["loss"])) for line in lines]
    assert [r.exit.exit_code for r in found if r.WhichOneof("record_type") == "exit"] == [0, 0]
