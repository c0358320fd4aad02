"""`python -m orchestra.engines.hosts.agent`: the end of `--hosts` on a host, as ssh starts it.

Questions and orders come in on standard input, a line of JSON each; answers, and what its ranks
print, go out on standard output. It ends its ranks once nobody is at the other end any more.
Imports without torch.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from orchestra.engines.hosts.facts import facts_here, file_digest
from orchestra.engines.processes.environment import HOST_VARIABLE, NEWS_VARIABLE, towards
from orchestra.engines.restarts import remains_in
from orchestra.errors import InputError
from orchestra.records.live import holder
from orchestra.settings.base import to_plain

MARK = "orchestra-agent "
"""The beginning of each line of this program: what a login script prints has it not."""
MARKER = ".orchestra-"
"""The beginning of the name of a file by which hosts find out whether they share a folder."""
BEAT_SECONDS = 5.0
"""In which the other end says something."""
SILENCE_SECONDS = 30.0
"""After which the other end counts as gone. A cut cable closes no connection."""
LEAVING_SECONDS = 45.0
"""In which the ranks of a run that has ended leave its folder, after an orderly stop."""
REACH_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_ORPHANED_SECONDS = 5.0  # for what a rank has started to close its output
_CONNECTIONS = 10  # of which the fastest tells a round trip
_CHUNK = 1 << 16
_ENDING = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


class _Gone(Exception):
    """Nobody is at the other end."""


class Agent:
    """Answers questions, and keeps ranks, until the other end is gone or orders the end."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._writing = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._marks: list[IO[bytes]] = []  # files that are gone when they are closed
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._news: dict[int, int] = {}  # the descriptors where ranks read news of others
        self._grace = 0.0
        self._answers: Mapping[str, Callable[[Any], Any]] = {
            "facts": lambda devices: asdict(facts_here(devices=devices)),
            "clock": lambda _: time.time(),
            "enter": _enter,
            "digests": lambda paths: [file_digest(Path(path)) for path in paths],
            "own_addresses": lambda _: _own_addresses(),
            "listen": lambda _: self._listen(),
            "mark": self._mark,
            "reach": lambda places: _reach(places),
            "round_trips": lambda places: [_round_trip(place) for place in places],
            "towards": _towards,
            "free_port": _free_port,
            "remains": _remains,
            "start": self._start,
        }

    def serve(self, descriptor: int) -> None:
        """Answer what comes in on `descriptor`; end all ranks before the return."""
        try:
            for line in _lines(descriptor):
                message = json.loads(line)
                match message["kind"]:
                    case "beat":
                        pass
                    case "signal":
                        with suppress(ProcessLookupError, KeyError):
                            self._processes[message["rank"]].send_signal(message["number"])
                    case "news":
                        with suppress(OSError, KeyError):  # the rank has ended, or is stuck
                            text = json.dumps(message["news"]) + "\n"
                            os.write(self._news[message["rank"]], text.encode())
                    case "end":
                        self._grace = message["grace"]
                        return
                    case kind:
                        self._tell(kind="answer", value=self._answers[kind](message["value"]))
        except _Gone:
            pass
        finally:
            self._let_go()
            self._end()

    def _tell(self, **message: Any) -> None:
        # The loop in `serve` notices by itself that nobody reads this.
        with self._writing, suppress(OSError):
            self._output.write(f"{MARK}{json.dumps(message)}\n".encode())
            self._output.flush()

    def _listen(self) -> int:
        """Listen on all addresses of this host; return the port, which the system has chosen."""
        try:
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError):  # a host without IPv6
            listener = socket.create_server(("", 0))
        self._listeners.append(listener)
        port: int = listener.getsockname()[1]
        return port

    def _mark(self, folder: str) -> dict[str, str]:
        """Make a file that others may look for, where `folder` is or will be, until the start."""
        place = Path(folder).absolute()
        while not place.exists():
            place = place.parent
        try:
            mark = tempfile.NamedTemporaryFile(prefix=MARKER, dir=place)  # noqa: SIM115
        except OSError as error:
            return {"refusal": error.strerror or str(error)}
        self._marks.append(mark)
        return {"path": mark.name}

    def _let_go(self) -> None:
        """Close what was held for the checks before the start."""
        while self._listeners:
            self._listeners.pop().close()
        while self._marks:
            self._marks.pop().close()

    def _start(self, order: Mapping[str, Any]) -> None:
        """Start ranks: each has a command, variables, and a text on its standard input."""
        self._let_go()
        self._grace = order["grace"]
        for each in order["ranks"]:
            variables, passed = {**os.environ, **each["variables"]}, []
            if each["rank"] == 0:
                end, self._news[0] = os.pipe()
                os.set_blocking(self._news[0], False)
                variables[NEWS_VARIABLE] = str(end)
                passed.append(end)
            process = subprocess.Popen(
                [sys.executable, *each["arguments"]], env=variables,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, pass_fds=passed,
            )  # fmt: skip
            for end in passed:
                os.close(end)
            self._processes[each["rank"]] = process
            given = each["rank"], process, each["input"].encode()
            threading.Thread(target=self._follow, args=given, daemon=True).start()

    def _follow(self, rank: int, process: subprocess.Popen[bytes], text: bytes) -> None:
        """Pass on what a rank prints, line by line, and how it has ended."""
        readers = [
            threading.Thread(target=self._pass_on, args=(rank, name, stream), daemon=True)
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        for reader in readers:
            reader.start()
        assert process.stdin is not None
        with suppress(OSError), process.stdin:
            process.stdin.write(text)
        status = process.wait()
        # What it has started, and left behind, would keep its output open.
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        for reader in readers:
            reader.join(_ORPHANED_SECONDS)
        self._tell(kind="ended", rank=rank, status=status)

    def _pass_on(self, rank: int, name: str, stream: IO[bytes] | None) -> None:
        assert stream is not None
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                self._tell(kind="output", rank=rank, stream=name, text=text)

    def _end(self) -> None:
        """Ask the ranks for an orderly stop, and kill what is left of them after the grace."""
        deadline = time.monotonic() + self._grace
        running = [each for each in self._processes.values() if each.returncode is None]
        if self._grace:
            for process in running:
                process.terminate()
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)


def _lines(descriptor: int) -> Iterator[bytes]:
    """Yield the lines that come in. Raises `_Gone` after the last one, or after a long silence."""
    held = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while selector.select(SILENCE_SECONDS):
            chunk = os.read(descriptor, _CHUNK)
            if not chunk:
                break
            *lines, held = (held + chunk).split(b"\n")
            yield from lines
    raise _Gone


def _enter(folder: str) -> str | None:
    """Make `folder` the working folder; return what is wrong with it, None if nothing."""
    try:
        os.chdir(folder)
    except OSError as error:
        return error.strerror
    return None


def _own_addresses() -> list[str]:
    """Return the addresses by which others may reach this host, the likeliest first."""
    if chosen := os.environ.get(HOST_VARIABLE):
        return [chosen]
    found = [address for _, address in facts_here().interfaces]
    # The address to which ssh has connected here: client, its port, server, its port
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) == 4 and connection[2] in found:
        found.insert(0, connection[2])
    return [*dict.fromkeys(found)]


def _reach(places: Sequence[tuple[str, int]]) -> list[str | None]:
    """Connect to each of `places`; return what went wrong there, None where nothing did."""
    if not places:
        return []
    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(_failure_at, places))


def _failure_at(place: tuple[str, int]) -> str | None:
    try:
        _connect(place)
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return None


def _connect(place: tuple[str, int]) -> None:
    host, port = place  # JSON makes a list of it
    socket.create_connection((host, port), REACH_SECONDS).close()


def _round_trip(place: tuple[str, int]) -> float:
    """Return the seconds of a packet to `place` and back: those of the fastest connection."""
    seconds = []
    for _ in range(_CONNECTIONS):
        began = time.monotonic()
        _connect(place)
        seconds.append(time.monotonic() - began)
    return min(seconds)


def _towards(place: tuple[str, int]) -> dict[str, str]:
    """Return the own address of the interface that leads to `place`, or what is wrong."""
    if chosen := os.environ.get(HOST_VARIABLE):
        return {"address": chosen}
    try:
        return {"address": towards(*place)}
    except InputError as error:
        return {"refusal": str(error)}


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
        return port


def _remains(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run has left in a folder, and whether a process holds that after `seconds`."""
    folder, deadline = Path(order["folder"]), time.monotonic() + order["seconds"]
    while (held := holder(folder) is not None) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return {"remains": to_plain(remains_in(folder)), "held": held}


def _leave(*_: object) -> None:
    for number in _ENDING:  # the ranks are still to be ended
        signal.signal(number, signal.SIG_IGN)
    sys.exit(1)


def main() -> None:
    """Serve the launcher that has started this process."""
    for number in _ENDING:
        signal.signal(number, _leave)
    # Ranks are to write to their own pipes, and a print of a library's not between the answers.
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        Agent(output).serve(0)
    # Threads may still wait for the output of processes that a rank has left behind.
    os._exit(0)


if __name__ == "__main__":
    main()
