"""`orchestra train --hosts`: on hosts with an sshd each, and its parts without any."""

from __future__ import annotations

import json
import queue
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.commands import Ended, Started, run
from tests.support.hosts import SshHosts, needs_sshd, ssh_hosts
from tests.support.waiting import DEADLINE_SECONDS, is_running, kill, wait_until

from orchestra.engines.hosts.agent import MARK, MARKER
from orchestra.engines.hosts.checks import Clock, late, unlike
from orchestra.engines.hosts.facts import facts_here
from orchestra.engines.hosts.names import HostRanks, read_hosts
from orchestra.engines.hosts.run import Command as RankCommand
from orchestra.engines.hosts.run import _Course, print_prefixed, travelling
from orchestra.engines.processes.environment import INTERRUPTED_STATUS
from orchestra.errors import InputError, RankLost

TRAIN = ["train", "--task", "digits", "--strategy", "AllReduce", "--out", "out"]
OWN_TASK = """\
from orchestra import Task
from tests.support.quadratic import quadratic


def tiny() -> Task:
    return quadratic()
"""
LONG = [*TRAIN, "--set", "steps=100000", "--set", "snapshots=1", "--set", "checkpoint_every=20"]


# Names -------------------------------------------------------------------------------------------


def test_hosts_have_a_rank_each_or_the_number_behind_the_colon() -> None:
    expected = (HostRanks("a"), HostRanks("me@b", 2), HostRanks("fe80::1", 4))
    assert read_hosts("a,me@b:2,[fe80::1]:4") == expected
    assert ",".join(map(str, expected)) == "a,me@b:2,[fe80::1]:4"


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:x", "a,b:2,a", "-oProxyCommand=x", "a b"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--hosts"):
        read_hosts(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "a,b", "--ranks", "3"], "--hosts has 2"),
        (["--hosts", "a,b", "--max-restarts", "-1"], "max_restarts"),
        (["--hosts", "a,b", "--engine", "simulation"], "leave out --hosts"),
        (["--hosts", "a,b", "--strategy", "Single"], "1 processes"),
        (["--remote-python", "python3"], "--hosts"),
    ],
)
def test_what_does_not_go_with_hosts_is_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    ended = run([*TRAIN, *arguments], tmp_path)
    assert ended.status == 2
    (line,) = ended.err.splitlines()
    assert message in line


def test_hosts_with_another_number_of_ranks_than_the_file_are_told(tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    (tmp_path / "tiny.yaml").write_text(
        "task: own_task:tiny\nstrategies: {ring: AllReduce}\nsteps: 2\nbatch_size: 4\nranks: 4\n"
    )
    found = run(["train", "tiny.yaml", "--hosts", "localhost:2", "--out", "out"], tmp_path)
    assert found.status == 0, found.err
    assert "orchestra: ranks: tiny.yaml has 4, --hosts has 2: training with 2\n" in found.err
    environment = json.loads((tmp_path / "out/environment.json").read_text())
    assert environment["hosts"] == "localhost:2"
    page = run(["report", "out"], tmp_path)
    assert page.status == 0, page.err
    assert "hosts localhost:2; the first: " in (tmp_path / "out/report.html").read_text()


# Checks ------------------------------------------------------------------------------------------


def test_other_versions_are_named_with_their_host() -> None:
    here = replace(facts_here(), torch="2.13.0")
    facts = {
        "a": here,
        "b": replace(here, orchestra="0.0.9"),
        "c": replace(here, source="other"),
        "d": replace(here, torch="2.6.0"),
        "e": replace(here, torch=None),
    }
    assert [line.partition(":")[0] for line in unlike(facts, here)] == ["b", "c", "d", "e"]
    assert unlike({"a": here}, here) == []


def test_a_clock_is_late_beyond_the_bound_and_the_error_of_the_reading() -> None:
    clocks = {"a": Clock(-5.5, 1.0), "b": Clock(-60.0, 0.1), "c": Clock(60.0, 0.1)}
    behind, ahead = late(clocks)
    assert behind.startswith("b: its clock is 60.0 s behind")
    assert ahead.startswith("c: its clock is 60.0 s ahead")


def test_variables_of_a_run_travel_and_those_of_a_machine_do_not() -> None:
    environ = {"ORCHESTRA_TLS_KEY": "k", "WANDB_API_KEY": "s", "HOME": "/", "ORCHESTRA_HOST": "x"}
    assert travelling(environ) == {"ORCHESTRA_TLS_KEY": "k", "WANDB_API_KEY": "s"}


# The course of a run, without hosts --------------------------------------------------------------


class SilentConnection:
    """Keeps what an agent is told, which does nothing of it."""

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []

    def say(self, kind: str, **more: Any) -> None:
        self.said.append((kind, more))


def course(*events: tuple[str, dict[str, Any]]) -> tuple[_Course, dict[str, SilentConnection]]:
    """The course of a run with rank 0 on a, and 1 on b, after these events."""
    connections = {"a": SilentConnection(), "b": SilentConnection()}
    hosts: Any = SimpleNamespace(events=queue.SimpleQueue(), connections=connections)
    for event in events:
        hosts.events.put(event)
    made = _Course(hosts, {0: "a", 1: "b"}, RankCommand([]), print_prefixed)
    made.follow()
    return made, connections


def test_rank_0_is_told_how_others_end_and_which_host_is_lost() -> None:
    made, connections = course(
        ("b", {"kind": "lost"}), ("a", {"kind": "ended", "rank": 0, "status": 1})
    )
    news = {"host": "b", "ranks": [1], "stops": True}
    assert connections["a"].said == [("news", {"rank": 0, "news": news})]
    with pytest.raises(RankLost, match="b: the ssh connection has ended"):
        made.status()
    _, connections = course(
        ("b", {"kind": "ended", "rank": 1, "status": -signal.SIGKILL}),
        ("a", {"kind": "ended", "rank": 0, "status": 75}),
    )
    news = {"ranks": [1], "status": -signal.SIGKILL, "host": "b"}
    assert connections["a"].said == [("news", {"rank": 0, "news": news})]


@pytest.mark.parametrize("status", [INTERRUPTED_STATUS, -signal.SIGINT])
def test_ctrl_c_in_the_set_up_of_rank_0_ends_the_others_at_once(status: int) -> None:
    made, connections = course(
        ("", {"kind": "interrupt"}),
        ("a", {"kind": "ended", "rank": 0, "status": status}),
        ("b", {"kind": "ended", "rank": 1, "status": -signal.SIGKILL}),
    )
    assert ("signal", {"rank": 0, "number": signal.SIGINT}) in connections["a"].said
    assert ("signal", {"rank": 1, "number": signal.SIGKILL}) in connections["b"].said
    if status == INTERRUPTED_STATUS:
        assert made.status() == 1
    else:
        with pytest.raises(KeyboardInterrupt):
            made.status()


# The agent, without ssh --------------------------------------------------------------------------


@pytest.fixture
def agent() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "orchestra.engines.hosts.agent"], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        yield process
        process.kill()


def say(agent: subprocess.Popen[str], **message: Any) -> None:
    assert agent.stdin is not None
    agent.stdin.write(json.dumps(message) + "\n")
    agent.stdin.flush()


def heard(agent: subprocess.Popen[str]) -> dict[str, Any]:
    assert agent.stdout is not None
    line = agent.stdout.readline()
    assert line.startswith(MARK)
    found: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return found


def start(agent: subprocess.Popen[str], code: str, grace: float = 0.0) -> None:
    rank = {"rank": 0, "arguments": ["-c", code], "variables": {}, "input": "given\n"}
    say(agent, kind="start", value={"grace": grace, "ranks": [rank]})
    assert heard(agent) == {"kind": "answer", "value": None}


WAITING = """\
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(os.getpid(), child.pid, flush=True)
signal.pause()
"""

# It ends in the handler: a signal that comes before `pause` would not end that.
OBEDIENT = """\
import signal

def stop(*_):
    print("asked", flush=True)
    raise SystemExit

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
signal.pause()
"""


def test_the_agent_passes_on_what_a_rank_prints_and_how_it_ends(
    agent: subprocess.Popen[str],
) -> None:
    start(agent, "print(input()); raise SystemExit(3)")
    assert heard(agent) == {"kind": "output", "rank": 0, "stream": "stdout", "text": "given"}
    assert heard(agent) == {"kind": "ended", "rank": 0, "status": 3}


def test_nothing_is_left_when_the_connection_of_the_agent_ends(
    agent: subprocess.Popen[str],
) -> None:
    start(agent, WAITING)
    pids = [int(word) for word in heard(agent)["text"].split()]
    assert all(map(is_running, pids))
    assert agent.stdin is not None
    agent.stdin.close()
    wait_until(lambda: not any(map(is_running, pids)), "the rank and its child are gone")
    assert agent.wait(DEADLINE_SECONDS) == 0


def test_a_rank_is_asked_to_stop_first(agent: subprocess.Popen[str]) -> None:
    start(agent, OBEDIENT, grace=60.0)
    assert heard(agent)["text"] == "ready"
    assert agent.stdin is not None
    agent.stdin.close()
    assert heard(agent)["text"] == "asked"
    assert agent.wait(DEADLINE_SECONDS) == 0  # it has not waited for the grace


# Hosts -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), 4) as made:
        yield made


def record(folder: Path) -> dict[str, Any]:
    (found,) = json.loads((folder / "out/summary.json").read_text())["runs"]
    assert isinstance(found, dict)
    return found


def refusal(hosts: SshHosts, tmp_path: Path, *arguments: str) -> str:
    """What the command says that finds something wrong with a host; nothing may have begun."""
    with hosts.started([*TRAIN, *arguments], tmp_path) as command:
        ended = command.end()
    assert ended.status == 2, ended
    (line,) = ended.err.splitlines()
    assert not (tmp_path / "out").exists()
    wait_until(hosts.nothing_is_left, "nothing is left on any host")
    return line


@pytest.mark.lab
@needs_sshd
def test_hosts_train_together_with_a_module_of_the_users_own(
    hosts: SshHosts, tmp_path: Path
) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside/own_task.py").write_text(OWN_TASK)
    experiment = tmp_path / "beside/tiny.yaml"
    experiment.write_text("task: own_task:tiny\nstrategies: {ring: AllReduce}\nsteps: 4\n")
    given = ["train", "beside/tiny.yaml", "--hosts", "a,b:2", "--set", "batch_size=4"]
    with hosts.started(given, tmp_path) as command:
        ended = command.end()
    assert ended.status == 0, ended.err
    wait_until(hosts.nothing_is_left, "nothing is left on any host")
    assert "b (10.0.0.2): 2 ranks" in ended.err
    assert "progress: orchestra watch runs/tiny-ring-1" in ended.err
    assert "record: runs/tiny-ring-1" in ended.out
    (found,) = json.loads((tmp_path / "runs/tiny-ring-1/summary.json").read_text())["runs"]
    assert (found["status"], found["ranks"], found["steps"]) == ("completed", 3, 4)
    environment = json.loads((tmp_path / "runs/tiny-ring-1/environment.json").read_text())
    assert environment["hosts"] == "a,b:2"


def running(hosts: SshHosts, command: Started, tmp_path: Path) -> None:
    command.wait_until(
        lambda: any(tmp_path.glob("out/checkpoints/*/manifest.json")), "a checkpoint"
    )


def ended(hosts: SshHosts, command: Started) -> Ended:
    found = command.end()
    wait_until(hosts.nothing_is_left, "nothing is left on any host")
    return found


def resumed(command: Started, times: int = 1) -> None:
    """Wait until a run goes on from a checkpoint, for the time of that number."""
    count = "resumed from checkpoint"
    command.wait_until(lambda: command.err().count(count) >= times, f"resumed {times} times")


@needs_sshd
def test_ctrl_c_and_a_kill_end_all_ranks_and_the_same_command_resumes(
    hosts: SshHosts, tmp_path: Path
) -> None:
    given = [*LONG, "--hosts", "a,b"]
    with hosts.started(given, tmp_path) as command:
        running(hosts, command, tmp_path)
        command.process.send_signal(signal.SIGINT)
        found = ended(hosts, command)
    assert found.status == 1, found.err
    assert record(tmp_path)["status"] == "stopped"
    with hosts.started(given, tmp_path) as command:
        resumed(command)
        command.process.send_signal(signal.SIGKILL)
        command.process.wait(DEADLINE_SECONDS)
        wait_until(hosts.nothing_is_left, "nothing is left on any host")
    assert record(tmp_path)["status"] == "stopped"


@needs_sshd
@pytest.mark.lab
def test_sigterm_stops_a_run_on_hosts_in_good_order(hosts: SshHosts, tmp_path: Path) -> None:
    with hosts.started([*LONG, "--hosts", "a,b"], tmp_path) as command:
        running(hosts, command, tmp_path)
        command.process.send_signal(signal.SIGTERM)
        found = ended(hosts, command)
    assert found.status == 0, found.err
    assert record(tmp_path)["stopped_by"] == "SIGTERM"


def lose_rank(hosts: SshHosts, name: str) -> None:
    kill(hosts.ranks(name).pop())


def lose_host(hosts: SshHosts, name: str) -> None:
    for pid in hosts.sessions(name):
        kill(pid)


def lose_agent(hosts: SshHosts, name: str) -> None:
    for pid in hosts.agents(name):
        kill(pid)


LOSSES: list[tuple[Callable[[SshHosts, str], None], str, str]] = [
    (lose_host, "b", "b: the ssh connection has ended"),
    (lose_rank, "b", "rank 1 on b was killed by SIGKILL"),
    (lose_rank, "a", "a: rank 0 was killed by SIGKILL"),
]


@needs_sshd
@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.lab)])
def test_a_run_on_hosts_is_restarted_after_a_loss(
    number: int, hosts: SshHosts, tmp_path: Path
) -> None:
    """With one restart after a lost connection, and with three after each kind of loss; the next
    loss ends it."""
    given = [*LONG, "--hosts", "a,b", "--max-restarts", str(number)]
    with hosts.started(given, tmp_path) as command:
        running(hosts, command, tmp_path)
        for times, (lose, name, _) in enumerate(LOSSES[:number], start=1):
            lose(hosts, name)
            resumed(command, times)
        lose_rank(hosts, "b")
        found = ended(hosts, command)
    assert found.status == 1, found.err
    cause, last = found.err.splitlines()[-2:]
    assert cause == "orchestra: rank 1 on b was killed by SIGKILL"
    assert last == f"orchestra: no restart is left of {number}"
    made = record(tmp_path)["restarts"]
    causes = [cause for _, _, cause in LOSSES[:number]]
    assert [each["cause"][: len(cause)] for each, cause in zip(made, causes, strict=True)] == causes
    assert all(each["step"] > 0 for each in made)


@needs_sshd
@pytest.mark.lab
@pytest.mark.parametrize("lose", [lose_host, lose_agent])
def test_a_lost_ssh_connection_ends_the_run_and_is_named(
    lose: Callable[[SshHosts, str], None], hosts: SshHosts, tmp_path: Path
) -> None:
    with hosts.started([*LONG, "--hosts", "a,b"], tmp_path) as command:
        running(hosts, command, tmp_path)
        lose(hosts, "b")
        found = ended(hosts, command)
    assert found.status == 1, found.err
    assert "orchestra: b: the ssh connection has ended" in found.err
    assert "SIGTERM" not in found.err
    left = record(tmp_path)
    if left["status"] == "failed":
        assert left["failure"] == "rank 1 on b is lost: the ssh connection to b has ended"
    else:
        assert "b: the ssh connection has ended; stopping in good order" in left["notices"]


@needs_sshd
@pytest.mark.lab
def test_a_rank_that_is_killed_ends_the_run(hosts: SshHosts, tmp_path: Path) -> None:
    with hosts.started([*LONG, "--hosts", "a,b"], tmp_path) as command:
        running(hosts, command, tmp_path)
        lose_rank(hosts, "b")
        found = ended(hosts, command)
    assert found.status == 1, found.err
    cause, remedy = found.err.splitlines()[-2:]
    assert cause == "orchestra: rank 1 on b was killed by SIGKILL"
    assert "the same command with --out out goes on from checkpoint" in remedy
    assert found.err.count("rank 1 on b") == 1
    assert (record(tmp_path)["status"], record(tmp_path)["failure"]) == (
        "failed",
        "rank 1 on b was killed by SIGKILL",
    )


@pytest.mark.lab
@needs_sshd
def test_an_elastic_run_goes_on_without_a_host(hosts: SshHosts, tmp_path: Path) -> None:
    with hosts.started([*LONG, "--hosts", "a,b", "--set", "min_ranks=1"], tmp_path) as command:
        running(hosts, command, tmp_path)
        lose_rank(hosts, "b")
        command.wait_until(lambda: "going on with 1" in command.err(), "the run goes on")
        command.process.send_signal(signal.SIGINT)
        found = ended(hosts, command)
    assert found.status == 1, found.err
    assert record(tmp_path)["status"] == "stopped"
    assert record(tmp_path)["regroupings"][0]["ranks"] == 1


@needs_sshd
@pytest.mark.lab
def test_a_cut_cable_ends_the_run_on_both_sides(hosts: SshHosts, tmp_path: Path) -> None:
    with hosts.started([*LONG, "--hosts", "a,b"], tmp_path) as command:
        running(hosts, command, tmp_path)
        hosts.network.cut("b", cut=True)
        found = ended(hosts, command)
    hosts.network.cut("b", cut=False)
    assert found.status == 1, found.err
    assert "b: the ssh connection has ended" in found.err


@needs_sshd
@pytest.mark.lab
def test_the_commands_of_the_guide_compare_strategies_on_hosts(
    hosts: SshHosts, tmp_path: Path
) -> None:
    text = Path("docs/how-to/several-machines.md").read_text()
    lines = text.partition("orchestra doctor --hosts a,b,c,d\n")[2].partition("```")[0].splitlines()
    assert len(lines) == 4
    for line in ["orchestra doctor --hosts a,b,c,d --no-links", *lines]:
        with hosts.started(shlex.split(line)[1:], tmp_path) as command:
            found = ended(hosts, command)
        assert found.status == 0, found.err
    assert (tmp_path / "runs/hosts/report.html").exists()


@needs_sshd
def test_an_unreachable_host_is_named(hosts: SshHosts, tmp_path: Path) -> None:
    line = refusal(hosts, tmp_path, "--hosts", "a,10.0.0.99")
    assert "10.0.0.99: ssh does not get there" in line
    assert "No route to host" in line


@needs_sshd
@pytest.mark.parametrize(
    ("instead", "reason"),
    [
        pytest.param("exit 127", "has no Python at", marks=pytest.mark.lab),
        (f"unset PYTHONPATH; exec {sys.base_prefix}/bin/python3 -S $0", "has no Orchestra there"),
    ],
)
def test_a_host_without_python_or_orchestra_is_named(
    instead: str, reason: str, hosts: SshHosts, tmp_path: Path
) -> None:
    line = instead.replace("$0", '"$@"')
    python = hosts.interpreter("b", line)
    found = refusal(hosts, tmp_path, "--hosts", "a,b", "--remote-python", python)
    assert f"b: {python} {reason}" in found or f"b: {reason}" in found
    assert " a: " not in found


OTHER_TIME = "import time; real = time.time; time.time = lambda: real() + 60"
OTHER_PACKAGE = (
    "from importlib import metadata; real = metadata.version; "
    "metadata.version = lambda name: '{version}' if name == '{name}' else real(name)"
)
OTHER_VERSION = OTHER_PACKAGE.format(name="neural-orchestra", version="0.0.9")
OTHER_TORCH = OTHER_PACKAGE.format(name="torch", version="2.6.0")


@needs_sshd
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (OTHER_TIME, "b: its clock is 60.0 s ahead"),
        pytest.param(OTHER_VERSION, "b: Orchestra 0.0.9, here", marks=pytest.mark.lab),
        pytest.param(OTHER_TORCH, "b: torch 2.6.0, a has", marks=pytest.mark.lab),
    ],
)
def test_a_host_with_another_clock_or_version_is_named(
    change: str, reason: str, hosts: SshHosts, tmp_path: Path
) -> None:
    program = tmp_path / "other.py"
    program.write_text(
        f"{change}\nimport runpy\n"
        "runpy.run_module('orchestra.engines.hosts.agent', run_name='__main__')\n"
    )
    python = hosts.interpreter("b", f"exec {sys.executable} -P {program}")
    line = refusal(hosts, tmp_path, "--hosts", "a,b", "--remote-python", python)
    assert reason in line
    assert " a: " not in line


@needs_sshd
def test_a_file_that_differs_is_named(hosts: SshHosts, tmp_path: Path) -> None:
    """All hosts have one file system here, so the agent of b reads more than there is."""
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    program = tmp_path / "other.py"
    program.write_text(
        "import runpy\nfrom pathlib import Path\nread = Path.read_bytes\n"
        "Path.read_bytes = lambda self: read(self) + b'#' * (self.name == 'own_task.py')\n"
        "runpy.run_module('orchestra.engines.hosts.agent', run_name='__main__')\n"
    )
    python = hosts.interpreter("b", f"exec {sys.executable} -P {program}")
    given = ["--task", "own_task:tiny", "--hosts", "a,b", "--remote-python", python]
    line = refusal(hosts, tmp_path, *given)
    assert f"b: {tmp_path}/own_task.py differs from the one here" in line


@needs_sshd
def test_a_host_that_does_not_share_the_folder_of_checkpoints_is_named(
    hosts: SshHosts, tmp_path: Path
) -> None:
    """All hosts have one file system here, so the agent of b overlooks what is there."""
    program = tmp_path / "other.py"
    program.write_text(
        "import runpy\nfrom pathlib import Path\n"
        "from orchestra.engines.hosts.agent import MARKER\nread = Path.read_bytes\n"
        "def overlooking(self):\n"
        "    return read(self.with_name('none') if self.name.startswith(MARKER) else self)\n"
        "Path.read_bytes = overlooking\n"
        "runpy.run_module('orchestra.engines.hosts.agent', run_name='__main__')\n"
    )
    python = hosts.interpreter("b", f"exec {sys.executable} -P {program}")
    given = ["--set", "checkpoint_every=4", "--hosts", "a,b,c", "--remote-python", python]
    line = refusal(hosts, tmp_path, *given)
    assert "b: out is not the folder of a, and a checkpoint needs one" in line
    assert not [*tmp_path.glob(f"{MARKER}*")]


@needs_sshd
def test_a_closed_port_is_named_with_both_hosts(hosts: SshHosts, tmp_path: Path) -> None:
    hosts.close_ports("d", "c")
    line = refusal(hosts, tmp_path, "--hosts", "a,c,d")
    assert "c: does not reach d (10.0.0.4: no answer)" in line
