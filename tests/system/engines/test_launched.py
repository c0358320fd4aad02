"""Runs that another launcher starts: what its variables say, and torchrun itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import rank_programs
from tests.support.commands import Started
from tests.support.free_ports import free_port
from tests.support.launchers import ended, forget, started
from tests.support.meshes import make_certificate, make_tls
from tests.support.paths import ROOT, SCRIPTS
from tests.support.rank_programs import pids
from tests.support.waiting import is_running, listening_ports, wait_until

from orchestra.engines.processes.environment import Launched, detect, first_host
from orchestra.engines.processes.rank import join
from orchestra.errors import InputError, RunFailed
from orchestra.transports.handshake import from_environment

__all__ = ["started"]

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
}
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
PET = {
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
    "PET_MASTER_ADDR": "job-0",
    "PET_MASTER_PORT": "23456",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[03-05,07]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environ", "launched"),
    [
        (TORCHRUN, Launched("torchrun", 3, 4, 1, 2, "node0", 29500, True, True)),
        (POD, Launched("PyTorchJob", 1, 2, 0, 1, "job-master-0", 23456)),
        (PET, Launched("PyTorchJob", 1, 2, 0, 1, "job-0", 23456)),
        (POD | PET, Launched("PyTorchJob", 1, 2, 0, 1, "job-master-0", 23456)),
        (SLURM, Launched("Slurm", 5, 7, 1, 2, "gpu03", 18456)),
        (
            SLURM | {"SLURM_NODEID": "3", "SLURM_LOCALID": "0", "SLURM_PROCID": "6"},
            Launched("Slurm", 6, 7, 0, 1, "gpu03", 18456),
        ),
        (
            SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "1024"},
            Launched("Slurm", 5, 7, 1, 2, "a", 1024),
        ),
        (OPEN_MPI, Launched("Open MPI", 2, 4, 0, 2, "node0", 29500)),
    ],
)
def test_the_variables_of_launchers(environ: dict[str, str], launched: Launched) -> None:
    assert detect(environ) == launched


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "LOCAL_RANK": "0"},
        # A batch script: in an allocation, and not started by srun.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"},
    ],
)
def test_no_launcher(environ: dict[str, str]) -> None:
    assert detect(environ) is None


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "not WORLD_SIZE"),
        (without(TORCHRUN, "RANK"), "not RANK"),
        (without(TORCHRUN, "MASTER_PORT"), "not MASTER_PORT"),
        (without(POD, "MASTER_ADDR"), "not MASTER_ADDR"),
        (without(PET, "PET_NNODES"), "not PET_NNODES"),
        (without(OPEN_MPI, "MASTER_ADDR"), "mpirun -x MASTER_ADDR="),
        (without(SLURM, "SLURM_LOCALID"), "not SLURM_LOCALID"),
        (without(SLURM, "SLURM_JOB_NODELIST"), "SLURM_LAUNCH_NODE_IPADDR"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4"),
        (TORCHRUN | {"RANK": "x"}, "RANK is 'x'"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "with 4 ranks in all"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "port 0"),
        (POD | {"PET_NPROC_PER_NODE": "4"}, "begin with torchrun"),
        (PET | {"PET_NPROC_PER_NODE": "auto"}, "begin with torchrun"),
        (SLURM | {"SLURM_NODEID": "9"}, "SLURM_NODEID is 9"),
    ],
)
def test_incomplete_and_contradicting_variables(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        detect(environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a1,b2", "a1"),
        ("gpu[03-07,12],cpu1", "gpu03"),
        ("n[1,3]-ib", "n1-ib"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def two_nodes(started: list[Started], program: str, folder: Path, fresh: bool = False) -> None:
    """Two nodes that run a program of `rank_programs`."""
    what = [str(ROOT / "tests" / "support" / "joined.py"), program, str(folder), "60"]
    on_two_nodes(started, folder, what, fresh)


def on_two_nodes(started: list[Started], logs: Path, what: list[str], fresh: bool = False) -> None:
    """Two agents of torchrun on this machine, with two ranks each."""
    port = free_port()
    for node in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--log-dir={logs}"]
        command += ["--nproc-per-node=2", f"--node-rank={node}", "--master-addr=127.0.0.1"]
        command += [f"--master-port={port}", *what]
        started.append(Started(command, ROOT, fresh=fresh))


def join_by_hand(
    started: list[Started],
    program: str,
    folder: Path,
    ranks: int,
    patience: str = "60",
) -> None:
    script = str(ROOT / "tests" / "support" / "joined.py")
    by_hand(started, [script, program, str(folder), patience], ranks, ROOT)


def by_hand(started: list[Started], words: Sequence[str], ranks: int, cwd: Path) -> None:
    """Processes with the variables of a PyTorchJob: rank 0 opens the store itself."""
    port = str(free_port())
    for rank in range(ranks):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(Started([sys.executable, *words], cwd, variables))


def test_two_nodes_of_torchrun(started: Any, tmp_path: Path) -> None:
    two_nodes(started, "collect_natively", tmp_path)
    for process in started:
        status, error = ended(process)
        assert status == 0, error
    expected = [[6.0] * 3, [4.0] * 2]
    assert (tmp_path / "outcome 0").read_text() == repr((expected,) * 4)
    assert (tmp_path / "outcome 3").read_text() == repr((None, None, None, expected))


def test_a_training_on_two_nodes_of_torchrun_and_the_same_again(
    started: Any, tmp_path: Path
) -> None:
    """With a rank that only serves; the second time all ranks leave at once."""
    strategy = 'ParameterServer(consistency="asynchronous")'
    what = ["-m", "orchestra", "train", "--task", "digits(channels=2, hidden=8)", "--strategy"]
    what += [strategy, "--set", "steps=6", "--set", "batch_size=8", "--out", str(tmp_path / "run")]
    summaries = []
    for _ in range(2):
        forget(started)
        on_two_nodes(started, tmp_path, what)
        for process in started:
            status, error = ended(process)
            assert status == 0, error
        summaries.append((tmp_path / "run" / "summary.json").read_text())
    assert summaries[0] == summaries[1]
    (run,) = json.loads(summaries[0])["runs"]
    assert (run["status"], run["workers"], run["servers"]) == ("completed", 3, 1)
    assert run["samples"] == 6 * 4 * 8


def test_the_first_cause_is_told_on_every_node(started: Any, tmp_path: Path) -> None:
    two_nodes(started, "wait_for_last", tmp_path)
    os.kill(pids(tmp_path, 4)[3], signal.SIGKILL)
    for process in started:
        status, error = ended(process)
        assert status == 1
        assert f"rank 3 on {socket.gethostname()} is gone: its control connection closed" in error


def test_a_failed_training_under_torchrun(tmp_path: Path) -> None:
    """Told once, and written down by whoever is left."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--log-dir={tmp_path / 'logs'}"]
    words += [
        "--nproc-per-node=3",
        "-m",
        "orchestra",
        "train",
        "--strategy",
        "AllReduce",
        "--set",
        "batch_size=8",
        "--set",
        "steps=40",
    ]
    words += ["--set", "snapshots=0"]
    task = "tests.support.failing_tasks:"
    with Started(
        [sys.executable, *words, "--task", f"{task}broken", "--out", "a"], tmp_path
    ) as run:
        ended = run.end()
    assert ended.status == 1
    told = [line for line in ended.err.splitlines() if line.startswith("orchestra: ")]
    assert len(told) == 1, told
    (entry,) = json.loads((tmp_path / "a" / "summary.json").read_text())["runs"]
    assert entry["status"] == "failed"
    assert told[0] == "orchestra: " + entry["failure"].splitlines()[0]
    gated = [*words, "--task", f"{task}gated('{tmp_path}')", "--out", "b"]
    with Started([sys.executable, *gated], tmp_path) as run:
        arrived = lambda: len(list(tmp_path.glob("at-*"))) == 3  # noqa: E731
        run.wait_until(arrived, "all workers are in mid-epoch")
        os.kill(first_rank(tmp_path), signal.SIGKILL)
        assert run.end().status == 1
    (entry,) = json.loads((tmp_path / "b" / "summary.json").read_text())["runs"]
    assert entry["status"] == "failed"
    assert entry["failure"] == "rank 0, which watches over the run, is gone"


def first_rank(folder: Path) -> int:
    """The process id of rank 0 among those that wait at the gate."""
    for path in folder.glob("at-*"):
        pid = int(path.name.removeprefix("at-"))
        if b"\0RANK=0\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            return pid
    raise AssertionError("rank 0 is not there")


@pytest.mark.lab
def test_restart_that_only_the_failed_node_counts(started: Any, tmp_path: Path) -> None:
    """Its rank fails; the other node's is busy, until its agent ends it for the others to meet."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
    command += [f"--rdzv-endpoint={tmp_path / 'agents'}", "--local-addr=127.0.0.1"]
    command += [f"--log-dir={tmp_path}", str(SCRIPTS / "restarted_loop.py")]
    started += [Started(command, tmp_path) for _ in range(2)]
    for process in started:
        status, error = ended(process)
        assert status == 0, error
    restarts = sorted((tmp_path / f"restarts-{rank}").read_text() for rank in range(2))
    assert restarts == ["0", "1"]


def test_ranks_without_torchrun(started: Any, tmp_path: Path) -> None:
    join_by_hand(started, "pass_round", tmp_path, 3)
    assert [ended(process) for process in started] == [(0, "")] * 3
    assert (tmp_path / "outcome 0").read_text() == "(3.0, 3.0, 3.0)"


def test_ranks_that_find_certificates_in_their_environment(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = make_tls(tmp_path)
    for name in ("certificate", "key", "authority"):
        monkeypatch.setenv(f"ORCHESTRA_TLS_{name.upper()}", str(getattr(tls, name)))
    join_by_hand(started, "pass_round", tmp_path, 3)
    assert [ended(process) for process in started] == [(0, "")] * 3
    forget(started)
    monkeypatch.setenv("ORCHESTRA_TLS_KEY", str(tls.authority))
    join_by_hand(started, "pass_round", tmp_path, 2, patience="3")
    status, error = ended(started[0])
    assert status == 1
    assert "TLS cannot use certificate" in error


def test_ranks_that_find_a_certificate_in_their_environment_that_has_expired(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = make_certificate(tmp_path, "authority", None)
    make_certificate(tmp_path, "rank", issuer, hours=-1.0)
    for name, file in (
        ("CERTIFICATE", "rank.pem"),
        ("KEY", "rank.key"),
        ("AUTHORITY", "authority.pem"),
    ):
        monkeypatch.setenv(f"ORCHESTRA_TLS_{name}", str(tmp_path / file))
    join_by_hand(started, "pass_round", tmp_path, 2)
    for rank, process in enumerate(started):
        status, error = ended(process)
        assert status == 1
        assert f"rank {rank} cannot reach the watcher" in error
        assert "its certificate is refused here: certificate has expired" in error


def test_half_of_the_variables_for_certificates() -> None:
    assert from_environment({}) is None
    with pytest.raises(InputError, match="ORCHESTRA_TLS_KEY, ORCHESTRA_TLS_AUTHORITY is not set"):
        from_environment({"ORCHESTRA_TLS_CERTIFICATE": "rank.pem"})


def test_port_that_another_program_has_is_told_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orchestra.engines.processes.rank.ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        of_rank = [Launched("torchrun", rank, 2, rank, 2, "127.0.0.1", port) for rank in range(2)]
        with pytest.raises(InputError, match=r"rank 0 cannot listen on .* Address already in use"):
            join(rank_programs.pass_round, None, of_rank[0])
        with pytest.raises(RunFailed, match=r"rank 1 cannot reach .*: is the port taken"):
            join(rank_programs.pass_round, None, of_rank[1])


def test_everything_listens_on_loopback(started: Any, tmp_path: Path) -> None:
    join_by_hand(started, "until_asked_to_stop", tmp_path, 2)
    listening = {port for pid in pids(tmp_path, 2) for port in listening_ports(pid)}
    assert listening
    assert {address.split(":")[0] for address in listening} == {"0100007F"}
    started[0].process.send_signal(signal.SIGINT)
    assert [ended(process) for process in started] == [(0, "")] * 2
    assert (tmp_path / "outcome 0").read_text() == "('stopped in order', 'stopped in order')"


def test_sigterm_to_one_rank_stops_all(started: Any, tmp_path: Path) -> None:
    """As Kubernetes sends it to the pod that has to go."""
    join_by_hand(started, "until_asked_to_stop", tmp_path, 3)
    os.kill(pids(tmp_path, 3)[1], signal.SIGTERM)
    assert [ended(process)[0] for process in started] == [0] * 3
    assert (tmp_path / "outcome 0").read_text() == str(("stopped in order",) * 3)


def test_sigterm_to_every_rank_of_a_training(started: Any, tmp_path: Path) -> None:
    """As Slurm sends it to all."""
    words = [
        "-m",
        "orchestra",
        "train",
        "--task",
        f"tests.support.failing_tasks:gated('{tmp_path}')",
    ]
    words += ["--strategy", "AllReduce", "--set", "steps=40", "--set", "batch_size=8"]
    by_hand(started, [*words, "--set", "snapshots=0", "--out", "out"], 2, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("at-*"))) == 2, "both workers are in mid-epoch")
    for process in started:
        process.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping in good order" in started[0].err(), "the order to stop")
    (tmp_path / "go").touch()
    assert [ended(process)[0] for process in started] == [0, 0]
    (entry,) = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert (entry["status"], entry["stopped_by"]) == ("stopped", "SIGTERM")
    assert (tmp_path / "out" / "checkpoints" / "0001").is_dir()


def test_stop_that_takes_longer_than_the_grace_is_written_down(
    started: Any, tmp_path: Path
) -> None:
    """Though the program of rank 0, which writes the record, is stuck."""
    words = [
        "-m",
        "orchestra",
        "train",
        "--task",
        f"tests.support.failing_tasks:gated('{tmp_path}')",
    ]
    words += ["--strategy", "AllReduce", "--set", "steps=40", "--set", "batch_size=8"]
    words += ["--set", "grace=0.5", "--set", "snapshots=0", "--out", "out"]
    by_hand(started, words, 2, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("at-*"))) == 2, "both workers are in mid-epoch")
    started[1].process.send_signal(signal.SIGTERM)
    assert ended(started[0])[0] == 1
    assert ended(started[1])[0] in (1, -signal.SIGKILL)
    (entry,) = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert entry["status"] == "failed"
    assert "did not come to rest in time within the 0.5 s" in entry["failure"]


@pytest.mark.parametrize(
    ("strategy", "ranks", "workers"),
    [
        ("AllReduce('ring')", 2, 2),
        ("LocalSGD(4)", 2, 2),
        ("ParameterServer(consistency='asynchronous')", 3, 2),
        pytest.param("ParameterServer()", 3, 2, marks=pytest.mark.lab),
        pytest.param("Gossip()", 3, 3, marks=pytest.mark.lab),
        pytest.param(
            "ParameterServer(consistency='asynchronous', placement='beside')",
            2,
            2,
            marks=pytest.mark.lab,
        ),
    ],
)
def test_sigterm_ends_a_loop_of_the_users_own(
    started: Any, tmp_path: Path, strategy: str, ranks: int, workers: int
) -> None:
    """After a common step, from which its script can save the state; servers end, too."""
    script = str(SCRIPTS / "stopped_loop.py")
    by_hand(started, [script, strategy], ranks, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("at-*"))) == workers, "all workers train")
    started[1].process.send_signal(signal.SIGTERM)
    found = [ended(process) for process in started]
    assert [status for status, _ in found] == [0] * ranks, found
    assert "stopping in good order" in found[0][1]
    if "asynchronous" not in strategy:
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        assert state["position"]["steps"] >= 3


def test_all_ranks_leave_when_rank_0_is_gone(started: Any, tmp_path: Path) -> None:
    join_by_hand(started, "deaf", tmp_path, 3)
    processes = pids(tmp_path, 3)
    os.kill(processes[0], signal.SIGKILL)
    for process in started[1:]:
        assert ended(process) == (1, "orchestra: rank 0, which watches over the run, is gone\n")


def test_ranks_that_are_stuck_leave_with_the_first_cause(started: Any, tmp_path: Path) -> None:
    join_by_hand(started, "blocked", tmp_path, 3)
    os.kill(pids(tmp_path, 3)[2], signal.SIGKILL)
    cause = f"rank 2 on {socket.gethostname()} is gone: its control connection closed"
    assert ended(started[1]) == (1, f"orchestra: {cause}\n")
    status, error = ended(started[0])
    assert (status, error.strip().removeprefix("orchestra: ")) == (1, cause)


def test_ranks_leave_when_rank_0_is_silent(started: Any, tmp_path: Path) -> None:
    join_by_hand(started, "blocked", tmp_path, 2, patience="4")
    os.kill(pids(tmp_path, 2)[0], signal.SIGSTOP)
    cause = "rank 0, which watches over the run, is silent for 4 s"
    assert ended(started[1]) == (1, f"orchestra: {cause}\n")


def test_ranks_leave_when_their_agent_is_gone(started: Any, tmp_path: Path) -> None:
    two_nodes(started, "until_asked_to_stop", tmp_path, fresh=True)
    ranks = pids(tmp_path, 4)
    for process in started:
        process.process.kill()
    wait_until(lambda: not any(map(is_running, ranks)), "all ranks leave")
