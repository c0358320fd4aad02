"""The command line: help, lists, errors of one line with status 2, and a run from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.paths import ROOT
from tests.support.recorded import recorded

import orchestra
from orchestra.cli.main import main
from orchestra.engines import run as engines_run
from orchestra.errors import RunFailed
from orchestra.records.record import RunRecord
from orchestra.strategies.registry import STRATEGIES
from orchestra.tasks import TASKS
from orchestra.trainer.settings import Run

TRAIN = ["train", "--task", "digits", "--strategy", "AllReduce", "--ranks", "2"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # main adds the folder it is called in
    return tmp_path


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Run, Path]]:
    """In place of the processes: takes note of what it is given, and completes at once."""
    calls: list[tuple[Run, Path]] = []

    def train_run(run: Run, folder: Path, **_: object) -> RunRecord:
        calls.append((run, folder))
        return recorded(
            name=run.name,
            strategy=repr(run.strategy),
            engine="processes",
            ranks=run.training.ranks,
            workers=run.training.ranks,
            servers=0,
            seed=run.seed,
            status="completed",
            metrics={"accuracy": 0.5},
            folder=folder,
        )

    monkeypatch.setattr(engines_run, "train_run", train_run)
    return calls


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert main([]) == 0
    assert capsys.readouterr().out == text
    assert text.count("\n  orchestra ") >= 3
    for command in ("train", "list"):
        assert f"\n  {command} " in text
        assert main([command, "--help"]) == 0
        assert f"usage: orchestra {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("orchestra 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["--hlep"], "unknown option '--hlep'"),
        (["train"], "give an experiment file, or both --task and --strategy"),
        (["train", "--task", "digits"], "give an experiment file, or both --task and --strategy"),
        (["train", "missing.yaml"], "missing.yaml: cannot be read: No such file or directory"),
        ([*TRAIN, "--rankes", "4"], "has no option --rankes; did you mean '--ranks'?"),
        ([*TRAIN, "--ranks", "four"], "argument --ranks: invalid int value: 'four'"),
        ([*TRAIN, "--ranks", "0"], "--ranks: 0 is below 1"),
        ([*TRAIN, "--ranks"], "argument --ranks: expected one argument"),
        ([*TRAIN, "--seed", "-1"], "--seed: -1 is below 0"),
        ([*TRAIN, "--engine", "proceses"], "invalid choice: 'proceses'"),
        ([*TRAIN, "--set", "optimizr.lr=1"], "did you mean 'optimizer'?"),
        ([*TRAIN, "--task", "digit"], "--task: unknown task 'digit'; did you mean 'digits'?"),
        ([*TRAIN, "--strategy", "Sngle"], "--strategy: unknown strategy 'Sngle'; did you mean"),
        ([*TRAIN, "--strategy", "DDP"], "unknown strategy 'DDP'; write AllReduce(\"native\")"),
        (
            [*TRAIN, "--strategy", "Quux"],
            "known: AllReduce, Auto, ElasticAveraging, Gossip, Hogwild, Hop, LocalSGD, ",
        ),
        ([*TRAIN, "--strategy", "doubling"], "'doubling'; known: AllReduce, Auto, ElasticAve"),
        ([*TRAIN, "--strategy", "AftrSteps(3)"], "did you mean 'AfterSteps'?"),
        ([*TRAIN, "--strategy", "LossStable"], "--strategy: expected Strategy, got LossStable"),
        ([*TRAIN, "--out", "own_tasks.py"], "own_tasks.py: is not a folder"),
        (
            [*TRAIN, "--task", "own_tasks"],
            "own_tasks is a module; name a function of it: own_tasks:ta",
        ),
        ([*TRAIN, "--task", "own_tasks.py"], "name a function of it: own_tasks:task"),
        ([*TRAIN, "--task", "own_tasks:tiny"], "task: own_tasks has no 'tiny'"),
        ([*TRAIN, "--task", "own_tasks:task(x=1)"], "own_tasks:task has no argument 'x'"),
        ([*TRAIN, "--task", "own_tasks:task"], "missing a required argument: 'size'"),
        ([*TRAIN, "--lr", "0.1"], "has no option --lr; write --set optimizer.lr=0.1"),
        ([*TRAIN, "--learning_rate=0.1"], "write --set optimizer.lr=0.1"),
        ([*TRAIN, "--batch-size", "64"], "write --set batch_size=64"),
        ([*TRAIN, "--optimizer", "Adam(lr=1)"], "write --set 'optimizer=Adam(lr=1)'"),
        (["compare", "a", "--epoch", "5"], "write --set epochs=5"),
        (["compare", "a", "--strategy", "Single()"], "write --set 'strategies={Single: Single()}'"),
        (
            ["simulate", "a", "--strategy", "AllReduce(shard=None, overlap=True)"],
            "strategies={AllReduce: '\"'\"'AllReduce(shard=None, overlap=True)'\"'\"'}'",
        ),
        (["simulate", "a", "--strategy", "ring"], "write --set 'strategies={ring: STRATEGY}'"),
        (["simulate", "a", "--target", "x>=1"], "'target={metric: accuracy, at_least: 0.9}'"),
        (["compare", "a", "--hosts", "a,b"], "orchestra train FILE --hosts A,B --strategy NAME"),
        (["compare", "a", "--host", "a"], "orchestra compare has no option --host; it runs on"),
        (["simulate", "a", "--hosts", "a,b"], "orchestra doctor --hosts A,B --out machines.yaml"),
        (["compare", "a", "--stepps", "a,b"], "no option --stepps; did you mean '--seeds'?"),
        (["compare", "a", "--stepps", "50"], "write --set steps=50"),
        (["report", "a", "--lr", "5"], "orchestra report has no option --lr; "),
        (["train", "a", "b"], "'b' is one argument too many"),
        (["emulation", "chek"], "unknown action 'chek' of orchestra emulation; did you mean"),
        (["emulation", "run", "one_host"], "give a command behind --"),
        (["emulation", "compose", "one_host", "--ranks", "0"], "--ranks: 0 is below 1"),
        (["list", "AlReduce"], "unknown name 'AlReduce'; did you mean 'AllReduce'?"),
        (["list", "a", "b"], "'b' is one argument too many"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    folder: Path,
    engine: list[tuple[Run, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "own_tasks.py").write_text(
        "def task(size) -> 'Task':\n    raise AssertionError('called')\n"
    )
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("orchestra: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert engine == []
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == [
        "own_tasks.py"
    ]
    sys.modules.pop("own_tasks", None)


WITHOUT_TORCH = [
    ["--help"],
    ["train", "--help"],
    ["emulation", "check", "--help"],
    ["emulation", "compose", "examples/none.yaml"],
    ["list"],
    ["list", "ParameterServer"],
    [*TRAIN, "--set", "batchsize=3"],
    ["train", "--task", "digits", "--strategy", "Switch(AllReduce, AllReduce, when=1)"],
    ["train", "exp.yaml"],
]


def test_help_lists_and_errors_need_no_torch(folder: Path) -> None:
    """One after the other in one fresh interpreter, which says after each what it has imported."""
    (folder / "exp.yaml").write_text("task: digits\nstrategies: {ring: AllReduce}\nrank: 3\n")
    code = (
        "import contextlib, json, sys\n"
        "from orchestra.cli.main import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(arguments)\n"
        "    found = {'torch', 'numpy', 'sklearn'} & set(sys.modules)\n"
        "    print(f'imported by {arguments}: {found}' if found else 'done', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(WITHOUT_TORCH)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines.count("done") == len(WITHOUT_TORCH), done.stderr
    errors = [line for line in lines if line != "done"]
    assert len(errors) == 4
    assert all(line.startswith("orchestra: ") for line in errors), done.stderr


def test_names_come_from_orchestra_and_import_only_what_they_need() -> None:
    """Settings load without torch; `distribute` loads neither planning nor the report."""
    code = (
        "import json, sys, orchestra, examples.own_strategy\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    assert getattr(orchestra, name).__name__ == name\n"
        "assert 'torch' not in sys.modules, 'settings import torch'\n"
        "from orchestra import distribute\n"
        "heavy = {'altair', 'orchestra.planning', 'orchestra.report', 'orchestra.experiments'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    names = sorted({*STRATEGIES.names(), "Cosine", "StepDecay"})
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(names)], cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {*names, "Task"} <= set(orchestra.__all__)


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    listed = {words[0] for words in lines if len(words) > 1}
    assert {*STRATEGIES.names(), *TASKS.names(), "Cosine", "experiment"} <= listed


def test_list_has_server_rules_under_a_heading_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list"]) == 0
    parts = capsys.readouterr().out.split("\n\n")
    [rules] = [part.split() for part in parts if "Buffered" in part]
    assert rules[:2] == ["server", "rules,"]
    assert "PolynomialStaleness" in rules
    assert "Single" not in rules


def test_list_describes_every_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # else words wrap inside the columns
    for name in [*STRATEGIES.names(), *TASKS.names(), "Cosine", "Target", "experiment"]:
        assert main(["list", name]) == 0
        assert capsys.readouterr().out
    assert main(["list", "ParameterServer"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("consistency", "'asynchronous'", "at least 1", "setting values default meaning"):
        assert part in text


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("optimizers", ["Adam", "RMSprop", "SGD"]),
        ("strategy", ["AllReduce", "Gossip"]),
        ("task", ["digits", "mnist"]),
        ("topology", ["Complete", "Ring"]),
        ("cluster", ["lan_1gbit", "wifi"]),
        ("rule", ["AfterSteps", "Buffered", "PolynomialStaleness"]),
        ("server rules", ["Buffered", "PolynomialStaleness"]),
    ],
)
def test_list_takes_a_heading_in_the_singular_too(
    name: str, listed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", name]) == 0
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert set(listed) <= set(words)


def test_lists_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], ["strategies"], ["clusters"], ["optimizers"], ["experiment"]):
        assert main(["list", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if len(line) > 80] == []


def test_train_without_a_file(
    folder: Path, engine: list[tuple[Run, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TRAIN, "--seed", "7", "--set", "steps=3", "--set", "task.channels=4"]
    assert main(arguments) == 0
    ((run, out),) = engine
    assert (run.name, run.seed, run.training.ranks, run.training.steps) == ("AllReduce", 7, 2, 3)
    assert run.task == "digits(channels=4)"
    assert out == Path("runs/digits-AllReduce-1")
    assert "accuracy" in capsys.readouterr().out
    summary = json.loads((folder / out / "summary.json").read_text())
    assert summary["experiment"] == "digits"
    assert [entry["name"] for entry in summary["runs"]] == ["AllReduce"]
    assert main(arguments) == 0
    assert engine[1][1] == Path("runs/digits-AllReduce-2")


def test_train_tells_of_idle_nodes(
    folder: Path, engine: list[tuple[Run, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = ["--engine", "simulation", "--cluster", "lan_1gbit(nodes=5)"]
    assert main([*TRAIN, *simulated]) == 0
    assert "3 of them stand idle; set ranks=5 to use all" in capsys.readouterr().out


def test_train_takes_the_one_strategy_of_a_file_and_its_first_seed(
    folder: Path, engine: list[tuple[Run, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    one = "task: digits\nseeds: [4, 5]\nstrategies:\n  ring: AllReduce\n"
    (folder / "one.yaml").write_text(one)
    (folder / "two.yaml").write_text(one + "  single: Single\n")
    assert main(["train", "one.yaml"]) == 0
    assert (engine[0][0].name, engine[0][0].seed) == ("ring", 4)
    assert main(["train", "two.yaml"]) == 2
    message = capsys.readouterr().err
    assert "holds 2 strategies (ring, single); train takes one: name it with --strategy ring" in (
        message
    )
    assert main(["train", "two.yaml", "--strategy", "ParameterServer", "--seed", "6"]) == 0
    assert (engine[1][0].name, engine[1][0].seed) == ("ParameterServer", 6)


def test_train_takes_the_strategy_of_a_label(
    folder: Path, engine: list[tuple[Run, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A label need be no name of Python's, and comes before a strategy that is called the same."""
    (folder / "many.yaml").write_text(
        "task: digits\ndevices: {from: cpu, Single: auto}\nstrategies:\n"
        "  from: LocalSGD(4)\n  one process: Single\n  Single: AllReduce('tree')\n  1: Gossip\n"
    )
    taken = [
        ("from", "LocalSGD(4)", "cpu"),
        ("one process", "Single()", "cpu"),
        ("Single", "AllReduce('tree')", "auto"),
        ("1", "Gossip(", "cpu"),
        ("AllReduce", "AllReduce('ring')", "cpu"),
    ]
    for label, strategy, device in taken:
        assert main(["train", "many.yaml", "--strategy", label]) == 0
        run = engine[-1][0]
        assert run.name == label
        assert repr(run.strategy).startswith(strategy)
        assert run.training.device == device
    changed = ["--set", "strategies.from.every=7"]
    assert main(["train", "many.yaml", "--strategy", "from", *changed]) == 0
    assert repr(engine[-1][0].strategy) == "LocalSGD(7)"
    capsys.readouterr()
    assert main(["train", "many.yaml", "--strategy", "form"]) == 2
    assert "--strategy: unknown strategy 'form'" in capsys.readouterr().err


def test_a_folder_is_resumed_but_never_overwritten(
    folder: Path, engine: list[tuple[Run, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, "--out", "out"]) == 0
    assert main([*TRAIN, "--out", "out", "--set", "batch_size=3"]) == 2
    assert "different experiment (in batch_size)" in capsys.readouterr().err
    assert main([*TRAIN, "--out", "out"]) == 0
    assert "completed before" in capsys.readouterr().out
    assert len(engine) == 1
    (folder / "out" / "summary.json").unlink()
    assert main([*TRAIN, "--out", "out"]) == 0
    assert "going on" in capsys.readouterr().out
    assert len(engine) == 2


def test_a_failed_run_is_status_1_and_leaves_a_summary(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train_run(run: Run, folder: Path, **_: object) -> RunRecord:
        raise RunFailed("rank 1 was killed")

    monkeypatch.setattr(engines_run, "train_run", train_run)
    assert main([*TRAIN, "--out", "out"]) == 1
    assert capsys.readouterr().err == "orchestra: rank 1 was killed\n"
    (entry,) = json.loads((folder / "out" / "summary.json").read_text())["runs"]
    assert (entry["status"], entry["failure"]) == ("failed", "rank 1 was killed")


def test_a_module_beside_its_experiment_file_is_found_from_anywhere(
    folder: Path, engine: list[tuple[Run, Path]]
) -> None:
    (folder / "there").mkdir()
    (folder / "there" / "beside_task.py").write_text("def spam() -> 'Task':\n    ...\n")
    text = "task: beside_task:spam\nstrategies: {ring: AllReduce}\n"
    (folder / "there" / "exp.yaml").write_text(text)
    assert main(["train", "there/exp.yaml"]) == 0
    assert engine[0][0].task == "beside_task:spam()"


def test_a_task_of_the_users_own_trains_from_end_to_end(folder: Path) -> None:
    (folder / "own_tasks.py").write_text(
        "from orchestra.tasks import Regression\n"
        "def task(size) -> Regression:\n"
        "    return Regression(train_samples=size, validation_samples=16, test_samples=16)\n"
    )
    command = [sys.executable, "-m", "orchestra", *TRAIN]
    command += ["--task", "own_tasks:task(64)", "--set", "steps=3", "--out", "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
    assert "record: out" in done.stdout
    (entry,) = json.loads((folder / "out" / "summary.json").read_text())["runs"]
    assert (entry["status"], entry["samples"], entry["ranks"]) == ("completed", 3 * 2 * 32, 2)
    parts = entry["setup"]
    assert parts.pop("import") > 0  # the fork server's, of torch: no part of the set-up
    assert entry["setup_seconds"] == pytest.approx(sum(parts.values()))
    assert parts["processes"] > 0


@pytest.mark.parametrize(
    ("shell", "status", "message"),
    [
        ("{orchestra} list > /dev/full", 1, "orchestra: standard output, or a file: No space left"),
        ("{orchestra} list >&-", 0, ""),
        ("mkdir gone; cd gone; rmdir ../gone; {orchestra} list", 2, "orchestra: the working direc"),
    ],
)
def test_output_that_goes_nowhere_is_no_traceback(
    folder: Path, shell: str, status: int, message: str
) -> None:
    command = shell.format(orchestra=f"{sys.executable} -m orchestra")
    environment = {**os.environ, "PYTHONPATH": str(Path(orchestra.__file__).parent.parent)}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True,
        stdout=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert done.stderr.count("\n") == bool(message)
    assert done.stderr.startswith(message)


def test_a_reader_who_has_seen_enough_is_no_failure(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "orchestra", "list"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 0
