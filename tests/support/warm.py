"""Commands and scripts that start in milliseconds: forked from a process that has imported torch.

`WarmProcess` is to `python -m MODULE` and `python SCRIPT` what `subprocess.Popen` is, with a
session, an environment, standard streams and an exit status of its own. What a fresh interpreter
spends its first seconds on is spent once, by a server that pytest starts for all its workers; a
pytest without workers starts it when it first needs it. So does multiprocessing's fork server in
such a process: it is forked along with it. Whatever depends on the interpreter's start (its time,
its imports, its variables) needs a fresh one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import process, util
from pathlib import Path
from typing import Any, NoReturn

from tests.support.paths import ROOT

_FOLDERS = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
MODULE_PATH = os.pathsep.join(dict.fromkeys(str(Path(folder).resolve()) for folder in _FOLDERS))
"""PYTHONPATH of what a test starts. Orchestra is what is installed: its sources have no compiled
parts unless it was installed to be edited."""

SERVER = "ORCHESTRA_TEST_SERVER"
"""The variable that tells a warm process where its server listens."""

FIXED = ("OMP_NUM_THREADS", "PYTHONPATH")
"""Variables that are read before or while torch is imported: the server's hold."""

IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.launcher.api",
    "orchestra.engines.processes.rank",
    "orchestra.cli.list",
    "orchestra.cli.train",
    "orchestra.cli.compare",
    "orchestra.experiments.run",
    "orchestra.tasks.classification",
    "sklearn.datasets",
    "lightning.pytorch",
    "transformers.trainer",
)

_name: str | None = None
_server: subprocess.Popen[bytes] | None = None  # held: its standard input is to stay open


class WarmProcess:
    """A process that is forked from the warm server.

    Args:
        command: `[sys.executable, "-m", module, ...]` or `[sys.executable, script, ...]`.
        file_size: no file may become larger, in bytes, as on a full disk.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path | str,
        env: Mapping[str, str],
        stdout: int,
        stderr: int,
        file_size: int = resource.RLIM_INFINITY,
    ) -> None:
        for name in FIXED:
            assert env.get(name) == variables()[name], f"{name} is read at the start: use fresh"
        self._command = list(command)
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = server()
        self._connection.connect(f"\0{name}")
        environment = {**env, SERVER: name}
        request = json.dumps([list(command), str(cwd), environment, file_size])
        socket.send_fds(self._connection, [request.encode()], [stdout, stderr])
        self.pid = int(self._connection.recv(64))

    def poll(self) -> int | None:
        """The exit status, or minus the signal that killed it; None while it runs."""
        if self.returncode is None:
            try:
                status = self._connection.recv(64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            assert status, "the server of warm processes is gone"
            self.returncode = int(status)
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """`poll`, once there is one.

        Raises:
            subprocess.TimeoutExpired: if it still runs after `timeout` seconds.
        """
        if self.returncode is None and not select.select([self._connection], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def variables() -> dict[str, str]:
    """What the server's environment has for certain."""
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": MODULE_PATH}


def server() -> str:
    """The name by which the server listens; it is started where there is none."""
    global _name, _server
    _name = _name or os.environ.get(SERVER)
    if _name is None:
        _name = f"orchestra-tests-{uuid.uuid4().hex}"
        _server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", _name],
            cwd=ROOT,
            env={**os.environ, **variables(), "HF_HUB_OFFLINE": "1", "ROOM": " " * 60_000},
            stdin=subprocess.PIPE,  # closes with this process, and ends the server
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert _server.stdout is not None
        assert _server.stdout.readline() == b"ready\n"
    return _name


def main(name: str) -> None:
    """Be the server; every process that it forks leaves here, and becomes a command."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(64)
    print("ready", flush=True)  # whoever asks already waits for the answer
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for module in IMPORTED:
        importlib.import_module(module)
    os.fsync = lambda fd: None  # what tests write need not outlast the machine
    gc.collect()
    gc.freeze()  # pages that the collector does not touch are not copied
    connection, request, streams = _serve(listener)
    command, folder, environment, file_size = json.loads(request)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    _become(folder, environment, streams)
    _tell(connection, os.getpid())
    connection.close()
    _end(_run, command, folder)


def _end(function: Callable[..., None], *arguments: Any) -> NoReturn:
    """Call it, and end this process as an interpreter ends, but for the teardown of modules, which
    takes longer than most commands."""
    status = 0
    try:
        function(*arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def _serve(listener: socket.socket) -> tuple[socket.socket, bytes, list[int]]:
    """Fork at each request, and tell how what was forked has ended; a child returns."""
    running: dict[int, tuple[int, socket.socket]] = {}
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                os._exit(0)  # pytest has ended
            if key.fd in running:
                selector.unregister(key.fd)
                os.close(key.fd)
                pid, connection = running.pop(key.fd)
                _tell(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                connection.close()
                continue
            connection, _ = listener.accept()
            request, streams, _, _ = socket.recv_fds(connection, 1 << 18, 2)
            pid = os.fork()
            if pid == 0:
                listener.close()
                selector.close()
                for _, held in running.values():
                    held.close()
                for descriptor in running:
                    os.close(descriptor)
                return connection, request, streams
            for descriptor in streams:
                os.close(descriptor)
            watched = os.pidfd_open(pid)
            running[watched] = pid, connection
            selector.register(watched, selectors.EVENT_READ)


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # whoever asked for the process may be gone
        connection.send(str(number).encode())


def _become(folder: str, environment: dict[str, str], streams: list[int]) -> None:
    """Be a process of its own, as the kernel sees it."""
    os.setsid()
    # A shell lets commands in its background ignore Ctrl-C, pytest and so this process too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _show_environment(environment)


def _run(command: list[str], folder: str) -> None:
    """Be what `command` says, to its end, which is this interpreter's."""
    tempfile.tempdir = None
    process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    _fork_the_fork_server()
    _fork_ranks_of_torchrun()
    if command[1] == "-m":
        sys.path[0] = folder
        sys.argv = command[2:]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(command[1]).parent)
        sys.argv = command[1:]
        runpy.run_path(command[1], run_name="__main__")


def _show_environment(environment: Mapping[str, str]) -> None:
    """Put it where /proc/PID/environ is read from, for tests that find processes by it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    block = "".join(f"{name}={value}\0" for name, value in environment.items()).encode()
    assert len(block) < end - start, "the environment is larger than the server's"
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def _fork_the_fork_server() -> None:
    """Have multiprocessing's fork server at hand: the first to be started is forked here and now,
    while this process has no threads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        ours.close()
        _await_errand(theirs)
    theirs.close()
    start_anew = util.spawnv_passfds

    def start(path: bytes, arguments: Any, descriptors: Any) -> int:
        if b"forkserver" not in os.fsencode(arguments[-1]) or ours.fileno() < 0:
            return start_anew(path, arguments, descriptors)
        numbers = sorted(descriptors)
        socket.send_fds(ours, [json.dumps([numbers, arguments[-1]]).encode()], numbers)
        ours.close()
        return pid

    util.spawnv_passfds = start  # type: ignore[assignment]


def _await_errand(connection: socket.socket) -> NoReturn:
    """Run the code that arrives, with descriptors of the numbers that it names."""
    code = 0
    try:
        message, received, _, _ = socket.recv_fds(connection, 1 << 18, 8)
        if message:
            numbers, program = json.loads(message)
            spare = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 512) for descriptor in received]
            connection.close()
            os.closerange(3, 512)
            for descriptor, number in zip(spare, numbers, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
            exec(program, {"__name__": "__main__"})
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def _fork_ranks_of_torchrun() -> None:
    """What torchrun's agent starts are warm processes, too."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    def popen(self: Any, arguments: tuple[str, ...], env: dict[str, str]) -> WarmProcess:
        command = [word for word in arguments if word != "-u"]
        out = 1 if self._stdout is None else self._stdout.fileno()
        err = 2 if self._stderr is None else self._stderr.fileno()
        return WarmProcess(command, Path.cwd(), env, out, err)

    SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main(sys.argv[1])
