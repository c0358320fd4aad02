"""Every command: its parser is light, its action is there, and nothing in the working folder is
imported by accident.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import commands_page, experiment_page
from tests.support.paths import ROOT

from orchestra.cli.commands import ORCHESTRA, Command, CommandGroup
from orchestra.cli.parsers import comparing, planning
from orchestra.experiments.comparison import SEARCH_SECONDS
from orchestra.planning.api import MINUTES

SOURCE = str(ROOT / "src")
HEAVY = {
    "torch", "numpy", "scipy", "sklearn", "altair", "jinja2", "flask", "safetensors", "greenlet",
    "multiprocessing", "orchestra.experiments", "orchestra.report", "orchestra.planning",
    "orchestra.engines", "orchestra.trainer.settings",
}  # fmt: skip


def commands(group: CommandGroup = ORCHESTRA) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Yield every command with the words that call it."""
    for name, each in group.commands.items():
        if isinstance(each, Command):
            yield (name,), each
        else:
            yield from (((name, *words), command) for words, command in commands(each))


def imported_by(code: str, *arguments: str) -> set[str]:
    """Run `code` in a fresh interpreter; return the modules that it has imported."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(*sys.modules, file=sys.stderr)", *arguments],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": SOURCE},
    )  # fmt: skip
    return set(done.stderr.split())


def test_all_parsers_together_import_nothing_heavy() -> None:
    found = imported_by(
        "import sys\nfrom orchestra.cli.commands import ORCHESTRA\nORCHESTRA.parser().format_help()"
    )
    assert not found & (HEAVY | {"yaml", "rich", "orchestra.settings"})


def test_names_are_listed_without_what_trains_or_reads_files() -> None:
    found = imported_by("import sys\nfrom orchestra.cli.main import main\nmain(['list'])")
    assert not found & (HEAVY | {"yaml"})


@pytest.mark.parametrize(
    ("words", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in commands()]
)
def test_every_command_has_help_and_an_action(words: tuple[str, ...], command: Command) -> None:
    assert command.parser().prog == " ".join(["orchestra", *words])
    module, _, function = command.action.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_a_shell_completes_commands_and_options(tmp_path: Path) -> None:
    """bash itself reads the script, and completes words as if somebody had pressed Tab."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestra", "completion", "bash"],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": SOURCE},
    )  # fmt: skip
    code = (
        "COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); "
        "$(complete -p orchestra | sed 's/.*-F \\([^ ]*\\).*/\\1/') orchestra; "
        'echo "${COMPREPLY[@]}"'
    )
    found = [
        subprocess.run(
            ["bash", "-c", f"{done.stdout}\n{code}", "bash", words],
            capture_output=True, text=True, check=True,
        ).stdout.split()
        for words in ("orchestra pl", "orchestra train --rec", "orchestra emulation c")
    ]  # fmt: skip
    assert found == [["plan"], ["--record-order"], ["check", "compose", "clean"]]


@pytest.mark.parametrize(
    ("name", "page"),
    [("commands", commands_page.page), ("experiment", experiment_page.page)],
    ids=["commands", "experiment"],
)
def test_a_generated_page_is_that_of_the_program(name: str, page: Callable[[], str]) -> None:
    written = (Path(SOURCE).parent / "docs" / "reference" / f"{name}.md").read_text()
    assert written == page(), f"python -m tests.{name}_page > docs/reference/{name}.md"


def test_help_names_the_defaults_of_python() -> None:
    assert planning.PLAN_MINUTES == MINUTES
    assert comparing.SEARCH_SECONDS == SEARCH_SECONDS


EXPERIMENT = """\
task: own_task:tiny
strategies: {ring: AllReduce}
ranks: 2
steps: 2
batch_size: 4
"""
OWN_TASK = """\
from tests.support.quadratic import quadratic
from orchestra import Task


def tiny() -> Task:
    return quadratic()
"""
IN_WORKING_FOLDER = """\
import json, os, sys
from orchestra.cli.main import main
here = os.getcwd()
for words in json.loads(sys.argv[1]):
    status = main(words)
    found = [
        name for name, module in list(sys.modules.items())
        if (getattr(module, "__file__", None) or "").startswith(here)
    ]
    print("RESULT", json.dumps([words, status, found]), flush=True)
"""
CALLS: list[list[str]] = [
    ["list"],
    ["completion", "bash"],
    ["schema", "experiment"],
    ["import", "aws:m5.xlarge,speed=1"],
    ["emulation", "compose", "lan_1gbit(nodes=2, cores=1)"],
    ["emulation", "check", "nowhere"],
    ["emulation", "run", "nowhere", "--", "true"],
    ["emulation", "clean", "--now"],
    ["doctor", "--hosts", "a:0"],
    ["studio", "--port", "99999"],
    ["watch", "nothing"],
    ["report", "nothing"],
    ["join", "nothing"],
    ["replay", "nothing"],
    ["calibrate", "--batch-size", "0"],
    ["plan", "--task", "digits", "--cluster", "nowhere"],
    ["map", "--task", "digits", "--cluster", "nowhere", "--x", "nodes", "--y", "nodes"],
    ["simulate", "nowhere.yaml"],
    ["compare", "nowhere.yaml"],
    ["train", "exp.yaml", "--out", "trained"],
    ["watch", "trained"],
    ["report", "trained", "--out", "page"],
]
STANDING_IN = (
    "rich",
    "yaml",
    "torch",
    "altair",
    "numpy",
    "safetensors",
    "markupsafe",
    "greenlet",
    "shtab",
)


def test_no_command_imports_a_package_from_the_working_folder(tmp_path: Path) -> None:
    """Files with the names of installed packages lie there, and PYTHONPATH has an empty entry,
    which Python takes for the working folder. Real ranks train a task of that folder.
    """
    assert {" ".join(words) for words, _ in commands()} == {
        " ".join(words[: 2 if words[0] == "emulation" else 1]) for words in CALLS
    }
    for name in STANDING_IN:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the working folder')\n")
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    root = str(Path(SOURCE).parent)
    done = subprocess.run(
        [sys.executable, "-c", IN_WORKING_FOLDER, json.dumps(CALLS)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, root, ""])},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    assert [words for words, _, _ in results] == CALLS, done.stderr
    trained = False
    for words, status, found in results:
        trained = trained or "exp.yaml" in words
        works = (
            trained
            or words[0] in ("list", "completion", "schema", "import")
            or words[1] == "compose"
        )
        assert status == (0 if works else 2), done.stderr
        assert found == (["own_task"] if trained else [])
