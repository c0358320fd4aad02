"""Trainings on processes whose servers are killed: what was answered is in the final parameters."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.support.commands import rank_pids, started
from tests.support.counted import RATE, updates_of
from tests.support.lab import in_lab
from tests.support.training import step_lines

SYNCHRONOUS = "ParameterServer(servers=2, replicas=1)"
ASYNCHRONOUS = "ParameterServer(servers=2, replicas=1, consistency='asynchronous')"
# A worker that has had most of the first batches waits at the gate with one of them: the other has
# to be allowed as many before that one is applied.
BOUNDED = "ParameterServer(servers=2, replicas=1, consistency='bounded', staleness=4)"
BESIDE = ASYNCHRONOUS.replace(")", ", placement='beside')")


class Gate:
    """A training of two workers and two servers (beside: three workers) that waits in mid-run."""

    def __init__(self, strategy: str, folder: Path, size: int = 1000, **more: Any) -> None:
        self.folder, self.out = folder, folder / "out"
        self.ranks, self.workers = (3, 3) if "beside" in strategy else (4, 2)
        words = ["train", "--task", f"tests.support.counted:counted('{folder}', {size})"]
        words += ["--strategy", strategy, "--ranks", str(self.ranks), "--out", str(self.out)]
        settings = {"steps": 30, "batch_size": 8, "equal": "worker_batch", "snapshots": 4}
        settings["optimizer"] = f"SGD(lr={RATE})"
        for key, value in {**settings, **more}.items():
            words += ["--set", f"{key}={value}"]
        self.command = started(words, folder)

    def __enter__(self) -> Gate:
        def arrived() -> bool:
            return len(list(self.folder.glob("at-*"))) == self.workers

        try:
            self.command.wait_until(arrived, "all workers are in mid-run")
        except BaseException:
            self.command.__exit__(None, None, None)
            raise
        self.pids = rank_pids(self.command.process.pid)
        assert len(self.pids) == self.ranks
        return self

    def __exit__(self, *_: Any) -> None:
        self.command.__exit__(None, None, None)

    def signal(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def open(self) -> None:
        (self.folder / "go").touch()

    def told(self, text: str) -> None:
        """Wait until the user is told `text`."""
        self.command.wait_until(lambda: text in self.command.err(), f"the user is told {text!r}")

    def completed(self) -> dict[str, Any]:
        """The record of a run that ends well."""
        ended = self.command.end()
        assert ended.status == 0, ended.err
        assert "Traceback" not in ended.err
        (entry,) = json.loads((self.out / "summary.json").read_text())["runs"]
        assert isinstance(entry, dict)
        return entry

    def failure(self) -> str:
        """What the user of a run that fails is told last."""
        ended = self.command.end()
        assert ended.status == 1, ended.err
        return ended.err.rpartition("orchestra: ")[2]

    def steps(self, rank: int) -> int:
        """Of a worker that is there at the end: its pushes that were answered."""
        return len(step_lines(self.out, rank))

    def updates(self) -> set[float]:
        """How many updates the final parameters have seen: one number where both slices agree."""
        return updates_of(load_file(self.out / "parameters.safetensors")["weight"])


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        (SYNCHRONOUS, 2),
        (ASYNCHRONOUS, 3),
        (BOUNDED, 2),
        pytest.param(SYNCHRONOUS, 3, marks=pytest.mark.lab),
        pytest.param(ASYNCHRONOUS, 2, marks=pytest.mark.lab),
        pytest.param(BOUNDED, 3, marks=pytest.mark.lab),
    ],
)
def test_a_run_survives_the_death_of_a_server(strategy: str, victim: int, tmp_path: Path) -> None:
    other = 5 - victim
    with Gate(strategy, tmp_path) as gate:
        gate.signal(victim)
        gate.open()
        entry = gate.completed()
    assert (entry["status"], entry["left_out"]) == (
        "completed",
        {str(victim): "was killed by SIGKILL"},
    )
    assert f"rank {other} serves the slice of rank {victim}, without a replica" in entry["notices"]
    assert f"the slice of rank {other} has no replica without rank {victim}" in entry["notices"]
    assert gate.steps(0) + gate.steps(1) == 120
    assert gate.updates() == {60 if strategy == SYNCHRONOUS else 120}
    curve = (gate.out / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["consensus_distance"] for line in curve] == [None] * 4


@pytest.mark.parametrize("victim", [2, pytest.param(3, marks=pytest.mark.lab)])
@pytest.mark.parametrize("strategy", [*in_lab([SYNCHRONOUS]), ASYNCHRONOUS])
def test_a_server_dies_while_pushes_are_on_their_way(
    strategy: str, victim: int, tmp_path: Path
) -> None:
    with Gate(strategy, tmp_path, size=2_000_000) as gate:
        gate.open()
        gate.signal(victim)
        entry = gate.completed()
    assert entry["left_out"] == {str(victim): "was killed by SIGKILL"}
    assert gate.steps(0) + gate.steps(1) == 120
    assert gate.updates() == {60 if strategy == SYNCHRONOUS else 120}


@pytest.mark.parametrize("victim", [0, *in_lab([1])])
def test_a_server_dies_with_the_worker_beside_it(victim: int, tmp_path: Path) -> None:
    """What that one had pushed until then stays: it waited in its fifth step at the latest. The
    others take the rest, and the batch that it held."""
    with Gate(BESIDE, tmp_path) as gate:
        gate.signal(victim)
        gate.open()
        entry = gate.completed()
    assert entry["left_out"] == {str(victim): "was killed by SIGKILL"}
    assert gate.updates() == {90}
    assert 90 - 5 <= sum(gate.steps(rank) for rank in {0, 1, 2} - {victim}) <= 90 - 3


def test_a_stopped_server_is_left_out_once_all_wait_for_it(tmp_path: Path) -> None:
    with Gate(ASYNCHRONOUS, tmp_path, patience=6) as gate:
        gate.signal(2, signal.SIGSTOP)
        gate.open()
        entry = gate.completed()
    assert entry["left_out"] == {"2": "is stopped, and all others wait for it"}
    assert gate.updates() == {120}


@pytest.mark.parametrize("strategy", [SYNCHRONOUS, *in_lab([ASYNCHRONOUS])])
def test_a_second_death_ends_the_run_by_name(strategy: str, tmp_path: Path) -> None:
    with Gate(strategy, tmp_path) as gate:
        gate.signal(2)
        gate.told("rank 3 serves the slice of rank 2, without a replica")
        gate.signal(3)
        gate.open()
        assert gate.failure() == f"rank 3 on {socket.gethostname()} was killed by SIGKILL\n"


def test_two_deaths_at_once_end_the_run_by_the_name_of_one(tmp_path: Path) -> None:
    with Gate(ASYNCHRONOUS, tmp_path) as gate:
        gate.signal(2)
        gate.signal(3)
        gate.open()
        assert re.match(r"rank [23] on \S+ was killed by SIGKILL", gate.failure())


def test_the_worker_that_evaluates_cannot_be_lost(tmp_path: Path) -> None:
    with Gate(ASYNCHRONOUS, tmp_path) as gate:
        gate.signal(0)
        gate.open()
        assert gate.failure() == f"rank 0 on {socket.gethostname()} was killed by SIGKILL\n"


@pytest.mark.parametrize(
    "strategy", [pytest.param(SYNCHRONOUS, marks=pytest.mark.lab), ASYNCHRONOUS]
)
def test_a_run_with_checkpoints_goes_on_without_a_server(strategy: str, tmp_path: Path) -> None:
    with Gate(strategy, tmp_path, checkpoint_every=1) as gate:
        gate.signal(3)
        gate.open()
        entry = gate.completed()
    assert entry["left_out"] == {"3": "was killed by SIGKILL"}
    taken = [int(path.name) for path in (gate.out / "checkpoints").glob("[0-9]*")]
    assert 0 < max(taken) <= 5, "none after the death"
    assert gate.steps(0) + gate.steps(1) == 120
    assert gate.updates() == {60 if strategy == SYNCHRONOUS else 120}
