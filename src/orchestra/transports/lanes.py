"""Collectives between ranks that share no memory, moved by compiled code.

For each tag, two ranks of a collective have a connection of their own: collectives of one tag begin
in the same order on all ranks, those of several tags do not. It is made when a collective first
needs it, by messages of the tag. Messages go on meanwhile, since the compiled code returns when the
streams have something to do. Who is lost only the streams say: a connection that ends may have been
closed because of another rank.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.transports import executor
from orchestra.transports.asides import Asides
from orchestra.transports.collective import exchange_messages, messages_of
from orchestra.transports.executor import DONE, LOOK, Job, Wire, plan_of
from orchestra.transports.framing import INBOX_BYTES, acknowledged
from orchestra.transports.handshake import Reception, address_of, connect, listen, remaining
from orchestra.transports.matching import Flow
from orchestra.transports.progress import ProgressEngine
from orchestra.transports.protocol import CollectiveCall, Traffic, Transport

CONNECT_SECONDS = 60.0
NOTICE_SECONDS = 2.0
"""Until the end of a rank's stream has come, after that of another connection to it."""
LOOK_MILLISECONDS = 200
"""After which blocked compiled code lets handlers of signals run: one that came just before it
blocked does not interrupt it."""
STRANGERS = 8
MOST_PREPARED = 256
"""Jobs that stay prepared, more than a model has buckets; one more, and all are made anew."""
_PORT = struct.Struct("<H")


class PreparedJob(NamedTuple):
    """A rank's part in collectives that are alike, ready to be carried out again and again.

    Attributes:
        peers: the ranks at the other ends of its wires.
        traffic: what one collective counts as.
    """

    job: Job
    peers: Sequence[int]
    wires: Sequence[Wire]
    traffic: Traffic
    scratch: int

    @property
    def awaited(self) -> int | None:
        """The rank from which the next bytes have to come, or that has to take some."""
        place = self.job.awaited
        return None if place is None else self.peers[place]


class Lanes:
    """The connections of one rank for collectives, by peer and tag.

    Args:
        token: of the ranks that are connected by streams.

    Attributes:
        latency: the seconds after which what is sent to a rank at a time leaves; None: at once.
    """

    def __init__(self, engine: ProgressEngine, token: bytes) -> None:
        self.latency: Callable[[int, float], float] | None = None
        self._engine, self._token = engine, token
        self._wires: dict[tuple[int, int], Wire] = {}
        self._prepared_jobs: dict[Hashable, PreparedJob | None] = {}
        self._lock = threading.Lock()
        self._running: set[int] = set()  # tags of which a flow is in compiled code
        self._closed = False
        self._process = os.getpid()
        engine.side_channels.append(self)

    def exchange(
        self,
        flow: Flow,
        transport: Transport,
        call: CollectiveCall,
        memory: Tensor,
        first: int,
        end: int | None,
    ) -> int:
        """Carry out this rank's part in some rounds of `call`; see `collective.Exchange`.

        Args:
            flow: whose traffic it is.
            transport: that of the flow, or an interceptor of it.
        """
        started = time.perf_counter()
        alike = (
            call.schedule, call.group.ranks, call.tag, memory.dtype, memory.is_cuda,
            call.vector.numel(), call.edges and tuple(call.edges), first, end,
        )  # fmt: skip
        try:
            prepared = self._prepared_jobs[alike]
        except KeyError:
            prepared = self._prepare(flow, call, memory, first, end)
            if len(self._prepared_jobs) == MOST_PREPARED:
                self._prepared_jobs.clear()
            self._prepared_jobs[alike] = prepared
        if prepared is None:
            return exchange_messages(transport, call, memory, first, end)
        job, peers, wires, moved, scratch = prepared
        if self.latency is not None:
            for peer, wire in zip(peers, wires, strict=True):
                wire.hold(self.latency(peer, started))
        arrived = [wire.arrived for wire in wires]
        job.begin(memory)
        flow.in_collective = prepared
        try:
            with self._in_compiled_code(call.tag, wires):
                self._finish(prepared, call.group.ranks, call.tag)
        finally:
            flow.in_collective = None
            waited, _ = job.seconds
            flow.traffic.seconds_waiting += waited
            flow.traffic.seconds_communicating += time.perf_counter() - started - waited
        flow.traffic.add(moved)
        for peer, wire, (before, passed) in zip(peers, wires, arrived, strict=True):
            now, seconds = wire.arrived
            if now - before > INBOX_BYTES:  # less of a message is read ahead, and takes no time
                self._engine.count(peer, now - before, seconds - passed)
        transport.executed(call, started, started + waited, moved.bytes_sent)
        return scratch

    def _prepare(
        self, flow: Flow, call: CollectiveCall, memory: Tensor, first: int, end: int | None
    ) -> PreparedJob | None:
        """Connect this rank with those that it meets in `call`; None where compiled code cannot
        carry it out, or has nothing to do."""
        schedule, ranks = call.schedule, call.group.ranks
        assert schedule is not None
        edges = schedule.edges(call.vector.numel()) if call.edges is None else tuple(call.edges)
        plan = plan_of(schedule, ranks.index(flow.rank), edges, memory.element_size(), first, end)
        if memory.is_cuda or not plan.fits(memory.dtype) or not plan.peers:
            return None
        peers = [ranks[place] for place in plan.peers]
        self._connect(peers, call.tag)
        wires = [self._wires[peer, call.tag] for peer in peers]
        job = Job(plan, memory.dtype, wires, call.tag, self._engine.news, LOOK_MILLISECONDS)
        return PreparedJob(
            job, peers, wires, messages_of(call, flow.rank, first, end), plan.scratch
        )

    def _finish(self, prepared: PreparedJob, ranks: Collection[int], tag: int) -> None:
        """Move rows until all are done, and with them what the streams have to move."""
        job, engine = prepared.job, self._engine
        engine.flush()
        while (status := job.run()) != DONE:
            if status == LOOK:
                engine.move()
                continue
            peer = prepared.peers[job.where]
            if status == executor.ENDED:
                engine.raise_loss(ranks, peer)
            raise AssertionError(f"tag {tag}: rank {peer} does not agree: {job.mismatch()}")
        engine.waits += 1

    @contextlib.contextmanager
    def _in_compiled_code(self, tag: int, wires: Sequence[Wire]) -> Iterator[None]:
        """Keep the wires open, and close them after a failure: nobody knows what is on them."""
        with self._lock:
            is_open = not self._closed
            if is_open:
                self._running.add(tag)
        if not is_open:
            self._engine.check()  # raises why
        try:
            yield
        except BaseException:
            _close(wires)
            raise
        finally:
            self._running.discard(tag)

    def acknowledged_bytes(self) -> int:
        """Return the bytes that the other ends' kernels have confirmed (Linux)."""
        wires = list(self._wires.values())
        open_ones = [wire.connection for wire in wires if wire.connection.fileno() >= 0]
        return sum(acknowledged(each) for each in open_ones)

    def shut(self, rank: int | None = None) -> None:
        """Let collectives, in any flow, find the connections to `rank` ended; None: to all."""
        for (peer, _), wire in list(self._wires.items()):
            if rank in (None, peer):
                with contextlib.suppress(OSError):
                    wire.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections. One in compiled code has been shut: its flow closes it."""
        # A forked process has none of these flows, and perhaps a lock that nobody will release.
        if os.getpid() != self._process:
            _close(self._wires.values())
            return
        with self._lock:
            self._closed = True
            running = set(self._running)
        _close(wire for (_, tag), wire in self._wires.items() if tag not in running)

    # --- connecting -----------------------------------------------------------------------------

    def _connect(self, peers: Sequence[int], tag: int) -> None:
        """Make the connections to `peers` that are missing; those make theirs to this rank."""
        missing = [peer for peer in peers if (peer, tag) not in self._wires]
        if not missing:
            return
        asides, token = Asides(self._engine, tag), self._token + b"/tag %d" % tag
        deadline = time.perf_counter() + CONNECT_SECONDS
        above = {peer for peer in missing if peer > self._engine.rank}

        def welcome(peer: int, connection: socket.socket) -> None:
            self._wires[peer, tag] = Wire(connection)
            above.remove(peer)

        with contextlib.ExitStack() as listening:
            selector = listening.enter_context(selectors.DefaultSelector())
            for peer in sorted(above):
                listener = listening.enter_context(listen(self._address(peer, own=True)))
                reception = Reception(
                    selector, listener, self._engine.rank, token, None, missing={peer},
                    spare=STRANGERS, welcome=welcome, refused=lambda *_: None,
                )  # fmt: skip
                listening.callback(reception.drop)
                asides.tell(peer, _PORT.pack(address_of(listener)[1]))
            # Each waits for ranks below it only, before it accepts those above: no circle.
            for peer in missing:
                if peer not in above:
                    self._wires[peer, tag] = Wire(self._reach(peer, asides, token, deadline))
            while above:
                self._engine.check(above)  # moves messages, too
                for key, _ in selector.select(1e-3 * LOOK_MILLISECONDS):
                    key.data()
                self._in_time(deadline, min(above, default=None))

    def _address(self, peer: int, *, own: bool) -> str:
        """Return the address of this end of the stream to `peer`, or of the other end."""
        stream, host = self._engine.connection(peer), ""
        if stream is not None:
            with contextlib.suppress(OSError):  # it has just been reset
                host = str((stream.getsockname() if own else stream.getpeername())[0])
        return host or self._engine.raise_loss((peer,), peer)

    def _reach(self, peer: int, asides: Asides, token: bytes, deadline: float) -> socket.socket:
        address = self._address(peer, own=False), *_PORT.unpack(asides.hear(peer))
        try:
            return connect(
                address, self._engine.rank, peer, token, tls=None, deadline=deadline,
                look=lambda: self._engine.check((peer,)),
            )  # fmt: skip
        except ConnectionError as error:
            until = time.perf_counter() + NOTICE_SECONDS
            while time.perf_counter() < until:
                self._engine.check((peer,))
                time.sleep(0.01)
            raise PeerLost(peer, f"it could not be reached for a collective: {error}") from error

    @staticmethod
    def _in_time(deadline: float, peer: int | None) -> None:
        if peer is not None:
            try:
                remaining(deadline)
            except TimeoutError:
                raise PeerLost(peer, "it did not connect for a collective in time") from None


def _close(wires: Collection[Wire] | Iterator[Wire]) -> None:
    for wire in wires:
        wire.close()
