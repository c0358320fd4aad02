"""`orchestra` and scripts as processes of their own, which a test can disturb and look after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import RLIM_INFINITY
from types import TracebackType
from typing import Any, Self

from tests.support.waiting import is_running, kill, wait_until
from tests.support.warm import MODULE_PATH, WarmProcess

import orchestra
from orchestra.errors import OrchestraError
from orchestra.records.record import RunRecord

MARK = "ORCHESTRA_TEST_MARK"
DEADLINE_SECONDS = 150.0


@dataclass(frozen=True)
class Ended:
    """What a process left."""

    status: int
    out: str
    err: str


class Started:
    """A process, found again with all that it started by a mark in the environment.

    Args:
        variables: of the environment, beside this one's; without those that are None.
        fresh: start an interpreter that has imported nothing yet, as a user does.
        file_size: no file may become larger, in bytes, as on a full disk.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        variables: Mapping[str, str | None] | None = None,
        fresh: bool = False,
        file_size: int = RLIM_INFINITY,
    ) -> None:
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        own = {"PYTHONPATH": MODULE_PATH, name: value, **(variables or {})}
        env = {key: text for key, text in {**os.environ, **own}.items() if text is not None}
        self.process: subprocess.Popen[bytes] | WarmProcess
        if fresh:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=env,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,
            )
        else:
            streams = self._out.fileno(), self._err.fileno()
            self.process = WarmProcess(command, cwd, env, *streams, file_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pid in self.alive():
            kill(pid)
        self.process.wait()
        self._out.close()
        self._err.close()

    def err(self) -> str:
        """What it has written to standard error so far."""
        return os.pread(self._err.fileno(), 1 << 20, 0).decode()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """As the function; a process that ended before is a failure at once."""
        wait_until(lambda: condition() or self.process.poll() is not None, what)
        assert condition(), f"the process ended before {what}: {self.err()}"

    def end(self) -> Ended:
        """Wait until it has ended; nothing that it started may be left."""
        status = self.process.wait(DEADLINE_SECONDS)
        wait_until(lambda: not self.alive(), "no process is left")
        out = os.pread(self._out.fileno(), 1 << 20, 0).decode()
        return Ended(status, out, self.err())

    def alive(self) -> set[int]:
        """The processes that carry the mark and are more than zombies."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if self.mark.encode() in environment and is_running(int(folder.name)):
                found.add(int(folder.name))
        return found


def started(arguments: Sequence[str], cwd: Path, **variables: str) -> Started:
    """`orchestra` with `arguments`, in the folder `cwd`."""
    return Started([sys.executable, "-m", "orchestra", *arguments], cwd, variables)


def run(arguments: Sequence[str], cwd: Path, **variables: str) -> Ended:
    """`started`, to the end."""
    with started(arguments, cwd, **variables) as command:
        return command.end()


def torchrun(
    script: Path, ranks: int, arguments: Sequence[str], cwd: Path, **variables: str
) -> Started:
    """`script` under torchrun, on loopback. (It never removes its log folder.)"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--log-dir={cwd}", f"--nproc-per-node={ranks}", str(script), *arguments]
    return Started(command, cwd, variables)


def rank_pids(launcher: int | None = None) -> list[int]:
    """The process ids of the ranks that process `launcher` (this one) has started, by rank."""
    children: dict[int, list[tuple[int, int]]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append((int(fields[19]), int(folder.name)))
    servers = children.get(launcher or os.getpid(), [])  # the fork server is among them
    return [pid for _, server in servers for _, pid in sorted(children.get(server, []))]


class Training:
    """`orchestra.train` in a thread, on processes that a test can disturb."""

    def __init__(self, task: Any, strategy: Any, ranks: int, **settings: Any) -> None:
        self.ranks = ranks
        self._record: RunRecord | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(task, strategy), kwargs=settings)
        self._thread.start()

    def _run(self, task: Any, strategy: Any, **settings: Any) -> None:
        try:
            self._record = orchestra.train(task, strategy, self.ranks, quiet=True, **settings)
        except OrchestraError as error:
            self.error = error

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """As the function; a training that ended before is a failure at once."""
        wait_until(lambda: condition() or not self._thread.is_alive(), what)
        assert condition(), f"the training ended ({self.error}) before {what}"

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        pids = rank_pids()
        assert len(pids) == self.ranks, pids
        os.kill(pids[rank], number)

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive(), "the training does not end"

    def record(self) -> RunRecord:
        """Of a training that ends well."""
        self.join()
        if self.error is not None:
            raise self.error
        assert self._record is not None
        return self._record

    def failure(self) -> str:
        """The message of a training that fails."""
        self.join()
        assert self.error is not None, "the training ended well"
        return str(self.error)
