"""The backend "shm" of torch.distributed: as gloo gives it, and by name when a rank is gone."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.support.commands import Started, torchrun
from tests.support.paths import SCRIPTS
from tests.support.rank_programs import COMPILED, WHERE_COMPILED


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.lab)])
@pytest.mark.parametrize(
    "compiled", [pytest.param("0", marks=pytest.mark.lab), pytest.param("1", marks=WHERE_COMPILED)]
)
def test_every_collective_gives_what_gloo_gives(ranks: int, compiled: str, tmp_path: Path) -> None:
    how = {"ORCHESTRA_COMPILED": compiled}
    with torchrun(SCRIPTS / "shm_collectives.py", ranks, [], tmp_path, **how) as process:
        ended = process.end()
    assert ended.status == 0, ended.err
    found = re.findall(r"compared (\d+) differ (.*)", ended.out)
    assert [differ for _, differ in found] == ["[]"] * ranks, ended.out
    assert all(int(count) > 300 for count, _ in found)


def test_distributed_data_parallel_trains_as_over_gloo_bit_for_bit(tmp_path: Path) -> None:
    """Plain, with unused parameters, no_sync, Join, and the hooks for fp16 and PowerSGD."""
    with torchrun(SCRIPTS / "shm_ddp.py", 2, [], tmp_path) as process:
        ended = process.end()
    assert ended.status == 0, ended.err
    assert re.findall(r"trained 6 differ (\S+)", ended.out) == ["[]"] * 2


@COMPILED
def test_a_rank_that_is_killed_at_any_moment_is_named(compiled: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "shm_killed.py"), str(tmp_path), "3", "12", "0"]
    with Started(command, tmp_path, {"ORCHESTRA_COMPILED": compiled}) as process:
        ended = process.end()
    assert ended.status == 0, ended.err
    lines = ended.out.splitlines()
    assert len(lines) == 12
    for line in lines:
        victim, _, raised = line.partition(" ")
        assert raised == f"['PeerLost: rank {victim} is gone: its connection closed']"
