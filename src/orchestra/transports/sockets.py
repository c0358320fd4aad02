"""The transport between CPU ranks of real processes: one TCP stream a pair of ranks.

`mesh.connect_mesh` makes one. How the parts divide the work:

    sockets      the transport of a flow, and background flows
    progress     whoever waits moves the bytes of everybody
    streams      one connection: frames out, frames in
    matching     which message belongs to which receive
    operations   the handles
    framing      tensors on a byte stream

CUDA tensors are staged through pinned host memory at both ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.transports.collective import CollectiveVerb
from orchestra.transports.framing import byte_view, header_bytes, pack_header
from orchestra.transports.operations import Flow, Receive, Send
from orchestra.transports.progress import ProgressEngine
from orchestra.transports.protocol import Traffic, Transport

T = TypeVar("T")


class SocketTransport(CollectiveVerb):
    """Messages of tensors over TCP, for one flow of one rank.

    `on_flow_start` is called first in the thread of each background flow.
    """

    def __init__(
        self,
        engine: ProgressEngine,
        on_flow_start: Callable[[], None] | None = None,
        flows: list[Flow] | None = None,
    ) -> None:
        self._engine = engine
        self._on_flow_start = on_flow_start
        self._flow = Flow(engine.rank, engine)
        self._flows = [] if flows is None else flows
        self._flows.append(self._flow)

    @property
    def rank(self) -> int:
        return self._engine.rank

    @property
    def size(self) -> int:
        return self._engine.size

    @property
    def traffic(self) -> Traffic:
        """Counters of this flow alone; hello, farewell and what TLS adds are not in them."""
        return self._flow.traffic

    @property
    def bytes_sent(self) -> int:
        """Payload and headers sent by all flows of this rank."""
        return sum(flow.traffic.bytes_sent for flow in self._flows)

    def send(self, tensor: Tensor, to: int, tag: int) -> Send:
        """Start sending a contiguous `tensor`; see `Transport.send`."""
        assert tensor.is_contiguous(), "only contiguous tensors can be sent"
        assert 0 <= to < self.size, f"there is no rank {to} among {self.size}"
        started = time.perf_counter()
        if to == self.rank:
            send = Send(self._flow, to, tensor, b"", memoryview(b""))
            self._engine.deliver_local(tensor.detach().clone(), tag)
            send.finished = True
        else:
            on_host = _pinned_copy(tensor) if tensor.is_cuda else tensor
            send = Send(self._flow, to, tensor, pack_header(tensor, tag), byte_view(on_host))
            self._engine.send(send)
            self.traffic.bytes_sent += header_bytes(tensor.dim()) + tensor.nbytes
        self.traffic.messages_sent += 1
        self.traffic.seconds_communicating += time.perf_counter() - started
        return send

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Receive:
        """Start receiving; see `Transport.receive`.

        A message of another dtype or number of elements than `into` is a mistake of the program:
        `wait` raises an AssertionError that names both ends.
        """
        assert into is None or into.is_contiguous(), "only contiguous tensors can be received into"
        assert source is None or 0 <= source < self.size, f"no rank {source} among {self.size}"
        receive = Receive(self._flow, source, tag, into)
        self._engine.post(receive)
        return receive

    def add(self, own: Tensor, *arrived: Tensor) -> None:
        """Add all that has arrived to what is there, in this order."""
        for each in arrived:
            own.add_(each)

    def now(self) -> float:
        """Seconds of a monotonic clock."""
        return time.perf_counter()

    def spawn(self, function: Callable[[Transport], T]) -> FlowTask[T]:
        """Run `function` in a daemon thread, with a flow of its own on the same streams."""
        child = SocketTransport(self._engine, self._on_flow_start, self._flows)
        return FlowTask(child, function, self._on_flow_start, self.traffic)

    def lost(self) -> frozenset[int]:
        """The ranks known to be gone without a farewell."""
        return self._engine.lost()

    def disconnect(self, rank: int, reason: str) -> None:
        """Treat `rank` as lost, as the end of its stream would. From any thread."""
        self._engine.disconnect(rank, reason)

    def abort(self, error: Exception) -> None:
        """Every operation of every flow, pending or to come, raises `error`. From any thread."""
        self._engine.abort(error)

    def close(self, timeout: float = 5.0) -> None:
        """Flush what is queued, within `timeout` seconds; say farewell; close every stream.

        After `abort` nothing is flushed or said, and the others see this rank as lost.
        """
        self._engine.close(self._flow, timeout)

    def acknowledged_bytes(self) -> int:
        """Bytes of all flows that the other ends' kernels have confirmed, hellos included.

        Linux only, and before `close`: a check on `traffic.bytes_sent`.
        """
        return self._engine.acknowledged_bytes()


class FlowTask(Generic[T]):
    """A background flow; what it returned or raised is kept for `wait`."""

    def __init__(
        self,
        transport: SocketTransport,
        function: Callable[[Transport], T],
        on_start: Callable[[], None] | None,
        spawner: Traffic,
    ) -> None:
        self._spawner = spawner
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(transport, function, on_start), daemon=True
        )
        self._thread.start()

    def _run(
        self,
        transport: SocketTransport,
        function: Callable[[Transport], T],
        on_start: Callable[[], None] | None,
    ) -> None:
        try:
            if on_start is not None:
                on_start()
            self._results.append(function(transport))
        except BaseException as error:
            self._error = error
            if isinstance(error, Exception) and not isinstance(error, PeerLost):
                transport.abort(error)  # others may wait for this flow, and nobody yet for its end

    def done(self) -> bool:
        """True if the flow has ended."""
        return not self._thread.is_alive()

    def wait(self) -> T:
        """Block until the flow ends: its result, or what it raised.

        The time blocked counts as waiting of the flow that spawned it.
        """
        started = time.perf_counter()
        self._thread.join()
        self._spawner.seconds_waiting += time.perf_counter() - started
        if self._error is not None:
            raise self._error
        (result,) = self._results
        return result


def _pinned_copy(tensor: Tensor) -> Tensor:
    """A CUDA tensor's elements in page-locked host memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
