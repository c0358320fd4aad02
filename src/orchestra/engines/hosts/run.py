"""Ranks on several hosts: started as a launcher would start them, and ended together."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestra.engines.hosts.checks import Meeting
from orchestra.engines.hosts.connection import Hosts
from orchestra.engines.hosts.names import HostRanks
from orchestra.engines.processes.environment import (
    HOST_VARIABLE,
    INTERRUPTED_STATUS,
    LAUNCHER_VARIABLE,
    LOST_STATUS,
    NEWS_VARIABLE,
    NODE_VARIABLE,
)
from orchestra.engines.processes.system import handling, spaced
from orchestra.errors import InputError, RankLost, RunFailed, tell
from orchestra.records.files import HOSTS_VARIABLE

LAUNCHER = "orchestra train --hosts"
LEAVING_SECONDS = 10.0
"""For the others to end by themselves, once rank 0 or a rank that the run needs has ended."""

_BAD_INPUT = 2
_INTERRUPTED = (INTERRUPTED_STATUS, -signal.SIGINT)
_PREFIXES = ("ORCHESTRA_", "GLOO_", "NCCL_", "TP_", "MLFLOW_", "WANDB_")
_NAMES = ("OMP_NUM_THREADS", "PYTHONHASHSEED", "TORCH_CPP_LOG_LEVEL")
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch warns of each address without a host name
_NOT_SENT = (HOST_VARIABLE, LAUNCHER_VARIABLE, NEWS_VARIABLE, NODE_VARIABLE, HOSTS_VARIABLE)


@dataclass(frozen=True)
class Command:
    """What each rank runs: arguments of the Python there, and what goes with them."""

    arguments: Sequence[str]
    input: str = ""  # standard input
    variables: Mapping[str, str] = field(default_factory=dict)  # beside those that travel
    grace: float = 0.0  # seconds of an orderly stop
    goes_on: bool = False  # the run may go on when it has lost a rank other than rank 0


Print = Callable[[str, str, int, str], None]
"""Called with the host, "stdout" or "stderr", the rank, and a line without its end."""


def print_prefixed(host: str, stream: str, rank: int, text: str) -> None:
    """Print a line of a rank: that of rank 0 as it is, the others with their host in front."""
    out = sys.stdout if stream == "stdout" else sys.stderr
    print(text if rank == 0 else f"{host}| {text}", file=out, flush=True)


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on other hosts get from this process."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _NOT_SENT
    }


def run_on(
    hosts: Hosts,
    places: Sequence[HostRanks],
    meeting: Meeting,
    command: Command,
    show: Print = print_prefixed,
) -> int:
    """Run `command` as every rank on its host, until all have ended; return the exit status.

    It is `LOST_STATUS` if the run lost a rank that it needs, and rank 0 has told the user.

    Ranks are numbered host by host. In the main thread, the first Ctrl-C, and SIGTERM, go to rank
    0, which stops the run in good order; a second Ctrl-C ends all ranks at once.

    Raises:
        InputError: a host is lost before anything has started.
        RankLost: the run ended since a host, or a rank that could not tell by itself, was lost.
        RunFailed: the same after a stop, or rank 0 did not end and was killed.
        KeyboardInterrupt: the user pressed Ctrl-C twice.
    """
    first = meeting.addresses[places[0].name]
    port = hosts.ask("free_port", {places[0].name: first})[places[0].name]
    orders = _orders(places, meeting, command, {"MASTER_ADDR": first, "MASTER_PORT": str(port)})
    location = {each["rank"]: name for name, order in orders.items() for each in order["ranks"]}
    course = _Course(hosts, location, command, show)
    stop = {signal.SIGINT: course.interrupt, signal.SIGTERM: spaced(course.terminate)}
    with handling(stop):
        hosts.ask("start", orders)
        course.follow()
    return course.status()


def _orders(
    places: Sequence[HostRanks], meeting: Meeting, command: Command, master: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return what to start on each host, with the variables that torchrun would set."""
    total = sum(place.ranks for place in places)
    orders: dict[str, dict[str, Any]] = {}
    begin = 0
    for place in places:
        common = {
            **_QUIET,
            **travelling(os.environ),
            **command.variables,
            **master,
            LAUNCHER_VARIABLE: LAUNCHER,
            HOST_VARIABLE: meeting.addresses[place.name],
            NODE_VARIABLE: place.name,
            HOSTS_VARIABLE: ",".join(map(str, places)),
            "WORLD_SIZE": str(total),
            "LOCAL_WORLD_SIZE": str(place.ranks),
        }
        ranks = [
            {
                "rank": begin + local,
                "arguments": list(command.arguments),
                "variables": {**common, "RANK": str(begin + local), "LOCAL_RANK": str(local)},
                "input": command.input,
            }
            for local in range(place.ranks)
        ]
        orders[place.name] = {"grace": command.grace, "ranks": ranks}
        begin += place.ranks
    return orders


@dataclass
class _Course:
    """The course of a run: what hosts tell, and what follows from it."""

    hosts: Hosts
    location: Mapping[int, str]  # the host of each rank
    command: Command
    show: Print
    statuses: dict[int, int | None] = field(default_factory=dict)  # None: lost with its host
    failed: int | None = None  # the first rank that the run needed and that has failed
    lost: str | None = None  # what to tell of the first host that the run needed and lost
    interrupts: int = 0
    terminated: bool = False
    _deadline: float | None = None  # for the ranks that are left
    _killed: bool = False

    def interrupt(self) -> None:
        self.hosts.events.put(("", {"kind": "interrupt"}))

    def terminate(self) -> None:
        self.hosts.events.put(("", {"kind": "terminate"}))

    def follow(self) -> None:
        """Show what ranks print, until all have ended."""
        while len(self.statuses) < len(self.location):
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            try:
                host, message = self.hosts.events.get(timeout=left)
            except queue.Empty:
                self._kill()
                continue
            match message["kind"]:
                case "output":
                    self.show(host, message["stream"], message["rank"], message["text"])
                case "ended":
                    self._on_ended(message["rank"], message["status"])
                case "lost":
                    self._on_lost(host)
                case "interrupt":
                    self._on_interrupt()
                case "terminate":
                    self.terminated = True
                    self._signal_first(signal.SIGTERM)
                    self._end_within(self.command.grace + LEAVING_SECONDS)

    def status(self) -> int:
        """Return the exit status of the whole run. Raises `RunFailed`."""
        own = self.statuses[0]
        if self.lost is not None:  # even if the other ranks have stopped in good order
            raise RunFailed(self.lost) if self._stopping else RankLost(self.lost)
        if own == INTERRUPTED_STATUS and self.interrupts:
            return 1  # rank 0 has told that
        if own is not None and own >= 0:
            # Where it failed, rank 0 has said why.
            return 1 if own == LOST_STATUS and self._stopping else own
        if self.interrupts > 1 or (own in _INTERRUPTED and self.interrupts):
            raise KeyboardInterrupt
        rank = 0 if self.failed is None else self.failed
        status = self.statuses[rank]
        text = f"{self.location[rank]}: rank {rank} {_how(status)}"
        if status == _BAD_INPUT:
            raise InputError(text)
        by_itself = self.failed is not None and not self._stopping
        raise RankLost(text) if by_itself and status is not None and status < 0 else RunFailed(text)

    @property
    def _stopping(self) -> bool:
        return self.terminated or self.interrupts > 0

    def _on_ended(self, rank: int, status: int) -> None:
        self.statuses.setdefault(rank, status)
        if rank > 0 and status != _BAD_INPUT:  # rank 0 cannot tell that one was refused its input
            self._tell_first({"ranks": [rank], "status": status, "host": self.location[rank]})
        needed = rank == 0 or status == _BAD_INPUT or not self.command.goes_on
        if status != 0 and needed and self.failed is None and self._deadline is None:
            self.failed = rank
        if rank == 0 and self.interrupts and status in _INTERRUPTED:
            self._kill()  # the others would wait for it: it was in its set-up
        elif rank == 0 or (status != 0 and needed):
            self._end_within(LEAVING_SECONDS)

    def _on_lost(self, host: str) -> None:
        gone = [rank for rank, place in self.location.items() if place == host]
        if all(rank in self.statuses for rank in gone):
            return
        self.statuses |= {rank: None for rank in gone if rank not in self.statuses}
        text = f"{host}: the ssh connection has ended"
        stops = 0 in gone or not self.command.goes_on
        self._tell_first({"host": host, "ranks": gone, "stops": stops})
        if not stops:
            tell(f"{text}; its ranks are being ended there")
            return
        self.lost = self.lost or f"{text}; its ranks are ended there, and those of the others too"
        self._end_within(self.command.grace + LEAVING_SECONDS)

    def _on_interrupt(self) -> None:
        self.interrupts += 1
        if self.interrupts == 1:
            self._signal_first(signal.SIGINT)
        else:
            self._kill()

    def _signal_first(self, number: signal.Signals) -> None:
        self.hosts.connections[self.location[0]].say("signal", rank=0, number=int(number))

    def _tell_first(self, news: Mapping[str, Any]) -> None:
        """Tell rank 0, which writes the record, what only the agents know."""
        self.hosts.connections[self.location[0]].say("news", rank=0, news=news)

    def _end_within(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._deadline = end if self._deadline is None else min(self._deadline, end)

    def _kill(self) -> None:
        """End what is left at once, and wait no longer for hosts that do not answer."""
        for rank, host in self.location.items():
            if rank not in self.statuses:
                self.hosts.connections[host].say("signal", rank=rank, number=int(signal.SIGKILL))
        if self._deadline is not None and self._killed:
            self.statuses |= {r: None for r in self.location if r not in self.statuses}
        self._killed = True
        self._deadline = time.monotonic() + LEAVING_SECONDS


def _how(status: int | None) -> str:
    if status is None:
        return "is lost with the ssh connection"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def first_free(hosts: Hosts, host: str, folder: str, name: str) -> str:
    """Return `folder`/`name`-1, -2 ..., the first that does not exist on `host`."""
    for begin in range(1, 1_000_000, 100):
        names = [f"{folder}/{name}-{number}" for number in range(begin, begin + 100)]
        there = hosts.ask("digests", {host: names})[host]
        for each, digest in zip(names, there, strict=True):
            if digest is None:
                return each
    raise InputError(f"{host}: {folder} is full; choose another --out")
