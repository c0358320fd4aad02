"""The processes engine with real processes: results, first causes, and nobody left behind."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support import rank_programs as programs
from tests.support.commands import Started
from tests.support.fork_servers import fork_server, parent_of
from tests.support.lab import in_lab
from tests.support.meshes import claim_rank, make_certificate, make_tls
from tests.support.paths import ROOT
from tests.support.rank_programs import Running, pids
from tests.support.waiting import descendants, is_running, is_stopped, listening_ports, wait_until

from orchestra.engines.failure_detector import Limits
from orchestra.engines.processes import launch
from orchestra.engines.processes.control import pack
from orchestra.engines.processes.environment import numeric
from orchestra.engines.processes.watcher import STRANGERS, Watcher
from orchestra.errors import InputError, RunFailed
from orchestra.transports.handshake import CHALLENGE_BYTES, WATCHER


def failure(program: Any, argument: Any, ranks: int, **options: Any) -> str:
    with pytest.raises(RunFailed) as caught:
        launch(program, argument, ranks, **options)
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_runs_the_program_and_returns_its_result(ranks: int) -> None:
    outcome = launch(programs.say_rank, {"x": 1}, ranks)
    assert outcome.results == tuple((rank, ranks, {"x": 1}) for rank in range(ranks))
    assert (outcome.left_out, outcome.stopped, outcome.notices) == ({}, False, ())
    assert [part for part in outcome.setup if part != "import"] == ["processes", "connections"]
    assert min(outcome.setup.values()) >= 0


def test_a_launcher_that_learns_late_of_the_imports_subtracts_no_more_than_passed() -> None:
    watcher = Watcher(1, Limits(), host="127.0.0.1", token="any", children=False)
    watcher.start()
    watcher.abandon()
    watcher.setup, watcher.imported = {"processes": 1.5, "connections": 0.5}, 2.0
    parts = watcher.outcome(lambda result: result).setup
    assert parts == {"import": 1.5, "processes": 0.0, "connections": 0.5}


def test_ranks_are_connected_with_each_other() -> None:
    assert launch(programs.pass_round, None, 4).results == (6.0,) * 4


def test_everything_between_ranks_and_watcher_can_be_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in vars(make_tls(tmp_path)).items():
        monkeypatch.setenv(f"ORCHESTRA_TLS_{name.upper()}", str(path))
    assert launch(programs.pass_round, None, 3).results == (3.0,) * 3
    assert " failed: ValueError: bad sample 17\n" in failure(programs.fail_in_one, 1, 3)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_variables_for_certificates_are_heeded_by_a_local_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = make_certificate(tmp_path, "authority", None)
    make_certificate(tmp_path, "rank", issuer, hours=-1.0)
    monkeypatch.setenv("ORCHESTRA_TLS_CERTIFICATE", str(tmp_path / "rank.pem"))
    monkeypatch.setenv("ORCHESTRA_TLS_KEY", str(tmp_path / "rank.key"))
    with pytest.raises(InputError, match="ORCHESTRA_TLS_AUTHORITY is not set"):
        launch(programs.say_rank, None, 1)
    monkeypatch.setenv("ORCHESTRA_TLS_AUTHORITY", str(tmp_path / "authority.pem"))
    cause = failure(programs.say_rank, None, 1)
    assert cause.startswith("rank 0 exited with status 1 without a result; a connection from 127")
    assert cause.endswith("certificate expired")


def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    """Given back and taken anew, 16 MiB are 4,096 pages each time."""
    assert max(launch(programs.faults_of_freed_memory, 10, 2).results) < 4_096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_the_threads_of_a_rank_that_is_alone_take_memory_from_one_place(tmp_path: Path) -> None:
    """As those of a simulation, which take turns."""
    assert launch(programs.places_of_memory, tmp_path / "heaps.xml", 1).results == (1,)


def test_native_collectives() -> None:
    expected = [[3.0] * 3, [3.0] * 2]
    assert launch(programs.collect_natively, None, 3).results == (expected,) * 3


def test_ranks_have_the_launchers_environment_of_the_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in "12":
        monkeypatch.setenv("ORCHESTRA_TEST", value)
        assert launch(programs.read_variable, "ORCHESTRA_TEST", 1).results == (value,)


def test_random_streams_begin_anew() -> None:
    first, second = launch(programs.draw, 3, 2).results
    assert first == second
    assert launch(programs.draw, 4, 1).results[0] != first


def test_the_launcher_does_not_import_torch() -> None:
    check = "import sys, orchestra.engines.processes; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_an_exception_is_reported_and_not_its_echoes() -> None:
    text = failure(programs.fail_in_one, 1, 3)
    first_line, *rest = text.splitlines()
    assert first_line == f"rank 1 on {socket.gethostname()} failed: ValueError: bad sample 17"
    assert "in fail_in_one" in "\n".join(rest)


def test_an_exception_is_reported_where_the_others_wait_in_a_native_collective() -> None:
    assert " failed: ValueError: bad sample 17\n" in failure(programs.fail_after_native, 1, 3)


@pytest.mark.parametrize("program", [programs.wait_for_last, programs.wait_natively_for_last])
def test_a_killed_rank_is_named(program: Any, tmp_path: Path) -> None:
    running = Running(program, tmp_path, 3)
    os.kill(pids(tmp_path, 3)[2], signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"^rank 2 on \S+ was killed by SIGKILL$"):
        running.outcome()


def test_a_rank_killed_in_mid_message_is_named(tmp_path: Path) -> None:
    running = Running(programs.send_half, tmp_path, 2)
    os.kill(pids(tmp_path, 2)[1], signal.SIGKILL)
    (tmp_path / "killed").touch()
    with pytest.raises(RunFailed, match=r"^rank 1 on \S+ was killed by SIGKILL$"):
        running.outcome()


@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_exits_without_a_result(status: int) -> None:
    text = failure(programs.leave_without_result, status, 2)
    assert text.endswith(f"exited with status {status} without a result")


def test_a_result_that_cannot_be_pickled() -> None:
    text = failure(programs.unpicklable, None, 2)
    assert text.startswith("rank 1 ")
    assert "the result of the program cannot be pickled" in text.splitlines()[0]


def test_an_argument_that_a_rank_cannot_import() -> None:
    assert "failed: ImportError: no such dataset" in failure(
        programs.say_rank, programs.Breaks(), 2
    )


def test_programs_that_cannot_be_sent_are_bad_input() -> None:
    with pytest.raises(InputError, match="cannot be sent to the ranks"):
        launch(lambda *_: None, None, 2)
    with pytest.raises(InputError, match="needs at least one"):
        launch(programs.say_rank, None, 0)


def test_an_address_for_others_is_one_of_this_machine() -> None:
    with pytest.raises(InputError, match="every address"):
        numeric("0.0.0.0")


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    """It works where ranks need nothing of the script, and is explained where they do."""
    script = tmp_path / "script.py"
    script.write_text(
        "from orchestra.engines.processes import launch\n"
        "from tests.support.rank_programs import say_rank\n"
        "print(launch(say_rank, 1, 2).results)\n"
        "def program(runtime, argument): pass\n"
        "launch(program, 1, 2)\n"
    )
    with Started([sys.executable, str(script)], ROOT) as process:
        done = process.end()
    assert done.out == "((0, 2, 1), (1, 2, 1))\n"
    assert "if __name__ == '__main__':" in done.err
    assert done.status == 1


def test_a_program_of_the_main_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from orchestra.engines.processes import launch\n"
        "def program(runtime, argument): return argument * runtime.rank\n"
        "if __name__ == '__main__': print(launch(program, 2, 3).results)\n"
    )
    with Started([sys.executable, str(script)], tmp_path) as process:
        done = process.end()
    assert (done.status, done.out) == (0, "(0, 2, 4)\n"), done.err


def test_a_rank_that_is_stopped_before_it_joins_is_named() -> None:
    stops = programs.StopsAtTheDoor("node", "127.0.0.1", "", "", "", 1, 0, (0.0,))
    assert failure(programs.say_rank, None, 1, places=[stops]) == (
        "rank 0 is stopped (by SIGSTOP or its terminal)"
    )


def test_the_others_learn_that_an_expendable_rank_died(tmp_path: Path) -> None:
    running = Running(programs.notices_loss, tmp_path, 2)
    wait_until((tmp_path / "1").exists, "rank 1 arrives")
    os.kill(int((tmp_path / "1").read_text()), signal.SIGKILL)
    outcome = running.outcome()
    assert outcome.results == ("went on without 1", None)
    assert outcome.left_out == {1: "was killed by SIGKILL"}


def test_what_a_rank_sent_before_it_ended_is_there_though_another_lost_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRA_INJECT", "Inject('cut', rank=0, at='receive')")
    outcome = launch(programs.loses_connection_to_rank_that_ends, tmp_path, 3)
    assert outcome.results == ("rank 1 is gone: has ended", "ended", "received 7")


@pytest.mark.parametrize("behind", [False, True])
def test_ranks_that_wait_for_each_other_are_named(behind: bool) -> None:
    text = failure(programs.wait_in_a_circle, behind, 2, patience=1.0)
    assert text == (
        f"the run hangs: rank 0 waits for rank 1 (to receive, tag {programs.TAG}), "
        f"rank 1 waits for rank 0 (to receive, tag {programs.TAG})"
    )


def test_a_rank_that_computes_without_end_is_named() -> None:
    text = failure(programs.loop_for_ever, None, 2, patience=1.0)
    assert text.startswith(f"rank 1 on {socket.gethostname()} hangs: no progress for ")


def answer(
    address: tuple[str, int], *greetings: bytes, claims: tuple[int, int, bytes] | None = None
) -> bytes:
    """What the watcher says, after its challenge, to a connection that sends `greetings`.

    `claims`: rank, receiver and token of the hello that it sends before.
    """
    said = b""
    with socket.create_connection(address) as connection:
        if claims is None:
            connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
            connection.sendall(b"".join(greetings))
        else:
            claim_rank(connection, *claims, then=b"".join(greetings))
        while True:
            try:
                data = connection.recv(1000)
            except ConnectionResetError:
                return said
            said += data
            if not data or b"dismissed" in said:
                return said


def test_only_the_token_opens_a_seat() -> None:
    watcher = Watcher(1, Limits(), host="127.0.0.1", token="secret", children=False)
    watcher.start()
    about = {"kind": "hello", "pid": os.getpid(), "address": ["127.0.0.1", 1]}
    about |= {"host": "here", "machine": "", "kernel": "", "memory": "", "cores": [0]}
    about |= {"uncompiled": ""}
    result = pack({"kind": "result"}, b"payload")
    nested = b"[" * 60_000  # more than a parser of JSON bears
    strangers = [
        b"GET / HTTP/1.0\r\n\r\n" * 5, pack(about), result, nested,
        (60_000).to_bytes(4, "big") + bytes(8) + nested,
    ]  # fmt: skip
    for stranger in strangers:
        assert answer(watcher.address, stranger, pack(about), result) == b""
    for claims in ((0, WATCHER, b"guess"), (1, WATCHER, b"secret"), (0, 0, b"secret")):
        assert answer(watcher.address, pack(about), result, claims=claims) == b""
    assert watcher.results == {}
    claims = (0, WATCHER, b"secret")
    said = answer(watcher.address, pack(about), result, claims=claims)
    assert b"roster" in said
    watcher.join()
    assert watcher.results == {0: b"payload"}


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[Watcher]:
    """Of one rank, with TLS, which has not come yet."""
    tls = make_tls(tmp_path)
    watcher = Watcher(1, Limits(), host="127.0.0.1", token="s", children=False, tls=tls)
    watcher.start()
    yield watcher
    watcher.abandon()
    watcher.join()


def silent_strangers(watcher: Watcher, stack: contextlib.ExitStack) -> list[socket.socket]:
    """More than there may be at a time."""
    connect = partial(socket.create_connection, watcher.address, timeout=60)
    return [stack.enter_context(connect()) for _ in range(STRANGERS + 2)]


def test_strangers_who_say_nothing_are_bounded_in_number(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestra.engines.processes.watcher.STRANGER_SECONDS", 1000.0)
    with contextlib.ExitStack() as stack:
        first, *_ = silent_strangers(watcher, stack)
        assert first.recv(1) == b""


def test_strangers_who_say_nothing_are_bounded_in_time(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestra.engines.processes.watcher.STRANGER_SECONDS", 0.5)
    with contextlib.ExitStack() as stack:
        assert all(stranger.recv(1) == b"" for stranger in silent_strangers(watcher, stack))


def test_a_port_scan_costs_a_run_with_tls_nothing(watcher: Watcher) -> None:
    for _ in range(50):
        with socket.create_connection(watcher.address) as scan:
            scan.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets
    with socket.create_connection(watcher.address, timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):
                pass
    assert watcher.detector.cause is None


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Any]:
    """Starts a launcher as a process of its own; nothing of it survives the test."""
    with contextlib.ExitStack() as stack:

        def start(program: str, ranks: int) -> tuple[Started, list[int]]:
            words = [sys.executable, "-m", "tests.support.rank_programs", program]
            process = stack.enter_context(Started([*words, str(tmp_path), str(ranks)], ROOT))
            return process, pids(tmp_path, ranks)

        yield start


def test_no_rank_survives_its_launcher(launcher: Any) -> None:
    process, ranks = launcher("deaf", 4)
    others = descendants(process.process.pid)
    os.kill(ranks[3], signal.SIGSTOP)
    wait_until(lambda: is_stopped(ranks[3]), "a rank is stopped")
    process.process.kill()
    wait_until(lambda: not any(map(is_running, {*ranks, *others})), "all processes end")


ADVICE = {
    signal.SIGINT: "stopping in good order; press Ctrl-C again",
    signal.SIGTERM: "stopping in good order; all ranks have to leave within 30 s",
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_stop_in_good_order(launcher: Any, number: signal.Signals) -> None:
    process, _ = launcher("until_asked_to_stop", 2)
    process.process.send_signal(number)
    ended = process.end()
    assert "results=('stopped in order', 'stopped in order')" in ended.out
    assert "stopped=True" in ended.out
    assert ADVICE[number] in ended.err
    assert ended.status == 0


def test_a_second_ctrl_c_ends_the_run_at_once(launcher: Any) -> None:
    process, _ = launcher("deaf", 3)
    process.process.send_signal(signal.SIGINT)
    process.wait_until(lambda: "press Ctrl-C again" in process.err(), "the order to stop")
    process.process.send_signal(signal.SIGINT)
    ended = process.end()
    assert (ended.status, ended.out) == (1, "failed: interrupted\n")


@pytest.fixture
def own_group() -> Iterator[Any]:
    """Starts a launcher of two ranks in a process group of its own, as a terminal does."""
    started: list[Started] = []

    def start(folder: Path, fresh: bool = True) -> Started:
        words = [sys.executable, "-m", "tests.support.rank_programs", "until_asked_to_stop"]
        started.append(Started([*words, str(folder), "2"], ROOT, fresh=fresh))
        return started[-1]

    yield start
    for process in started:
        process.__exit__(None, None, None)


@pytest.mark.parametrize("number", in_lab([signal.SIGINT, signal.SIGTERM]))
def test_ctrl_c_and_sigterm_to_the_group_while_the_fork_server_starts(
    number: signal.Signals, own_group: Any, tmp_path: Path
) -> None:
    """A terminal or a batch system sends it to all processes."""
    command = own_group(tmp_path)
    pid = command.process.pid
    command.wait_until(lambda: fork_server(pid) is not None, "the fork server starts")
    os.killpg(pid, number)
    ended = command.end()
    assert (ended.status, ended.err.count("\n")) == (0, 1), ended.err
    assert "stopped=True" in ended.out
    assert ADVICE[number] in ended.err


@pytest.mark.parametrize(
    ("number", "how", "when"),
    [
        (signal.SIGKILL, "was killed by SIGKILL", "in the run"),
        (signal.SIGSTOP, "is stopped (by SIGSTOP or", "in the run"),
        pytest.param(
            signal.SIGKILL, "was killed by SIGKILL", "at the start", marks=pytest.mark.lab
        ),
        pytest.param(
            signal.SIGSTOP, "is stopped (by SIGSTOP or", "at the start", marks=pytest.mark.lab
        ),
    ],
)
def test_a_fork_server_that_is_killed_or_stopped_is_named(
    own_group: Any, tmp_path: Path, number: signal.Signals, how: str, when: str
) -> None:
    command = own_group(tmp_path, fresh=when == "at the start")
    pid = command.process.pid
    if when == "at the start":
        command.wait_until(lambda: fork_server(pid) is not None, "the fork server starts")
        server = fork_server(pid)
        assert server is not None
    else:
        server = parent_of(pids(tmp_path, 2)[0])
    os.kill(server, number)
    ended = command.end()
    assert ended.status == 1
    start = "failed: the fork server, from which the ranks are started, "
    assert ended.out.startswith(start + how), ended
    assert "Traceback" not in ended.err


def test_a_rank_can_end_the_processes_that_it_starts() -> None:
    """Though it takes no notice of SIGTERM itself."""
    assert launch(programs.end_own_child, None, 1).results == (-signal.SIGTERM,)


def test_handlers_are_restored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    launch(programs.say_rank, None, 1)
    assert [signal.getsignal(number) for number in numbers] == before
    assert not {*numbers} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_many_launches_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(programs.say_rank, None, 1)  # from here on the fork server runs
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # tests beside this one use the common folder
    monkeypatch.setattr(tempfile, "tempdir", None)
    own = Path("/proc/self/fd")

    def left() -> tuple[set[int], int, set[str], set[str]]:
        files = {entry.name for entry in tmp_path.iterdir()}
        return descendants(), len(list(own.iterdir())), listening_ports(os.getpid()), files

    before = left()
    for _ in range(2):
        launch(programs.collect_natively, None, 3)
        failure(programs.fail_in_one, 0, 2)
    assert left() == before
