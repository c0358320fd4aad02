"""Messages and collectives of tensors in virtual time: the transport of a rank's flows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from orchestra.cluster.nodes import MessageCost
from orchestra.collectives import Group, all_reduce
from orchestra.engines.simulation.background import BackgroundQueue, Queued
from orchestra.engines.simulation.collective import Part
from orchestra.engines.simulation.kernel import Flow
from orchestra.engines.simulation.network import Message, Port, Sending
from orchestra.engines.simulation.participant import carry_out
from orchestra.engines.simulation.placed import PlacedPlan
from orchestra.engines.simulation.rendezvous import Rendezvous
from orchestra.errors import InputError, PeerLost
from orchestra.schedules.sums import SumStage
from orchestra.transports import matching
from orchestra.transports.background import HandOver
from orchestra.transports.collective import execute_in_stages
from orchestra.transports.framing import MESSAGE, Header
from orchestra.transports.matching import Operation
from orchestra.transports.protocol import CollectiveCall, Pending, SharedTensor, Traffic, Transport

T = TypeVar("T")


class SimulatedTransport(Transport):
    """The transport of one flow."""

    def __init__(self, port: Port, rendezvous: Rendezvous) -> None:
        self._port, self._rendezvous, self._kernel = port, rendezvous, port.net.kernel
        self._flow = matching.Flow(port.rank, self)
        self.rank, self.size = port.rank, len(port.net.ports)
        self.traffic = self._flow.traffic
        self._queue: BackgroundQueue | None = None
        # The collective whose messages this flow sends now, and how many it has sent to each rank
        self._sent_collective: tuple[PlacedPlan, Counter[int]] | None = None

    @property
    def bytes_sent(self) -> int:
        """Payload and headers sent by all flows of this rank."""
        self._kernel.catch_up_with_own()
        self._port.meter.settle()
        return self._port.bytes_sent

    # Every send is copied, and each message leaves by itself: no option changes anything.
    def send(self, tensor: Tensor, to: int, tag: int, **_: Any) -> Sending:
        """Start sending a contiguous `tensor`; see `Transport.send`."""
        assert tensor.is_contiguous(), "only contiguous tensors can be sent"
        assert 0 <= to < self.size, f"there is no rank {to} among {self.size}"
        port, traffic = self._port, self._flow.traffic
        port.require_open()
        sending = Sending(self._flow, port, tensor, to)
        # The sender may change its tensor long before the message arrives in virtual time.
        payload = tensor.detach().clone()
        traffic.messages_sent += 1
        overhead = port.net.overhead
        if to == self.rank:
            local = 0.0 if overhead.local is None else overhead.local.at(tensor.nbytes)
            port.spend(local + 2 * self._handling, traffic)  # of both ends
            # Other flows read the mailbox too: nothing may be in it before its time.
            self._kernel.catch_up()
            port.mailbox.deliver_local(payload, tag)
            sending.finished = True
            port.wake_all()
            return sending
        header = Header(MESSAGE, tensor.dtype, tuple(tensor.shape), tag, tensor.nbytes)
        size = header.frame_bytes
        port.bytes_sent += size
        traffic.bytes_sent += size
        if to in port.mailbox.gone:
            sending.fail(PeerLost(to, port.mailbox.gone[to]))
            return sending
        port.meter.count(port.net.members[to], size)
        # Random shares are drawn only while the stopwatch runs, so that runs with and without an
        # evaluation draw the same numbers.
        both_ways, fair = None, not port.meter.running
        if self._sent_collective is not None:
            both_ways, fair = self._count_message(*self._sent_collective, to)
        message = Message(header, payload, sending, port.net.ports[to], both_ways, fair=fair)
        stream = port.net.stream(self.rank, to)
        port.keep_order()
        near = port.net.is_near(self.rank, to)
        cost = self._cost(size, near)
        port.spend(cost.send_setup + self._handling + port.warm_up(), traffic)
        # The rest of the processor time passes while the first bytes are on their way.
        stream.send(message, self._kernel.here())
        port.spend(cost.send_rest, traffic)
        if cost.is_buffered:
            sending.finished = True
        stream.leave(message, self._kernel.here())
        return sending

    def _count_message(self, placed: PlacedPlan, sent: Counter[int], to: int) -> tuple[bool, bool]:
        """Count the next message of a collective to rank `to`; return its `both_ways` and `fair`
        (see `Load`)."""
        sent[to] += 1
        pair = placed.place[self.rank], placed.place[to]
        return placed.plan.goes_both_ways(pair, sent[to] - 1), placed.shares_fairly(pair[0])

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> matching.Receive:
        """Start receiving; see `Transport.receive`."""
        assert into is None or into.is_contiguous(), "only contiguous tensors can be received into"
        assert source is None or 0 <= source < self.size, f"no rank {source} among {self.size}"
        self._port.require_open()
        receive = matching.Receive(self._flow, source, tag, into)
        self._port.mailbox.post(receive)
        return receive

    def add(self, own: Tensor, *arrived: Tensor) -> None:
        """Add all that has arrived to what is there, which takes as long as the overhead says."""
        for each in arrived:
            own.add_(each)
        seconds = self._port.net.overhead.add * (own.nbytes * len(arrived))
        self._port.spend(seconds, self.traffic)

    def collective(self, call: CollectiveCall) -> Pending[int]:
        """Begin this rank's part in a collective; see `Transport.collective`."""
        needs_flow = self._background or self._rendezvous.faults or call.message_by_message
        if call.background and call.schedule is not None and not needs_flow:
            placed = self._rendezvous.plan(self._port.net, call)
            if placed.plan.is_synchronizing:
                return self._begin_queued(placed, call)
        return super().collective(call)

    def _begin_queued(self, placed: PlacedPlan, call: CollectiveCall) -> Queued:
        port = self._port
        if self._queue is None:
            self._kernel.catch_up()
            new_transport = partial(SimulatedTransport, port, self._rendezvous)
            self._queue = BackgroundQueue(
                self._rendezvous, port, port, new_transport, self.traffic, port.signal_seconds
            )
            self._kernel.add_thread(port.slot)
        port.spend(port.signal_seconds, self.traffic)
        return self._queue.begin(placed, call)

    def end_background(self) -> None:
        """End the background flow, or what stands for it; see `Transport.end_background`."""
        super().end_background()
        if self._queue is not None:
            self._port.spend(self._port.signal_seconds, self.traffic)
            self._kernel.catch_up()
            self._kernel.add_thread(self._port.slot, -1)
            self._queue = None

    def execute(self, call: CollectiveCall, over: Transport | None = None) -> int:
        """Carry out a collective, without a flow's messages if all ranks meet; see `Transport`."""
        schedule, vector = call.schedule, call.vector
        assert schedule is not None
        together = schedule.all_reduce or schedule.synchronizing
        if not together or len(call.group) == 1 or not vector.numel():
            return self.exchange(call, over)
        port, kernel = self._port, self._kernel
        traffic, placed = self.traffic, self._rendezvous.plan(self._port.net, call)
        port.keep_order()
        waited, start = traffic.seconds_waiting, kernel.here()
        port.spend(port.warm_up() + placed.beginning, traffic)
        if not placed.plan.is_synchronizing:  # ranks may be through before all have begun
            return self.exchange(call, over)
        place, thread = placed.place[self.rank], kernel.current.processor
        collective = self._rendezvous.collective(placed, call, place, thread)
        if collective.is_sent:
            return self.exchange(call, over)
        part = Part(collective, place)
        collective.begin(part, call, thread, kernel.here())
        part.pass_time()
        part.count(port)
        moved = part.traffic()
        traffic.add(moved)
        moving = start + traffic.seconds_waiting - waited
        (over or self).executed(call, start, moving, moved.bytes_sent)
        return part.buffer_bytes

    def exchange(self, call: CollectiveCall, over: Transport | None = None) -> int:
        """Carry out `call` now, with messages where ranks do not share memory."""
        placed = self._rendezvous.plan(self._port.net, call)

        def carry_out_here(stage: SumStage) -> tuple[float, float]:
            started, waited = self._kernel.here(), self.traffic.seconds_waiting
            carry_out(stage, call, self._port, self.traffic)
            return started, started + self.traffic.seconds_waiting - waited

        self._sent_collective = placed, Counter()
        try:
            return execute_in_stages(over or self, call, placed.near(self.rank), carry_out_here)
        finally:
            self._sent_collective = None

    def native_all_reduce(self, vector: Tensor) -> Pending[int]:
        """Begin what stands for the all-reduce of torch.distributed."""
        return self._port.native()(vector)

    def share(self, like: Tensor, group: Group, tag: int) -> SharedTensor:
        """Memory for all ranks of `group`, on one node; see `Transport.share`."""
        net, ranks = self._port.net, group.ranks
        far = [rank for rank in ranks if net.nodes[rank] != net.nodes[self.rank]]
        if far:
            raise InputError(
                f"rank {far[0]} cannot share memory with rank {self.rank}: put all ranks on one "
                f"node, not on {net.nodes[self.rank]} and {net.nodes[far[0]]}"
            )
        self._port.shares[ranks, tag] += 1
        key = ranks, tag, self._port.shares[ranks, tag]
        values = net.shared.setdefault(key, torch.empty_like(like))
        if self.rank == ranks[0]:
            values.copy_(like)
        all_reduce(self, torch.zeros(1), "ring", group, tag)  # nobody reads before
        return SharedTensor(values, self._kernel.catch_up)

    def handle(self) -> None:
        """Let the processor time of the strategy's own code pass: that around a message's ends."""
        self._port.spend(2 * self._handling, self.traffic)

    def new_hand_over(self) -> HandOver:
        """Make what two flows of this rank wait on."""
        return FlowHandOver(self._port)

    def now(self) -> float:
        """Virtual seconds."""
        return self._kernel.here()

    def spawn(self, function: Callable[[Transport], T]) -> FlowTask[T]:
        """Run `function` in a flow of its own of this rank."""
        self._kernel.catch_up()
        transport = SimulatedTransport(self._port, self._rendezvous)
        processor = self._port.new_processor()
        flow = self._kernel.start(self._port.slot, lambda: function(transport), processor)
        return FlowTask(flow, self.traffic)

    def arrived(self) -> dict[int, tuple[float, float]]:
        """See `Transport.arrived`."""
        self._port.meter.settle()
        return dict(self._port.mailbox.arrived)

    def lost(self) -> frozenset[int]:
        """The ranks known to be gone."""
        self._kernel.catch_up()
        return frozenset(self._port.mailbox.lost)

    # As the progress behind this flow's operations

    def wait(self, operation: Operation) -> None:
        """Let virtual time pass until `operation` is finished, and take in what it brings."""
        self._wait(operation)
        self._port.require_open()

    def _wait(self, operation: Operation) -> None:
        if not isinstance(operation, matching.Receive):
            self.traffic.seconds_waiting += self._sleep(operation, lambda: operation.finished)
            return
        receive = operation
        if not receive.frame_bytes and not receive.finished:
            port, alone = self._port, self._kernel.current.processor.undisturbed()
            # Then the seconds to take it in are known before it arrives.
            if alone and not (port.is_cold or port.shares_caches):
                self._sleep_through(receive)
                return
            begun = self._sleep(receive, lambda: receive.finished or receive.frame_bytes > 0)
            self.traffic.seconds_waiting += begun
        if receive.frame_bytes and receive.error is None:
            seconds = self._seconds_to_take(receive)
            self._port.keep_order()
            self._port.spend(seconds + self._port.warm_up(), self.traffic)
            receive.frame_bytes = 0
        self.traffic.seconds_communicating += self._sleep(receive, lambda: receive.finished)

    def _seconds_to_take(self, receive: matching.Receive) -> float:
        near = self._port.net.is_near(receive.source, self.rank)
        return self._cost(receive.frame_bytes, near).receiving + self._handling

    def _cost(self, frame_bytes: int, near: bool) -> MessageCost:
        net = self._port.net
        cost = net.message_cost if self._sent_collective is None else net.transfer_cost
        return cost(frame_bytes, near)

    @property
    def _handling(self) -> float:
        """Processor seconds of the strategy's own code around a message."""
        return 0.0 if self._sent_collective is not None else self._port.net.overhead.handling

    def _sleep_through(self, receive: matching.Receive) -> None:
        """Let virtual time pass until `receive` is finished, without waking when it begins."""
        kernel, flow, traffic = self._kernel, self._kernel.current, self.traffic
        started = kernel.here()
        self._sleep(receive, lambda: receive.finished)
        begun = max(started, receive.began_at if receive.frame_bytes else kernel.here())
        traffic.seconds_waiting += begun - started
        if receive.frame_bytes and receive.error is None:
            seconds = self._seconds_to_take(receive)
            # Receiving overlaps with arrival: it has been under way since the first byte came.
            flow.ahead = begun + seconds / flow.processor.rate
            receive.frame_bytes = 0
        traffic.seconds_communicating += kernel.here() - begun

    def _sleep(self, operation: Operation, condition: Callable[[], bool]) -> float:
        """Let virtual time pass until `condition` is true; returns the seconds."""
        return self._port.sleep_until(condition, lambda: self._signs(operation), operation)

    def withdraw(self, receive: matching.Receive) -> None:
        """Let `receive` take no message, unless one has begun."""
        self._kernel.catch_up()
        self._port.mailbox.withdraw(receive)

    def test(self, operation: Operation) -> bool:
        """Return whether `operation` is finished, or will never be."""
        self._kernel.catch_up()
        return operation.finished or self._port.closed

    def _signs(self, operation: Operation) -> tuple[tuple[int, ...], str]:
        if isinstance(operation, matching.Receive):
            whom, verb, tag = operation.requested, "to receive", f", tag {operation.tag}"
        else:
            assert isinstance(operation, Sending)
            whom, verb, tag = operation.to, "to send", ""
        others = tuple(rank for rank in range(self.size) if rank != self.rank)
        return self._port.net.slots(others if whom is None else (whom,)), verb + tag


@dataclass(eq=False)
class FlowHandOver(HandOver):
    """Between two flows of the rank of `port`: telling takes as long as a message to itself."""

    port: Port

    def look(self) -> None:
        self.port.net.kernel.catch_up()

    def wait_until(self, condition: Callable[[], bool], traffic: Traffic) -> None:
        waits = (self.port.slot,), "another flow of its own"
        traffic.seconds_waiting += self.port.sleep_until(condition, lambda: waits, self)

    def tell(self, change: Callable[[], None], traffic: Traffic) -> None:
        self.port.spend(self.port.signal_seconds, traffic)
        self.port.net.kernel.catch_up()
        change()
        self.port.wake(self)

    def pass_on(self, change: Callable[[], None], traffic: Traffic) -> None:
        self.port.net.kernel.catch_up()  # by now somebody may have begun to wait
        if self.port.is_awaited(self):
            self.tell(change, traffic)
        else:
            change()
            self.port.wake(self)


@dataclass(eq=False)
class FlowTask(Generic[T]):
    """A background flow of a rank; `spawner` counts how long its own flow waits for it."""

    flow: Flow
    spawner: Traffic

    def done(self) -> bool:
        """Return whether the flow has ended."""
        self.flow.kernel.catch_up()
        return self.flow.ended

    def wait(self) -> T:
        """Let virtual time pass until the flow ends: its result, or what it raised."""
        started = self.flow.kernel.here()
        self.flow.kernel.join(self.flow)
        self.spawner.seconds_waiting += self.flow.kernel.here() - started
        if self.flow.error is not None:
            raise self.flow.error
        return self.flow.result  # type: ignore[no-any-return]
