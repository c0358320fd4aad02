"""The examples for trackers and for Optuna, run as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from tests.support.commands import Ended, Started, run
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


def needs(library: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(library) is not None
    return pytest.mark.skipif(not there, reason=f"{library} is not installed")


def train(name: str, folder: Path, **variables: str) -> None:
    """Train the example for a tracker into the folder `out`."""
    given = ["train", str(EXAMPLES / f"trackers/{name}.yaml"), "--out", "out"]
    ended = run(given, folder, **variables)
    assert ended.status == 0, ended.err
    (record,) = json.loads((folder / "out/summary.json").read_text())["runs"]
    assert record["status"] == "completed"


@needs("tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    train("tensorboard", tmp_path)
    assert any(tmp_path.glob("out/tensorboard/rank-0/events.*"))
    assert any(tmp_path.glob("out/tensorboard/snapshots/events.*"))


@needs("mlflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own libraries
@pytest.mark.timeout(600)  # its imports take long
def test_mlflow(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    train("mlflow", tmp_path, MLFLOW_TRACKING_URI=uri)
    client = MlflowClient(uri)
    there = client.get_experiment_by_name("mlflow")
    assert there is not None
    (found,) = client.search_runs([there.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.metrics["test/accuracy"] > 0


@needs("wandb")
@pytest.mark.timeout(600)
def test_wandb_offline(tmp_path: Path) -> None:
    train("wandb", tmp_path, WANDB_MODE="offline")
    (log,) = tmp_path.glob("out/wandb/offline-run-*/run-*.wandb")
    assert b"train/loss" in log.read_bytes()


def optuna_trials(folder: Path, *arguments: str) -> Ended:
    command = [sys.executable, str(EXAMPLES / "optuna_trials.py"), *arguments]
    with Started(command, folder, fresh=True) as started:
        return started.end()


@needs("optuna")
@pytest.mark.timeout(600)
def test_optuna_prunes_trials_by_the_callback(tmp_path: Path) -> None:
    ended = optuna_trials(tmp_path, "--trials", "8", "--folder", "trials")
    assert ended.status == 0, ended.err
    states = re.findall(r"^trial (\d+): (\w+),", ended.out, re.MULTILINE)
    assert len(states) == 8
    assert {state for _, state in states} == {"complete", "pruned"}
    for number, state in states:
        summary = tmp_path / f"trials/trial-{number}/summary.json"
        (record,) = json.loads(summary.read_text())["runs"]
        expected = ("stopped", "callback") if state == "pruned" else ("completed", None)
        assert (record["status"], record["stopped_by"]) == expected
    assert ended.out.splitlines()[-1].startswith("best: trial ")
