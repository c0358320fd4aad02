"""Messages and collectives of tensors in virtual time: the transport of a rank's flows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from orchestra.engines.simulation.background import BackgroundQueue, Queued
from orchestra.engines.simulation.kernel import Flow, Kernel
from orchestra.engines.simulation.network import Message, Port, Sending
from orchestra.engines.simulation.rendezvous import Contribution, Member, Rendezvous
from orchestra.errors import PeerLost
from orchestra.schedules import Schedule
from orchestra.transports import matching
from orchestra.transports.collective import CollectiveMixin
from orchestra.transports.framing import MESSAGE, Header, header_bytes
from orchestra.transports.matching import Operation
from orchestra.transports.protocol import (
    CollectiveCall,
    HandOver,
    Task,
    Traffic,
    Transport,
)
from orchestra.worker.interception import InterceptedTransport

T = TypeVar("T")


class SimulatedTransport(CollectiveMixin):
    """The transport of one flow."""

    def __init__(self, port: Port, rendezvous: Rendezvous) -> None:
        self._port = port
        self._rendezvous = rendezvous
        self._kernel = port.net.kernel
        self._flow = matching.Flow(port.rank, self)
        self._queue: BackgroundQueue | None = None

    @property
    def rank(self) -> int:
        return self._port.rank

    @property
    def size(self) -> int:
        return len(self._port.net.ports)

    @property
    def traffic(self) -> Traffic:
        """Counters of this flow alone."""
        return self._flow.traffic

    @property
    def bytes_sent(self) -> int:
        """Payload and headers sent by all flows of this rank."""
        self._kernel.catch_up_with_own()
        return self._port.bytes_sent

    def send(self, tensor: Tensor, to: int, tag: int) -> Sending:
        """Start sending a contiguous `tensor`; see `Transport.send`."""
        assert tensor.is_contiguous(), "only contiguous tensors can be sent"
        assert 0 <= to < self.size, f"there is no rank {to} among {self.size}"
        port, traffic = self._port, self.traffic
        sending = Sending(self._flow, port, tensor, to)
        payload = tensor.detach().clone()
        traffic.messages_sent += 1
        overhead = port.net.overhead
        if to == self.rank:
            if overhead.local is not None:
                self._spend(overhead.local.at(tensor.nbytes))
            self._kernel.catch_up()
            port.mailbox.deliver_local(payload, tag)
            sending.finished = True
            port.wake()
            return sending
        header = Header(MESSAGE, tensor.dtype, tuple(tensor.shape), tag, tensor.nbytes)
        size = header_bytes(tensor.dim()) + tensor.nbytes
        port.bytes_sent += size
        traffic.bytes_sent += size
        if to in port.mailbox.gone:
            sending.fail(PeerLost(to, port.mailbox.gone[to]))
            return sending
        port.meter.count(to, size)
        message = Message(header, payload, sending, port.net.ports[to])
        stream = port.net.stream(self.rank, to)
        port.keep_order()
        cost = overhead.message(size)
        self._spend(cost.send_setup + port.warm_up())
        stream.send(message, self._kernel.here())
        self._spend(cost.send_rest)
        if size <= overhead.buffer:
            sending.finished = True
        stream.leave(message, self._kernel.here())
        return sending

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> matching.Receive:
        """Start receiving; see `Transport.receive`."""
        assert into is None or into.is_contiguous(), "only contiguous tensors can be received into"
        assert source is None or 0 <= source < self.size, f"no rank {source} among {self.size}"
        receive = matching.Receive(self._flow, source, tag, into)
        self._port.mailbox.post(receive)
        return receive

    def add(self, own: Tensor, *arrived: Tensor) -> None:
        """Add all that has arrived to what is there, which takes as long as the overhead says."""
        for each in arrived:
            own.add_(each)
        self._spend(self._port.net.overhead.add * (own.nbytes * len(arrived)))

    def collective(self, call: CollectiveCall) -> Task[int]:
        """Begin this rank's part in a collective; see `Transport.collective`."""
        no_flow = self._background is None and not self._rendezvous.faults
        if call.background and call.schedule is not None and no_flow and not call.visible:
            given = self._contribution(call.schedule, call)
            if given.needs_no_values:
                return self._begin_queued(given)
        return super().collective(call)

    def _contribution(self, schedule: Schedule, call: CollectiveCall) -> Contribution:
        net = self._port.net
        placed = self._rendezvous.placed(net, schedule, call.group, call.vector, call.edges)
        return Contribution(placed, call.vector, call.tag, call.edges)

    def _another(self) -> SimulatedTransport:
        return SimulatedTransport(self._port, self._rendezvous)

    def _begin_queued(self, given: Contribution) -> Queued:
        port = self._port
        if self._queue is None:
            self._kernel.catch_up()
            self._queue = BackgroundQueue(
                self._rendezvous, port, port, self._another, self.traffic, port.signal_seconds
            )
            self._kernel.add_thread(self.rank)
            self._rendezvous.flow_began(self.rank)
        self._spend(port.signal_seconds)
        return self._queue.begin(given)

    def end_background(self) -> None:
        """End the background flow, or what stands for it; see `Transport.end_background`."""
        super().end_background()
        if self._queue is not None:
            self._spend(self._port.signal_seconds)
            self._kernel.catch_up()
            self._kernel.add_thread(self.rank, -1)
            self._queue = None

    def execute(self, call: CollectiveCall, over: Transport | None = None) -> int:
        """Without messages where all ranks meet; with a vector of no elements there are none."""
        schedule, vector = call.schedule, call.vector
        assert schedule is not None
        together = schedule.all_reduce or schedule.joint
        if not together or len(call.group) == 1 or not vector.numel():
            return super().execute(call, over)
        port, kernel, current = self._port, self._kernel, self._kernel.current
        traffic = self.traffic
        port.keep_order()
        waited, start = traffic.seconds_waiting, kernel.here()
        self._spend(port.warm_up() + port.net.overhead.collective)
        moves_values = not (schedule.all_reduce or vector.is_meta)
        member = self._join(
            self._contribution(schedule, call),
            call.visible or moves_values or self._rendezvous.faults,
        )
        if member is None:
            return super().execute(call, over)
        while not member.done:
            kernel.park()
        current.waits = None
        traffic.add(member.count(port))
        if isinstance(over, InterceptedTransport):
            over.executed(call, start, start + traffic.seconds_waiting - waited)
        return member.buffer_bytes

    def native_all_reduce(self, vector: Tensor) -> Task[int]:
        """Begin what stands for the all-reduce of torch.distributed."""
        return self._port.native().all_reduce(vector)

    def new_hand_over(self) -> HandOver:
        """Make what two flows of this rank wait on."""
        return FlowHandOver(self._port)

    def _join(self, given: Contribution, message_by_message: bool) -> Member | None:
        """Join the rendezvous once virtual time has caught up with that of this flow."""
        kernel, flow = self._kernel, self._kernel.current
        joined: list[Member | None] = []

        def join() -> None:
            member = self._rendezvous.join(
                given,
                self.rank,
                flow.processor,
                lambda: kernel.resume(flow),
                message_by_message=message_by_message,
            )
            joined.append(member)
            if member is not None:
                flow.waits = member.waits
            elif is_ahead:
                kernel.resume(flow)

        is_ahead = kernel.here() > kernel.now()
        kernel.when_here(join)
        while not joined:
            kernel.park()
        return joined[0]

    def now(self) -> float:
        """Virtual seconds."""
        return self._kernel.here()

    def spawn(self, function: Callable[[Transport], T]) -> FlowTask[T]:
        """Run `function` in a flow of its own of this rank."""
        self._kernel.catch_up()
        transport = self._another()
        processor = self._port.new_processor()
        flow = self._kernel.start(self.rank, lambda: function(transport), processor)
        self._rendezvous.flow_began(self.rank)
        return FlowTask(self._kernel, flow, self.traffic)

    def lost(self) -> frozenset[int]:
        """The ranks known to be gone."""
        self._kernel.catch_up()
        return frozenset(self._port.mailbox.lost)

    # As the progress behind this flow's operations

    def wait(self, operation: Operation) -> None:
        """Let virtual time pass until `operation` is finished, and take in what it brings."""
        if not isinstance(operation, matching.Receive):
            self.traffic.seconds_waiting += self._sleep(operation, lambda: operation.finished)
            return
        receive = operation
        if not receive.frame_bytes and not receive.finished and self._may_sleep_through():
            self._sleep_through(receive)
            return
        begun = self._sleep(receive, lambda: receive.finished or receive.frame_bytes > 0)
        self.traffic.seconds_waiting += begun
        if receive.frame_bytes and receive.error is None:
            seconds = self._port.net.overhead.message(receive.frame_bytes).receiving
            self._port.keep_order()
            self._spend(seconds + self._port.warm_up())
            receive.frame_bytes = 0
        self.traffic.seconds_communicating += self._sleep(receive, lambda: receive.finished)

    def _may_sleep_through(self) -> bool:
        """Whether nothing that happens meanwhile changes how long it takes to take a message in."""
        port = self._port
        alone = self._kernel.current.processor.undisturbed()
        return alone and not (port.is_cold or port.shares_caches)

    def _sleep_through(self, receive: matching.Receive) -> None:
        """Let virtual time pass until `receive` is finished, without waking when it begins."""
        kernel, flow, traffic = self._kernel, self._kernel.current, self.traffic
        started = kernel.here()
        self._sleep(receive, lambda: receive.finished)
        begun = max(started, receive.began_at if receive.frame_bytes else kernel.here())
        traffic.seconds_waiting += begun - started
        if receive.frame_bytes and receive.error is None:
            seconds = self._port.net.overhead.message(receive.frame_bytes).receiving
            flow.ahead = begun + seconds / flow.processor.rate
            receive.frame_bytes = 0
        traffic.seconds_communicating += kernel.here() - begun

    def _sleep(self, operation: Operation, so: Callable[[], bool]) -> float:
        """Let virtual time pass until `so`; how much did."""
        started = self.now()
        if not so():
            flow = self._kernel.current
            flow.waits = lambda: self._signs(operation)
            self._port.sleep_until(so)
            flow.waits = None
        return self.now() - started

    def test(self, operation: Operation) -> bool:
        """Whether `operation` is finished."""
        self._kernel.catch_up()
        return operation.finished

    def _spend(self, seconds: float) -> None:
        if seconds > 0:
            started = self.now()
            self._kernel.current.processor.spend(seconds)
            self.traffic.seconds_communicating += self.now() - started

    def _signs(self, operation: Operation) -> tuple[tuple[int, ...], str]:
        if isinstance(operation, matching.Receive):
            whom, verb, tag = operation.requested, "to receive", f", tag {operation.tag}"
        else:
            assert isinstance(operation, Sending)
            whom, verb, tag = operation.to, "to send", ""
        others = tuple(rank for rank in range(self.size) if rank != self.rank)
        return (others if whom is None else (whom,)), verb + tag


class FlowHandOver:
    """Between two flows of the rank of `port`: telling takes as long as a message to itself."""

    def __init__(self, port: Port) -> None:
        self._port = port

    def wait_until(self, so: Callable[[], bool], traffic: Traffic) -> None:
        kernel, rank = self._port.net.kernel, self._port.rank
        started = kernel.here()
        if not so():
            flow = kernel.current
            flow.waits = lambda: ((rank,), "another flow of its own")
            self._port.sleep_until(so)
            flow.waits = None
        traffic.seconds_waiting += kernel.here() - started

    def tell(self, change: Callable[[], None], traffic: Traffic) -> None:
        kernel, seconds = self._port.net.kernel, self._port.signal_seconds
        if seconds > 0:
            started = kernel.here()
            kernel.current.processor.spend(seconds)
            traffic.seconds_communicating += kernel.here() - started
        kernel.catch_up()
        change()
        self._port.wake()


class FlowTask(Generic[T]):
    """A background flow of a rank."""

    def __init__(self, kernel: Kernel, flow: Flow, spawner: Traffic) -> None:
        self._kernel = kernel
        self._flow = flow
        self._spawner = spawner

    def done(self) -> bool:
        """Whether the flow has ended."""
        self._kernel.catch_up()
        return self._flow.ended

    def wait(self) -> T:
        """Let virtual time pass until the flow ends: its result, or what it raised."""
        started = self._kernel.here()
        self._kernel.join(self._flow)
        self._spawner.seconds_waiting += self._kernel.here() - started
        if self._flow.error is not None:
            raise self._flow.error
        result: Any = self._flow.result
        return result  # type: ignore[no-any-return]
