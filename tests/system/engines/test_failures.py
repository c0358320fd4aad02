"""Trainings in which something dies, stops, hangs or breaks, as their user meets them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import Ended, Started, rank_pids, run
from tests.support.failures import HOST, RING, Gate, entry_of, train
from tests.support.lab import in_lab, some
from tests.support.training import step_lines
from tests.support.waiting import is_running, wait_until

from orchestra.trainer.checkpoint_files import complete

ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"
# A worker at the gate lets the others come to it, too.
BOUNDED = "ParameterServer(consistency='bounded', staleness=4)"
BESIDE = "ParameterServer(consistency='bounded', staleness=4, placement='beside')"
BACKUP = "ParameterServer(backup=1)"
STOPPING = "stopping in good order; all ranks have to leave within 30 s of SIGTERM"


def assert_one_line(ended: Ended, status: int, message: str) -> None:
    assert ended.status == status, ended.err
    assert ended.err == f"orchestra: {message}\n"


@pytest.mark.parametrize(
    ("strategy", "workers", "victim"),
    some(
        [
            (RING, 3, 1),
            ("AllReduce('native')", 3, 1),
            ("ParameterServer", 2, 2),
            (ASYNCHRONOUS, 2, 2),
        ]
    ),
)
def test_a_dead_rank_ends_the_run_by_name(
    strategy: str, workers: int, victim: int, tmp_path: Path
) -> None:
    """A worker of a synchronous run, or a server: rank 2 in the last two."""
    with Gate(tmp_path, strategy, workers) as gate:
        gate.signal(victim, signal.SIGKILL)
        gate.open()
        ended = gate.end()
    cause = f"rank {victim} on {HOST} was killed by SIGKILL"
    assert_one_line(ended, 1, cause)
    assert (gate.entry()["status"], gate.entry()["failure"]) == ("failed", cause)
    assert ended.out == ""
    (first,) = {len(step_lines(tmp_path / "out", rank)) for rank in range(workers)} - {0}
    assert first in (3, 4), "the steps before the failure are kept"


@pytest.mark.parametrize("strategy", [ASYNCHRONOUS, BOUNDED, BACKUP])
def test_a_run_that_is_not_synchronous_goes_on_without_a_dead_worker(
    strategy: str, tmp_path: Path
) -> None:
    with Gate(tmp_path, strategy, 2) as gate:
        gate.signal(0, signal.SIGKILL)
        gate.open()
        ended = gate.end()
    assert ended.status == 0, ended.err
    assert f"rank 0 on {HOST} was killed by SIGKILL; going on without it" in ended.err
    assert "Traceback" not in ended.err
    entry = gate.entry()
    assert (entry["status"], entry["left_out"]) == ("completed", {"0": "was killed by SIGKILL"})
    assert any("going on without" in notice for notice in entry["notices"])
    assert entry["steps"] == len(step_lines(tmp_path / "out", 1))
    if strategy == BACKUP:
        assert entry["steps"] == 60
    else:
        assert_all_was_done_without(tmp_path / "out", 0)
    assert entry["parameters_sha256"]


def test_an_asynchronous_run_with_checkpoints_goes_on_without_a_dead_worker(
    tmp_path: Path,
) -> None:
    """Nobody waits for the dead one's part of a checkpoint, which would be no use without it."""
    with Gate(tmp_path, ASYNCHRONOUS, 2, checkpoint_every=1) as gate:
        gate.signal(0, signal.SIGKILL)
        gate.open()
        ended = gate.end()
    assert ended.status == 0, ended.err
    assert gate.entry()["left_out"] == {"0": "was killed by SIGKILL"}


def assert_all_was_done_without(folder: Path, victim: int) -> None:
    """The other workers took all batches that were left, and the one that the victim held."""
    lines = [line for rank in {0, 1, 2} - {victim} for line in step_lines(folder, rank)]
    assert max(line["consumed"] for line in lines) == 40 * 3 * 8
    positions = [line["position"] for line in lines]
    assert len(positions) == len(set(positions)) > 60


def test_an_asynchronous_run_leaves_out_a_worker_that_is_stopped_to_the_end(
    tmp_path: Path,
) -> None:
    with Gate(tmp_path, ASYNCHRONOUS, 2) as gate:
        gate.signal(1, signal.SIGSTOP)
        gate.open()
        ended = gate.end()
    assert ended.status == 0, ended.err
    assert gate.entry()["left_out"] == {"1": "was still stopped at the end"}
    assert_all_was_done_without(tmp_path / "out", 1)


@pytest.mark.parametrize(("strategy", "workers"), in_lab([(BOUNDED, 2), (BESIDE, 3)]))
def test_a_bounded_run_leaves_out_a_stopped_worker_once_all_wait_for_it(
    strategy: str, workers: int, tmp_path: Path
) -> None:
    with Gate(tmp_path, strategy, workers, patience=6) as gate:
        gate.signal(1, signal.SIGSTOP)
        gate.open()
        ended = gate.end()
    assert ended.status == 0, ended.err
    assert gate.entry()["left_out"] == {"1": "is stopped, and all others wait for it"}
    assert_all_was_done_without(tmp_path / "out", 1)


def test_an_asynchronous_run_takes_a_stopped_worker_back(tmp_path: Path) -> None:
    with Gate(tmp_path, ASYNCHRONOUS, 2) as gate:
        gate.signal(1, signal.SIGSTOP)
        gate.told(f"rank 1 on {HOST} is stopped; going on without it")
        gate.signal(1, signal.SIGCONT)
        gate.told(f"rank 1 on {HOST} is back")
        gate.open()
        ended = gate.end()
    assert ended.status == 0, ended.err
    assert gate.entry()["left_out"] == {}
    assert gate.entry()["samples"] == 40 * 3 * 8


def test_a_stopped_rank_ends_a_synchronous_run_by_name(tmp_path: Path) -> None:
    with Gate(tmp_path, RING, 3) as gate:
        gate.signal(1, signal.SIGSTOP)
        gate.open()
        ended = gate.end()
    assert_one_line(ended, 1, f"rank 1 on {HOST} is stopped (by SIGSTOP or its terminal)")


def test_a_folder_in_use_is_refused_and_its_user_is_named(tmp_path: Path) -> None:
    with Gate(tmp_path, RING, 3) as gate:
        words = train(f"gated('{tmp_path}')", RING)
        who = f"process {gate.command.process.pid}"
        in_use = f"out: {who} is using it; wait for its end, or choose another --out"
        assert_one_line(run(words, tmp_path), 2, in_use)
        gate.open()
        assert gate.end().status == 0
    lines = [len(step_lines(tmp_path / "out", rank)) for rank in range(3)]
    assert lines == [40] * 3


def test_a_folder_is_free_again_when_its_user_was_killed(tmp_path: Path) -> None:
    with Gate(tmp_path, RING, 3) as gate:
        gate.command.process.kill()
        gate.end()
    (tmp_path / "go").touch()
    assert run(train(f"gated('{tmp_path}')", RING), tmp_path).status == 0


def test_nothing_survives_the_launcher(tmp_path: Path) -> None:
    with Gate(tmp_path, RING, 3) as gate:
        gate.signal(2, signal.SIGSTOP)  # a rank that could not even notice
        gate.command.process.kill()
        assert gate.end().status == -signal.SIGKILL


@pytest.mark.parametrize("strategy", [RING, ASYNCHRONOUS])
def test_an_exception_in_one_ranks_dataset_is_shown(strategy: str, tmp_path: Path) -> None:
    ended = run(train("broken", strategy), tmp_path)
    assert ended.status == 1
    first, *rest = ended.err.splitlines()
    assert first.startswith("orchestra: rank ")
    assert first.endswith(" failed: ValueError: sample 70 cannot be decoded")
    assert rest[0] == "Traceback (most recent call last):"
    assert ended.err.count("Traceback") == 1
    assert "in disturb" in ended.err
    for echo in ("PeerLost", "RunAborted", "during handling", "is gone"):
        assert echo not in ended.err
    assert entry_of(tmp_path)["failure"].startswith(first.removeprefix("orchestra: "))


def test_a_slow_but_healthy_step_is_not_killed(tmp_path: Path) -> None:
    """Longer without a beat than makes a rank suspect, and shorter than patience."""
    ended = run(train("slow(3.7)", RING, patience=20, steps=4), tmp_path)
    assert (ended.status, ended.err) == (0, "")


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    ended = run(train("diverging", RING), tmp_path)
    assert ended.status == 1
    (line,) = ended.err.splitlines()
    assert "the loss became " in line
    assert "set stop_on_nonfinite to false" in line
    assert "Traceback" not in ended.err


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    ended = run(train("missing_file('nowhere.pt')", RING), tmp_path)
    task = "tests.support.failing_tasks:missing_file('nowhere.pt')"
    reason = "cannot read nowhere.pt: No such file or directory"
    assert_one_line(ended, 2, f"task: {task}: {reason}")


def limited(kilobytes: int, arguments: list[str], cwd: Path) -> Ended:
    """As on a full disk: no file can become larger than `kilobytes`."""
    words = [sys.executable, "-m", "orchestra", *arguments]
    with Started(words, cwd, file_size=1024 * kilobytes) as command:
        return command.end()


@pytest.mark.parametrize(
    ("kilobytes", "settings", "file"),
    some(
        [
            (1, {"checkpoint_every": 5}, "rank-"),
            (1, {"steps": 1}, "parameters.safetensors"),
            (9, {"steps": 100}, "steps-rank-"),
        ]
    ),
)
def test_a_full_disk_is_one_line(
    kilobytes: int, settings: dict[str, Any], file: str, tmp_path: Path
) -> None:
    ended = limited(kilobytes, train("gated('.', 100000)", RING, **settings), tmp_path)
    assert ended.status == 1, ended.err
    (line,) = ended.err.splitlines()
    assert "cannot write " in line
    assert file in line
    assert "File too large" in line


@pytest.mark.parametrize("out", ["file/below", "/proc/nothing/here"])
def test_a_folder_that_cannot_be_written_is_bad_input(out: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = run([*train("gated('.')", RING), "--out", out], tmp_path)
    assert ended.status == 2
    (line,) = ended.err.splitlines()
    assert line.startswith(f"orchestra: {out}: ")


def test_sigterm_to_the_process_group_stops_in_good_order(tmp_path: Path) -> None:
    """And again to the launcher, as `timeout` sends it."""
    with Gate(tmp_path, RING, 3, checkpoint_every=30) as gate:
        pid = gate.command.process.pid
        os.killpg(pid, signal.SIGTERM)
        gate.told("stopping in good order")
        os.kill(pid, signal.SIGTERM)
        gate.open()
        ended = gate.end()
    assert_one_line(ended, 0, STOPPING)
    entry = gate.entry()
    assert (entry["status"], entry["stopped_by"]) == ("stopped", "SIGTERM")
    resumed = run(train(f"gated('{tmp_path}')", RING, checkpoint_every=30), tmp_path)
    assert f"resumed from checkpoint 1, step {entry['steps']}" in resumed.err
    assert (resumed.status, entry_of(tmp_path)["steps"]) == (0, 40)


def test_sigterm_to_one_rank_stops_all(tmp_path: Path) -> None:
    """As Kubernetes sends it to one pod."""
    with Gate(tmp_path, RING, 3) as gate:
        gate.signal(2, signal.SIGTERM)
        gate.told("stopping in good order")
        gate.open()
        ended = gate.end()
    assert_one_line(ended, 0, STOPPING)
    entry = gate.entry()
    assert (entry["status"], entry["stopped_by"]) == ("stopped", "SIGTERM")
    assert (tmp_path / "out" / "checkpoints" / "0001").is_dir()


def test_the_last_checkpoint_stands_where_a_stop_takes_longer_than_the_grace(
    tmp_path: Path,
) -> None:
    with Gate(tmp_path, RING, 3, checkpoint_every=2, grace=0.5) as gate:
        gate.command.process.send_signal(signal.SIGTERM)
        ended = gate.end()
    assert ended.status == 1
    names = ", ".join(f"rank {rank} on {HOST}" for rank in range(3))
    assert ended.err.splitlines()[-1] == (
        f"orchestra: {names} did not come to rest in time within the 0.5 s that SIGTERM leaves "
        "(grace); the last checkpoint stands"
    )
    assert gate.entry()["status"] == "failed"
    assert list(complete(tmp_path / "out" / "checkpoints")) == [1]


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with Gate(tmp_path, RING, 3) as gate:
        gate.command.process.send_signal(signal.SIGINT)
        gate.told("stopping in good order; press Ctrl-C again to end at once")
        gate.command.process.send_signal(signal.SIGINT)
        ended = gate.end()
    assert ended.status == 1
    assert ended.err.endswith("orchestra: interrupted\n")
    assert "Traceback" not in ended.err
    assert gate.entry()["status"] == "failed"


def test_no_rank_of_this_module_is_left() -> None:
    wait_until(lambda: not any(map(is_running, rank_pids())), "no rank is left")
