"""Lists of numbers on the command line, and what stands for many."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from orchestra.cli.main import main
from orchestra.cli.numbers import numbers


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("4", [4]),
        ("4,2,7", [4, 2, 7]),
        ("1,2,4,...,256", [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        ("1,2,4,…,16", [1, 2, 4, 8, 16]),
        ("2, 6, 18, ..., 54", [2, 6, 18, 54]),
        ("1,2,...,6", [1, 2, 3, 4, 5, 6]),
        ("2,4,...,10", [2, 4, 6, 8, 10]),
        ("0,1,...,4", [0, 1, 2, 3, 4]),
        ("4,8,12,...,24", [4, 8, 12, 16, 20, 24]),
    ],
)
def test_what_a_list_stands_for(text: str, meant: list[int]) -> None:
    assert numbers(text) == meant


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1,two", "is not a list of whole numbers such as 1,2,4 or 1,2,4,...,256"),
        ("1,2,4...256", "is not a list of whole numbers"),
        ("", "is not a list of whole numbers"),
        ("1,2,4,...,100", "does not come to 100, but to 64 and 128"),
        ("1,3,...,8", "does not come to 8, but to 7 and 9"),
        ("1,2,5,...,50", "rises neither by equal steps nor by equal factors"),
        ("0,2,4,8,...,16", "rises neither by equal steps nor by equal factors"),
        ("4,2,...,1", "rises neither by equal steps nor by equal factors"),
        ("1,2,4,...,4", "has to end with a number above 4"),
        ("1,...,8", "needs ... once, after two numbers or more and before the last one"),
        ("1,2,...", "needs ... once"),
        ("1,2,...,8,...,64", "needs ... once"),
        ("1,2,...,100000", "stands for more than 1000 numbers"),
    ],
)
def test_what_is_none(text: str, reason: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        numbers(text)
    assert str(caught.value).startswith(f"{text!r} {reason}")


@pytest.mark.parametrize("command", ["compare", "simulate"])
def test_the_command_answers_in_one_line(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main([command, "exp.yaml", "--ranks", "1,2,4,...,100"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--ranks: '1,2,4,...,100' does not come to 100, but to 64 and 128" in error
