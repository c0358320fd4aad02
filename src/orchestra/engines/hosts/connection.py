"""The near end of an agent on a host: ssh, questions and answers, and what comes by itself."""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self, TypeVar

from orchestra.engines.hosts.agent import BEAT_SECONDS, MARK, SILENCE_SECONDS
from orchestra.engines.hosts.facts import version_of
from orchestra.engines.hosts.names import LOCAL
from orchestra.errors import InputError

T = TypeVar("T")
Message = dict[str, Any]
Events = queue.SimpleQueue[tuple[str, Message]]
"""What comes from hosts by itself: the name of the host, and the message."""

CONNECT_SECONDS = 10
ANSWER_SECONDS = 60.0
LEAVING_SECONDS = 5.0
_SSH = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}",
    "-o", f"ServerAliveInterval={BEAT_SECONDS:.0f}",
    "-o", f"ServerAliveCountMax={SILENCE_SECONDS / BEAT_SECONDS:.0f}",
)  # fmt: skip
_SSH_FAILED = 255
_NO_PROGRAM = (126, 127)  # of a shell, and of env


class HostLost(Exception):
    """The connection to `host` has ended, for a `reason` in words."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: {reason}")
        self.host = host
        self.reason = reason


class Connection:
    """An agent on `host`, started with the interpreter `python` there."""

    def __init__(self, host: str, python: str, events: Events) -> None:
        self.host, self._python = host, python
        self._events = events
        self._answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._noise: deque[str] = deque(maxlen=20)  # of ssh and of the agent
        self._writing = threading.Lock()
        agent = [python, "-P", "-m", "orchestra.engines.hosts.agent"]
        variables = {**os.environ, **module_path()}
        if host != LOCAL:
            there = [f"{name}={value}" for name, value in module_path().items()]
            agent = [*_SSH, "--", host, shlex.join(["exec", "env", *there, *agent])]
        try:
            self._process = subprocess.Popen(
                agent, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for this process, which ends them
            )  # fmt: skip
        except OSError as error:
            raise InputError(f"{agent[0]} cannot be started: {error.strerror}") from None
        self._readers = [
            threading.Thread(target=read, name=host, daemon=True)
            for read in (self._read_messages, self._read_noise)
        ]
        for reader in self._readers:
            reader.start()

    def ask(self, kind: str, value: Any = None) -> Any:
        """Return the agent's answer. Raises `HostLost`."""
        self.say(kind, value=value)
        try:
            answer = self._answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise HostLost(self.host, f"did not answer within {ANSWER_SECONDS:g} s") from None
        if answer is None:
            raise HostLost(self.host, self._reason())
        return answer["value"]

    def say(self, kind: str, **more: Any) -> None:
        """Send an order; do nothing if the connection has ended, since an event reports that."""
        stream = self._process.stdin
        assert stream is not None
        with self._writing, suppress(OSError, ValueError):
            stream.write(json.dumps({"kind": kind, **more}).encode() + b"\n")
            stream.flush()

    def close(self) -> None:
        """Close the connection: the agent ends its ranks, if there are any left."""
        assert self._process.stdin is not None
        with self._writing, suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVING_SECONDS)
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(LEAVING_SECONDS)

    def _read_messages(self) -> None:
        for line in _lines_of(self._process.stdout):
            if not line.startswith(MARK):
                self._noise.append(line)
                continue
            message: Message = json.loads(line.removeprefix(MARK))
            if message["kind"] == "answer":
                self._answers.put(message)
            else:
                self._events.put((self.host, message))
        self._answers.put(None)
        self._events.put((self.host, {"kind": "lost"}))

    def _read_noise(self) -> None:
        self._noise.extend(_lines_of(self._process.stderr))

    def _reason(self) -> str:
        """Say why the agent is gone, by the status and the last words of ssh or of Python."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVING_SECONDS)
        self._readers[1].join(LEAVING_SECONDS)
        said = " ".join(self._noise)
        last = self._noise[-1].strip() if self._noise else "it said nothing"
        status = self._process.returncode
        wanted = f"version {version_of('neural-orchestra') or 'of here'}"
        if status == _SSH_FAILED and self.host != LOCAL:
            remedy = f"`ssh {self.host} true` has to work without a password"
            return f"ssh does not get there ({last.removeprefix('ssh: ')}); {remedy}"
        if "No module named 'orchestra'" in said:
            return f"{self._python} has no Orchestra there; install {wanted}"
        if "No module named 'orchestra." in said:
            return f"{self._python} has another version of Orchestra; install {wanted}"
        if status in _NO_PROGRAM:
            remedy = "name the one to use with --remote-python"
            return f"has no Python at {self._python} ({last}); {remedy}"
        return f"the agent has ended with status {status} ({last})"


def _lines_of(stream: IO[bytes] | None) -> Iterator[str]:
    assert stream is not None
    with stream:
        for line in stream:
            yield line.decode(errors="replace").rstrip("\r\n")


class Hosts:
    """Agents on several hosts, in their order, until the end of a `with` block."""

    def __init__(self, names: Sequence[str], python: str) -> None:
        self.events: Events = queue.SimpleQueue()
        self.connections: dict[str, Connection] = {}
        self._done = threading.Event()
        self._pool = ThreadPoolExecutor(len(names))
        self._beats = threading.Thread(target=self._beat, name="beats", daemon=True)
        try:
            for name in names:
                self.connections[name] = Connection(name, python, self.events)
            self._beats.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._done.set()
        closing = [self._pool.submit(each.close) for each in self.connections.values()]
        for each in closing:
            each.result()
        self._pool.shutdown()

    def leave_out(self, name: str) -> None:
        """Close the connection to one host, and go on without it."""
        self.connections.pop(name).close()

    def each(self, call: Callable[[Connection], T]) -> tuple[dict[str, T], list[str]]:
        """Call `call` with every connection at a time; return the results, and who was lost."""
        pending = {
            name: self._pool.submit(call, connection)
            for name, connection in self.connections.items()
        }
        found: dict[str, T] = {}
        lost: list[str] = []
        for name, future in pending.items():
            try:
                found[name] = future.result()
            except HostLost as error:
                lost.append(str(error))
        return found, lost

    def ask(self, kind: str, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask every host, or those in `values` with a value each.

        Raises:
            InputError: the connection to some of them is lost; it names all of these.
        """
        found, lost = self.each(
            lambda connection: (
                connection.ask(kind, None if values is None else values[connection.host])
                if values is None or connection.host in values
                else None
            )
        )
        if lost:
            raise InputError("; ".join(lost))
        return {name: value for name, value in found.items() if values is None or name in values}

    def _beat(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            for connection in [*self.connections.values()]:
                connection.say("beat")


def module_path() -> dict[str, str]:
    """Return PYTHONPATH with full paths, if it is set: the agent has to find Orchestra, too."""
    folders = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if not folders:
        return {}
    return {"PYTHONPATH": os.pathsep.join(str(Path(folder).absolute()) for folder in folders)}
