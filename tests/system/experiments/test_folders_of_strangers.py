"""Folders that others may have written to: what they name is not run, what they lack is told."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.support.comparisons import experiment
from tests.support.lab import some
from tests.support.recorded import recorded

from orchestra.cli.main import main
from orchestra.experiments.experiment import alone, runs
from orchestra.experiments.run import claim
from orchestra.records.files import run_folder
from orchestra.records.store import write_planned, write_summary
from orchestra.report.figures import frame
from orchestra.settings.reading import yaml_text


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def comparison(here: Path) -> Path:
    """A comparison of two strategies that is done, in the folder `done`."""
    whole, folder = experiment(), here / "done"
    claim(folder, whole)
    records = []
    for run in runs(whole):
        inner = run_folder(folder, run.name, 2, 0)
        claim(inner, alone(whole, run))
        records.append(
            recorded(
                run.name, repr(run.strategy), "processes", 2, 2, 0, 0, "completed",
                train_seconds=2.5, final_loss=0.25, steps=6, samples=48, global_batch=8,
            )
        )  # fmt: skip
        write_summary(inner, "small", records[-1:])
    write_summary(folder, "small", records)
    write_planned(folder, {run_folder(folder, run.name, 2, 0): run.name for run in runs(whole)})
    return folder


def test_reading_a_folder_imports_nothing_that_it_names(
    comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "from pathlib import Path\nPath('was run').touch()\nclass Mine: pass\n"
    for place in (comparison, comparison.parent):
        (place / "evil_module.py").write_text(code)
    path = comparison / "experiment.yaml"
    path.write_text(path.read_text().replace("AllReduce('ring')", "evil_module:Mine()"))
    assert "evil_module:Mine" in path.read_text()
    assert main(["watch", str(comparison)]) == 0
    assert "2 of 2 runs are done" in capsys.readouterr().out
    assert not Path("was run").exists()


ESCAPE = "\x1b]0;taken\x07\N{RIGHT-TO-LEFT OVERRIDE}"


@pytest.mark.parametrize("label", ["a\x1bb", "a\nb", "a\N{RIGHT-TO-LEFT OVERRIDE}b"])
def test_a_label_has_no_control_characters(
    label: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {"task": "digits", "ranks": 1, "strategies": {label: "Single()"}}
    (here / "experiment.yaml").write_text(yaml_text(document))
    assert main(["train", "experiment.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{label!r} cannot be a name" in line


def test_texts_of_others_do_not_act_on_figures_pages_and_terminals(
    comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = comparison / "summary.json"
    summary = json.loads(path.read_text())
    _, entry = summary["runs"]
    entry |= {"name": f"=ring{ESCAPE}", "metrics": {f"accuracy{ESCAPE}": 0.5}}
    entry |= {"notices": [ESCAPE], "status": "failed", "failure": f"rank 1: {ESCAPE}"}
    path.write_text(json.dumps(summary))
    assert main(["report", str(comparison), "--csv", "--latex", "--out", "page"]) == 0
    texts = [file.read_text() for file in Path("page").rglob("*.*") if file.suffix != ".png"]
    assert main(["watch", str(comparison / "runs" / "ring" / "2-ranks" / "seed-0")]) == 0
    texts.append(capsys.readouterr().out)
    assert [text for text in texts if "taken\x07" in text or "\x1b]" in text] == []
    lines = (Path("page") / "table.csv").read_text().splitlines()
    assert "'=ring]0;taken" in [line.partition(",")[0] for line in lines]


def test_what_a_task_raises_reaches_the_terminal_without_control_characters(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "task_that_raises.py").write_text(
        "from orchestra.tasks import Task\n"
        f"def made() -> Task:\n    raise RuntimeError({ESCAPE!r} + 'the reason')\n"
    )
    words = ["--task", "task_that_raises:made", "--strategy", "Single", "--ranks", "1"]
    assert main(["train", *words]) == 1
    err = capfd.readouterr().err
    assert "the reason" in err
    assert "\x1b" not in err


def nest(path: Path) -> None:
    path.write_text("[" * 20_000 + "]" * 20_000 + "\n")


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no room


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def latin(path: Path) -> None:
    path.write_bytes(b'{"name": "\xe9"}\n')


def no_number(path: Path) -> None:
    if path.suffix == ".yaml":
        path.write_text("ranks: x\nstrategies: {a: Single()}\nseeds: [.nan]\n")
    elif path.name == "summary.json":
        path.write_text(
            re.sub(r'"train_seconds": [\d.]+', '"train_seconds": NaN', path.read_text())
        )
    else:
        path.write_text('{"step": NaN, "samples": NaN, "seconds": "x", "metrics": 3}\n')


DAMAGES = (nest, endless, huge, fifo, a_folder, latin, no_number)
OF_A_RUN = "environment.json", "curve.jsonl", "steps-rank-0.jsonl", "links.json", "summary.json"
OF_A_COMPARISON = "experiment.yaml", "summary.json", "tuning.json", "techniques.json"


NO_NUMBERS = [
    (no_number, name) for name in ("environment.json", "experiment.yaml", "techniques.json")
]
"""What a report makes no use of the numbers of."""


def damages(files: Iterable[str]) -> list[Any]:
    return [
        pytest.param(damage, name, id=f"{name}-{damage.__name__}")
        for name in files
        for damage in DAMAGES
        if (damage, name) not in NO_NUMBERS
    ]


def escape(path: Path) -> None:
    """Name a folder outside of the comparison's."""
    path.write_text('{"runs/../../other": "other"}')


def test_watch_shows_the_runs_of_a_comparison_without_a_plan(
    comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (comparison / "runs.json").unlink()
    assert main(["watch", str(comparison)]) == 0
    assert "2 of 2 runs are done" in capsys.readouterr().out


@pytest.mark.parametrize(("damage", "name"), some(damages((*OF_A_RUN, *OF_A_COMPARISON))))
def test_report_names_the_damaged_file(
    damage: Callable[[Path], None],
    name: str,
    comparison: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(frame, "save", lambda *_: None)
    path = comparison / name
    if name in OF_A_RUN[:-1]:
        path = run_folder(comparison, "ring", 2, 0) / name
    damage(path)
    assert main(["report", str(comparison), "--out", "page"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"orchestra: {path}")
    assert not Path("page").exists()


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *damages(["runs.json", "runs/ring/2-ranks/seed-0/summary.json"]),
        *damages(["experiment.yaml"]),
        (escape, "runs.json"),
    ],
)
def test_watch_names_the_damaged_file(
    damage: Callable[[Path], None],
    name: str,
    comparison: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    watched, path = comparison, comparison / name
    if name == "experiment.yaml":  # a comparison is watched without it
        watched = run_folder(comparison, "ring", 2, 0)
        path = watched / name
    damage(path)
    assert main(["watch", str(watched)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"orchestra: {path}")


@pytest.mark.parametrize("damage", some(DAMAGES))
def test_watch_does_without_a_damaged_file_that_grows(
    damage: Callable[[Path], None], comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(comparison, "ring", 2, 0)
    (folder / "summary.json").unlink()
    for name in ("live.json", "steps-rank-0.jsonl"):
        damage(folder / name)
    assert main(["watch", str(folder)]) == 1
    assert "cut off" in capsys.readouterr().out


def test_train_names_the_damaged_file_and_tells_of_steps_that_are_gone(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--task", "digits", "--strategy", "Single", "--ranks", "1", "--out", "run"]
    words += ["--set", "steps=4", "--set", "checkpoint_every=2", "--set", "trace_steps=0"]
    assert main(words) == 0
    summary, steps = here / "run" / "summary.json", here / "run" / "steps-rank-0.jsonl"
    experiment = here / "run" / "experiment.yaml"
    whole = experiment.read_bytes()
    for path in (summary, experiment):
        for damage in (nest, endless, fifo, latin):
            capfd.readouterr()
            damage(path)
            assert main(words) == 2
            (line,) = capfd.readouterr().err.splitlines()
            assert line.startswith("orchestra: run")
            path.unlink()
        experiment.write_bytes(whole)
    lines = steps.read_text().splitlines()
    steps.write_text("")
    assert main(words) == 0
    assert f"{steps.relative_to(here)}: the steps before the checkpoint" in capfd.readouterr().err
    assert len(steps.read_text().splitlines()) < len(lines)
