"""The socket transport: tensors on the byte streams between all ranks, and how it is set up.

Every rank connects to those below it and accepts the others. CUDA tensors are staged through pinned
host memory at both ends.
"""

from __future__ import annotations

import functools
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from orchestra.errors import GroupChanged, PeerLost
from orchestra.transports.collective import execute
from orchestra.transports.framing import (
    SHARED_BYTES,
    header_bytes,
    pack_header,
    pack_shared,
)
from orchestra.transports.handshake import TLS, Reception, connect, remaining
from orchestra.transports.host import Host
from orchestra.transports.lanes import Lanes
from orchestra.transports.large_messages import byte_view, on_host
from orchestra.transports.matching import Flow, Receive, Send
from orchestra.transports.progress import ProgressEngine
from orchestra.transports.protocol import (
    CollectiveCall,
    Group,
    Pending,
    SharedTensor,
    Traffic,
    Transport,
)

T = TypeVar("T")

_NOTHING = memoryview(b"")
LOOK_SECONDS = 0.2
"""Between two looks at whether the ranks still have to connect."""
STRANGERS = 64
"""Connections that have not said hello, beside those of the ranks; more push out the oldest."""


class SocketTransport(Flow, Transport):
    """Messages of tensors over TCP, for one flow of one rank.

    Args:
        engine: moves the bytes of all flows of this rank.
        on_flow_start: called first in the thread of each background flow.

    Attributes:
        native: begins the all-reduce of torch.distributed, where there is one.
        host: the memory that ranks of this host share, where they do.
        lanes: the connections over which compiled code moves collectives, where it does.
        traffic: of this flow alone; hello, farewell and what TLS adds are not counted.
        disconnect, abort, connection: see `ProgressEngine`; from any thread.
    """

    def __init__(
        self, engine: ProgressEngine, on_flow_start: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(engine.rank, engine)
        self.size = engine.size
        self.native: Callable[[Tensor], Pending[int]] | None = None
        self.host: Host | None = None
        self.lanes: Lanes | None = None
        self.disconnect, self.abort = engine.disconnect, engine.abort
        self.connection = engine.connection
        self._engine = engine
        self._on_flow_start = on_flow_start
        engine.begin(self)

    @property
    def waits(self) -> int:
        """For messages, by all flows, that have ended."""
        return self._engine.waits

    @property
    def bytes_sent(self) -> int:
        return self._engine.bytes_sent()

    def send(
        self,
        tensor: Tensor,
        to: int,
        tag: int,
        *,
        buffer: Tensor | None = None,
        more: bool = False,
    ) -> Send:
        assert tensor.is_contiguous(), "only contiguous tensors can be sent"
        assert 0 <= to < self.size, f"there is no rank {to} among {self.size}"
        started = time.perf_counter()
        if to == self.rank:
            send = Send(self, to, tensor, b"", _NOTHING, tag)
            # A copy, since the send is finished at once, and the sender may change its tensor.
            self._engine.deliver_local(tensor.detach().clone(), tag)
            send.finished = True
        else:
            send = self._in_segment(tensor, to, tag) or self._over_socket(tensor, to, tag)
            self._engine.send(send, more=more)
            if buffer is not None and not buffer.is_cuda:  # else its copy on the host is being sent
                self._engine.move_rest(send, buffer)
            # The same in a segment and over the socket: it says what the strategy exchanges.
            self.traffic.bytes_sent += header_bytes(tensor.dim()) + tensor.nbytes
        self.traffic.messages_sent += 1
        self.traffic.seconds_communicating += time.perf_counter() - started
        return send

    def _in_segment(self, tensor: Tensor, to: int, tag: int) -> Send | None:
        """Copy `tensor` to where rank `to` finds it, if it is on this host; `to` has to be told."""
        if tensor.nbytes < SHARED_BYTES:
            return None
        segment = self._engine.segment(to, tensor.nbytes)
        if segment is None:
            return None
        segment.fill(tensor)  # without the engine's lock: other flows go on
        header = pack_shared(tensor, tag, segment)
        return Send(self, to, tensor, header, _NOTHING, tag, is_shared=True)

    def _over_socket(self, tensor: Tensor, to: int, tag: int) -> Send:
        content = byte_view(on_host(tensor))
        return Send(self, to, tensor, pack_header(tensor, tag), content, tag)

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Receive:
        """Start receiving; see `Transport.receive`.

        A message of another dtype or number of elements than `into` is a mistake of the program:
        `wait` raises an AssertionError that names both ends.
        """
        assert into is None or into.is_contiguous(), "only contiguous tensors can be received into"
        assert source is None or 0 <= source < self.size, f"no rank {source} among {self.size}"
        receive = Receive(self, source, tag, into)
        self._engine.post(receive)
        return receive

    def execute(self, call: CollectiveCall, over: Transport | None = None) -> int:
        """Carry out `call` now, in shared memory for the rounds that stay on this host."""
        exchange = None if self.lanes is None else functools.partial(self.lanes.exchange, self)
        if self.host is None:
            return execute(over or self, call, exchange)
        return self.host.execute(self, over or self, call, exchange)

    def share(self, like: Tensor, group: Group, tag: int) -> SharedTensor:
        host = self.host or Host(self._engine, frozenset())
        return host.share(like, group.ranks, tag)

    def share_memory(self, neighbours: Collection[int]) -> None:
        """From now on, carry out collectives and send large messages to `neighbours` in memory that
        they share."""
        self.host = Host(self._engine, frozenset(neighbours))
        self._engine.share_memory(neighbours)

    def add(self, own: Tensor, *arrived: Tensor) -> None:
        for each in arrived:
            own.add_(each)

    def now(self) -> float:
        return time.perf_counter()

    def arrived(self) -> dict[int, tuple[float, float]]:
        return self._engine.arrived()

    def lost(self) -> frozenset[int]:
        return self._engine.lost()

    def acknowledged_bytes(self) -> int:
        """Bytes of all flows that the other ends have confirmed: see `ProgressEngine`."""
        in_lanes = 0 if self.lanes is None else self.lanes.acknowledged_bytes()
        return self._engine.acknowledged_bytes() + in_lanes

    def hold(self, latency: Callable[[int, float], float]) -> None:
        """Let all that is sent leave later: see `ProgressEngine`."""
        if self.lanes is not None:
            self.lanes.latency = latency
        self._engine.hold(latency)

    def native_all_reduce(self, vector: Tensor) -> Pending[int]:
        return super().native_all_reduce(vector) if self.native is None else self.native(vector)

    def spawn(self, function: Callable[[Transport], T]) -> FlowTask[T]:
        """Run `function` in a daemon thread, with a flow of its own on the same streams."""
        child = SocketTransport(self._engine, self._on_flow_start)
        child.native, child.host, child.lanes = self.native, self.host, self.lanes

        ended: Future[T] = Future()

        def run() -> None:
            try:
                self._on_flow_start()
                result = function(child)
            except BaseException as error:
                self._engine.end(child)
                if isinstance(error, Exception) and not isinstance(error, PeerLost):
                    self.abort(error)  # others may wait for this flow, and nobody yet for its end
                ended.set_exception(error)
            else:
                self._engine.end(child)  # before anybody learns of it, and counts its bytes
                ended.set_result(result)

        threading.Thread(target=run, daemon=True).start()
        return FlowTask(ended, self.traffic)

    def close(self, timeout: float = 5.0) -> None:
        """Flush what is queued, within `timeout` seconds; say farewell; close every stream.

        After `abort` nothing is flushed or said, and the others see this rank as lost.
        """
        self._engine.close(timeout)


@dataclass(frozen=True)
class FlowTask(Generic[T]):
    """A background flow, which has `ended` with what it returned or raised."""

    ended: Future[T]
    spawner: Traffic

    def done(self) -> bool:
        return self.ended.done()

    def wait(self) -> T:
        """Block until the flow ends; return its result, or raise what it raised.

        The time blocked counts as waiting of the flow that spawned it.
        """
        started = time.perf_counter()
        try:
            return self.ended.result()
        finally:
            self.spawner.seconds_waiting += time.perf_counter() - started


def connect_mesh(
    rank: int,
    addresses: Sequence[tuple[str, int]],
    listener: socket.socket,
    token: bytes,
    *,
    tls: TLS | None = None,
    timeout: float,
    compiled: bool = False,
    on_flow_start: Callable[[], None] = lambda: None,
    on_wait: Callable[[tuple[int, ...]], None] = lambda ranks: None,
    is_over: Callable[[], bool] = lambda: False,
    report: Callable[[PeerLost], None] | None = None,
) -> SocketTransport:
    """Connect `rank` with every other one; `addresses[r]` is where rank r listens.

    With `compiled` collectives go over connections of their own, in compiled code: all ranks have
    to have it, and none of them TLS, which it does not speak.

    `listener` is closed when this returns or raises. Connections that do not prove that they
    belong to the run within `timeout` seconds, or claim a rank that is there already, are dropped.
    `on_wait` is called with the ranks that this one waits for, whenever they change. For `report`,
    of use once all are connected, see `ProgressEngine`.

    Raises:
        PeerLost: the first rank that could not be reached, or did not come.
        GroupChanged: `is_over` has returned True: there is another group.
    """
    deadline = time.perf_counter() + timeout
    connections: dict[int, socket.socket] = {}
    missing = set(range(rank + 1, len(addresses)))
    refused: list[str] = []

    def welcome(peer: int, connection: socket.socket) -> None:
        connections[peer] = connection
        on_wait(tuple(sorted(missing)))

    try:
        with listener, selectors.DefaultSelector() as selector:
            # All listen before any address is known, so that the kernel completes these connections
            # even while `peer` is still connecting to others.
            for peer in range(rank):
                on_wait((peer,))
                at = addresses[peer]
                connections[peer] = _reach(at, rank, peer, token, tls, deadline, is_over)
            reception = Reception(
                selector, listener, rank, token, tls, missing=missing, spare=STRANGERS,
                welcome=welcome, refused=lambda _, why: refused.append(why),
            )  # fmt: skip
            on_wait(tuple(sorted(missing)))
            try:
                while missing:
                    if is_over():
                        raise GroupChanged()
                    for key, _ in selector.select(min(remaining(deadline), LOOK_SECONDS)):
                        key.data()
            finally:
                reception.drop()
    except BaseException as error:
        for connection in connections.values():
            connection.close()
        if not isinstance(error, TimeoutError):
            raise
        raise _not_connected(missing, refused) from None
    engine = ProgressEngine(rank, connections, report)
    transport = SocketTransport(engine, on_flow_start)
    if compiled:
        transport.lanes = Lanes(engine, token)
    return transport


def _reach(
    address: tuple[str, int], rank: int, peer: int, token: bytes, tls: TLS | None,
    deadline: float, is_over: Callable[[], bool],
) -> socket.socket:  # fmt: skip
    """Connect `rank` with `peer`, which listens at `address`. Raises `PeerLost`, `GroupChanged`."""

    def look() -> None:
        if is_over():
            raise GroupChanged()

    try:
        return connect(address, rank, peer, token, tls=tls, deadline=deadline, look=look)
    except ConnectionError as error:
        where = "{}:{}".format(*address)
        raise PeerLost(peer, f"it could not be reached at {where}: {error}") from error


def _not_connected(missing: Collection[int], refused: Sequence[str]) -> PeerLost:
    """Return the error of a rank to which those `missing` did not connect in time."""
    first, *rest = sorted(missing)
    others = f" (nor did {', '.join(map(str, rest))})" if rest else ""
    why = "".join(f"; a connection was refused: {reason}" for reason in refused[-1:])
    return PeerLost(first, f"it did not connect in time{others}{why}")
