"""Comparisons: which runs, in which order and folders, what fails, what is added, what is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.commands import run
from tests.support.comparisons import SMALL, TASK, compared, experiment, files, rows, summary

import orchestra
from orchestra import AllReduce, Single, Strategy
from orchestra.cli.main import main
from orchestra.engines.processes.training import lacking
from orchestra.errors import InputError
from orchestra.experiments.comparison import carry_out
from orchestra.experiments.experiment import runs, with_one_process
from orchestra.experiments.file import load, to_yaml
from orchestra.records.files import run_folder
from orchestra.records.store import RunFolder, RunStore

FAILING = "tests.support.comparison_tasks:Failing(mended='{}')"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_all_strategies_with_each_seed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = carry_out(experiment(seeds=[4, 2]), folder / "out", report=False)
    assert rows(folder / "out") == [
        ("one", 2, 4, "completed"),
        ("ring", 2, 4, "completed"),
        ("one", 2, 2, "completed"),
        ("ring", 2, 2, "completed"),
    ]
    assert comparison.well
    assert (comparison.folder, comparison.report) == (folder / "out", None)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == [
        "1/4 one, 2 ranks, seed 4",
        "2/4 ring, 2 ranks, seed 4",
        "3/4 one, 2 ranks, seed 2",
        "4/4 ring, 2 ranks, seed 2",
    ]
    for record, entry in zip(comparison.records, summary(folder / "out")["runs"], strict=True):
        place = run_folder(folder / "out", record.asked.name, record.asked.ranks, record.asked.seed)
        assert record.folder == place
        assert json.loads((place / "summary.json").read_text())["runs"] == [entry]
        assert entry["global_batch"] == 2 * 8
        assert entry["tuned"] == {}


def test_a_comparison_names_its_runs_when_it_claims_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestra.experiments.comparison.finished", stop)  # looks for done runs
    with pytest.raises(KeyboardInterrupt):
        compared(folder, seeds=[0, 1])
    store = RunStore(folder)
    assert store.is_comparison
    assert [(str(run.path.relative_to(folder)), name) for run, name in store.planned] == [
        (f"runs/{label}/2-ranks/seed-{seed}", f"{label}, 2 ranks, seed {seed}")
        for seed in (0, 1)
        for label in ("one", "ring")
    ]


def test_train_repeats_a_run_of_a_comparison(folder: Path) -> None:
    (_, record) = compared(folder / "out").records
    again = orchestra.train(TASK, AllReduce("ring"), 2, quiet=True, **settings())
    assert again.learned.parameters_sha256 == record.learned.parameters_sha256
    by_file = run(["train", str(record.folder / "experiment.yaml"), "--out", "again"], folder)
    assert by_file.status == 0, by_file.err
    repeated = RunFolder(folder / "again").record
    assert repeated.learned.parameters_sha256 == record.learned.parameters_sha256


def settings() -> dict[str, Any]:
    """`SMALL` as arguments of Python's functions."""
    return {key: SMALL[key] for key in ("name", "batch_size", "steps", "snapshots", "optimizer")}


def test_from_python(folder: Path) -> None:
    strategies: dict[str, str | Strategy] = {
        "mine": AllReduce("parallel"),
        "words": "AllReduce('ring')",
    }
    comparison = orchestra.compare(
        TASK, strategies, 2, seeds=(3,), report=False, quiet=True, **settings()
    )
    assert comparison.folder == Path("runs/small-1")
    assert [record.asked.name for record in comparison.records] == ["one process", "mine", "words"]
    path = folder / "exp.yaml"
    path.write_text(to_yaml(experiment()))
    of_file = orchestra.compare(path, seeds=(3,), report=False, quiet=True, out="by-file")
    assert [(record.asked.name, record.asked.seed) for record in of_file.records] == [
        ("one", 3),
        ("ring", 3),
    ]
    expected = comparison.records[2].learned.parameters_sha256
    assert of_file.records[1].learned.parameters_sha256 == expected


def test_one_process_is_always_among_the_strategies() -> None:
    added = with_one_process(experiment(strategies={"ring": "AllReduce"}))
    assert added.strategies == {"one process": Single(), "ring": AllReduce()}
    assert with_one_process(added) is added
    named = experiment(strategies={"ring": "AllReduce", "alone": "Single"})
    assert with_one_process(named) is named
    with pytest.raises(InputError, match="one process: this label stands for Single"):
        with_one_process(experiment(strategies={"one process": "AllReduce"}))


def test_several_numbers_of_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategies = {"one": "Single", "server": "ParameterServer"}
    made = experiment(ranks=[1, 2], strategies=strategies)
    comparison = carry_out(made, folder / "out", report=False)
    assert rows(folder / "out") == [
        ("one", 1, 0, "completed"),
        ("one", 2, 0, "completed"),
        ("server", 2, 0, "completed"),
    ]
    assert [record.batching.global_batch for record in comparison.records] == [8, 16, 16]
    (left_out,) = summary(folder / "out")["not_run"]
    assert (left_out["name"], left_out["ranks"]) == ("server", 1)
    assert "leave no worker" in left_out["reason"]
    assert capsys.readouterr().err.count("server, 1 rank: left out: ") == 1


def test_what_wants_more_gpus_than_there_are_is_not_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    strategies = {"gpu": "Single", "nccl": "AllReduce('native')", "ring": "AllReduce"}
    made = experiment(strategies=strategies, devices={"gpu": "cuda", "nccl": "cuda"})
    assert {run.name: run.training.device for run in runs(made)} == {
        "gpu": "cuda", "nccl": "cuda", "ring": "cpu",
    }  # fmt: skip
    assert [run.name for run in runs(made) if lacking(run)] == ["nccl"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    carry_out(made, folder / "out", report=False)
    assert rows(folder / "out") == [("one process", 2, 0, "completed"), ("ring", 2, 0, "completed")]
    missing = [(row["name"], row["reason"]) for row in summary(folder / "out")["not_run"]]
    assert missing == [
        ("gpu", "wants 1 GPU; torch sees none here: use cpu or auto"),
        ("nccl", "wants 2 GPUs; torch sees none here: use cpu or auto"),
    ]


def test_a_failed_run_leaves_the_others_alone_until_it_is_retried(folder: Path) -> None:
    out, mended = folder / "out", folder / "mended"
    strategies = {
        "one": "Single",
        "broken": FAILING.format(mended),
        "refused": "tests.support.comparison_tasks:Refusing",
        "ring": "AllReduce",
    }
    statuses = ["completed", "failed", "failed", "completed"]
    comparison = compared(out, strategies=strategies)
    assert [record.ending.status for record in comparison.records] == statuses
    assert not comparison.well
    _, broken, refused, _ = comparison.records
    assert broken.ending.failure is not None
    assert "ValueError: broken on purpose" in broken.ending.failure.splitlines()[0]
    assert refused.ending.failure == "Refusing: refuses everything; choose another strategy"

    before = files(out / "runs")
    mended.touch()
    assert [r.ending.status for r in compared(out, strategies=strategies).records] == statuses
    assert files(out / "runs") == before
    retried = compared(out, strategies=strategies, retry=True)
    statuses[1] = "completed"
    assert [record.ending.status for record in retried.records] == statuses
    assert [status for *_, status in rows(out)] == statuses
    after = files(out / "runs")
    for name in before:
        if name.startswith(("one/", "ring/")):
            assert after[name] == before[name], name
    one, broken, _, ring = retried.records
    assert broken.learned.parameters_sha256 == ring.learned.parameters_sha256
    assert one.ending.failure is None


def test_bad_input_of_every_run_is_that_of_the_comparison(folder: Path) -> None:
    with pytest.raises(InputError, match="LBFGS cannot be distributed"):
        compared(folder / "out", optimizer="LBFGS(lr=0.1)", seeds=[0, 1])
    assert not (folder / "out").exists()


def test_a_different_comparison_is_refused(folder: Path) -> None:
    compared(folder / "out")
    before = files(folder / "out")
    with pytest.raises(InputError, match=r"holds a different experiment \(in seeds\)"):
        compared(folder / "out", seeds=[0, 1])
    assert files(folder / "out") == before


COMPARE = ["compare", "exp.yaml"]
FILE = "task: digits\nstrategies: {ring: AllReduce, one process: Single}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare"], "the following arguments are required: EXPERIMENT"),
        (["compare", "missing.yaml"], "missing.yaml: cannot be read: No such file"),
        ([*COMPARE, "--ranks", "1,x"], "argument --ranks: '1,x' is not a list of whole numbers"),
        ([*COMPARE, "--ranks", "2,2"], "ranks: [2, 2] holds a number twice"),
        ([*COMPARE, "--ranks", "0"], "--ranks: 0 is below 1"),
        ([*COMPARE, "--seed", "1", "--seeds", "2"], "not allowed with argument"),
        ([*COMPARE, "--baseline", "rign"], "there is no strategy 'rign'; did you mean 'ring'?"),
        ([*COMPARE, "--set", "tune={sweep: 1}"], "--set tune: unknown key 'sweep'"),
        ([*COMPARE, "--set", "strategies={one process: AllReduce}"], "rename AllReduce('ring')"),
        ([*COMPARE, "--set", "devices={rign: cuda}"], "no strategy 'rign'; did you mean 'ring'?"),
        ([*COMPARE, "--set", "task=own:f"], "no package or module 'own'"),
        ([*COMPARE, "--search-seconds", "-1"], "--search-seconds: -1 is not 0 or more"),
        (["train", "exp.yaml"], "holds 2 strategies (ring, one process); train takes one"),
        (
            ["train", "exp.yaml", "--strategy", "Single", "--set", "ranks=[1, 2]"],
            "holds 2 numbers of ranks (1, 2); train takes one: name it with --ranks",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "exp.yaml").write_text(FILE)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("orchestra: ")
    assert message in captured.err
    assert [path.name for path in folder.iterdir()] == ["exp.yaml"]


def test_under_a_launcher_it_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "exp.yaml").write_text(FILE)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert main(COMPARE) == 2
    assert "call it without torchrun" in capsys.readouterr().err


def test_the_command_from_end_to_end(folder: Path) -> None:
    strategies = {"ring": "AllReduce", "broken": FAILING.format("/nowhere")}
    changed = experiment(strategies=strategies, target={"metric": "accuracy", "at_least": 0.0})
    (folder / "exp.yaml").write_text(to_yaml(changed))
    arguments = ["compare", "exp.yaml", "--seed", "5", "6", "--out", "out", "--no-report"]
    ended = run(arguments, folder, COLUMNS="200")
    assert ended.status == 1, ended
    assert rows(folder / "out") == [
        ("one process", 2, 5, "completed"),
        ("ring", 2, 5, "completed"),
        ("broken", 2, 5, "failed"),
        ("one process", 2, 6, "completed"),
        ("ring", 2, 6, "completed"),
        ("broken", 2, 6, "failed"),
    ]
    lines = ended.err.splitlines()
    assert lines[1].startswith("2/6 ring, 2 ranks, seed 5: accuracy 0.")
    assert "3/6 broken, 2 ranks, seed 5: failed: rank " in ended.err
    assert "Fair: same initial parameters" in ended.out
    assert "NOT tuned: every strategy ran with SGD(lr=0.1)" in ended.out
    table = ended.out[ended.out.index("\nstrategy") :].splitlines()[2:5]
    assert {line.split("  ")[0] for line in table[:2]} == {"one process", "ring"}
    assert table[2].split()[0] == "broken"
    assert ended.out.count("failed: broken, 2 ranks, seed ") == 2
    assert ended.out.endswith("record: out\n")
    assert load(folder / "out" / "experiment.yaml").seeds == (5, 6)
