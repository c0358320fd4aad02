"""The network in virtual time: messages from one rank to another, in the order of sending.

A message costs its sender processor time, crosses the network behind those that its rank sent to
the same target before, and costs its receiver processor time once somebody waits for it. The three
go on at the same time, as bytes do that follow each other; the message is there when all are done.
Which message meets which receive is decided by the mailbox that real processes use, too.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from orchestra.cluster.nodes import Overhead
from orchestra.engines.simulation.barriers import Barriers
from orchestra.engines.simulation.fluid import Fluid, Resource
from orchestra.engines.simulation.kernel import Flow, Kernel, Wait
from orchestra.engines.simulation.processor import Thread
from orchestra.engines.simulation.stream import Load, Route, Stream
from orchestra.errors import GroupChanged
from orchestra.transports import matching
from orchestra.transports.framing import Header
from orchestra.transports.matching import Incoming, Mailbox
from orchestra.transports.protocol import Pending, Traffic


class Message(Load):
    """From `send` to its delivery; `payload` is what was there when it was sent, and `arriving`
    what the mailbox knows it by, once it has begun."""

    __slots__ = ("_sending", "_target", "arriving", "header", "payload")

    def __init__(
        self,
        header: Header,
        payload: Tensor,
        sending: Sending,
        target: Port,
        both_ways: bool | None,
        *,
        fair: bool,
    ) -> None:
        super().__init__(header.frame_bytes, both_ways, fair)
        self.header, self.payload = header, payload
        self._sending, self._target = sending, target
        self.arriving: Incoming | None = None

    def begin(self) -> None:
        source = self._sending.port.rank
        self.arriving = self._target.mailbox.begin(source, self.header, self.payload)
        receive = self.arriving.receive
        if receive is None:
            self._target.wake_all()  # it may be a misfit, of which the one who receives it learns
        else:
            receive.began_at = self._target.net.kernel.now()
            self._target.wake(receive)  # whoever waits for it begins to take it in

    def end(self) -> None:
        assert self.arriving is not None
        self._sending.finish()
        self._target.mailbox.complete(self.arriving)
        if self.arriving.receive is not None:
            self._target.wake(self.arriving.receive)

    def fail(self, error: Exception) -> None:
        # Whoever sends it learns of the error, unless it has gone on since.
        if not self._sending.finished:
            self._sending.fail(error)
            self._sending.port.wake(self._sending)


class Meter:
    """Bytes of messages, payload and headers, by the rank that they go to.

    Set-up, checkpoints and evaluation lie outside the stopwatch, as they do in a record. A message
    counts in full when it is sent. Those of an all-reduce count together, when its rank has ended
    its part.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.sent: Counter[int] = Counter()  # messages from a rank to itself cross no link
        self.seconds = 0.0  # for which the stopwatch ran
        # Count what is through by now, before anybody reads what is counted.
        self.uncounted: list[Callable[[], None]] = []
        self._now = now
        self._began: float | None = None

    def run(self, running: bool) -> None:
        """The stopwatch starts or goes on, or it stops."""
        self.settle()
        if running:
            self._began = self._now()
        elif self._began is not None:
            self.seconds += self._now() - self._began
            self._began = None

    @property
    def running(self) -> bool:
        return self._began is not None

    def settle(self) -> None:
        """Count the messages of the collectives that have ended by now."""
        for call in self.uncounted:
            call()

    def count(self, target: int, size: int) -> None:
        """A message of `size` bytes goes to `target`."""
        if self._began is not None:
            self.sent[target] += size

    def count_all(self, sent: Mapping[int, int], times: int = 1) -> None:
        """Count `times` times the bytes that `sent` has for each rank."""
        if self._began is not None:
            for target, size in sent.items():  # faster than `Counter.update`
                self.sent[target] += times * size


BeginNativeAllReduce = Callable[[Tensor], Pending[int]]
"""Begins to replace a tensor by its sum over all ranks."""


@dataclass(eq=False)
class Net:
    """The ports of the ranks of one group, and the streams between them.

    Ranks are numbered in their group, but for `members` and for what the kernel knows of them.
    """

    kernel: Kernel
    fluid: Fluid
    overhead: Overhead
    members: tuple[int, ...]  # the number of each rank at the start of the run, its slot
    nodes: Sequence[str]  # the name of each rank's node
    hosts: Sequence[int]  # of each rank, a number that those have in common that share memory
    route: Callable[[int, int], Route]  # between two slots
    before_arrival: Callable[[Sequence[Resource]], None]  # called before a message crosses these
    ports: list[Port] = field(default_factory=list)
    shared: dict[tuple[tuple[int, ...], int, int], Tensor] = field(default_factory=dict)
    shown: dict[Hashable, dict[int, Tensor]] = field(default_factory=dict)  # by stage and place
    streams: dict[tuple[int, int], Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The costs of a message, from its bytes with the header, and whether its ranks are near.
        self.message_cost = functools.lru_cache(maxsize=1024)(self.overhead.message)
        self.transfer_cost = functools.lru_cache(maxsize=1024)(self.overhead.transfer)
        self.barriers = Barriers(self.kernel)

    def is_near(self, source: int, target: int) -> bool:
        """Return whether two ranks share memory."""
        return self.hosts[source] == self.hosts[target]

    def stream(self, source: int, target: int) -> Stream:
        """Return the stream from one rank to another; it is made when it is first used."""
        key = source, target
        if key not in self.streams:
            route = self.route(self.members[source], self.members[target])
            self.streams[key] = Stream(self, route, source, target)
        return self.streams[key]

    def slots(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the slots of `ranks`."""
        return tuple(self.members[rank] for rank in ranks)


class Port:
    """One rank's end of the network, shared by its flows.

    `new_processor` makes what one more flow of the rank computes on; `meter` counts what it sends;
    `native` gives what stands for torch.distributed.

    Attributes:
        slot: the number of the rank at the start of the run.
        closed: whether the rank has given up its group.
    """

    native: Callable[[], BeginNativeAllReduce]

    def __init__(
        self, net: Net, rank: int, new_processor: Callable[[], Thread], meter: Meter
    ) -> None:
        self.net, self.rank, self.slot = net, rank, net.members[rank]
        self.new_processor, self.meter = new_processor, meter
        self.mailbox = Mailbox(rank)
        self.bytes_sent = 0
        self.shares: Counter[tuple[tuple[int, ...], int]] = Counter()  # of memory, by ranks and tag
        self._cold = self.closed = False
        # Flows are found by the operation that they wait for: with many servers a rank has many
        # flows, and asking each of them after every message was slow.
        self._asleep: dict[object, dict[Flow, Callable[[], bool]]] = {}  # by what they wait for
        net.ports.append(self)

    @property
    def signal_seconds(self) -> float:
        """Processor seconds for telling another flow of this rank a number of 8 bytes."""
        local = self.net.overhead.local
        return 0.0 if local is None else local.at(8)

    def mark_caches_cold(self) -> None:
        """Let the next message of the rank pay `Overhead.cold`: a step has begun."""
        self.keep_order()
        self._cold = True

    @property
    def shares_caches(self) -> bool:
        """True if the order in which flows of this rank send and receive changes their costs."""
        return self.net.overhead.cold > 0 and self.net.kernel.flows_of[self.slot] > 1

    def keep_order(self) -> None:
        """Let the current flow catch up with virtual time, if others share its caches."""
        # Only the first message of a step is charged for cold caches. A flow that is ahead of
        # virtual time must not claim that charge before a flow that sends earlier.
        if self.shares_caches:
            self.net.kernel.catch_up()

    @property
    def is_cold(self) -> bool:
        """True if the next message takes more seconds."""
        return self._cold and self.net.overhead.cold > 0

    def warm_up(self) -> float:
        """Return the extra seconds of the message under way: 0 but for the first of a step."""
        cold, self._cold = self._cold, False
        return self.net.overhead.cold if cold else 0.0

    def spend(self, seconds: float, traffic: Traffic) -> None:
        """Let the current flow compute `seconds` core-seconds, counted in `traffic`."""
        if seconds > 0:
            kernel = self.net.kernel
            started = kernel.here()
            kernel.current.processor.spend(seconds)
            traffic.seconds_communicating += kernel.here() - started

    def sleep_until(
        self, condition: Callable[[], bool], waits: Callable[[], Wait], what: object
    ) -> float:
        """Park the current flow until `condition` is true at a call of `wake(what)`.

        Meanwhile `waits` tells whom it waits for. Returns the virtual seconds that pass.

        Raises:
            GroupChanged: the port is closed.
        """
        if condition():
            return 0.0
        kernel = self.net.kernel
        flow, started = kernel.current, kernel.here()
        flow.waits = waits
        self._asleep.setdefault(what, {})[flow] = condition
        try:
            while not condition():
                self.require_open()
                kernel.park()
        finally:
            flow.waits = None
        return kernel.here() - started

    def is_awaited(self, what: object) -> bool:
        """Return whether a flow sleeps for `what`."""
        return bool(self._asleep.get(what))

    def wake(self, what: object) -> None:
        """Resume the flows that sleep for `what` and whose condition is true now."""
        asleep = self._asleep.get(what, {})
        awake = [flow for flow, condition in asleep.items() if condition()]
        for flow in awake:
            del asleep[flow]
            self.net.kernel.resume(flow)
        if awake and not asleep:
            del self._asleep[what]

    def wake_all(self) -> None:
        """Resume all sleeping flows whose condition is true now."""
        for what in list(self._asleep):
            self.wake(what)

    def streams(self, *, out: bool = True, into: bool = True) -> list[Stream]:
        """Return the streams from this rank, and those to it."""
        return [
            stream
            for (source, target), stream in self.net.streams.items()
            if (out and source == self.rank) or (into and target == self.rank)
        ]

    def close(self) -> None:
        """From an event: the rank gives up its group. What it waits for raises `GroupChanged`, and
        messages under way to and from it never arrive."""
        self.closed = True
        for stream in self.streams():
            stream.close(GroupChanged())
        asleep, self._asleep = self._asleep, {}
        for flows in asleep.values():
            for flow in flows:
                self.net.kernel.resume(flow)

    def require_open(self) -> None:
        """Raise `GroupChanged` if the port is closed."""
        if self.closed:
            raise GroupChanged()


class Sending(matching.Operation):
    """A send; `wait` returns the tensor."""

    __slots__ = ("port", "tensor", "to")

    def __init__(self, flow: matching.Flow, port: Port, tensor: Tensor, to: int) -> None:
        super().__init__(flow)
        self.port, self.tensor, self.to = port, tensor, to

    @property
    def source(self) -> int:
        return self.flow.rank

    def finish(self) -> None:
        """The tensor is free."""
        self.finished = True
        self.port.wake(self)

    def wait(self) -> Tensor:
        """The tensor that was sent, free to be changed again."""
        self._finish()
        return self.tensor
