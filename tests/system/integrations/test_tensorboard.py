"""Event files for TensorBoard, read back by its own reader; any tracker that is missing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from tests.support.event_files import approximately, read
from tests.support.training import settings, step_lines, train_processes

from orchestra.cli.main import main
from orchestra.engines.processes import launch
from orchestra.errors import RunFailed
from orchestra.records.exports import TRACKERS
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.single import Single
from orchestra.trainer.program import train
from orchestra.trainer.session import Session
from orchestra.trainer.settings import Run, Training
from orchestra.worker.runtime import Runtime


def test_the_scalars_are_those_of_the_records(tmp_path: Path) -> None:
    strategy = ParameterServer(consistency="asynchronous")
    training = {"steps": 12, "snapshots": 3, "tensorboard": True}
    train_processes(settings(strategy, 3, "digits_in_one_thread()", **training), tmp_path)
    folder = tmp_path / "tensorboard"
    assert {path.name for path in folder.iterdir()} == {"rank-0", "rank-1", "snapshots"}
    for rank in (0, 1):
        lines, curves = step_lines(tmp_path, rank), read(folder / f"rank-{rank}")
        assert len(lines) > 1
        begins = [0.0, *(line["seconds"] for line in lines)]
        expected = {
            "loss": [line["loss"] for line in lines],
            "learning rate/0": [line["rates"][0] for line in lines],
            "staleness": [line["staleness"][0] for line in lines],
            "samples per second": [
                line["samples"] / (line["seconds"] - begin)
                for line, begin in zip(lines, begins, strict=False)
            ],
        }
        assert curves == {
            name: approximately(list(enumerate(values, start=1)))
            for name, values in expected.items()
        }
    points = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert len(points) == 3
    assert read(folder / "snapshots") == {
        name: approximately([(point["samples"], point["metrics"][name]) for point in points])
        for name in ("accuracy", "loss")
    }


def test_a_run_that_goes_on_from_a_checkpoint_shows_each_step_once(tmp_path: Path) -> None:
    training = {"steps": 12, "checkpoint_every": 8, "tensorboard": True}
    run = settings(AllReduce(), 2, "images(samples=400)", **training)
    for _ in range(2):
        train_processes(run, tmp_path)
        assert [at for at, _ in read(tmp_path / "tensorboard" / "rank-1")["loss"]] == [
            *range(1, 13)
        ]


def test_a_failed_run_keeps_what_it_measured(tmp_path: Path) -> None:
    run = settings(AllReduce(), 2, "nan_at(sample=40)", epochs=3, tensorboard=True)
    with pytest.raises(RunFailed, match="the loss became nan"):
        train_processes(run, tmp_path)
    lines = step_lines(tmp_path, 0)
    assert lines
    assert len(read(tmp_path / "tensorboard" / "rank-0")["loss"]) == len(lines)


def shown(runtime: Runtime, assignment: tuple[Run, Path]) -> list[int]:
    """The steps that can be read before the run has ended."""
    run, folder = assignment
    session = Session(runtime, run, run.strategy, folder)
    session.begin()
    session.train()
    return [at for at, _ in read(folder / "tensorboard" / "rank-0")["loss"]]


def test_figures_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    run = settings(Single(), 1, "images()", steps=3, tensorboard=True)
    assert launch(shown, (run, tmp_path), 1).results == ([1, 2, 3],)


def imported(runtime: Runtime, assignment: tuple[Run, Path]) -> bool:
    train(runtime, assignment)
    return "tensorboard" in sys.modules


@pytest.mark.parametrize("asked", [False, True])
def test_it_is_imported_where_it_is_asked_for_only(asked: bool, tmp_path: Path) -> None:
    run = settings(Single(), 1, "images()", steps=2, tensorboard=asked)
    assert launch(imported, (run, tmp_path), 1).results == (asked,)
    assert (tmp_path / "tensorboard").exists() == asked


@pytest.mark.parametrize("name", TRACKERS)
def test_without_the_library_nothing_is_started(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = [
        "train",
        "--task",
        "digits",
        "--strategy",
        "Single()",
        "--out",
        str(tmp_path / "x"),
    ]
    assert main([*arguments, "--set", f"{name}=true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"pip install '.[{name}]'" in line
    assert not (tmp_path / "x").exists()


def test_a_folder_of_that_name_is_not_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run's folder has one."""
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    with pytest.raises(ValueError, match="not installed"):
        Training(tensorboard=True)
