"""The watcher: holds a control connection to each rank, and carries out what is decided."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from orchestra.engines import events
from orchestra.engines.failure_detector import FailureDetector, Limits
from orchestra.engines.processes.control import BadFrame, Frames, Message, pack
from orchestra.engines.processes.joining import Admission, Invitation, answer_to
from orchestra.engines.processes.system import exit_status, is_stopped, machine
from orchestra.errors import InputError, RankLost, RunFailed
from orchestra.records.report import Counters
from orchestra.settings.base import from_plain
from orchestra.transports.handshake import (
    NEWCOMER,
    TLS,
    WATCHER,
    Reception,
    address_of,
    listen,
)
from orchestra.worker.runtime import RankActivity, shares_of_cores

SERVER = "the fork server, from which the ranks are started,"
NOT_KNOWN = 255  # multiprocessing's status of a process whose fork server is gone
TICK_SECONDS = 0.25
SEND_SECONDS = 1.0  # messages are small: whoever does not take one is stuck
STRANGER_SECONDS = 10.0  # for a connection to show the token
STRANGERS = 32  # such connections, beside those of the ranks; more push out the oldest

BY_MESSAGES = "collectives between hosts go by messages"
"""How the notice begins that compiled code does not move them, and why."""


@dataclass(frozen=True)
class Outcome:
    """A run that ended well.

    `setup` has the seconds before the program began: `import`, only in the first launch of a
    process, until the process that all ranks are forked from had imported torch; `processes`, from
    there until every rank was there; `connections`, until all were connected to each other.
    """

    results: tuple[Any, ...]  # of the program, by rank; None for a rank that was left out
    left_out: dict[int, str]  # why, for each rank that the run went on without
    stopped: bool  # the user asked for an orderly stop
    terminated: bool  # by SIGTERM
    notices: tuple[str, ...]  # for the user on the way, one line each
    setup: dict[str, float]


@dataclass(eq=False)
class _Link:
    """The control connection of `rank`, which has `joined` once it has introduced itself."""

    connection: socket.socket
    rank: int
    frames: Frames
    joined: bool = False
    pid: int = 0
    same_machine: bool = False
    cores: tuple[str, Sequence[int]] = ("", ())  # of which host it may use which
    address: tuple[str, int] = ("", 0)
    memory: str = ""  # the same for ranks that can share memory
    uncompiled: str = ""  # why collectives with it go by messages; nothing where they do not

    def send(self, message: Message) -> None:
        # A rank that is gone or stuck is found out by its silence, not here.
        with contextlib.suppress(OSError):
            self.connection.sendall(pack(message))


class Watcher:
    """Runs in a thread from `start` until every rank is gone, which `join` waits for.

    The ranks reach it at `address`. From the thread, `on_event` is called with each event and each
    notice, and `on_cause` with the cause of a failure, before any rank hears of it: once one has
    left, its launcher may end the others, this process too.
    """

    def __init__(
        self,
        ranks: int,
        limits: Limits,
        *,
        host: str,  # the address to listen on
        token: str,  # the secret that a rank has to show
        children: bool,  # the ranks are child processes, each given to `adopt` once started
        news: int | None = None,  # where the launcher of others writes how they have ended
        limit: float | None = None,  # seconds after which all ranks are killed
        min_ranks: int = 1,  # with fewer the run does not go on
        invitation: Invitation | None = None,  # for newcomers; None: nobody can join the run
        shared_memory: bool = True,  # whether newcomers may share memory with ranks of their host
        tls: TLS | None = None,  # encrypts the control connections
        on_event: Callable[[events.Event | events.Notice], None] | None = None,
        on_cause: Callable[[str], None] | None = None,
    ) -> None:
        self.results: dict[int, bytes] = {}
        self.setup: dict[str, float] = {}
        self.imported = 0.0
        self._ranks = ranks
        self._invitation, self._shared_memory = invitation, shared_memory
        # The number of the next newcomer, which no file of an earlier one has
        self._next_rank = max(ranks, invitation.next_rank if invitation else 0)
        self._on_event = on_event or (lambda _: None)
        self._on_cause = on_cause or (lambda _: None)
        self._children: dict[int, BaseProcess] = {}
        self._links: dict[int, _Link] = {}
        self._connected: set[int] = set()
        self._orders: list[Callable[[], None]] = []  # from other threads
        self._abandoned = self._said_why = False
        self._limit = math.inf if limit is None else limit
        self._heartbeat_at = -math.inf
        self._crash: BaseException | None = None
        self._group = tuple(range(ranks))  # the ranks that are left
        self._missing = set(self._group)  # those of them that others cannot reach yet
        self._server: int | None = None  # the fork server
        self._server_runs_at = math.inf  # when it was last seen to
        self._machine = machine()
        self._selector = selectors.DefaultSelector()
        listener = listen(host)
        self.address = address_of(listener)
        self._reception = Reception(
            self._selector, listener, WATCHER, token.encode(), tls,
            missing=set(range(ranks)) | ({NEWCOMER} if invitation else set()), spare=STRANGERS,
            welcome=self._welcome, refused=self._refuse,
        )  # fmt: skip
        self._wake_in, self._wake_out = socket.socketpair()
        self._started_at = time.monotonic()
        self.detector = FailureDetector(
            ranks, limits, start=self._started_at, children=children, follows=news is not None,
            min_ranks=min_ranks,
            refusal=invitation.refusal if invitation else lambda _: None,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        if news is not None:
            held = bytearray()
            read = partial(self._read_news, news, held)
            self._selector.register(news, selectors.EVENT_READ, read)

    # From other threads

    def start(self) -> None:
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._take_orders)
        self._thread.start()

    def adopt(self, rank: int, process: BaseProcess) -> None:
        def watch() -> None:
            self._children[rank] = process
            reap = partial(self._reap, rank)
            self._selector.register(process.sentinel, selectors.EVENT_READ, reap)

        self._order(watch)

    def abandon(self) -> None:
        """Kill all ranks, and wait until they are gone."""
        self._abandoned = True
        self._order(lambda: None)
        self._thread.join()

    def rely_on(self, server: int) -> None:
        """Watch over the fork server, process `server`: without it no rank starts or is reaped."""
        self._server, self._server_runs_at = server, time.monotonic()

    def server_lost(self, error: Exception) -> RunFailed:
        """Return why the run failed, after the fork server gave `error` in place of a rank."""
        status = None if self._server is None else exit_status(self._server, within=1.0)
        if self.detector.cause is not None:
            return self._failure(self.detector.cause)
        if status is None:
            return RunFailed(f"{SERVER} does not answer: {error}")
        text = f"{SERVER} {events.exit_text(status)}"
        return RankLost(text) if status < 0 else RunFailed(text)

    def _failure(self, cause: str) -> RunFailed:
        return RankLost(cause) if self.detector.ended_by_loss else RunFailed(cause)

    def fail(self, rank: int, error: Exception) -> None:
        """End the run: `rank`, of this process, could not join it."""
        self._order(lambda: self._observe(events.Failed(rank, events.describe(error))))

    def interrupt(self) -> None:
        """Note that the user pressed Ctrl-C. Safe in a signal handler."""
        self._order(lambda: self._observe(events.Interrupted()))

    def terminate(self) -> None:
        """Note that SIGTERM came to the launcher. Safe in a signal handler."""
        self._order(lambda: self._observe(events.Terminated()))

    def join(self) -> None:
        """Block until all ranks are gone. Raises what the thread raised, if anything."""
        while self._thread.is_alive():  # a signal to another thread does not wake this one
            self._thread.join(TICK_SECONDS)
        if self._crash is not None:
            raise self._crash

    def outcome(self, read: Callable[[bytes], Any]) -> Outcome:
        """Return the outcome of a run whose ranks are gone; `read` decodes a rank's result, unless
        it has joined later, and sends JSON.

        Raises `InputError` or `RunFailed` with the cause, where it has failed: `RankLost` for a
        loss.
        """
        detector, setup = self.detector, dict(self.setup)
        if detector.bad_input is not None:
            raise InputError(detector.bad_input)
        if detector.cause is not None:
            raise self._failure(detector.cause)
        if self.imported and "processes" in setup:
            # A busy launcher may see the end of the imports after the rank that waited for them.
            imported = min(self.imported, setup["processes"])
            setup = {"import": imported, **setup, "processes": setup["processes"] - imported}
        results = {
            rank: read(result) if rank < self._ranks else json.loads(result)
            for rank, result in self.results.items()
        }
        in_order = tuple(
            results.get(rank) for rank in range(max([self._ranks, *(rank + 1 for rank in results)]))
        )
        notices = tuple(detector.notices)
        return Outcome(
            in_order, detector.left_out, detector.stopped, detector.terminated, notices, setup
        )

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)  # first, so that the byte below finds it
        with contextlib.suppress(OSError):  # the thread has ended
            self._wake_out.send(b"\0")

    # The thread

    def _run(self) -> None:
        try:
            while not (self.detector.over or self._abandoned or self.age() > self._limit):
                for key, _ in self._selector.select(TICK_SECONDS):
                    key.data()
                self._tick()
        except BaseException as error:
            self._crash = error
        finally:
            self._close()

    def _close(self) -> None:
        for process in self._children.values():
            process.kill()
            process.join()
            process.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._wake_out.close()
        self._selector.close()

    def _take_orders(self) -> None:
        self._wake_in.recv(1024)  # before the orders: a later one sends a byte of its own
        while self._orders:
            self._orders.pop(0)()

    def _tick(self) -> None:
        now = time.monotonic()
        self._reception.drop(now - STRANGER_SECONDS)
        self._look_after_server(now)
        stopped = [rank for rank in self.detector.suspects(now) if self._is_stopped(rank)]
        self._carry_out(self.detector.tick(now, stopped))
        if now - self._heartbeat_at > events.BEAT_SECONDS:  # for ranks on other hosts
            self._heartbeat_at = now
            self._broadcast({"kind": "watching"})

    def _is_stopped(self, rank: int) -> bool:
        """Return whether a rank of this machine is stopped, as far as its process is known."""
        if (link := self._links.get(rank)) is not None:
            return link.same_machine and is_stopped(link.pid)
        child = self._children.get(rank)
        return child is not None and child.pid is not None and is_stopped(child.pid)

    def _look_after_server(self, now: float, within: float = 0.0) -> None:
        """Check that the fork server runs; otherwise end the run by its name."""
        if self._server is None:
            return
        status = exit_status(self._server, within=within)
        if status is None and not is_stopped(self._server):
            self._server_runs_at = now
            return
        if status is None and now - self._server_runs_at < self.detector.limits.silence:
            return
        how = events.STOPPED if status is None else events.exit_text(status)
        by_signal = status is None or status < 0
        self._observe(events.ForkServerLost(f"{SERVER} {how}", by_signal))
        if status is None:
            os.kill(self._server, signal.SIGKILL)  # which wakes a launcher that waits for it
        self._server = None

    def _observe(self, event: events.Event) -> None:
        self._on_event(event)
        self._carry_out(self.detector.observe(time.monotonic(), event))

    def _carry_out(self, instructions: list[events.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, events.Kill):
                self._kill(instruction.rank)
            elif isinstance(instruction, events.Notice):
                self._on_event(instruction)
            elif isinstance(instruction, events.Refuse):
                if (link := self._links.get(instruction.rank)) is not None:
                    link.send({"kind": "abort", "cause": instruction.why})
            elif isinstance(instruction, events.Disconnect) and instruction.to is not None:
                self._links[instruction.to].send({"kind": "disconnect", **asdict(instruction)})
            else:  # an order to all ranks
                if isinstance(instruction, events.Abort):
                    self._on_cause(instruction.cause)
                elif isinstance(instruction, events.Regroup):
                    self._group, self._missing = instruction.members, set(instruction.members)
                kind = type(instruction).__name__.lower()
                self._broadcast({"kind": kind, **asdict(instruction)})

    def _broadcast(self, message: Message) -> None:
        for link in self._links.values():
            link.send(message)

    def _kill(self, rank: int) -> None:
        link = self._links.get(rank)
        if rank in self._children:
            self._children[rank].kill()
        elif link is None:
            self._observe(events.Disconnected(rank))  # it never came
        elif not link.same_machine:
            self._hang_up(link)
        elif link.pid != os.getpid():  # else its control thread ends it, a little later
            with contextlib.suppress(ProcessLookupError):
                os.kill(link.pid, signal.SIGKILL)
            self._hang_up(link)

    # Processes

    def _reap(self, rank: int) -> None:
        process = self._children[rank]
        self._selector.unregister(process.sentinel)
        process.join()
        self._reception.advance_all()  # one may be why this rank did not join
        if (link := self._links.get(rank)) is not None:
            self._drain(link)  # what it said before it ended comes first
        status = process.exitcode
        assert status is not None
        if status == NOT_KNOWN:
            self._look_after_server(time.monotonic(), within=0.5)
        self._observe(events.Exited(rank, status))

    def _read_news(self, descriptor: int, held: bytearray) -> None:
        """Take in lines of JSON from the launcher; `held` is the beginning of the next one."""
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            self._selector.unregister(descriptor)
            return
        *lines, rest = (bytes(held) + chunk).split(b"\n")
        held[:] = rest
        for news in map(json.loads, lines):
            for rank in news["ranks"]:
                if (link := self._links.get(rank)) is not None:
                    self._drain(link)  # what it said before it ended comes first
                if "status" in news:
                    self._observe(events.Exited(rank, news["status"], news["host"]))
            if "stops" in news:
                lost = tuple(news["ranks"])
                self._observe(events.HostGone(news["host"], lost, news["stops"]))

    def _drain(self, link: _Link) -> None:
        while link.connection.fileno() >= 0:
            link.connection.setblocking(False)  # else `read` waits up to SEND_SECONDS
            before = link.frames.received
            self._read(link)
            if link.frames.received == before:
                return

    # Connections

    def _welcome(self, rank: int, connection: socket.socket) -> None:
        if rank == NEWCOMER:
            self._receive_application(connection)
            return
        link = _Link(connection, rank, Frames(connection))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(link))
        self._read(link)

    def _receive_application(self, connection: socket.socket) -> None:
        """Give a newcomer its number, with which it comes again."""
        self._reception.missing.add(NEWCOMER)  # there may be more
        frames = Frames(connection)

        def read() -> None:
            try:
                goes_on, messages = frames.read(), [message for message, _ in frames.complete()]
            except BadFrame:
                goes_on, messages = False, []
            if goes_on and not messages:
                return
            self._selector.unregister(connection)
            with connection, contextlib.suppress(OSError):
                if messages:
                    connection.settimeout(SEND_SECONDS)
                    connection.sendall(pack(self._answer_to(messages[0])))

        self._selector.register(connection, selectors.EVENT_READ, read)
        read()

    def _answer_to(self, application: Message) -> Message:
        assert self._invitation is not None
        if self.detector.cause is not None or self.detector.stopped:
            return {"kind": "refusal", "why": "it is coming to its end"}
        place = Admission(
            self._next_rank, self._ranks, self._invitation.folder, self._invitation.experiment,
            self.detector.limits, self._shared_memory,
        )  # fmt: skip
        answer = answer_to(application, place)
        if answer["kind"] == "place":
            self._reception.missing.add(self._next_rank)
            self._next_rank += 1
        return answer

    def _refuse(self, host: str, why: str) -> None:
        self._carry_out(self.detector.refused(f"a connection from {host} was refused: {why}"))

    def _read(self, link: _Link) -> None:
        try:
            open_still = link.frames.read()
            for message, payload in link.frames.complete():
                self._heard(link, message, payload)
        except (BadFrame, KeyError, TypeError, ValueError, RecursionError):
            open_still = False
        if not open_still:
            self._hang_up(link)

    def _hang_up(self, link: _Link) -> None:
        if link.connection.fileno() < 0:
            return
        self._selector.unregister(link.connection)
        link.connection.close()
        if link.joined:
            self._observe(events.Disconnected(link.rank))

    def _heard(self, link: _Link, message: Message, payload: bytes) -> None:
        rank, kind = link.rank, message["kind"]
        if not link.joined:
            self._admit(link, message)
        elif (event := _event_of(rank, message)) is not None:
            self._observe(event)
        elif kind == "notice":
            self._carry_out(self.detector.noticed(str(message["text"])))
        elif kind == "connected":
            self._connected.add(rank)
            if "connections" not in self.setup and self._connected >= set(range(self._ranks)):
                self.setup["connections"] = self.age() - self.setup["processes"]
        elif kind == "result":
            self.results[rank] = payload
            link.send({"kind": "dismissed"})
            self._observe(events.Finished(rank))
        elif kind == "ready":
            self._observe(events.Ready(rank, message["generation"]))
            if message["generation"] == self.detector.generation:
                link.address = tuple(message["address"])
                self._expect(rank)

    def age(self) -> float:
        return time.monotonic() - self._started_at

    def _admit(self, link: _Link, message: Message) -> None:
        rank = link.rank
        link.connection.settimeout(SEND_SECONDS)
        link.joined, link.pid = True, message["pid"]
        link.address = tuple(message["address"])
        link.cores = str(message["kernel"] or message["host"]), list(map(int, message["cores"]))
        link.memory = str(message["memory"])
        link.uncompiled = str(message["uncompiled"])
        link.same_machine = bool(self._machine) and message["machine"] == self._machine
        self._links[rank] = link
        self._observe(events.Joined(rank, message["host"]))
        if self.detector.cause is not None:
            link.send({"kind": "abort", "cause": self.detector.cause})  # it came late for that
        if rank in self._group:  # else a newcomer, which is not taken in yet
            self._expect(rank)
            if not self._missing:
                self.setup["processes"] = self.age()

    def _expect(self, rank: int) -> None:
        """Note that `rank` can be reached; tell all of the group, once all can, where they are."""
        self._missing.discard(rank)
        if self._missing:
            return
        links = [self._links[rank] for rank in self._group]
        roster = {
            "generation": self.detector.generation,
            "members": self._group,
            "addresses": [link.address for link in links],
            "threads": shares_of_cores([link.cores for link in links]),
            "memory": [link.memory for link in links],
            "compiled": not any(link.uncompiled for link in links),
        }
        self._broadcast({"kind": "roster", **roster})
        if why := self._why_messages(links):
            self._carry_out(self.detector.noticed(why))
        if self.detector.stopped:
            self._broadcast({"kind": "stop"})

    def _why_messages(self, links: Sequence[_Link]) -> str:
        """Return why collectives go by messages, for the first group where they do; else ""."""
        reasons = [link.uncompiled for link in links if link.uncompiled]
        if self._said_why or not reasons or len({link.memory or link.rank for link in links}) == 1:
            return ""
        self._said_why = True
        return f"{BY_MESSAGES}, which costs time: {reasons[0]}"


def _event_of(rank: int, message: Message) -> events.Event | None:
    """Return the event that `message` from `rank` tells of; None if it is more than that."""
    match message["kind"]:
        case "beat":
            waits_for = tuple(message["beat"]["waits_for"])
            counters = from_plain(Counters | None, message["beat"]["counters"])
            activity = RankActivity(message["beat"]["activity"])
            read = {"waits_for": waits_for, "counters": counters, "activity": activity}
            return events.Heartbeat(**{**message["beat"], "rank": rank, **read})
        case "terminated":
            return events.Terminated(rank)
        case "leaving":
            return events.Left(rank)
        case "accusation":
            failure = events.Failure(**message["failure"])
            return events.Accused(rank, failure, message["generation"], message["waits"])
        case "failure":
            return events.Failed(rank, events.Failure(**message["failure"]))
    return None
