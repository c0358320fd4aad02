"""Faults that a rank injects into itself, and what their users see."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

import pytest
from benchmarks.faults import Trial, run_trial
from tests.support.commands import Ended, Started
from tests.support.training import step_lines

from orchestra.engines.injection import LOG, VARIABLE, Inject, injections
from orchestra.engines.processes.injection import reset
from orchestra.errors import InputError
from orchestra.trainer.checkpoint_files import complete

HOST = socket.gethostname()


def trained(
    folder: Path, inject: str, strategy: str = "AllReduce('ring')", ranks: int = 2, *more: str
) -> Ended:
    words = [sys.executable, "-m", "orchestra", "train", "--strategy", strategy, *more]
    words += [
        "--ranks",
        str(ranks),
        "--task",
        "benchmarks.faults:task",
        "--out",
        "out",
        "--set",
        "steps=12",
    ]
    words += ["--set", "batch_size=4", "--set", "snapshots=0", "--set", "checkpoint_every=4"]
    variables = {VARIABLE: inject, LOG: str(folder / "log"), "ORCHESTRA_SHARED_MEMORY": "0"}
    with Started(words, folder, variables) as command:
        return command.end()


def test_faults_are_read_from_a_variable() -> None:
    text = "Inject('kill', rank=1, at='send', number=30); Inject('delay', rank=0, at='gradient')"
    environment = {VARIABLE: text}
    assert injections(environment, 1) == [Inject("kill", rank=1, at="send", number=30)]
    assert injections(environment, 2) == []
    assert injections({}, 0) == []
    with pytest.raises(InputError, match=r"ORCHESTRA_INJECT: .*'explode'"):
        injections({VARIABLE: "Inject('explode', rank=0)"}, 0)


def test_fault_comes_at_its_operation_alone(tmp_path: Path) -> None:
    ended = trained(tmp_path, "Inject('kill', rank=1, at='gradient', number=7)")
    assert ended.err == f"orchestra: rank 1 on {HOST} was killed by SIGKILL\n"
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert len(step_lines(tmp_path / "out", 1)) <= 6


def test_parameters_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    """The checkpoint before them stands, from which a resumed run can go on."""
    ended = trained(tmp_path, "Inject('nan', rank=1, at='gradient', number=8)")
    assert ended.status == 1
    assert ended.err.count("\n") == 1
    assert "failed: parameters are NaN or infinite after step 8, so that no checkpoint" in ended.err
    assert list(complete(tmp_path / "out" / "checkpoints")) == [1]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["runs"][0]["failure"]


def test_leader_that_fails_leaves_the_files_that_others_write(tmp_path: Path) -> None:
    """Else they would fail, too, and one of them might be taken for the cause."""
    ended = trained(tmp_path, "Inject('full_disk', rank=0, at='write', number=3)")
    assert ended.status == 1
    assert ended.err.startswith(f"orchestra: rank 0 on {HOST} failed: cannot write ")
    assert ended.err.endswith(": No space left on device\n")
    assert (tmp_path / "out" / "checkpoints" / ".attempt-1").is_dir()


def test_connection_that_is_reset_ends_at_both_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
        with here, there:
            reset(here)
            with pytest.raises(ConnectionResetError):
                there.recv(1)
            with pytest.raises(OSError, match="reset"):
                here.recv(1)


def test_who_learns_of_a_loss_first_leaves_nobody_waiting(tmp_path: Path) -> None:
    """The first collectives of all are over fewer ranks for nobody, whoever knows already."""
    ended = trained(tmp_path, "Inject('cut', rank=2)", "AllReduce('tree')", 4)
    assert ended.status == 1
    assert re.fullmatch(
        rf"orchestra: rank \d on {HOST} lost its connection to rank \d\n", ended.err
    )


def test_a_group_that_has_lost_a_connection_makes_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRA_COMPILED", "0")  # messages are sent in a collective
    cut = "Inject('cut', rank=1, at='send', number=40)"
    ended = trained(tmp_path, cut, "AllReduce('ring')", 3, "--set", "min_ranks=2")
    assert ended.status == 0
    assert re.search(
        r"rank \d on \S+ lost its connection to rank \d; all ranks connect anew", ended.err
    )
    (run,) = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert run["left_out"] == {}
    assert [(each["lost"], each["ranks"]) for each in run["regroupings"]] == [([], 3)]
    assert run["samples"] == 12 * 3 * 4


# Of each kind of fault, and of each kind of strategy
SAMPLE = (
    0, 2, 4, 5, 7, 9, 12, 13, 15, 17, 18, 19, 20, 21, 22, 26, 27, 30, 31, 32, 33, 34, 36, 37,
    39, 41, 42, 43, 44, 45, 46, 47, 48, 51, 55, 56, 58, 59, 61, 62, 66, 67, 70, 73, 74, 77, 83,
    325, 369, 453, 575, 612, 728, 744, 770, 850, 880, 930, 968, 1606,
)  # fmt: skip


@pytest.mark.parametrize("number", SAMPLE)
def test_sample_of_the_campaign(number: int, tmp_path: Path) -> None:
    """The whole one is `python -m benchmarks.faults`."""
    result = run_trial(Trial.of(0, number), tmp_path, timed=False)
    assert result.fired
    assert result.problems == []
