"""The notebook of the examples: its cells are Python, and it runs where Jupyter's client is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ROOT

NAME = "first_comparison.ipynb"
NOTEBOOK: dict[str, Any] = json.loads((ROOT / "examples" / NAME).read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_is_committed_without_outputs() -> None:
    for cell in NOTEBOOK["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_its_cells_are_python() -> None:
    assert CODE
    for number, code in enumerate(CODE):
        compile(code, f"cell {number}", "exec")


def test_it_runs(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    notebook = nbformat.read(tmp_path / "examples" / NAME, as_version=4)
    resources = {"metadata": {"path": str(tmp_path / "examples")}}
    nbclient.NotebookClient(notebook, timeout=150, resources=resources).execute()
    last = notebook.cells[-1].outputs[0]["text"]
    seconds = {line[:12].strip(): float(line.split()[-2]) for line in last.splitlines()}
    assert seconds["ring"] < seconds["one process"]
