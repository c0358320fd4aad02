"""Server rules with a mistake: the run fails at once, in one line that names the rule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.lab import some

from orchestra.cli.main import main

RULES = "tests.support.faulty_rules"
SIMULATED = ("engine=simulation", "cluster=lan_1gbit(nodes=3)")
GROUPS = "Returns.ready() has to return lists of pending pushes, none empty and no push twice; it "
DIVISOR = "Forgets.correct() has to return what the learning rates are divided by, a number above 0"
WAITING = "Seven.ready() left 2 pushes unapplied, although every worker waits for its answer: "
CASES = {
    "too few pushes ever come": (
        "consistency={}:Seven()",
        f"{WAITING}with working=2 it has to return some",
    ),
    "pushes are left at the end": (
        "consistency={}:SevenOnArrival()",
        "SevenOnArrival.ready() left 4 pushes unapplied, although no worker pushes any more: with "
        "working=0 it has to return all",
    ),
    "nothing": ("consistency={}:Returns()", f"{GROUPS}returned None"),
    "pushes, not groups": ("consistency={}:Returns('pushes')", f"{GROUPS}returned [Push(worker="),
    "a push twice": ("consistency={}:Returns('twice')", GROUPS),
    "an empty group": ("consistency={}:Returns('empty')", GROUPS),
    "no divisor": (
        "consistency='asynchronous', learning_rate={}:Forgets()",
        f"{DIVISOR}; it returned NoneType",
    ),
    "a divisor of 0": (
        "consistency='asynchronous', learning_rate={}:Forgets(True)",
        f"{DIVISOR}; it returned 0.0",
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # main adds the folder it is called in
    return tmp_path


def train(strategy: str, *changes: str) -> int:
    """Two workers, which together push four times."""
    words = [
        "train",
        "--task",
        "tests.support.bad_tasks:fine",
        "--strategy",
        strategy,
        "--ranks",
        "3",
    ]
    for change in ("steps=2", "batch_size=4", *changes):
        words += ["--set", change]
    return main(words)


@pytest.mark.parametrize("name", some(CASES))
def test_the_rule_is_named_in_one_line(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, message = CASES[name]
    assert train(f"ParameterServer({arguments.format(RULES)})", *SIMULATED) == 1
    captured = capfd.readouterr().err
    assert captured.startswith("orchestra: rank 2 failed: ")
    assert message in captured
    assert captured.count("\n") == 1, captured


@pytest.mark.parametrize("placement", some(["dedicated", "beside"]))
@pytest.mark.parametrize("rule", ["Seven", "SevenOnArrival"])
def test_real_processes_end_at_once(
    rule: str, placement: str, capfd: pytest.CaptureFixture[str]
) -> None:
    rule = f"{RULES}:{rule}()"
    strategy = f"ParameterServer(consistency={rule}, placement={placement!r})"
    assert train(strategy, "patience=600") == 1
    assert " pushes unapplied, although " in capfd.readouterr().err
