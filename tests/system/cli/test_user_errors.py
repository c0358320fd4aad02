"""Bad input, as the user meets it: one line on standard error, and status 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.support.commands import rank_pids, run

import orchestra
from orchestra.cli.main import main
from orchestra.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken_module.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "raising_module.py").write_text("1 / 0\n")
    for code in ("0", "'no licence'"):
        name = f"exiting_{len(code)}.py"
        (tmp_path / name).write_text(f"import sys\nsys.exit({code})\n")
    (tmp_path / "exiting_class.py").write_text(
        "import orchestra, sys\n"
        "class Mine(orchestra.Single):\n"
        "    def check(self):\n        sys.exit(0)\n"
    )
    return tmp_path


def arguments(*changes: str, task: str = "fine", strategy: str = "AllReduce") -> list[str]:
    name = f"tests.support.bad_tasks:{task}" if task.isidentifier() else task
    words = ["train", "--task", name, "--strategy", strategy, "--ranks", "2", "--out", "out"]
    for change in ("steps=2", "batch_size=4", *changes):
        words += ["--set", change]
    return words


SERVER = "ParameterServer(servers=3)"
BESIDE = "ParameterServer(servers=3, placement='beside')"
OWN = "tests.support.unfinished_plug_ins"
DECORATE = "is not a dataclass: decorate it with @dataclass"
CASES = {
    "unknown strategy": (arguments(strategy="AlReduce"), "did you mean 'AllReduce'?"),
    "unknown argument": (arguments(strategy="AllReduce(algoritm=1)"), "did you mean 'algorithm'?"),
    "unknown choice": (arguments(strategy="AllReduce('rign')"), "did you mean 'ring'?"),
    "too few ranks": (arguments(strategy=SERVER), "leave no worker: raise ranks, lower servers"),
    "too few beside": (arguments(strategy=BESIDE), "lower servers or raise ranks"),
    "no ranks": (arguments("ranks=0"), "ranks: 0 is below 1"),
    "unknown setting": (arguments("batchsize=3"), "did you mean 'batch_size'?"),
    "unknown optimizer": (arguments("optimizer=Adma(lr=0.1)"), "did you mean 'Adam"),
    "optimizer refused": (arguments("optimizer=LBFGS(lr=0.1)"), "LBFGS cannot be distributed"),
    "optimizer's argument": (arguments("optimizer=SGD(lr=0.1, momentun=0.9)"), "momentun"),
    "optimizer's value": (arguments("optimizer=SGD(lr=-1.0)"), "learning rate"),
    "optimizer's NaN": (arguments("optimizer.lr=nan"), "SGD.lr: nan is not a finite number"),
    "capturable": (
        arguments("optimizer=Adam(lr=0.1, capturable=True)"),
        "optimizer.capturable: is for GPUs",
    ),
    "capturable in a simulation": (
        arguments(
            "optimizer=Adam(lr=0.1, capturable=True)",
            "engine=simulation",
            "cluster=lan_1gbit(nodes=2)",
        ),
        "optimizer.capturable: is for GPUs",
    ),
    "no such group": (arguments("parameter_groups=[{match: nowhere}]"), "matches no parameter"),
    "nothing to train": (arguments(task="nothing_to_train"), "model has no parameters that are"),
    "no parameters": (arguments(task="no_parameters"), "model has no parameters that are"),
    "two dtypes": (arguments(task="two_dtypes"), "float64"),
    "unsplittable": (
        arguments("accumulation=2", task="unsplittable"),
        "accumulation: this batch cannot be split",
    ),
    "accumulation": (arguments("accumulation=9"), "cannot be split into 9 micro-batches"),
    "no package": (arguments(task="nowhere_at_all:f"), "no package or module 'nowhere_at_all'"),
    "no module": (arguments(task="tests.nowhere:f"), "no module 'tests.nowhere'"),
    "broken import": (arguments(task="broken_module:f"), "No module named 'not_installed_any"),
    "raising import": (arguments(task="raising_module:f"), "ZeroDivisionError: division by zero"),
    "exiting import": (arguments(task="exiting_1:f"), "exiting_1 failed: SystemExit: 0"),
    "exiting with a text": (arguments(strategy="exiting_12:S"), "SystemExit: no licence"),
    "exiting settings": (arguments(strategy="exiting_class:Mine"), "Mine exits: SystemExit: 0"),
    "no function": (arguments(task="fien"), "has no 'fien'; did you mean 'fine'?"),
    "not a task": (
        arguments(task="not_a_task"),
        "'tests.support.bad_tasks:not_a_task' does not say that",
    ),
    "a shell": (arguments(task="os:system('touch called')"), "'os:system' does not say that"),
    "returns a model": (
        arguments(task="returns_a_model"),
        "gives a model, a Sequential, not an orchestra.tasks.Task: return Task(model=",
    ),
    "returns nothing": (arguments(task="returns_nothing"), "gives a NoneType, not an orchestra"),
    "a model": (arguments(task="a_model"), "give a function that makes it"),
    "task's argument": (arguments(task="tests.support.bad_tasks:fine(size=3)"), "'size'"),
    "unknown metric": (
        arguments("target={metric: acuracy, at_least: 0.9}"),
        "target: the task has no metric 'acuracy'; did you mean 'accuracy'?",
    ),
    "nothing to measure": (
        arguments("target={metric: accuracy, at_least: 0.9}", task="untested"),
        "target: the task has neither validation nor test data",
    ),
    "a function in a member": (
        arguments(strategy=f"{OWN}:Keeps"),
        "KeepsMember.rule: a function cannot be kept in a checkpoint: make it in `open`, as "
        "field(init=False)",
    ),
    "streams in a member": (
        arguments(strategy=f"{OWN}:Keeps('streams')"),
        "KeepsMember.rule: a Random cannot be kept in a checkpoint: make it in `open`, as ",
    ),
    "an undecorated strategy": (
        arguments(strategy=f"{OWN}:Undecorated(4)"),
        f"--strategy: Undecorated {DECORATE}(frozen=True, repr=False)",
    ),
    "an undecorated strategy's settings": (
        ["list", f"{OWN}:Undecorated"],
        f"Undecorated {DECORATE}(frozen=True, repr=False)",
    ),
    "an undecorated member": (
        arguments(strategy=f"{OWN}:Plain"),
        f"PlainMember {DECORATE}(eq=False)",
    ),
    "a member without an update": (
        arguments(strategy=f"{OWN}:NoUpdate"),
        "NoUpdateMember is not complete: it has to define update",
    ),
    "no GPU": (
        arguments("device=cuda"),
        "device: AllReduce('ring') wants 1 GPU; torch sees none here",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_status_2(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words, message = CASES[name]
    assert main(words) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith("orchestra: ")
    assert captured.err.count("\n") == 1, captured.err
    assert message in captured.err
    assert captured.out == ""
    assert not (folder / "out").exists(), "the folder is free for the corrected command"
    assert rank_pids() == []


def test_what_a_member_keeps_later_is_named_at_the_first_checkpoint(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments("checkpoint_every=1", strategy=f"{OWN}:KeepsLater")) == 1
    first = capfd.readouterr().err.splitlines()[0]
    assert "KeepsLaterMember.rule: a function cannot be kept in a checkpoint" in first


def test_more_threads_than_torch_survives(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert main(arguments()) == 2
    assert capfd.readouterr().err.startswith("orchestra: OMP_NUM_THREADS: 100000 is above 4096")


def test_the_corrected_command_may_use_the_folder(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = "target={metric: acuracy, at_least: 0.9}"
    assert main(arguments(wrong)) == 2
    assert main(arguments(wrong.replace("acu", "accu"))) == 0
    assert "completed" in capfd.readouterr().out
    (entry,) = json.loads((folder / "out" / "summary.json").read_text())["runs"]
    assert entry["status"] == "completed"


def test_the_folder_of_another_experiment(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments()) == 0
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    capfd.readouterr()
    assert main(arguments("seeds=[1]")) == 2
    line = capfd.readouterr().err
    assert "out: holds a different experiment (in seeds); choose another --out" in line
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == before


def test_from_python_it_is_an_input_error(folder: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'Adam") as caught:
        orchestra.train(
            "tests.support.bad_tasks:fine", "AllReduce", 2, out="out", optimizer="Adma(lr=1)"
        )
    assert "\n" not in str(caught.value)
    assert not (folder / "out").exists()


def test_as_a_command_of_its_own(folder: Path) -> None:
    """What is tested above in this process holds for the real command."""
    ended = run(arguments("optimizer=Adma(lr=0.1)"), folder)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("orchestra: ")
