"""Commands and code of README, tutorials and how-to pages: each block runs here, or says why not.

A comment before a block says what it is:

    <!-- run -->                    it is run here, in the folder of the page, in turn
    <!-- file: train.py -->         it is written into that folder first
    <!-- file of examples/x.py -->  it is a part of that file
    <!-- not run: REASON -->        its commands are only parsed

Blocks of the language `text`, and those without one, are output.

By default `orchestra simulate` takes a few steps, and skips its report and its search for
techniques, which have tests of their own; the lab runs it as the page says.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.commands import Ended, Started
from tests.support.paths import ROOT

from orchestra.cli.commands import ORCHESTRA, Command

PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]
PAGES += sorted([*ROOT.glob("docs/tutorials/*.md"), *ROOT.glob("docs/how-to/*.md")])
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
OUTPUT = ("", "text")
README = {
    "sh": "installs packages or trains for minutes; .ci/run runs the command of the tests",
    "diff": "a part of examples/own_loop.py",
}
"""Why blocks of the README are not run, by their language; it has no marks."""
TABLE = "docs/tutorials/first-comparison.md"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the mark before it."""

    mark: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a block of shell, without comments; continued lines are one."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def blocks_of(page: Path) -> list[Block]:
    return [
        Block(found["mark"] or "", found["language"], found["text"])
        for found in BLOCK.finditer(page.read_text())
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a command sets, and its words."""
    words = shlex.split(command, comments=True)
    variables = {}
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return variables, words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    unmarked = []
    for block in blocks_of(page):
        if block.language in OUTPUT or block.mark.startswith(("run", "file", "not run: ")):
            continue
        if page.name == "README.md" and block.language in README:
            continue
        if block.language == "yaml" and yaml.safe_load(block.text):
            continue
        unmarked.append(f"{block.language}: {block.text[:60]}")
    assert not unmarked


def orchestra_calls(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `orchestra` on the page, behind `sudo` and launchers, too."""
    for block in blocks_of(page):
        for command in block.commands if block.language == "sh" else ():
            for part in re.split(r"&&|>|(?<= )--(?= )", command):
                _, words = words_of(part) if part.count("'") % 2 == 0 else ({}, [])
                words = [word.rpartition("/")[2] if "bin/" in word else word for word in words]
                if "orchestra" in words:
                    yield words[words.index("orchestra") + 1 :]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_line_is_one_that_the_program_knows(page: Path) -> None:
    for arguments in orchestra_calls(page):
        found: Any = ORCHESTRA
        rest = [*arguments]
        while not isinstance(found, Command):
            found = found.find(rest.pop(0))
        if found.action.endswith(("emulation:run", "emulation:compose")):
            continue  # the words behind -- belong to another program
        with contextlib.redirect_stderr(io.StringIO()) as complaint:
            try:
                found.parser().parse_args(rest)
            except SystemExit as ended:
                pytest.fail(f"orchestra {shlex.join(arguments)}: {ended} {complaint.getvalue()}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_that_is_a_file_is_that_file(page: Path) -> None:
    for block in blocks_of(page):
        if block.mark.startswith("file of "):
            written = (ROOT / block.mark.removeprefix("file of ")).read_text()
            assert block.text in written
        elif block.language == "python":
            compile(textwrap.dedent(block.text), name_of(page), "exec")


RUNNING = [page for page in PAGES if any(block.mark == "run" for block in blocks_of(page))]


def started(words: Sequence[str], cwd: Path, variables: dict[str, str]) -> Started:
    """Start a command of a page with this interpreter."""
    first, *rest = words
    if first == "orchestra":
        command = ["-m", "orchestra", *rest]
    elif first == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--log-dir={cwd / 'log'}"]
        command = [*launcher, *rest]
    else:
        assert first == "python", first
        command = rest
    variables = {"OMP_NUM_THREADS": "1", **variables}
    return Started([sys.executable, *command], cwd, variables)


def ended(words: Sequence[str], cwd: Path, variables: dict[str, str]) -> Ended:
    with started(words, cwd, variables) as process:
        return process.end()


SIMULATING = [
    page for page in RUNNING if any(words[:1] == ["simulate"] for words in orchestra_calls(page))
]
SHORT = ("--set", "steps=12", "--search-seconds", "0", "--no-report")
"""Options of `orchestra simulate`, which otherwise takes a minute."""


@pytest.mark.parametrize(
    ("page", "options"),
    [
        *(pytest.param(page, SHORT, id=name_of(page)) for page in RUNNING),
        *(
            pytest.param(page, (), id=f"{name_of(page)}, whole", marks=pytest.mark.lab)
            for page in SIMULATING
        ),
    ],
)
def test_the_blocks_of_a_page_run(page: Path, options: Sequence[str], tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for number, block in enumerate(blocks_of(page)):
        if block.mark.startswith("file: "):
            (tmp_path / block.mark.removeprefix("file: ")).write_text(block.text)
        elif block.mark == "run" and block.language == "python":
            script = tmp_path / f"block_{number}.py"
            script.write_text(block.text)
            result = ended(["python", script.name], tmp_path, {})
            assert result.status == 0, result.err
        elif block.mark == "run":
            cwd = tmp_path
            for command in block.commands:
                variables, words = words_of(command)
                if words[0] == "cd":
                    cwd = cwd / words[1]
                    continue
                if words[:2] == ["orchestra", "simulate"]:
                    words += options
                result = ended(words, cwd, variables)
                assert result.status == 0, f"{command}\n{result.err}"
    if name_of(page) == TABLE and options != SHORT:
        check_table(page, tmp_path / "runs" / "first" / "summary.json")


def check_table(page: Path, summary: Path) -> None:
    """The table of the first comparison has the figures of the run: virtual time is exact."""
    [table] = [block.text for block in blocks_of(page) if block.mark.startswith("output of ")]
    shown = {}
    for line in table.splitlines()[1:]:
        *label, _target, _sign, _spread, reached, duration, traffic = line.split()
        shown[" ".join(label)] = float(reached), float(duration), float(traffic)
    runs = json.loads(summary.read_text())["runs"]
    assert {run["name"] for run in runs} == {*shown}
    for run in runs:
        found = run["metrics"]["accuracy"], run["train_seconds"], run["bytes_sent"] / 1e6
        expected = shown[run["name"]]
        assert found[0] == pytest.approx(expected[0], abs=0.02)
        assert found[1:] == pytest.approx(expected[1:], rel=0.006)
