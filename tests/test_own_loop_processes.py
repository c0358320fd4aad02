"""Loops of the user's own as guests of processes: several in one script, beside a process group,
servers, evaluations that take long, and what a script may ask of its place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tests.commands import Started, torchrun

SCRIPTS = Path(__file__).parent / "scripts"
SEVERAL = SCRIPTS / "several_loops.py"


def vectors(folder: Path, rank: int = 0) -> list[list[float]]:
    found: list[list[float]] = json.loads((folder / f"rank-{rank}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("strategy", "ranks", "parts"),
    [
        ("AllReduce('ring')", 2, ["folds", "cell_run_twice", "by_turns", "get_batch"]),
        ("ParameterServer(placement='beside')", 2, ["folds", "by_turns", "cell_run_twice"]),
        ("ParameterServer", 3, ["folds", "cell_run_twice", "get_batch"]),
    ],
)
def test_several_loops_in_one_script(
    strategy: str, ranks: int, parts: list[str], tmp_path: Path
) -> None:
    """Two workers come to what one process with the batch of both comes to; with servers that
    come back for the next loop, and at last leave a loop that no `for` drives. Under all-reduce
    beside the script's own process group."""
    plain = tmp_path / "plain"
    plain.mkdir()
    with Started([sys.executable, str(SEVERAL), strategy, *parts], plain) as process:
        assert process.end().status == 0
    with torchrun(SEVERAL, ranks, [strategy, *parts], tmp_path) as process:
        ended = process.end()
    assert ended.status == 0, ended.err
    assert len(list(tmp_path.glob("*.json"))) == 2
    for rank in range(2):
        for ours, theirs in zip(vectors(tmp_path, rank), vectors(plain), strict=True):
            torch.testing.assert_close(
                torch.tensor(ours), torch.tensor(theirs), rtol=1e-6, atol=1e-6
            )
