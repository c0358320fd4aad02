"""The control connection between a rank and the watcher: its frames, and the rank's end of it.

Beats go up, orders come down. Imports without torch: launchers use it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestra.engines.events import BEAT_SECONDS, Failure, Heartbeat, describe
from orchestra.engines.failure_detector import Limits
from orchestra.engines.processes.environment import NODE_VARIABLE
from orchestra.engines.processes.system import (
    Latencies,
    RankPlace,
    StopWish,
    keep_freed_memory,
)
from orchestra.errors import GroupChanged, PeerLost, RunAborted, RunEnded, RunFailed
from orchestra.transports.handshake import TLS, WATCHER, address_of, connect
from orchestra.worker.runtime import RankActivity

if TYPE_CHECKING:
    from orchestra.transports.sockets import SocketTransport

GONE = "rank 0, which watches over the run, is gone"
GONE_ELSEWHERE = "the command that has started the run is gone"

Message = dict[str, Any]
Signs = tuple[Hashable, tuple[int, ...], str]
"""Of life of a running program, asked for at each beat: what changes whenever something moved, and
the ranks and the operation that it is blocked on."""

_LENGTHS = struct.Struct("!IQ")  # of the JSON text, of the bytes beside it
_CHUNK = 1 << 16  # little enough to be there for a rank that is short of memory


@dataclass(frozen=True)
class RankSpec:
    """The rank `rank` of `ranks`, as its launcher describes it.

    Where it is `local`, the watcher lives in the launcher on this host. Otherwise rank 0 holds it,
    and ranks report the end of the run on standard error.
    """

    rank: int
    ranks: int
    local_rank: int  # its index among the ranks of its host
    watcher: tuple[str, int]  # host and port of the control connections
    host: str  # the address on which this rank listens for the others
    token: str  # the secret that the members of this run share
    limits: Limits
    local: bool = True
    supervised: bool = True  # this process leaves when its parent process is gone
    tls: TLS | None = None  # encrypts all connections, where given
    threads: int | None = None  # of its program; None: `OMP_NUM_THREADS`, or its share of cores
    shared_memory: bool = True  # carry out collectives with ranks of this host there
    place: RankPlace | None = (
        None  # the node that this process moves to, where it is an emulated one
    )
    latencies: tuple[float, ...] = ()  # as of a `RankPlace`, where a command was started there
    newcomer: bool = False  # it joins a run under way, and may leave it again
    injects: bool = True  # the faults that `ORCHESTRA_INJECT` has for it

    @property
    def held(self) -> Latencies | None:
        """How long messages wait before they leave; None if none does."""
        if self.place is not None:
            return self.place.held()
        return Latencies(self.latencies) if any(self.latencies) else None

    @property
    def node(self) -> str:
        """The name of its host."""
        if self.place is not None:
            return self.place.node
        return os.environ.get(NODE_VARIABLE) or socket.gethostname()


@dataclass(frozen=True)
class Roster:
    """The ranks of one group, in the message that each of them gets from the watcher.

    Ranks are given by their numbers in the group, unless a field says otherwise.
    """

    generation: int
    members: tuple[int, ...]  # the number of each at the start of the run
    addresses: tuple[tuple[str, int], ...]  # where each listens for data connections
    threads: int  # this rank's share of the cores of its host
    neighbours: tuple[int, ...]  # the ranks with which it can share memory, itself included
    compiled: bool  # whether compiled code moves collectives between hosts
    rank: int  # this one's number in the group

    @staticmethod
    def of(order: Message, slot: int) -> Roster:
        """Read what the watcher has sent to the rank with the number `slot` at the start."""
        members, hosts = tuple(order["members"]), order["memory"]
        rank = members.index(slot)
        return Roster(
            order["generation"], members, tuple((host, port) for host, port in order["addresses"]),
            order["threads"][rank],
            tuple(n for n, host in enumerate(hosts) if host and host == hosts[rank]),
            order["compiled"], rank,
        )  # fmt: skip


class BadFrame(Exception):
    """The other end does not speak this protocol."""


def pack(message: Message, payload: bytes = b"") -> bytes:
    """Return the frame of `message`, followed by `payload`."""
    text = json.dumps(message).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


class Frames:
    """Reads frames from a connection: a JSON object each, followed by raw bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.received = 0  # bytes
        self._connection = connection
        self._buffer = bytearray()

    def read(self) -> bool:
        """Read a part of what has arrived; False at the end of the connection."""
        try:
            data = self._connection.recv(_CHUNK)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except OSError:
            return False
        self._buffer += data
        self.received += len(data)
        return bool(data)

    def complete(self) -> Iterator[tuple[Message, bytes]]:
        while len(self._buffer) >= _LENGTHS.size:
            text, payload = _LENGTHS.unpack_from(self._buffer)
            end = _LENGTHS.size + text + payload
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTHS.size : end])
            del self._buffer[:end]
            try:
                message = json.loads(body[:text])
            except (ValueError, RecursionError) as error:
                raise BadFrame("not JSON") from error
            if not isinstance(message, dict):
                raise BadFrame("not a JSON object")
            yield message, body[text:]


class Control:
    """Keeps the watcher informed from a thread of its own, and obeys it.

    When the connection ends, the watcher is gone: this process then leaves at once, whatever its
    program is doing. It is also the `Reporter` of the rank's program.

    From the thread, `on_left` is called with the reason before this process leaves because the
    watcher is gone, or because its own program is stuck, if it holds the watcher; and `on_cause`
    with the first cause, when the run ends by it. The thread tells the watcher of the `wish` once
    that is asked for.
    """

    def __init__(
        self,
        spec: RankSpec,
        on_left: Callable[[str], None] | None = None,
        on_cause: Callable[[str], None] | None = None,
        wish: StopWish | None = None,
    ) -> None:
        self._spec = spec
        self._wish = wish or StopWish()
        self._wish_told = False
        self._on_cause = on_cause or (lambda _: None)
        self._on_left = on_left or (lambda _: None)
        self.connection = _connect(spec)  # to the watcher
        self._sending = threading.RLock()
        self._changed = threading.Condition()
        self._roster: Roster | None = None
        self._ordered = self._joined = 0  # generation of the newest group, and of this rank's
        self._left: tuple[int, ...] = ()  # the other ranks of the newest group
        self._members = tuple(range(spec.ranks))  # of the group that the transport is of
        self._cause: str | None = None
        self._dismissed = self._stop = self._rest = self._failing = False
        self._leave_at = math.inf
        self._heard_at = time.monotonic()
        self._parent = os.getppid()
        self._state = Heartbeat(spec.rank)  # changed as a whole: another thread sends it
        self._progress = 0
        self._last_news: Hashable = None
        self._probe: Callable[[], Signs] = lambda: (None, (), "")
        self._transport: SocketTransport | None = None
        self._thread = threading.Thread(target=self._beat_and_obey, name="control", daemon=True)

    # The way into the run

    def hello(self, **about: Any) -> None:
        """Introduce this rank, and begin to beat."""
        self._send({"kind": "hello", **about})
        self._thread.start()

    def roster(self) -> Roster:
        """Block until all ranks have joined; raises `RunAborted` if the run ends before."""
        found = self._roster_of(0)
        assert found is not None
        return found

    def regroup(self, make_listener: Callable[[], socket.socket]) -> tuple[Roster, socket.socket]:
        """Block until the watcher has told who is left, and all of these can be reached: this rank
        by a listener that `make_listener` makes, which is returned, too.

        Raises `RunAborted` if the run ends in place of it.
        """
        while True:
            self.wait_for_next(self._joined)
            if self._cause is not None:
                raise RunAborted(self._cause)
            self._joined = generation = self._ordered
            self.connecting(self._left)
            listener = make_listener()
            address = address_of(listener)
            self._send({"kind": "ready", "generation": generation, "address": address})
            try:
                roster = self._roster_of(generation)
            except BaseException:
                listener.close()
                raise
            if roster is not None:
                return roster, listener
            listener.close()  # another rank was lost meanwhile

    def wait_for_next(self, generation: int) -> None:
        """Block until the group of that number has ended, by a loss, a newcomer or with the run."""
        self._wait_for(lambda: self._ordered > generation)

    def _roster_of(self, generation: int) -> Roster | None:
        """Wait for the roster of a group; None where one more rank is lost before it comes."""

        def come() -> bool:
            there = self._roster is not None and self._roster.generation == generation
            return there or self._ordered > generation

        self._wait_for(come)
        if self._cause is not None:
            raise RunAborted(self._cause)
        return None if self._ordered > generation else self._roster

    def is_over(self, generation: int) -> bool:
        """Return whether the group of that number has ended, by a loss or with the run."""
        return self._ordered > generation or self._cause is not None

    def accuse(self, error: PeerLost, roster: Roster, *, waits: bool = False) -> None:
        """Report the loss of another rank of a group; see `Accused`."""
        failure = asdict(replace(describe(error), lost=roster.members[error.rank]))
        about = {"failure": failure, "generation": roster.generation, "waits": waits}
        self._send({"kind": "accusation", **about})

    def attach(
        self, transport: SocketTransport, roster: Roster, probe: Callable[[], Signs]
    ) -> None:
        """Let orders reach the transport of this rank, which is connected now with a group."""
        with self._changed:
            self._probe, self._transport = probe, transport
            self._members = roster.members
            if self._cause is not None:
                transport.abort(RunAborted(self._cause))
            elif self._ordered > roster.generation:
                transport.abort(GroupChanged())
        self._send({"kind": "connected"})

    def connecting(self, to: tuple[int, ...]) -> None:
        """Tell in beats that this rank waits for the ranks `to`, to connect with them."""
        self._probe = lambda: (to, to, "to connect")

    # The way out

    def finish(self, result: bytes) -> None:
        """Deliver the result; returns when the watcher has it. Raises `RunFailed` if the run has
        ended for another rank's failure meanwhile."""
        self._send({"kind": "result"}, result)
        self._wait_for(lambda: self._dismissed)
        cause = self._cause
        self._close()
        if cause is not None:
            raise RunEnded(cause)

    def fail(self, failure: Failure) -> str:
        """Report why the program ended; return the first cause of the run's end."""
        self._failing = True
        self._send({"kind": "failure", "failure": asdict(failure)})
        self._wait_for(lambda: False)
        self._close()
        assert self._cause is not None
        return self._cause

    def _wait_for(self, come: Callable[[], bool]) -> None:
        """Block until `come`, or until the run ends for a cause."""
        with self._changed:
            self._changed.wait_for(lambda: come() or self._cause is not None)

    def _close(self) -> None:
        self._dismissed = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self.connection.close()

    # Reporter

    def progress(self, **facts: Any) -> None:
        self._state = replace(self._state, **facts)

    def activity(self, activity: RankActivity) -> None:
        self._state = replace(self._state, activity=activity)
        self._beat()
        if activity is RankActivity.TRAINING:
            # What set-up frees, such as a whole model of which this rank trains a stage, goes back
            # to the system; what steps free is kept for the next.
            keep_freed_memory()

    def expendable(self, yes: bool) -> None:
        self._state = replace(self._state, expendable=yes)
        self._beat()

    def elastic(self, program: str, *, rests: bool = False) -> None:
        self._state = replace(self._state, elastic=program, rests=rests)
        self._beat()

    def notice(self, text: str) -> None:
        self._send({"kind": "notice", "text": text})

    def stop_requested(self) -> bool:
        return self._stop

    def newcomers_wait(self) -> bool:
        return self._rest

    def group_is_over(self) -> bool:
        return self.is_over(self._joined)

    # The thread

    def _beat_and_obey(self) -> None:
        frames = Frames(self.connection)
        next_beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            while not self._dismissed:
                now = time.monotonic()
                if now >= next_beat:
                    self._beat()
                    next_beat = now + BEAT_SECONDS
                if self._wish.asked and not self._wish_told:
                    self._wish_told = True
                    self._send({"kind": "leaving" if self._spec.newcomer else "terminated"})
                    if self._spec.newcomer:
                        self._leave("left the run", status=0)
                if self._spec.supervised and os.getppid() != self._parent:
                    self._leave("the launcher of this rank is gone")
                if now >= self._leave_at:
                    if self._holds_watcher and self._cause is not None:
                        self._on_left(self._cause)  # its program will not tell
                    self._leave(self._cause or "")
                timeout = min(next_beat, self._leave_at) - now
                if not selector.select(max(0.0, timeout)):
                    self._check_watcher()
                elif not self._take_in(frames):
                    break
        if not self._dismissed:
            self._orphaned(GONE_ELSEWHERE if self._spec.newcomer else GONE)

    def _take_in(self, frames: Frames) -> bool:
        """Obey what has arrived; False at the end of the connection."""
        self._heard_at = time.monotonic()
        with self._sending:  # two threads must not use one TLS connection at a time
            self.connection.settimeout(0.0)
            open_still = frames.read()
            self.connection.settimeout(None)
        try:
            for message, _ in frames.complete():
                self._obey(message)
        except BadFrame:
            return False
        return open_still

    def _obey(self, order: Message) -> None:
        with self._changed:
            match order["kind"]:
                case "roster" if self._spec.rank in order["members"]:
                    self._roster = Roster.of(order, self._spec.rank)
                case "dismissed":
                    self._dismissed = True
                case "stop":
                    self._stop = True
                case "quiesce":
                    self._rest = True
                case "disconnect" if self._transport is not None:
                    if order["rank"] in self._members:
                        place = self._members.index(order["rank"])
                        self._transport.disconnect(place, order["reason"])
                case "regroup" if self._spec.rank in order["members"]:
                    self._ordered, self._rest = order["generation"], False
                    own = self._spec.rank
                    self._left = tuple(rank for rank in order["members"] if rank != own)
                    if self._transport is not None:
                        self._transport.abort(GroupChanged())
                case "abort":
                    self._abort(order["cause"], at_once=order.get("at_once", False))
            self._changed.notify_all()

    def _abort(self, cause: str, *, at_once: bool) -> None:
        """End the program: by an error in its transport, or with the process where it is stuck."""
        self._cause = cause
        self._on_cause(cause)
        if self._transport is not None:
            self._transport.abort(RunAborted(cause.split("\n", 1)[0]))
        seconds = self._spec.limits.unwinding
        if at_once:
            seconds = BEAT_SECONDS  # in which the watcher ends the others
        elif self._holds_watcher:
            seconds += self._spec.limits.leaving  # the watcher sees the others off first
        elif self._transport is None and not self._failing:
            seconds = 0.0  # nothing to save, and connecting cannot be interrupted
        self._leave_at = time.monotonic() + seconds

    def _check_watcher(self) -> None:
        """Leave if the watcher is silent: a host without power closes no connections."""
        patience = self._spec.limits.patience
        if not self._spec.local and time.monotonic() - self._heard_at > patience:
            self._orphaned(f"rank 0, which watches over the run, is silent for {patience:g} s")

    @property
    def _holds_watcher(self) -> bool:
        return not self._spec.local and self._spec.rank == 0

    def _orphaned(self, reason: str) -> None:
        if self._cause is None:
            self._on_left(reason)
        self._leave(self._cause or reason)

    def _leave(self, reason: str, *, status: int = 1) -> None:
        if not self._spec.local:
            first_line = reason.split("\n", 1)[0]
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), f"orchestra: {first_line}\n".encode())
        os._exit(status)  # the program may be stuck in native code

    def _beat(self) -> None:
        progress, waits_for, what = self._probe()
        with self._sending:  # which guards the news, too: any thread of the program may beat
            state = self._state
            news = (progress, state.step, state.samples, state.activity)
            self._progress += news != self._last_news  # no clock is compared between hosts
            self._last_news = news
            beat = replace(state, progress=self._progress, waits_for=waits_for, waits_what=what)
            self._send({"kind": "beat", "beat": asdict(beat)})

    def _send(self, message: Message, payload: bytes = b"") -> None:
        # Where the connection has ended the thread finds out, and acts.
        with self._sending, contextlib.suppress(OSError):
            self.connection.sendall(pack(message, payload))


def _connect(spec: RankSpec) -> socket.socket:
    host, port = spec.watcher
    deadline = time.perf_counter() + spec.limits.joining
    identity = spec.rank, WATCHER, spec.token.encode()
    try:
        connection = connect((host, port), *identity, tls=spec.tls, deadline=deadline)
    except ConnectionError as error:
        raise RunFailed(
            f"rank {spec.rank} cannot reach the watcher at {host}:{port}: {error}; where rank 0's "
            "host gives itself an address that others cannot reach, name another for it"
        ) from error
    connection.settimeout(None)
    # A data loader's worker must not keep the connection of its dead rank open.
    os.register_at_fork(after_in_child=connection.close)
    return connection
