"""How many threads a rank computes with: on processes, and what that means in virtual time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import rank_programs as programs
from tests.commands import torchrun
from tests.test_launched import ROOT, ended, free_port, started

from orchestra.engines.processes import launch
from orchestra.worker.threads import chosen_threads, shares_of_cores, usable_cores

__all__ = ["started"]
CORES = usable_cores()


@pytest.mark.parametrize(
    ("usable", "shares"),
    [
        ([("a", range(8))], [8]),
        ([("a", range(8))] * 2, [4, 4]),
        ([("a", range(8))] * 3, [2, 2, 2]),
        ([("a", range(2))] * 5, [1] * 5),
        ([("a", [0]), ("a", [1])], [1, 1]),
        ([("a", [0]), ("a", [1, 2])], [1, 2]),
        ([("a", range(4)), ("b", range(4)), ("b", range(4))], [4, 2, 2]),
        ([("a", range(4)), ("a", [0])], [3, 1]),  # they share one core
    ],
)
def test_each_core_is_divided_among_the_ranks_that_may_use_it(
    usable: Sequence[tuple[str, Sequence[int]]], shares: list[int]
) -> None:
    assert shares_of_cores(usable) == shares


@pytest.mark.parametrize(
    ("text", "number"),
    [(None, None), ("", None), ("3", 3), ("1", 1), ("4,2", 4), ("0", None), ("many", None)],
)
def test_what_the_user_asks_for(text: str | None, number: int | None) -> None:
    environ = {} if text is None else {"OMP_NUM_THREADS": text}
    assert chosen_threads(environ) == number


def test_local_ranks_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting comes first, then the variable, then the share."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert launch(programs.thread_count, None, 1).results == (len(CORES),)
    assert launch(programs.thread_count, None, 2).results == (max(1, len(CORES) // 2),) * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(programs.thread_count, None, 2).results == (3, 3)
    assert launch(programs.thread_count, None, 2, threads=2).results == (2, 2)


def test_a_background_flow_has_one_thread() -> None:
    assert launch(programs.thread_counts_of_flows, None, 1, threads=3).results == ((3, 1, 3),)


def torchrun_nodes(
    started: list[subprocess.Popen[str]],
    folder: Path,
    cores: Sequence[set[int]],
    program: str = "thread_count",
    ranks: int = 1,
    **variables: str,
) -> str:
    """What the ranks returned, where each agent of torchrun may use only these cores."""
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environ |= {"PYTHONPATH": f"{ROOT}:{ROOT}/src", **variables}
    port = free_port()
    for node, own in enumerate(cores):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(cores)}"]
        command += [f"--nproc-per-node={ranks}", f"--node-rank={node}", f"--master-port={port}"]
        command += ["--master-addr=127.0.0.1", str(ROOT / "tests" / "joined.py"), program]
        command += [str(folder), "60"]
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, own)  # what is started from here inherits it
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environ, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        finally:
            os.sched_setaffinity(0, before)
        started.append(process)
    for process in started:
        status, error = ended(process)
        assert status == 0, error
    return (folder / "outcome 0").read_text()


needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="there is one core")


@needs_two_cores
def test_two_nodes_of_torchrun_with_a_core_each(started: Any, tmp_path: Path) -> None:
    told = torchrun_nodes(started, tmp_path, [{CORES[0]}, {CORES[1]}])
    assert told == "(1, 1)"


@needs_two_cores
def test_a_node_of_torchrun_with_two_cores(started: Any, tmp_path: Path) -> None:
    assert torchrun_nodes(started, tmp_path, [set(CORES[:2])]) == "(2,)"


@needs_two_cores
def test_two_nodes_of_torchrun_that_share_two_cores(started: Any, tmp_path: Path) -> None:
    assert torchrun_nodes(started, tmp_path, [set(CORES[:2])] * 2) == "(1, 1)"


def test_two_nodes_of_torchrun_with_the_users_number(started: Any, tmp_path: Path) -> None:
    told = torchrun_nodes(started, tmp_path, [set(CORES)] * 2, OMP_NUM_THREADS="3")
    assert told == "(3, 3)"


@pytest.mark.parametrize(("variables", "told"), [({}, "None"), ({"OMP_NUM_THREADS": "1"}, "1")])
def test_the_one_that_torchrun_sets_itself_is_not_the_users(
    variables: dict[str, str], told: str, started: Any, tmp_path: Path
) -> None:
    chosen = torchrun_nodes(started, tmp_path, [set(CORES)], "asked_threads", 2, **variables)
    assert chosen == f"({told}, {told})"


OWN_LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import orchestra

torch.set_num_threads(3)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
model, optimizer, loader = orchestra.distribute(model, optimizer, loader, "AllReduce('ring')")
for (inputs,) in loader:
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.get_num_threads())
"""


def test_in_a_loop_of_the_users_own_the_users_number_stays(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(OWN_LOOP)
    with torchrun(script, 2, [], tmp_path) as process:
        told = process.end()
    assert (told.status, told.out.split()) == (0, ["3", "3"]), told.err
