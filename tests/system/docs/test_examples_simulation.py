"""The examples of the simulation print what their first lines say, to the last digit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.commands import Started
from tests.support.lab import some
from tests.support.paths import ROOT

from orchestra.cluster import load_cluster

FOLDER = ROOT / "examples" / "simulation"
SCRIPTS = sorted(FOLDER.glob("*.py"))
PRINTS = "It prints:\n\n"


@pytest.mark.parametrize("script", some(SCRIPTS), ids=lambda path: path.stem)
def test_output_is_what_the_example_says(script: Path, tmp_path: Path) -> None:
    """On every machine: no figure is measured."""
    head = script.read_text().split('"""')[1]
    expected = [line.removeprefix("    ") for line in head.partition(PRINTS)[2].splitlines()]
    with Started([sys.executable, str(script)], tmp_path) as process:
        ended = process.end()
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.splitlines() == expected
    assert expected
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_its_clusters_can_be_read(path: Path) -> None:
    assert len(load_cluster(str(path), where="test", folder=Path()).nodes) in (4, 8)


def test_there_are_some() -> None:
    assert len(SCRIPTS) >= 3
